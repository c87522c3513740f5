//! A stand-in for QEMU with the shim preloaded, and a worker that talks to it.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "tests")]

pub(crate) mod prepared;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use protocol::layout::{Counter, Layout, PageState, Shared};
use protocol::ring::{Consumer, Drained};
use protocol::{
    Answer, Content, MAX_PACKET, Merge, Merged, Pages, Refusal, Region, Request, State, Taken,
    Tracking, Trap, VERSION,
};
use sys::pool_file::{Page, PoolFile};
use sys::remote_memory::RemoteMemory;
use sys::seqpacket::{Connection, SeqpacketError};
use sys::shared_memory::SharedMemory;

/// Granules of 128 KiB.
pub(crate) const GRANULE: u32 = 32;

/// A process that behaves like QEMU, ended when dropped.
pub(crate) struct StandIn {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    /// A stand-in that has not answered by then hangs. This is longer than any retry of the shim,
    /// even on a busy machine.
    pub(crate) patience: Duration,
    _alone: MutexGuard<'static, ()>,
}

/// One at a time: a fault that waits on a busy machine looks like one that waits for a broken
/// shim.
static ALONE: Mutex<()> = Mutex::new(());

impl StandIn {
    /// With the shim, and nothing plugged yet.
    pub(crate) fn new() -> Self {
        Self::run_by(None)
    }

    /// As another user.
    pub(crate) fn run_by(uid: Option<u32>) -> Self {
        Self::start(|command| {
            if let Some(uid) = uid {
                command.uid(uid);
            }
        })
    }

    /// With further settings for the command.
    pub(crate) fn start(more: impl FnOnce(&mut Command)) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut command = Command::new(env!("CARGO_BIN_EXE_overbook-shim-stand-in"));
        command.env("LD_PRELOAD", shim()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let go_first = || {
            // A fault that waits on a busy machine looks like one that waits for a broken shim,
            // and the shim gives everything back. A user who may not raise the priority needs an
            // idle machine.
            let _ = rustix::process::setpriority_process(None, -20);
            Ok(())
        };
        // SAFETY: a system call, which is allowed after a fork.
        unsafe { command.pre_exec(go_first) };
        more(&mut command);
        let mut child = command.spawn().unwrap();
        let commands = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let patience = Duration::from_secs(60);
        Self { child, commands, answers, patience, _alone: alone }
    }

    /// With one block of `mib`, filled with seed 1.
    pub(crate) fn with_ram(mib: u32) -> Self {
        let mut stand_in = Self::new();
        stand_in.expect(&format!("plug {mib}"));
        stand_in.expect("fill 0 1");
        stand_in
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs a command that must succeed, while the worker gives signs of life.
    pub(crate) fn expect_beside(&mut self, worker: &TestWorker, command: &str) -> String {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    worker.status();
                    std::thread::sleep(Duration::from_millis(5));
                }
            });
            let answer = self.tell(command);
            done.store(true, Ordering::Relaxed);
            answer.unwrap_or_else(|error| panic!("{command}: {error}"))
        })
    }

    /// The answer to a command.
    pub(crate) fn tell(&mut self, command: &str) -> Result<String, String> {
        self.begin(command);
        self.finish()
    }

    /// Gives a command whose answer is read later.
    pub(crate) fn begin(&mut self, command: &str) {
        writeln!(self.commands, "{command}").unwrap();
    }

    pub(crate) fn finish(&mut self) -> Result<String, String> {
        let mut line = String::new();
        assert!(self.has_answer_within(self.patience), "no answer: it hangs");
        self.answers.read_line(&mut line).unwrap();
        match line.trim_end_matches('\n').split_once(' ') {
            Some(("ok", words)) => Ok(words.to_owned()),
            _ => Err(line),
        }
    }

    /// Whether an answer has come, or the stand-in has ended.
    pub(crate) fn has_answer_within(&self, most: Duration) -> bool {
        let timeout = rustix::event::Timespec::try_from(most).unwrap();
        let stdout = self.answers.get_ref();
        let mut fds = [rustix::event::PollFd::new(stdout, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&timeout)).unwrap() > 0
    }

    /// How the stand-in has ended, if it has.
    pub(crate) fn has_ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Runs a command that must succeed.
    pub(crate) fn expect(&mut self, command: &str) -> String {
        self.tell(command).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// The content of a page of the first block.
    pub(crate) fn page(&self, worker: &TestWorker, page: u32) -> Page {
        let mut bytes = [0; 4096];
        let address = worker.regions[0].address + u64::from(page) * 4096;
        assert_eq!(RemoteMemory::of(self.pid()).unwrap().read(address, &mut bytes), 4096);
        bytes
    }

    /// Number of mappings of the first block.
    pub(crate) fn mappings_of(&self, worker: &TestWorker) -> usize {
        // A write continues before the mappings that it split are joined: the answer comes after
        // that.
        worker.status();
        let region = worker.regions[0];
        let block = region.address..region.address + u64::from(region.pages) * 4096;
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        let start = |line: &&str| u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        maps.lines().filter(|line| block.contains(&start(line))).count()
    }

    /// Number of mappings of the process: staging is one more.
    pub(crate) fn mappings(&self) -> usize {
        std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap().lines().count()
    }

    /// The process's anonymous memory.
    pub(crate) fn anonymous_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// The names of the process's threads; a thread that has just ended has none.
    pub(crate) fn threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let name = |task: std::io::Result<std::fs::DirEntry>| {
            let name = std::fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
            Some(name.trim().to_owned())
        };
        tasks.filter_map(name).collect()
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The library in the directory of the test programs.
pub(crate) fn shim() -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name("liboverbook_shim.so");
    assert!(library.is_file(), "{} is not built", library.display());
    library
}

/// A worker's side of the connection.
pub(crate) struct TestWorker {
    connection: Connection,
    pub(crate) regions: Vec<Region>,
    pub(crate) state: State,
    memory: SharedMemory,
    consumer: Consumer,
}

impl TestWorker {
    /// Connects and says Hello.
    pub(crate) fn meet(stand_in: &StandIn) -> Self {
        Self::try_to_meet(stand_in).unwrap_or_else(|answer| panic!("no welcome but {answer:?}"))
    }

    /// The same where the shim may have no memory to share.
    pub(crate) fn try_to_meet(stand_in: &StandIn) -> Result<Self, Answer> {
        let connection = connect(stand_in);
        let answer = ask_on(&connection, &Request::Hello { version: VERSION });
        let (Answer::Welcome { regions, state, .. }, Some(fd)) = answer else {
            return Err(answer.0);
        };
        let layout = Layout::of_regions(&regions);
        let memory = SharedMemory::open(fd.as_fd(), layout.words(), layout.bytes()).unwrap();
        let shared = Shared::open(layout, memory.words(), memory.bytes()).unwrap();
        let consumer = Consumer::new(shared.ring());
        Ok(Self { connection, regions, state, memory, consumer })
    }

    /// Connects, and starts tracking that revokes only the granules requested.
    pub(crate) fn tracking(stand_in: &StandIn) -> Self {
        let worker = Self::meet(stand_in);
        assert_eq!(worker.ask(&Request::Track(by_name())), Answer::Done { count: 0 });
        worker
    }

    pub(crate) fn ask(&self, request: &Request) -> Answer {
        ask_on(&self.connection, request).0
    }

    /// Makes `pool` the pool of all slot numbers from now on.
    pub(crate) fn use_pool(&self, pool: &PoolFile, slots: u32) -> Answer {
        let reader = pool.reader().unwrap();
        ask_with(&self.connection, &Request::Pool { slots }, Some(reader.as_fd())).0
    }

    /// Merges runs of page, pages, slot; a slot of `None` means zeros.
    pub(crate) fn merge(&self, runs: &[(u32, u32, Option<u32>)]) -> Merged {
        let run = |&(page, pages, slot): &(u32, u32, Option<u32>)| {
            let content = slot.map_or(Content::Zeros, Content::Slot);
            Merge { page, pages, content }
        };
        match self.ask(&Request::Merge { runs: runs.iter().map(run).collect() }) {
            Answer::Merged(merged) => merged,
            other => panic!("{other:?}"),
        }
    }

    /// Asks for copies of `pages` pages from `page` on; returns how many of them were merged.
    pub(crate) fn unshare(&self, page: u32, pages: u32) -> u32 {
        match self.ask(&Request::Unshare { page, pages }) {
            Answer::Done { count } => count,
            other => panic!("{other:?}"),
        }
    }

    /// Sets whether memory that the guest frees is handed over from now on, or discarded.
    pub(crate) fn hand_over(&self, lazily: bool) {
        assert_eq!(self.ask(&Request::HandOver { lazily }), Answer::Done { count: 0 });
    }

    /// Takes the freed pages of this run.
    pub(crate) fn take(&self, page: u32, pages: u32) -> Taken {
        match self.ask(&Request::Take { runs: vec![Pages { page, pages }] }) {
            Answer::Taken(taken) => taken,
            other => panic!("{other:?}"),
        }
    }

    /// Number of these pages that are merged.
    pub(crate) fn merged(&self, pages: std::ops::Range<u32>) -> usize {
        self.of_state(pages, PageState::Merged)
    }

    /// Number of these pages that were freed, and neither discarded nor taken since.
    pub(crate) fn freed(&self, pages: std::ops::Range<u32>) -> usize {
        self.of_state(pages, PageState::Freed)
    }

    fn of_state(&self, pages: std::ops::Range<u32>, state: PageState) -> usize {
        let shared = self.shared();
        pages.into_iter().filter(|&page| shared.state(page) == state).count()
    }

    /// Revokes granules; returns how many.
    pub(crate) fn revoke(&self, granules: impl IntoIterator<Item = u32>) -> u32 {
        let granules = granules.into_iter().collect();
        match self.ask(&Request::Revoke { granules }) {
            Answer::Done { count } => count,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn recall(&self, granules: impl IntoIterator<Item = u32>) -> u32 {
        let granules = granules.into_iter().collect();
        match self.ask(&Request::Recall { granules }) {
            Answer::Done { count } => count,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn refused(&self, request: &Request) -> Refusal {
        match self.ask(request) {
            Answer::Refused(refusal) => refusal,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn release(&self) -> u32 {
        match self.ask(&Request::Release) {
            Answer::Done { count } => count,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn status(&self) -> (State, u32) {
        match self.ask(&Request::Status) {
            Answer::Status(status) => (status.state, status.generation),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn shared(&self) -> Shared<'_> {
        let layout = Layout::of_regions(&self.regions);
        Shared::open(layout, self.memory.words(), self.memory.bytes()).unwrap()
    }

    pub(crate) fn count(&self, counter: Counter) -> u64 {
        self.shared().get(counter)
    }

    /// The traps since the last call, as granules.
    pub(crate) fn traps(&mut self) -> (Vec<u32>, Drained) {
        let layout = Layout::of_regions(&self.regions);
        let shared = Shared::open(layout, self.memory.words(), self.memory.bytes()).unwrap();
        let mut granules = Vec::new();
        let each = |trap: Trap| granules.push(trap.granule);
        let drained = self.consumer.drain(shared.ring(), u32::MAX, each);
        (granules, drained)
    }

    /// Waits until nothing is staged any more.
    pub(crate) fn until_all_back(&self) -> Duration {
        let began = Instant::now();
        while self.count(Counter::StagedPages) > 0 {
            assert!(began.elapsed() < Duration::from_secs(10), "pages stay staged");
            std::thread::sleep(Duration::from_millis(5));
        }
        began.elapsed()
    }

    /// Sends bytes that are not a request; returns the answer, or the error if the shim hung up.
    pub(crate) fn send_raw(&self, packet: &[u8]) -> Result<Answer, SeqpacketError> {
        self.connection.send(packet, None)?;
        receive(&self.connection).map(|(answer, _)| answer)
    }

    /// Sends a request until nothing more fits, and reads no answer.
    pub(crate) fn flood(self, request: &Request) -> Self {
        let packet = request.encode(1).unwrap();
        for _ in 0..100_000 {
            if self.connection.send(&packet, None).is_err() {
                break;
            }
        }
        self
    }

    /// Hangs up; the shared memory stays mapped.
    pub(crate) fn hang_up(self) -> Self {
        let (connection, other) = unconnected();
        drop(other);
        Self { connection, ..self }
    }
}

fn unconnected() -> (Connection, sys::seqpacket::Listener) {
    let name = format!("overbook-shim-test.{}.{}", std::process::id(), fastrand::u64(..));
    let listener = sys::seqpacket::Listener::bind(&name).unwrap();
    (Connection::connect(&name, Duration::from_secs(1)).unwrap(), listener)
}

/// The address at which its shim listens; `None`: it does not listen.
pub(crate) fn address_of(stand_in: &StandIn) -> Option<String> {
    let names = sys::threads::names(stand_in.pid(), 1_000).unwrap();
    names.iter().find_map(|name| protocol::address_of_listener(stand_in.pid(), name))
}

pub(crate) fn connect(stand_in: &StandIn) -> Connection {
    let began = Instant::now();
    loop {
        let address = address_of(stand_in).unwrap_or_default();
        match Connection::connect(&address, Duration::from_secs(1)) {
            Ok(connection) => return connection,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(5), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn ask_on(connection: &Connection, request: &Request) -> (Answer, Option<OwnedFd>) {
    ask_with(connection, request, None)
}

/// Sends a request; the answer must carry its number.
fn ask_with(
    connection: &Connection,
    request: &Request,
    fd: Option<BorrowedFd<'_>>,
) -> (Answer, Option<OwnedFd>) {
    static IDS: AtomicU32 = AtomicU32::new(1);
    let id = IDS.fetch_add(1, Ordering::Relaxed);
    connection.send(&request.encode(id).unwrap(), fd).unwrap();
    let (answered, answer, fd) = receive_numbered(connection).unwrap();
    assert_eq!(answered, request.numbered(id), "{request:?}: {answer:?}");
    (answer, fd)
}

/// The next packet.
pub(crate) fn receive(
    connection: &Connection,
) -> Result<(Answer, Option<OwnedFd>), SeqpacketError> {
    receive_numbered(connection).map(|(_, answer, fd)| (answer, fd))
}

fn receive_numbered(
    connection: &Connection,
) -> Result<(u32, Answer, Option<OwnedFd>), SeqpacketError> {
    let mut packet = vec![0; MAX_PACKET];
    assert!(connection.wait(Duration::from_secs(20)).unwrap(), "no answer");
    let received = connection.receive(&mut packet)?.unwrap();
    let (id, answer) = Answer::decode(&packet[..received.length]).unwrap();
    Ok((id, answer, received.fd))
}

/// Tracking that revokes only requested granules.
pub(crate) fn by_name() -> Tracking {
    Tracking { granule_pages: GRANULE, hot_set: None, sample: u32::MAX, max_traps_per_s: 1_000_000 }
}
