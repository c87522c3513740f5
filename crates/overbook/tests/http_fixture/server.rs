//! A server with an invented loop behind it, on a real socket in its own directory.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
};

use api::published::Published;
use api::wire::{HistoryRow, LoanRow, LoanStatus, ReleasePreview, ReleasedVm};
use model::{Bytes, GroupName, Loan, Reason, Scope, VmName, spec::ApiSpec};
use overbook::http::{
    self, Ask, Asks, Doors, Inside, Listeners, LoopAnswer, Outcome, Question, Span,
};
use tokio::sync::{mpsc, oneshot, watch};

use crate::http_fixture;

/// A running server; it ends when dropped.
pub(crate) struct TestServer {
    #[allow(dead_code, reason = "not every test file uses every part")]
    pub(crate) socket: PathBuf,
    /// Its TCP address.
    #[allow(dead_code, reason = "not every test file uses every part")]
    pub(crate) tcp: Option<SocketAddr>,
    ticks: watch::Sender<Arc<Published>>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

#[allow(dead_code, reason = "not every test file uses every part")]
impl TestServer {
    /// Serves the fixture; requests succeed.
    pub(crate) fn start() -> Self {
        Self::serve(false, Ok(()))
    }

    /// Serves the fixture; requests fail with `why`.
    pub(crate) fn refusing(why: &str) -> Self {
        Self::serve(false, Err(why.to_owned()))
    }

    /// Also serves the fixture on TCP, with the token `0123456789abcdef`, and `fedcba9876543210`
    /// for clients that only read.
    pub(crate) fn with_tcp() -> Self {
        Self::serve(true, Ok(()))
    }

    /// Publishes the next tick.
    pub(crate) fn publish(&self, tick: Published) {
        self.ticks.send_replace(Arc::new(tick));
    }

    /// Ends the server and waits for its end.
    pub(crate) fn stop(mut self) {
        self.end();
    }

    fn serve(with_tcp: bool, outcome: Result<(), String>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let secret = |name: &str, token: &str| {
            let path = dir.path().join(name);
            fs::write(&path, token).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
            path
        };
        let token = secret("token", "0123456789abcdef\n");
        let read = secret("read", "fedcba9876543210\n");
        let tcp = with_tcp.then(|| "127.0.0.1:0".parse().unwrap());
        let api = ApiSpec {
            socket: socket.clone(),
            tcp,
            token_file: Some(token),
            read_token_file: Some(read),
        };
        let (ticks, latest) = watch::channel(Arc::new(http_fixture::published()));
        let (orders, mut asked) = mpsc::channel::<Ask>(4);
        let asks = Asks { readings: orders.clone(), orders };
        let (end, ended) = oneshot::channel();
        let (ready, address) = std::sync::mpsc::channel();
        let inside = Inside { latest, asks };
        let thread = thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::spawn(async move {
                    while let Some(Ask { question, reply }) = asked.recv().await {
                        // The client may have disconnected.
                        let _ = reply.send(answer(question, &outcome));
                    }
                });
                let doors = Doors::open(&api).unwrap();
                ready.send(doors.tcp_address()).unwrap();
                let Listeners { unix, tcp } = doors.listeners();
                let tcp =
                    tcp.as_ref().map(|(tcp, tokens)| (tcp.try_clone().unwrap(), tokens.clone()));
                let listeners = Listeners { unix: unix.try_clone().unwrap(), tcp };
                let served = http::serve(listeners, inside, async { drop(ended.await) });
                tokio::spawn(served).await.unwrap().unwrap();
            });
        });
        let tcp = address.recv().unwrap();
        Self { socket, tcp, ticks, end: Some(end), thread: Some(thread), _dir: dir }
    }

    fn end(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.end();
    }
}

fn answer(question: Question, outcome: &Result<(), String>) -> Outcome {
    let done = |verb: &str| outcome.clone().map(|()| LoopAnswer::Done(format!("{verb} done")));
    match question {
        Question::Sign => Ok(LoopAnswer::Done(String::new())),
        Question::Pause(scope) => done(&of("pause", &scope)),
        Question::Resume(scope) => done(&of("resume", &scope)),
        Question::Release(scope) => done(&of("release", &scope)),
        Question::PreviewRelease => {
            outcome.clone().map(|()| LoopAnswer::Preview(Box::new(preview())))
        }
        Question::Lender(lender) => Ok(LoopAnswer::MayHold(lender.holds)),
        Question::Reload { is_sure } => done(if is_sure { "sure reload" } else { "reload" }),
        Question::History { vm, span } => rows(&vm, span).map(LoopAnswer::History),
        Question::LastChange { .. } => Ok(LoopAnswer::LastChange(Some(last_change().into()))),
        Question::Loans { group, span } => Ok(LoopAnswer::Loans(loans(&group, span))),
    }
}

fn of(verb: &str, scope: &Scope) -> String {
    match scope {
        Scope::Host => verb.to_owned(),
        Scope::Group(name) => format!("{verb} of group {name}"),
        Scope::Vm(name) => format!("{verb} of {name}"),
    }
}

fn preview() -> ReleasePreview {
    let vm = |name: &str, mib: u64| ReleasedVm {
        vm: name.to_owned(),
        group: Some("web".to_owned()),
        balloon_bytes: mib << 20,
        text: "balloon back to 256 MiB".to_owned(),
        ..ReleasedVm::default()
    };
    let paged = ReleasedVm { paged_out_bytes: 12 << 20, ..vm("web-1", 64) };
    ReleasePreview::in_order([paged, vm("web-2", 4)].into_iter(), 70 << 20, true)
}

/// A reading, and a change three minutes before the fixture's tick; the history of `broken`
/// cannot be read.
fn rows(vm: &VmName, span: Span) -> Result<Option<Vec<HistoryRow>>, String> {
    if vm.as_str() == "broken" {
        return Err("the disk is on fire".to_owned());
    }
    if vm.as_str() == "web-2" || vm.as_str() == "web-9" {
        return Ok(None);
    }
    let reading = HistoryRow {
        wall_ms: span.since_wall_ms,
        step_seconds: Some(1),
        balloon_bytes: Some(192 << 20),
        ..HistoryRow::default()
    };
    Ok(Some(vec![reading, last_change()]))
}

fn last_change() -> HistoryRow {
    HistoryRow {
        wall_ms: http_fixture::published().wall_ms - 180_000,
        mode: Some("enforce".to_owned()),
        change: Some("target raised to 192 MiB: it is short of memory".to_owned()),
        ..HistoryRow::default()
    }
}

fn loans(group: &GroupName, span: Span) -> Option<Vec<LoanRow>> {
    if group.as_str() != "web" {
        return None;
    }
    let loan = Loan { borrower: "shop".into(), amount: Bytes::ZERO, reason: Reason::LoanUnneeded };
    let loan = LoanStatus::of(group, &loan);
    Some(vec![LoanRow { wall_ms: span.since_wall_ms, mode: "enforce".to_owned(), loan }])
}
