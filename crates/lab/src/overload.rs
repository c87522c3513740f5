//! One burst of clients at a web server that was given less memory than it was promised, and the
//! remedies (Overdriver §5).
//!
//! The paper's ten minutes are one minute here, so its intervals of 10 s are 1 s. The daemon's
//! are 2 s, the shortest that it accepts. The guest's disk has moving heads: a read takes 5 ms.
//! Other hosts' memory is behind a link of 1 Gbit/s, which migrations use as well. The second
//! host has all the memory that the guest was promised. The first one has the memory that the
//! guest was given.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use cluster::records;
use cluster::store::{Change, StoreError};
use model::cluster::Intent;
use model::{Bytes, DiskReading, HostName, Learned, Profile, VmName};
use serde_json::{Value, json};

use crate::hosts::Hosts;
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::Files;
use crate::metrics::{Follower, Newest};
use crate::pool::{HOSTS, HostPool, PoolSettings};
use crate::qmp::QmpLine;
use crate::remote_swap::{Disk, RemoteSwap};
use crate::scenario::Context;

/// The remedy for an overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// None is needed: the guest has the memory that it was promised.
    Memory,
    /// The guest swaps to its disk.
    Disk,
    /// The guest swaps into another host's memory, backed by the disk.
    Network,
    /// The guest is migrated at the first sign of an overload, and swaps to its disk until it has
    /// arrived. The lab decides that at once, where a controller would wait.
    Migration,
    /// Overbook: another host's memory, and a migration once the overload is sustained.
    Both(Threshold),
    /// The same with the threshold that Overbook has [learned] from the guest, instead of this
    /// one.
    Learned(Threshold),
}

/// The daemon's profile of a guest that was overloaded twenty times, for one interval each.
fn learned() -> Learned {
    let profile = Profile {
        intervals: 5_000,
        transient: 20,
        sustained: 0,
        lengths: vec![20],
        sustained_overloads: 0,
    };
    Learned { profiles: [(VmName::from(GUEST), profile)].into(), ..Learned::default() }
}

/// The threshold of a sustained overload, in intervals of 2 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    /// The number of latest intervals that are considered.
    pub window: u32,
    /// The number of overloaded ones among them that makes an overload sustained.
    pub sustained: u32,
}

#[derive(Clone, Debug, Default)]
pub struct OverloadSample {
    /// Requests that were answered from shortly before the burst until shortly after it.
    pub answered: f64,
    /// Mean response time of the requests in that time, in milliseconds.
    pub response_ms: f64,
    /// Time for which the guest paged above the limit of an overload.
    pub overloaded_s: f64,
    /// Data sent to other hosts and received from them.
    pub traffic: Bytes,
    /// The most memory of other hosts that was taken for this.
    pub space: Bytes,
    /// Whether the guest changed hosts.
    pub moved: bool,
    /// Answers per second, over the seconds since the start.
    pub rates: Vec<(f64, f64)>,
}

impl OverloadSample {
    /// How often the guest changed hosts, in one burst.
    pub fn moves(&self) -> f64 {
        f64::from(u8::from(self.moved))
    }
}

const GUEST: &str = "web";
/// Memory that the guest was promised, and memory that it was given.
pub const PROMISED: Bytes = Bytes::mib(256);
const GIVEN: Bytes = Bytes::mib(128);
/// Working sets in MB: of the sessions that are always there, and of those that come in a burst.
const CALM_MB: u32 = 64;
const BURST_MB: u32 = 96;
/// Requests per second, and the factor by which a burst multiplies them: 600 sessions to 250.
const RATE: u32 = 125;
const FACTOR: f64 = 2.4;
/// Time until the burst, in which the pool comes up.
const OFF: Duration = Duration::from_secs(15);
/// Time before and after the burst that is measured, too.
const BEFORE: Duration = Duration::from_secs(3);
const AFTER: Duration = Duration::from_secs(5);
const SWAP: Bytes = Bytes::mib(256);
/// Time of a read on a disk with moving heads, in microseconds.
const READ_US: u32 = 5_000;
/// Rate of the link, in Mbit/s.
const CABLE: u32 = 1_000;
const PAGES_PER_S: f64 = 200.0;
const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(50);
/// Interval over which paging is measured.
const SECOND: Duration = Duration::from_secs(1);

/// Requests that clients send in the measured time.
pub fn asked(burst: Duration) -> f64 {
    let (calm, burst) = ((BEFORE + AFTER).as_secs_f64(), burst.as_secs_f64());
    f64::from(RATE) * (calm + FACTOR * burst)
}

pub fn run(context: &Context, remedy: Remedy, burst: Duration) -> Result<OverloadSample, LabError> {
    context.make_dir()?;
    let (near, far) = (context.dir.join("a"), context.dir.join("b"));
    // Output of an earlier run's guest there.
    match fs::remove_dir_all(&far) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    let threshold = match remedy {
        Remedy::Both(threshold) | Remedy::Learned(threshold) => Some(threshold),
        _ => None,
    };
    let is_remote = remedy == Remedy::Network || threshold.is_some();
    let lent = if is_remote { SWAP } else { Bytes::ZERO };
    let disk = Disk { size: SWAP, read_delay_us: READ_US, lent, cache: false };
    let swap_dir = context.dir.join("swap");
    let swap = if is_remote {
        RemoteSwap::start_apart(Hosts::start(CABLE)?, &swap_dir, GUEST, disk)?
    } else {
        RemoteSwap::start(&swap_dir, GUEST, disk)?
    };
    let (on, off) = (burst.as_secs_f64(), OFF.as_secs_f64());
    let load = format!(
        "web --rate {RATE} --mb {CALM_MB} --burst {FACTOR}:{on}:{off} --burst-mb {BURST_MB}"
    );
    let given = if remedy == Remedy::Memory { PROMISED } else { GIVEN };
    let guest = context.guest(GUEST, "pool", given, &load).up_to(PROMISED);
    let mut lab = Lab::start(&near, &context.provisions, &[swap.given_to(guest)])?;
    lab.wait_for("the guest to be open", LIMIT, |lab| {
        let newest = lab.machine(GUEST)?.last_metric();
        Ok(newest.is_some_and(|sample| sample.value.get("dropped").is_some()))
    })?;
    let begun = Instant::now();
    let pool = if threshold.is_some() || remedy == Remedy::Migration {
        swap.make_known(&lab)?;
        let learned = matches!(remedy, Remedy::Learned(_)).then(learned);
        Some(pool(&lab, &far, threshold, learned)?)
    } else {
        None
    };
    let window = (OFF.saturating_sub(BEFORE), OFF + burst + AFTER);
    let mut watch =
        OverloadWatch::begin(begun, [&near, &far], pool, swap.status().unwrap_or_default())?;
    watch.may_move = remedy == Remedy::Migration;
    let mut carried = None;
    while begun.elapsed() < window.1 + SECOND {
        interrupt::sleep(POLL)?;
        if carried.is_none() && begun.elapsed() >= window.0 {
            carried = Some(swap.carried()?);
        }
        watch.look(&swap)?;
    }
    let mut seen = watch.seen(window);
    seen.traffic = seen.traffic.plus(swap.carried()?.minus(carried.unwrap_or_default()));
    drop(watch);
    lab.stop()?;
    swap.end()?;
    Ok(seen)
}

/// Two hosts, and a controller if Overbook decides itself. `learned` is the first host's daemon's
/// knowledge.
fn pool(
    lab: &Lab,
    far: &Path,
    threshold: Option<Threshold>,
    learned: Option<Learned>,
) -> Result<HostPool, LabError> {
    let Threshold { window, sustained } =
        threshold.unwrap_or(Threshold { window: 2, sustained: 2 });
    let overload = format!(
        "interval_s = 2\npages_per_s = {PAGES_PER_S}\nwindow = {window}\nsustained = {sustained}"
    );
    let settings = PoolSettings {
        guest: GUEST,
        given: GIVEN,
        promised: PROMISED,
        others: &[],
        budget: PROMISED,
        balloon: &["observe", "enforce"],
        host: "",
        overload: &overload,
        pool: "precopy_s = 6\nrest_s = 10",
        members: 1,
    };
    let mut pool = HostPool::new(lab, &[far.to_owned()], &settings)?;
    if let Some(learned) = learned {
        let text = serde_json::to_vec(&learned).map_err(io::Error::other)?;
        fs::write(lab.dir().join("run/state/learned.json"), text)?;
    }
    let controller = pool.controller();
    for daemon in 0..controller {
        pool.start(daemon)?;
    }
    if threshold.is_some() {
        pool.start(controller)?;
    }
    Ok(pool)
}

/// A line of the guest's report.
#[derive(Clone, Copy, Default)]
struct OverloadRow {
    at: f64,
    answered: f64,
    dropped: f64,
    mean_us: f64,
}

/// The observer of a run.
struct OverloadWatch {
    begun: Instant,
    hosts: [Newest; 2],
    _follower: Follower,
    source: QmpLine,
    pool: Option<HostPool>,
    may_move: bool,
    rows: Vec<OverloadRow>,
    /// The disk's count of pages over the last second, with times.
    disk: VecDeque<(Instant, u64)>,
    /// The time of the last reading, and the total time for which readings were above the limit.
    looked: Instant,
    overloaded: Duration,
    /// Memory used on other hosts: before the burst, and at most.
    held: (Bytes, Bytes),
    sent: Bytes,
    moved: bool,
}

impl OverloadWatch {
    fn begin(
        begun: Instant,
        dirs: [&Path; 2],
        pool: Option<HostPool>,
        disk: DiskReading,
    ) -> Result<Self, LabError> {
        let hosts = [Newest::default(), Newest::default()];
        let files = dirs.map(|dir| Files::new(dir, GUEST));
        let followed = files.iter().zip(&hosts).map(|(f, n)| (f.metrics.clone(), n.clone()));
        let held = disk.repositories.unwrap_or_default().held;
        Ok(Self {
            begun,
            _follower: Follower::start(followed.collect())?,
            hosts,
            source: QmpLine::new(&files[0].lab_socket),
            pool,
            may_move: false,
            rows: Vec::new(),
            disk: VecDeque::new(),
            looked: Instant::now(),
            overloaded: Duration::ZERO,
            held: (held, held),
            sent: Bytes::ZERO,
            moved: false,
        })
    }

    fn look(&mut self, swap: &RemoteSwap) -> Result<(), LabError> {
        for host in 0..self.hosts.len() {
            let Some(sample) = self.hosts[host].get() else { continue };
            let number = |key: &str| sample.value[key].as_f64();
            let (Some(answered), Some(dropped)) = (number("ops"), number("dropped")) else {
                continue;
            };
            let last = self.rows.last().copied().unwrap_or_default();
            if answered + dropped > last.answered + last.dropped {
                self.moved |= host == 1;
                let at = sample.arrived.saturating_duration_since(self.begun).as_secs_f64();
                let mean_us = number("mean_us").unwrap_or(f64::NAN);
                self.rows.push(OverloadRow { at, answered, dropped, mean_us });
            }
        }
        if let Some(disk) = swap.status() {
            self.look_at(&disk)?;
        }
        if self.pool.is_some() && !self.moved {
            let asked = self.source.with(|qmp| qmp.execute("query-migrate", json!({})));
            let sent = |told: Value| told["ram"]["transferred"].as_u64();
            self.sent = asked.ok().and_then(sent).map_or(self.sent, Bytes);
        }
        Ok(())
    }

    fn look_at(&mut self, disk: &DiskReading) -> Result<(), LabError> {
        let now = Instant::now();
        let held = disk.repositories.unwrap_or_default().held;
        if self.begun.elapsed() < OFF {
            self.held = (held, held);
        }
        self.held.1 = self.held.1.max(held);
        let pages = (disk.read.0 + disk.written.0) / 4096;
        self.disk.push_back((now, pages));
        while self.disk.len() > 2 && now - self.disk[1].0 >= SECOND {
            self.disk.pop_front();
        }
        let (since, before) = self.disk[0];
        let rate = (pages - before) as f64 / (now - since).as_secs_f64().max(1e-3);
        let is_overloaded = now - since >= SECOND && rate > PAGES_PER_S;
        if is_overloaded && self.begun.elapsed() >= OFF.saturating_sub(BEFORE) {
            self.overloaded += now - self.looked;
            if self.may_move {
                self.have_moved()?;
            }
        }
        self.looked = now;
        Ok(())
    }

    /// Decides that the guest moves to the other host.
    fn have_moved(&mut self) -> Result<(), LabError> {
        let Some(pool) = &self.pool else { return Ok(()) };
        let refused = |error: StoreError| LabError::Io(io::Error::other(error));
        let [from, to, _] = HOSTS.map(HostName::from);
        let intent = Intent { generation: 1, from, to, group: "pool".into(), is_withdrawn: false };
        let vm = VmName::from(GUEST);
        if let Some(seat) = pool.sit().map_err(refused)? {
            let change = Change::put(records::intent(&vm), &intent);
            pool.write(&seat, change).map_err(refused)?;
            self.may_move = false;
        }
        Ok(())
    }

    fn seen(&self, window: (Duration, Duration)) -> OverloadSample {
        let (from, until) = (window.0.as_secs_f64(), window.1.as_secs_f64());
        let pairs = || self.rows.windows(2).map(|pair| (pair[0], pair[1]));
        // Answers between two lines count by the part of their interval that lies in the window.
        let (mut answered, mut asked, mut waited) = (0.0, 0.0, 0.0);
        for (old, new) in pairs() {
            let within = (new.at.min(until) - old.at.max(from)).max(0.0) / (new.at - old.at);
            answered += (new.answered - old.answered) * within;
            let both = (new.answered + new.dropped - old.answered - old.dropped) * within;
            asked += both;
            waited += both * new.mean_us;
        }
        let rates =
            pairs().map(|(old, new)| (new.at, (new.answered - old.answered) / (new.at - old.at)));
        let taken = if self.moved { PROMISED } else { Bytes::ZERO };
        OverloadSample {
            answered,
            // Without an answer there is no response time.
            response_ms: waited / asked / 1e3,
            overloaded_s: self.overloaded.as_secs_f64(),
            traffic: self.sent,
            space: self.held.1.minus(self.held.0).plus(taken),
            moved: self.moved,
            rates: rates.collect(),
        }
    }
}
