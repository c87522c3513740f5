//! A server with a made-up loop behind it, on a real socket in a directory of its own.

use std::{
    fs,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    sync::Arc,
    thread::{self, JoinHandle},
};

use model::{Bytes, GroupName, Loan, Reason, VmName, spec::ApiSpec};
use overbook::{
    http::{
        self, Inside, Listeners, ReadHistory,
        wire::{HistoryRow, LoanRow, LoanStatus},
    },
    published::{Published, Request},
};
use tokio::sync::{mpsc, oneshot, watch};

use crate::http_fixture;

/// A running server; ends with the value.
pub(crate) struct Server {
    pub(crate) socket: PathBuf,
    /// Where it listens on TCP.
    #[allow(dead_code, reason = "not every test file uses every part")]
    pub(crate) tcp: Option<SocketAddr>,
    ticks: watch::Sender<Arc<Published>>,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

#[allow(dead_code, reason = "not every test file uses every part")]
impl Server {
    /// Serves the fixture; requests succeed.
    pub(crate) fn start() -> Self {
        Self::serve(false, Ok(()))
    }

    /// Serves the fixture; requests fail with `why`.
    pub(crate) fn refusing(why: &str) -> Self {
        Self::serve(false, Err(why.to_owned()))
    }

    /// Serves the fixture on TCP too, with the token `0123456789abcdef`.
    pub(crate) fn with_tcp() -> Self {
        Self::serve(true, Ok(()))
    }

    /// The next tick.
    pub(crate) fn publish(&self, tick: Published) {
        self.ticks.send_replace(Arc::new(tick));
    }

    /// Ends it and waits for its end.
    pub(crate) fn stop(mut self) {
        self.end();
    }

    fn serve(with_tcp: bool, outcome: Result<(), String>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let token = dir.path().join("token");
        fs::write(&token, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        let tcp = with_tcp.then(|| "127.0.0.1:0".parse().unwrap());
        let api = ApiSpec { socket: socket.clone(), tcp, token_file: Some(token) };
        let (ticks, latest) = watch::channel(Arc::new(http_fixture::published()));
        let (requests, mut wished) = mpsc::channel(4);
        let (end, ended) = oneshot::channel();
        let (ready, address) = std::sync::mpsc::channel();
        let inside = Inside { latest, requests, history: Arc::new(MadeUp), ticks: Arc::default() };
        let thread = thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                tokio::spawn(async move {
                    while let Some(request) = wished.recv().await {
                        answer(request, &outcome);
                    }
                });
                let listeners = Listeners::bind(&api).unwrap();
                ready.send(listeners.tcp_address()).unwrap();
                // A task of its own, as in the daemon.
                let served = http::serve(listeners, inside, async { drop(ended.await) });
                tokio::spawn(served).await.unwrap();
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

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

fn answer(request: Request, outcome: &Result<(), String>) {
    let (verb, reply) = match request {
        Request::Pause(reply) => ("pause", reply),
        Request::Resume(reply) => ("resume", reply),
        Request::Release(reply) => ("release", reply),
    };
    // The client may have gone.
    let _ = reply.send(outcome.clone().map(|()| format!("{verb} done")));
}

/// A reading, and a change three minutes before the fixture's tick; `broken` cannot be read.
struct MadeUp;

impl ReadHistory for MadeUp {
    fn rows(&self, vm: &VmName, since_wall_ms: u64, _: usize) -> Result<Vec<HistoryRow>, String> {
        if vm.as_str() == "broken" {
            return Err("the disk is on fire".to_owned());
        }
        if vm.as_str() == "web-2" || vm.as_str() == "web-9" {
            return Ok(Vec::new());
        }
        let reading = HistoryRow {
            wall_ms: since_wall_ms,
            step_seconds: Some(1),
            balloon_bytes: Some(192 << 20),
            ..HistoryRow::default()
        };
        Ok([reading].into_iter().chain(self.last_change(vm)?).collect())
    }

    fn last_change(&self, _: &VmName) -> Result<Option<HistoryRow>, String> {
        Ok(Some(HistoryRow {
            wall_ms: http_fixture::published().wall_ms - 180_000,
            mode: Some("enforce".to_owned()),
            change: Some("target raised to 192 MiB: it is short of memory".to_owned()),
            ..HistoryRow::default()
        }))
    }

    fn loans(&self, group: &GroupName, since: u64, _: usize) -> Result<Vec<LoanRow>, String> {
        if group.as_str() != "web" {
            return Ok(Vec::new());
        }
        let loan =
            Loan { borrower: "shop".into(), amount: Bytes::ZERO, reason: Reason::LoanUnneeded };
        let loan = LoanStatus::of(group, &loan);
        Ok(vec![LoanRow { wall_ms: since, mode: "enforce".to_owned(), loan }])
    }
}
