//! Watches the domains: one round of questions a second, and after events.
//!
//! **Problem.** A call of libvirt may never come back: its daemon is stopped, or the QEMU that it
//! asks is. **Idea.** Each round runs on a thread with a connection of its own. A round that takes
//! longer than [`PATIENCE`] is left behind, and the next one uses a new thread. libvirt leaves out
//! a domain whose QEMU owes it an answer, so one stuck domain costs one round, and the others are
//! seen again. libvirt 11 asks QEMU also for a description. So a known one is read again only if
//! the domain has answered, and no round reads one for which another round still waits. At most
//! [`MOST_STUCK`] threads are left behind; after that the watcher waits for one of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use model::libvirt::{DomainProcess, FromLibvirt, LibvirtDomain};
use model::{Bytes, GuestStats};
use sys::clock::boot_now;
use virt::connect::Connect;
use virt::domain::Domain;

use crate::board::Board;
use crate::connection::OpenConnection;
use crate::description::Description;
use crate::places::CallPlaces;
use crate::qemu::process_of;
use crate::raw::{self, DomainStats, Subscription};
use crate::said;
use crate::wake::WAKE;

/// Pause between two rounds without an event.
const EVERY: Duration = Duration::from_secs(1);
/// Shortest pause between two rounds, however many events there are.
const LEAST: Duration = Duration::from_millis(100);
/// Longest time of a round.
const PATIENCE: Duration = Duration::from_secs(3);
/// Maximum number of rounds that libvirt owes an answer to: each occupies one of its 20 workers.
const MOST_STUCK: usize = 8;
/// A description is read again after this time, because events may be lost.
const READ_AGAIN: Duration = Duration::from_secs(10);
/// `VIR_DOMAIN_PAUSED` and `VIR_DOMAIN_PAUSED_MIGRATION`: a domain that arrives, or has left.
const MIGRATES: (u64, u64) = (3, 2);

/// `VIR_DOMAIN_PAUSED` and `VIR_DOMAIN_PMSUSPENDED`: the vCPUs of a domain are stopped.
const STOPPED: [u64; 2] = [3, 7];

/// Watches until the process ends.
pub(crate) fn run(uri: &str, board: &Board) -> ! {
    let threads = CallPlaces::new(MOST_STUCK + 1);
    let descriptions = Arc::new(Mutex::default());
    let mut worker: Option<RoundThread> = None;
    let mut may_be_new = true;
    loop {
        let news = match worker.take().or_else(|| RoundThread::start(uri, &threads, &descriptions))
        {
            None => lost(format!("{MOST_STUCK} calls of libvirt do not come back")),
            Some(current) => match current.round(may_be_new) {
                Ok(Ok(message)) => {
                    worker = Some(current);
                    message
                }
                Ok(Err(why)) => lost(why),
                Err(()) => lost("libvirt does not answer".to_owned()),
            },
        };
        board.publish(&news);
        thread::sleep(LEAST);
        may_be_new = WAKE.wait(EVERY - LEAST);
    }
}

fn lost(why: String) -> FromLibvirt {
    FromLibvirt::Lost { why }
}

type Outcome = Result<FromLibvirt, String>;

/// A thread with a connection.
struct RoundThread {
    orders: Sender<bool>,
    outcomes: Receiver<Outcome>,
}

impl RoundThread {
    /// `None`: too many threads are stuck.
    fn start(
        uri: &str,
        threads: &CallPlaces,
        descriptions: &Arc<Mutex<Descriptions>>,
    ) -> Option<Self> {
        let place = threads.take()?;
        let (orders, inbox) = channel();
        let (outbox, outcomes) = channel();
        let (uri, descriptions) = (uri.to_owned(), Arc::clone(descriptions));
        thread::spawn(move || {
            work(&uri, &descriptions, &inbox, &outbox);
            drop(place);
        });
        Some(Self { orders, outcomes })
    }

    /// Asks for a round. `Err`: it does not come back.
    fn round(&self, may_be_new: bool) -> Result<Outcome, ()> {
        let ended = || Ok(Err("the connection to libvirt has ended".to_owned()));
        if self.orders.send(may_be_new).is_err() {
            return ended();
        }
        match self.outcomes.recv_timeout(PATIENCE) {
            Ok(outcome) => Ok(outcome),
            Err(RecvTimeoutError::Disconnected) => ended(),
            Err(RecvTimeoutError::Timeout) => Err(()),
        }
    }
}

/// Answers orders until one fails or the watcher has left this thread behind.
fn work(
    uri: &str,
    descriptions: &Mutex<Descriptions>,
    orders: &Receiver<bool>,
    outcomes: &Sender<Outcome>,
) {
    let connect = match OpenConnection::open(uri) {
        Ok(connect) => connect,
        // Nothing listens if the watcher has given up.
        Err(error) => return drop(outcomes.send(Err(said(&error)))),
    };
    let events = Subscription::new(&connect);
    while let Ok(may_be_new) = orders.recv() {
        let outcome = look(&connect, descriptions, may_be_new);
        let is_over = outcome.is_err();
        if outcomes.send(outcome).is_err() || is_over {
            break;
        }
    }
    drop(events);
}

/// The descriptions of domains, by UUID.
#[derive(Debug, Default)]
struct Descriptions {
    known: BTreeMap<String, KnownDomain>,
    /// Those that a round reads now, or was left behind with.
    being_read: BTreeSet<String>,
}

/// A domain's description.
#[derive(Clone, Debug)]
struct KnownDomain {
    /// libvirt's number of the domain, which each start of it changes.
    number: u32,
    /// The time at which it was read.
    read: Instant,
    process: Option<DomainProcess>,
    description: Description,
}

fn look(connect: &Connect, descriptions: &Mutex<Descriptions>, may_be_new: bool) -> Outcome {
    let at = boot_now();
    let all = raw::stats_of_all(connect).map_err(|error| said(&error))?;
    lock(descriptions).known.retain(|uuid, _| all.iter().any(|stats| stats.uuid == *uuid));
    let domains =
        all.into_iter().filter_map(|stats| domain(connect, stats, descriptions, may_be_new));
    Ok(FromLibvirt::Domains { at, domains: domains.collect() })
}

/// One domain; `None`: it has just ended.
fn domain(
    connect: &Connect,
    stats: DomainStats,
    descriptions: &Mutex<Descriptions>,
    may_be_new: bool,
) -> Option<LibvirtDomain> {
    let handle = Domain::lookup_by_uuid_string(connect, &stats.uuid).ok()?;
    // Only a QEMU that has just answered libvirt is known to be the domain's.
    let has_answered = stats.fields.contains_key("balloon.rss");
    let own = lock(descriptions).known.get(&stats.uuid).cloned();
    let own = own.filter(|known| known.number == stats.number);
    let is_fresh = |known: &KnownDomain| !may_be_new && known.read.elapsed() < READ_AGAIN;
    let mut current = match own {
        Some(known) if is_fresh(&known) || !has_answered => known,
        own => read(&handle, &stats, descriptions).or(own)?,
    };
    if has_answered && current.process.is_none() {
        current.process = process_of(&stats.name);
    }
    let KnownDomain { process, description, .. } = current.clone();
    lock(descriptions).known.insert(stats.uuid.clone(), current);
    let field = |name: &str| stats.fields.get(name).copied();
    let is_migrating =
        (field("state.state"), field("state.reason")) == (Some(MIGRATES.0), Some(MIGRATES.1));
    // A QEMU that has just answered also answers the question about a migration.
    let job = has_answered.then(|| handle.get_job_info().ok()).flatten();
    let is_busy = job.map(|job| raw::is_job(&job));
    Some(LibvirtDomain {
        name: stats.name.as_str().into(),
        process,
        settings: description.settings,
        has_balloon: description.has_balloon,
        max: kib(field("balloon.maximum")).unwrap_or_default(),
        current: kib(field("balloon.current")).filter(|_| description.has_balloon),
        stats: guest_stats(field),
        stats_date_s: field("balloon.last-update").unwrap_or(0),
        stats_period_s: description.stats_period_s,
        reports_free_pages: description.reports_free_pages,
        deflates_on_oom: description.deflates_on_oom,
        is_busy: if is_migrating { Some(true) } else { is_busy },
        is_suspended: is_suspended(field("state.state")),
        uuid: stats.uuid,
    })
}

/// Reads a domain's description. `None`: it cannot be read, or another round waits for it.
fn read(
    handle: &Domain,
    stats: &DomainStats,
    descriptions: &Mutex<Descriptions>,
) -> Option<KnownDomain> {
    if !lock(descriptions).being_read.insert(stats.uuid.clone()) {
        return None;
    }
    let text = handle.get_xml_desc(0);
    lock(descriptions).being_read.remove(&stats.uuid);
    let description = Description::read(&text.ok()?).ok()?;
    Some(KnownDomain { number: stats.number, read: Instant::now(), process: None, description })
}

/// Held only to copy in and out: a thread that is left behind must not hold it.
fn lock(descriptions: &Mutex<Descriptions>) -> MutexGuard<'_, Descriptions> {
    descriptions.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_suspended(state: Option<u64>) -> bool {
    state.is_some_and(|state| STOPPED.contains(&state))
}

fn guest_stats(field: impl Fn(&str) -> Option<u64>) -> GuestStats {
    GuestStats {
        total: kib(field("balloon.available")),
        free: kib(field("balloon.unused")),
        available: kib(field("balloon.usable")),
        disk_caches: kib(field("balloon.disk_caches")),
        swap_in: kib(field("balloon.swap_in")),
        swap_out: kib(field("balloon.swap_out")),
        major_faults: field("balloon.major_fault"),
        minor_faults: field("balloon.minor_fault"),
        oom_kills: None,
    }
}

/// A size that libvirt gives in KiB. A value that the guest does not fill in is the largest one.
fn kib(size: Option<u64>) -> Option<Bytes> {
    size.filter(|kib| *kib < u64::MAX >> 10).map(|kib| Bytes(kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_that_is_paused_or_asleep_is_suspended() {
        let suspended: Vec<u64> = (0..=9).filter(|state| is_suspended(Some(*state))).collect();
        let expected = [virt_sys::VIR_DOMAIN_PAUSED, virt_sys::VIR_DOMAIN_PMSUSPENDED];
        assert_eq!(suspended, expected.map(u64::from));
        assert!(!is_suspended(None));
    }

    #[test]
    fn sizes_are_kib_and_an_absent_statistic_stays_absent() {
        let stats = guest_stats(|name| match name {
            "balloon.unused" => Some(2048),
            "balloon.swap_in" => Some(u64::MAX >> 10),
            "balloon.major_fault" => Some(7),
            _ => None,
        });
        let expected = GuestStats {
            free: Some(Bytes::mib(2)),
            major_faults: Some(7),
            ..GuestStats::default()
        };
        assert_eq!(stats, expected);
    }
}
