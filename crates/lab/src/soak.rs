//! Merging by workers that are killed: the effect of such a soak on guests, and its remains.
//!
//! The group's worker (the real process) merges as fast as it can, and tracks. One order in nine
//! is to unshare everything. After half a second to twenty, the worker is killed, and the next
//! one takes over. At the end everything is unshared, and the kernel shows what remains.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use model::{Bytes, Dedup, PagesPerMs};
use sys::pool_file::PoolFile;
use sys::pool_maps;
use worker::{Report, SLOTS};

use crate::figures::{Figures, Target};
use crate::lab::{Lab, LabError, Machine};
use crate::lives;
use crate::random::Random;
use crate::worker_process::{Wanted, WorkerProcess};

/// Scan rate in orders: more than any worker can do.
const RATE: PagesPerMs = PagesPerMs(1000);
/// For each order, one of the nine numbers from 0 to this one is drawn; 0: it is to unshare.
const UNSHARE: u64 = 8;
const UNSHARE_LIMIT: Duration = Duration::from_secs(60);
/// The most new mappings of four QEMUs: their own, and pieces larger than a huge page, of which
/// each QEMU has 112 at most.
const MOST_GROWN: f64 = 256.0;

/// A soak of the guests of a lab.
#[derive(Debug)]
pub struct Soak<'a> {
    lab: &'a Lab,
    group: &'static str,
    table: Option<PathBuf>,
    seed: u64,
    /// Mappings of all QEMUs before the soak.
    mappings: u32,
    toll: SoakCounts,
}

/// The counts of a soak, over all workers.
#[derive(Debug, Default)]
struct SoakCounts {
    kills: u32,
    /// Number of orders to unshare everything.
    unshared: u32,
    merged: u64,
    broken: u64,
    dropped: u64,
    /// The largest number of pages in a worker's table.
    known: u64,
}

/// The remains after everything was unshared.
#[derive(Debug, Default)]
struct Left {
    shared_pages: usize,
    pool_bytes: u64,
    mappings: u32,
    /// Growth of the QEMUs' mappings of any kind.
    grown: u32,
}

impl<'a> Soak<'a> {
    /// A soak of guests that no worker has merged yet. `table`: pages that are known before.
    pub fn new(
        lab: &'a Lab,
        group: &'static str,
        table: Option<PathBuf>,
        seed: u64,
    ) -> Result<Self, LabError> {
        let mappings = count_mappings(lab)?;
        Ok(Self { lab, group, table, seed, mappings, toll: SoakCounts::default() })
    }

    /// Merges, kills and unshares for `length`. `beside` is called for each guest after each
    /// order.
    pub fn run(
        &mut self,
        length: Duration,
        beside: impl FnMut(&Machine, &mut Random) -> Result<(), LabError>,
    ) -> Result<(), LabError> {
        let (start, mut random) = (|| self.worker(), Random::new(self.seed));
        let mut unshared = 0;
        let order = |random: &mut Random| {
            let unshares = random.between(0, UNSHARE) == 0;
            unshared += u32::from(unshares);
            Wanted { scan_rate: (!unshares).then_some(RATE), ..Wanted::default() }
        };
        let last_words = lives::run(self.lab, length, &mut random, start, order, beside)?;
        self.toll = SoakCounts { unshared, ..SoakCounts::default() };
        last_words.iter().for_each(|report| self.toll.count(report));
        Ok(())
    }

    fn worker(&self) -> Result<WorkerProcess, LabError> {
        let worker = WorkerProcess::start(self.group)?;
        Ok(match &self.table {
            Some(table) => worker.knowing(table),
            None => worker,
        })
    }

    /// Has everything unshared. Adds the soak's counts, and the remains by the kernel's count.
    pub fn end(self, figures: &mut Figures) -> Result<(), LabError> {
        let left = self.unshare()?;
        self.toll.add_to(figures);
        left.add_to(figures);
        Ok(())
    }

    fn unshare(&self) -> Result<Left, LabError> {
        let mut worker = self.worker()?;
        worker.order(self.lab, Wanted::default())?;
        self.lab.wait_for("nothing to be shared any more", UNSHARE_LIMIT, |_| {
            let report = worker.report().unwrap_or_default();
            let is_unshared = |dedup: Dedup| dedup.passes > 1 && dedup.shared == Bytes::ZERO;
            Ok(!report.vms.is_empty()
                && report
                    .vms
                    .values()
                    .all(|vm| vm.dedup.is_some_and(|dedup| is_unshared(dedup.value))))
        })?;
        worker.end()?;
        let mut left = Left::default();
        let mut pools = BTreeMap::new();
        let pids = self.lab.pids();
        for &pid in &pids {
            for mapping in pool_maps::mappings(pid)? {
                left.mappings += 1;
                pools.entry(mapping.file).or_insert((pid, mapping));
            }
        }
        for (file, (pid, mapping)) in pools {
            let pool = PoolFile::adopt(pid, &mapping, SLOTS).map_err(std::io::Error::other)?;
            left.pool_bytes += pool.bytes().map_err(std::io::Error::from)?;
            for &pid in &pids {
                left.shared_pages += pool_maps::sharers(pid, file, &[pool_maps::EVERYWHERE])?.len();
            }
        }
        left.grown = count_mappings(self.lab)?.saturating_sub(self.mappings);
        Ok(left)
    }
}

fn count_mappings(lab: &Lab) -> Result<u32, LabError> {
    let counts: std::io::Result<Vec<u32>> = lab.pids().into_iter().map(pool_maps::count).collect();
    Ok(counts?.into_iter().sum())
}

impl SoakCounts {
    fn count(&mut self, report: &Report) {
        self.kills += 1;
        self.known = self.known.max(report.known_pages);
        for reading in report.vms.values().filter_map(|vm| Some(vm.dedup?.value)) {
            self.merged += reading.merged.0;
            self.broken += reading.broken.0;
            self.dropped += reading.dropped.0;
        }
    }

    fn add_to(&self, figures: &mut Figures) {
        let mut add = |name: &str, value: f64, unit: &'static str, note: &str| {
            figures.check(name, value, unit, note, Target::AtLeast(1.0));
        };
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        add("kills", self.kills.into(), "count", "workers killed, each followed by the next");
        add("unshared", self.unshared.into(), "count", "times that all was to be unshared");
        add("merged_mib", mib(self.merged), "MiB", "shared with a slot of a pool");
        add("broken_mib", mib(self.broken), "MiB", "of it written by guests and seen so");
        add("dropped_mib", mib(self.dropped), "MiB", "pages of zeros");
        if self.known > 0 {
            add("known", self.known as f64, "pages", "that the group's table names");
        }
    }
}

impl Left {
    fn add_to(&self, figures: &mut Figures) {
        let mut add = |name: &str, value: f64, unit: &'static str, note: &str, most: Target| {
            figures.check(name, value, unit, note, most);
        };
        let none = Target::Equals(0.0);
        let note = "shared when all was unshared, by the kernel's count";
        add("left_shared_pages", self.shared_pages as f64, "pages", note, none);
        add("left_in_pools", self.pool_bytes as f64, "B", "that the pools take then", none);
        add("left_mappings", self.mappings.into(), "count", "mappings of pools then", none);
        let note = "mappings more than before: QEMUs' own, and pieces that could not be joined";
        add("left_pieces", self.grown.into(), "count", note, Target::AtMost(MOST_GROWN));
    }
}
