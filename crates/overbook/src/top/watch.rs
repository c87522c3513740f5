//! Asks the daemon in a thread of its own, so that the screen never waits for it.

use std::{
    path::Path,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::Duration,
};

use api::client::{ApiClient, ClientError, path_of};
use api::verdict::HostVerdict;
use api::wire::{Explanation, GroupStatus, HostStatus, StatusPage, VmStatus};

/// Pause between two questions.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// A message from the asking thread.
#[derive(Clone, Debug)]
pub(super) enum PollerEvent {
    /// A new page of figures.
    Page(Box<Page>),
    /// A request was carried out or refused.
    Said(String),
    /// The daemon does not answer: the verdict on that.
    Lost(HostVerdict),
}

/// One page of figures.
#[derive(Clone, Debug)]
pub(super) struct Page {
    pub(super) verdict: HostVerdict,
    pub(super) host: HostStatus,
    pub(super) groups: Vec<GroupStatus>,
    pub(super) vms: Vec<VmStatus>,
    /// The explanation of the selected VM.
    pub(super) explanation: Option<Explanation>,
}

/// A command to the thread.
enum PollerCommand {
    Select(Option<String>),
    Send(&'static str),
}

/// The view's handle of the thread. Dropping it ends the thread.
pub(super) struct StatusPoller {
    news: Receiver<PollerEvent>,
    wishes: Sender<PollerCommand>,
}

impl StatusPoller {
    /// Asks once, then starts the thread.
    pub(super) fn start(socket: &Path) -> Result<Self, ClientError> {
        let client = ApiClient::new(socket)?;
        let page = ask(&client, None)?;
        let (tell, news) = mpsc::channel();
        let (wishes, wished) = mpsc::channel();
        // This function still holds the receiver, so the send cannot fail.
        let _ = tell.send(PollerEvent::Page(Box::new(page)));
        thread::spawn(move || attend(&client, &tell, &wished));
        Ok(Self { news, wishes })
    }

    /// Messages since the last call.
    pub(super) fn news(&self) -> impl Iterator<Item = PollerEvent> + '_ {
        self.news.try_iter()
    }

    /// Explains this VM from now on.
    pub(super) fn select(&self, vm: Option<String>) {
        // The thread ends only with this handle.
        let _ = self.wishes.send(PollerCommand::Select(vm));
    }

    /// Posts a request.
    pub(super) fn send(&self, path: &'static str) {
        let _ = self.wishes.send(PollerCommand::Send(path));
    }
}

fn attend(client: &ApiClient, tell: &Sender<PollerEvent>, wished: &Receiver<PollerCommand>) {
    let mut selected = None;
    loop {
        match wished.recv_timeout(PAUSE) {
            Ok(PollerCommand::Select(vm)) => selected = vm,
            Ok(PollerCommand::Send(path)) => {
                let said = client.post(path).map_or_else(|e| e.to_string(), |done| done.message);
                if tell.send(PollerEvent::Said(said)).is_err() {
                    return;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let news = match ask(client, selected.as_deref()) {
            Ok(page) => PollerEvent::Page(Box::new(page)),
            Err(error) => PollerEvent::Lost(HostVerdict::of_failure(&error)),
        };
        if tell.send(news).is_err() {
            return;
        }
    }
}

pub(super) fn ask(client: &ApiClient, selected: Option<&str>) -> Result<Page, ClientError> {
    // The selected VM may have just gone; the rest of the page is still shown.
    let explain = |vm| client.get(&path_of("explain", vm)).ok();
    let StatusPage { verdict, host, groups, vms } = client.get("/v1/status")?;
    Ok(Page { verdict, host, groups, vms, explanation: selected.and_then(explain) })
}
