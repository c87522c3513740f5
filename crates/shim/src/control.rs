//! The thread that answers a worker.
//!
//! The thread serves one worker at a time, run by root or by the user that runs QEMU by hand. It
//! tells another worker that it is busy, and closes that connection without reading from it. Each
//! packet is one request, with one answer of the same number. A malformed packet is refused and
//! changes nothing. When the connection closes, for any reason, everything is given back.
//!
//! The listener opens when the first guest RAM appears, because QEMU forks before that to become
//! a daemon.

use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

use protocol::layout::{Counter, GiveBack};
use protocol::{
    Answer, HELLO, MAX_PACKET, Refusal, Request, Status, VERSION, VERSIONS, address, listener_name,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::random;
use sys::seqpacket::{Connection, Listener};

use crate::descriptors::Guarded;
use crate::engine::{self, ENGINE, lock};
use crate::merge::AttachedPool;
use crate::process::userfaultfd;
use crate::time::{AsNanos, now, own_cpu};
use crate::tracker::Tracker;
use crate::{alerts, bench, fault_thread, remapping, requests, threads, watchdog};

/// How often the cost of a trap is measured while tracking.
const CALIBRATION: Duration = Duration::from_secs(3);
/// Touches per measurement.
const TOUCHES: u32 = 4;
/// Connections accepted in one turn.
const MOST_ACCEPTED: u32 = 8;
/// Delay before the next try after the kernel has refused an address.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);
/// CPU time of this thread for merging, unsharing and freed memory.
static OTHER_NS: AtomicU64 = AtomicU64::new(0);

/// Starts listening; once per process.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        threads::guard_forks();
        // Without this thread no worker can connect: QEMU runs as if the shim were not there.
        let _ = threads::start("ob-ctl", run);
    });
}

struct Worker {
    connection: Connection,
    /// The version of the protocol that its greeting has named; `None`: it has not greeted yet.
    version: Option<u16>,
    _guarded: Option<Guarded>,
}

fn run() {
    let listener = listen();
    let Some(_guarded) = Guarded::new(listener.as_fd().as_raw_fd()) else { return };
    let mut worker: Option<Worker> = None;
    let mut calibrated = now();
    loop {
        wait(&listener, worker.as_ref());
        if let Some(there) = &mut worker
            && !there.listen()
        {
            leave(&mut worker);
        }
        // Several at a time: any process may open connections, and a flood of them is refused
        // faster than it arrives.
        for _ in 0..MOST_ACCEPTED {
            let Ok(Some(connection)) = listener.accept() else { break };
            meet(&mut worker, connection);
        }
        if now().since(calibrated) > CALIBRATION {
            calibrated = now();
            calibrate();
        }
    }
}

/// Listens at an address that no other process can know in advance, and publishes it in this
/// thread's name.
fn listen() -> Listener {
    let pid = rustix::process::getpid().as_raw_nonzero().get().unsigned_abs();
    loop {
        let nonce = random::word();
        if let Ok(listener) = Listener::bind(&address(pid, nonce)) {
            let name = CString::new(listener_name(nonce)).unwrap_or_default();
            if rustix::thread::set_name(&name).is_ok() {
                return listener;
            }
        }
        std::thread::sleep(LISTEN_AGAIN);
    }
}

fn wait(listener: &Listener, worker: Option<&Worker>) {
    let mut fds = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::from_borrowed_fd(
            worker.map_or(listener.as_fd(), |worker| worker.connection.as_fd()),
            PollFlags::IN,
        ),
    ];
    let timeout = Timespec::try_from(CALIBRATION).ok();
    // Interrupted or not: the caller checks.
    let _ = poll(&mut fds, timeout.as_ref().filter(|_| worker.is_some()));
}

fn meet(worker: &mut Option<Worker>, connection: Connection) {
    let guarded = Guarded::new(connection.as_fd().as_raw_fd());
    let Ok(peer) = connection.peer() else { return };
    // A new worker may connect at the moment when the old one is gone.
    if worker.as_ref().is_some_and(Worker::hung_up) {
        leave(worker);
    }
    let refusal = if peer.uid != 0 && !is_of_our_owner(peer.uid) {
        Refusal::NotPermitted { uid: peer.uid }
    } else if let Some(there) = worker {
        Refusal::Busy { pid: there.connection.peer().map_or(0, |peer| peer.pid) }
    } else {
        alerts::worker_spoke();
        *worker = Some(Worker { connection, version: None, _guarded: guarded });
        return;
    };
    if let Ok(packet) = Answer::Refused(refusal).encode(HELLO) {
        let _ = connection.send(&packet, None);
    }
}

/// Whether a user other than root runs this QEMU by hand. libvirt runs the QEMU of every tenant
/// as one user. There the same uid proves nothing, and the parent belongs to root (libvirt, or
/// init after `-daemonize`).
fn is_of_our_owner(uid: u32) -> bool {
    let parent = rustix::process::getppid().map_or(1, |pid| pid.as_raw_nonzero().get());
    let owner = std::fs::metadata(format!("/proc/{parent}")).map(|there| there.uid());
    uid == rustix::process::geteuid().as_raw() && owner.is_ok_and(|owner| owner == uid)
}

fn leave(worker: &mut Option<Worker>) {
    *worker = None;
    alerts::worker_left();
    lock().is_lazy = false;
    engine::give_back(Some(GiveBack::WorkerGone));
}

impl Worker {
    fn hung_up(&self) -> bool {
        let mut fds = [PollFd::new(&self.connection, PollFlags::empty())];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let answered = poll(&mut fds, Some(&at_once)).is_ok();
        answered && fds[0].revents().contains(PollFlags::HUP)
    }

    /// Answers the request that has arrived; `false` when the worker is gone.
    fn listen(&mut self) -> bool {
        let mut packet = [0; MAX_PACKET];
        match self.connection.receive(&mut packet) {
            Ok(None) => true,
            // The sender has closed since: its request may be wrong by now.
            Ok(Some(_)) if self.hung_up() => false,
            Ok(Some(received)) => {
                alerts::worker_spoke();
                let (id, request) = self.decode(&packet[..received.length]);
                let (began, is_tracking) = (own_cpu(), request.as_ref().is_ok_and(is_tracking));
                let answered = request.and_then(|request| {
                    catch_unwind(AssertUnwindSafe(|| self.answer(request, received.fd)))
                        .unwrap_or_else(|_| Err(failed_inside()))
                });
                if !is_tracking {
                    let took = own_cpu().saturating_sub(began).as_nanos_u64();
                    OTHER_NS.fetch_add(took, Ordering::Relaxed);
                }
                say_own_cpu();
                let sent = match answered {
                    Ok(Some(answer)) => self.send(id, &answer, None),
                    Ok(None) => self.greet(),
                    Err(refusal) => self.send(id, &Answer::Refused(refusal), None),
                };
                alerts::worker_spoke();
                sent
            }
            Err(_) => false,
        }
    }

    /// Decodes a request. One that is newer than the worker's version is no request.
    fn decode(&self, packet: &[u8]) -> (u32, Result<Request, Refusal>) {
        let (id, request) = Request::decode(packet);
        let is_newer = |request: &Request| self.version.is_some_and(|it| request.since() > it);
        if request.as_ref().is_ok_and(is_newer) {
            let length = u32::try_from(packet.len()).unwrap_or(u32::MAX);
            return (HELLO, Err(Refusal::Malformed { length }));
        }
        (id, request)
    }

    /// Carries out a request; `None`: the caller sends the greeting.
    fn answer(&mut self, request: Request, fd: Option<OwnedFd>) -> Result<Option<Answer>, Refusal> {
        if let Request::Hello { version } = request {
            if !VERSIONS.contain(version) {
                return Err(Refusal::Version { shim: VERSION, worker: version });
            }
            self.version = Some(version);
            return Ok(None);
        }
        if self.version.is_none() {
            return Err(Refusal::NotTracking { why: "say Hello first".to_owned() });
        }
        let answer = match request {
            Request::Track(tracking) => {
                start_threads()?;
                alerts::tracking_begins();
                let count = requests::track(tracking)?;
                calibrate();
                Answer::Done { count }
            }
            Request::Revoke { granules } => Answer::Done { count: requests::revoke(&granules)? },
            Request::Recall { granules } => Answer::Done { count: requests::recall(&granules)? },
            Request::Pool { slots } => {
                let pool = AttachedPool::open(fd, slots)?;
                lock().pool = Some(pool);
                Answer::Done { count: 0 }
            }
            Request::Merge { runs } => {
                start_threads()?;
                Answer::Merged(requests::merge(&runs, || !self.hung_up())?)
            }
            Request::Unshare { page, pages } => {
                start_threads()?;
                Answer::Done { count: requests::unshare(page, pages)? }
            }
            Request::HandOver { lazily } => {
                lock().is_lazy = lazily;
                Answer::Done { count: 0 }
            }
            Request::Take { runs } => {
                start_threads()?;
                Answer::Taken(requests::take(&runs, || !self.hung_up())?)
            }
            Request::Keep { runs } => Answer::Done { count: requests::keep(&runs) },
            Request::Release => Answer::Done { count: engine::give_back(None) },
            Request::About => Answer::About { release: env!("CARGO_PKG_VERSION").to_owned() },
            Request::Status | Request::Hello { .. } => {
                let engine = lock();
                let generation = engine.ops.ram.generation();
                let staging = engine.ops.tracker.as_ref().map_or_else(Vec::new, Tracker::staging);
                Answer::Status(Status { state: engine.state(), generation, staging })
            }
        };
        Ok(Some(answer))
    }

    fn send(&self, id: u32, answer: &Answer, fd: Option<BorrowedFd<'_>>) -> bool {
        // A refused greeting is of every version.
        let version = self.version.unwrap_or(VERSIONS.oldest);
        let packet = answer.encode_for(version, id);
        packet.is_ok_and(|packet| self.connection.send(&packet, fd).is_ok())
    }

    /// Sends the regions and the state, and shares the memory that describes them. All are of one
    /// moment, because RAM may be plugged in the next.
    fn greet(&self) -> bool {
        let Some(version) = self.version else { return false };
        let mut engine = lock();
        let (regions, state) = (engine.ops.regions(), engine.state());
        let memory = engine.ops.current_channel().map(AsFd::as_fd);
        self.send(HELLO, &Answer::Welcome { version, regions, state }, memory)
    }
}

fn failed_inside() -> Refusal {
    engine::give_back(Some(GiveBack::KernelRefused));
    Refusal::NotTracking { why: "the shim failed; see QEMU's log".to_owned() }
}

/// Starts the fault thread, the remapping thread and the watchdog, which never end. A thread that
/// could not be started is retried at the next request.
fn start_threads() -> Result<(), Refusal> {
    const THREADS: [(&str, fn()); 3] = [
        ("overbook-fault", fault_thread::run),
        ("overbook-remap", remapping::run),
        ("overbook-watch", watchdog::run),
    ];
    static STARTED: Mutex<usize> = Mutex::new(0);
    let start = || {
        alerts::prepare()?;
        let mut started = STARTED.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((name, body)) = THREADS.get(*started) {
            threads::start(name, *body)?;
            *started += 1;
        }
        Ok(())
    };
    // Without userfaultfd there is nothing to serve, and `track` reports why.
    let result: std::io::Result<()> = if userfaultfd().is_ok() { start() } else { Ok(()) };
    result.map_err(|error| Refusal::Kernel {
        call: "clone".to_owned(),
        errno: error.raw_os_error().unwrap_or(0),
    })
}

/// Whether a request is part of tracking. Recalling is not: granules are recalled to be merged.
fn is_tracking(request: &Request) -> bool {
    use Request::{About, Hello, Release, Revoke, Status, Track};
    matches!(request, Hello { .. } | About | Track(_) | Revoke { .. } | Release | Status)
}

/// Publishes the CPU time of tracking in this process, and the longest waits.
fn say_own_cpu() {
    if let Some(channel) = &lock().ops.channel {
        let shared = channel.shared();
        let ns = own_cpu().as_nanos_u64().saturating_sub(OTHER_NS.load(Ordering::Relaxed));
        shared.set(Counter::ControlNs, ns);
        let longest = ENGINE.longest();
        shared.set(Counter::LongestWaitNs, longest.wait.load(Ordering::Relaxed));
        shared.set(Counter::LongestHoldNs, longest.hold.load(Ordering::Relaxed));
        shared.set(Counter::Stalls, watchdog::stalls());
    }
}

/// Measures the cost of a trap, if tracking is on.
fn calibrate() {
    let mut total = Duration::ZERO;
    for _ in 0..TOUCHES {
        let place = lock().ops.tracker.as_mut().and_then(Tracker::arm_bench);
        let Some(place) = place else { return };
        // SAFETY: the place is kept for ever.
        total += unsafe { bench::touch(place) };
    }
    if let Some(channel) = &lock().ops.channel {
        channel.shared().set(Counter::RoundTripNs, (total / TOUCHES).as_nanos_u64());
    }
}
