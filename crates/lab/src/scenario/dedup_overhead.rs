//! `dedup-overhead`: the memory that merging itself takes, in the kernel and in the worker.
//!
//! The real worker merges four guests until nothing more is saved. In one layout long runs of
//! pages are the same. In the other every second page is the same over nearly all of the guests'
//! memory, so that each such page is a mapping of its own.
//!
//! * The **saved** memory (the fall of all QEMUs' `Pss_Anon`, less the pool) is compared with the
//!   kernel's cost: mappings with their dependent objects, page tables, and the index of the
//!   pool's file.
//! * The **scanned** memory (the guests' resident RAM) is compared with the worker's cost: the
//!   growth of its own memory, and of the shims' page states that it reads.
//!
//! Mappings are those that the processes list, at the size of the kernel's object. Their
//! dependent objects are counted for the whole machine. To show whether other work on it distorts
//! that count, the growth of all of the machine's mappings is compared with that of those listed
//! (`counter_error`).

use model::{PagesPerMs, TrackingBudget};
use pages::dedup::BYTES_PER_PAGE;
use sys::memory_map::PAGE_LEN;
use sys::pool_maps;
use worker::Report;

use super::dedup_vs_ksm::anonymous_mib;
use super::prelude::*;
use crate::slab::Objects;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-overhead",
    summary: "what merging takes of memory: mappings, page tables and the worker, to what it saves and scans",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SHIM],
    claims: claims! {
        "overhead_of_saved" <= 0.03 => "ratio",
            "Mappings and page tables take little of the saved memory in a natural layout";
        "overhead_of_saved_worst" <= 0.07 => "ratio",
            "Mappings and page tables take little in the worst layout, every second page the same";
        "overhead_of_scanned" <= 0.005 => "ratio",
            "The worker's index takes little of the scanned memory";
        "counter_error" <= 0.05 => "ratio", "The worker's own count of these costs is right";
    },
    run,
};

const GUESTS: usize = 4;
/// Three GiB in all: for a group of any size, the worker takes 4 to 5 MiB.
const MEMORY: Bytes = Bytes::mib(768);
const NATURAL: (&str, u32, &str) = ("natural", 580, "copies --same-mb 290 --own-mb 290 --rest");
const WORST: (&str, u32, &str) =
    ("worst", 580, "copies --same-mb 290 --own-mb 290 --interleaved --rest");
const SETTLE: Duration = Duration::from_secs(3);
const WORKER_LIMIT: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Merging has ended when this time passes with no more than [`LITTLE`] saved.
const QUIET: Duration = Duration::from_secs(12);
const LITTLE: f64 = 1.0;
const START_LIMIT: Duration = Duration::from_secs(60);
const MERGE_LIMIT: Duration = Duration::from_secs(300);
/// More than the worker can reach.
const RATE: PagesPerMs = PagesPerMs(1000);
/// The kernel's object for a mapping.
const MAPPING: &str = "vm_area_struct";
/// Objects that depend on mappings.
const CACHES: [&str; 3] = ["anon_vma_chain", "anon_vma", "maple_node"];
/// The index nodes of the pool's file, and the number of pages that each holds.
const FILE_NODE: (&str, f64) = ("radix_tree_node", 64.0);

/// Memory taken at one moment.
struct OverheadSample {
    /// All mappings of the QEMUs, and of the machine.
    listed: f64,
    mappings: Objects,
    objects: Vec<Objects>,
    page_tables: Bytes,
    anonymous_mib: f64,
    worker: Bytes,
}

/// Measurements of one layout, in MiB.
struct PageLayout {
    saved: f64,
    pool: f64,
    scanned: f64,
    dropped: f64,
    shared_pages: f64,
    /// Of the pool.
    mappings: f64,
    /// The kernel's cost by kind.
    kernel: Vec<(&'static str, f64)>,
    worker: f64,
    counter_error: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut of_scanned = Vec::new();
    let mut counter_error: f64 = 0.0;
    for ((name, mb, work), figure) in
        [(NATURAL, "overhead_of_saved"), (WORST, "overhead_of_saved_worst")]
    {
        context.say(&format!("{name} ..."));
        let layout = layout(context, name, mb, work)?;
        context.say(&format!("  {}\n  {}", layout.in_words(), layout.worker_in_words()));
        let value = layout.kernel_mib() / layout.saved;
        figures.tell(figure, value, "ratio", layout.in_words());
        let each = layout.kernel_mib() * f64::from(1 << 20) / layout.mappings;
        let note = "what the kernel takes for each mapping of the pool";
        figures.tell(&format!("mapping_bytes_{name}"), each, "B", note);
        let left = layout.saved - layout.kernel_mib() - layout.worker;
        let note =
            format!("by all four, the pool subtracted; {left:.0} without all that merging takes");
        figures.tell(&format!("saved_mib_{name}"), layout.saved, "MiB", note);
        of_scanned.push((layout.worker / layout.scanned, layout.worker_in_words()));
        counter_error = counter_error.max(layout.counter_error);
    }
    let note = of_scanned.iter().map(|(_, words)| words.as_str()).collect::<Vec<_>>().join("; ");
    let most = of_scanned.iter().map(|(ratio, _)| *ratio).largest();
    figures.tell("overhead_of_scanned", most, "ratio", note);
    let note =
        "growth of the machine's mappings to those that the QEMUs list, - 1: whether it was quiet";
    figures.tell("counter_error", counter_error, "ratio", note);
    Ok(figures)
}

fn layout(context: &Context, name: &str, mb: u32, work: &str) -> Result<PageLayout, LabError> {
    let guest = |number: usize| {
        context
            .guest(&format!("copy-{number}"), "dedup", MEMORY, work)
            .seeded(number as u64)
            .with_shim(true)
    };
    let mut lab = context.start((0..GUESTS).map(guest))?;
    fleet::wait_until_filled(&lab, mb)?;
    interrupt::sleep(SETTLE)?;
    let pids = lab.pids();
    let mut worker = WorkerProcess::start(name)?;
    lab.wait_for("the worker to report", WORKER_LIMIT, |_| Ok(worker.report().is_some()))?;
    let before = OverheadSample::now(&pids, &worker)?;
    let mut scanned = Bytes::ZERO;
    for machine in lab.machines() {
        scanned = scanned.plus(machine.overhead()?.guest);
    }
    let tracking = TrackingBudget::Off;
    worker.order(&lab, Wanted { tracking, scan_rate: Some(RATE), ..Wanted::default() })?;
    let began = Instant::now();
    let mut last_change = (Instant::now(), 0.0);
    while last_change.0.elapsed() < if last_change.1 > 0.0 { QUIET } else { START_LIMIT } {
        interrupt::sleep(LOOK_EVERY)?;
        if began.elapsed() > MERGE_LIMIT {
            let what = "merging to end".to_owned();
            return Err(LabError::Timeout { what, limit: MERGE_LIMIT });
        }
        let Some(report) = worker.report() else { continue };
        let saved = before.anonymous_mib - anonymous_mib(&pids)? - report.pool.as_mib();
        if saved > last_change.1 + LITTLE {
            last_change = (Instant::now(), saved);
        }
    }
    let after = OverheadSample::now(&pids, &worker)?;
    let told = worker.report().ok_or_else(|| std::io::Error::other("the worker tells nothing"));
    let report = told?;
    let mut mappings = 0.0;
    for pid in &pids {
        mappings += pool_maps::mappings(*pid)?.len() as f64;
    }
    worker.end()?;
    lab.stop()?;
    PageLayout::new(&before, &after, &report, scanned, mappings)
}

impl OverheadSample {
    fn now(pids: &[u32], worker: &WorkerProcess) -> Result<Self, LabError> {
        let of_worker = Counters::of(worker.identity().pid)?;
        let (mut listed, mut page_tables) = (0.0, of_worker.page_tables);
        for pid in pids {
            listed += std::fs::read_to_string(format!("/proc/{pid}/maps"))?.lines().count() as f64;
            page_tables = page_tables.plus(Counters::of(*pid)?.page_tables);
        }
        Ok(Self {
            listed,
            mappings: Objects::of(MAPPING)?,
            objects: CACHES.into_iter().map(Objects::of).collect::<Result<_, _>>()?,
            page_tables,
            anonymous_mib: anonymous_mib(pids)?,
            // The worker maps the shims' page states, but not the pool.
            worker: of_worker.anonymous.plus(of_worker.shared),
        })
    }
}

impl PageLayout {
    fn new(
        before: &OverheadSample,
        after: &OverheadSample,
        report: &Report,
        scanned: Bytes,
        mappings: f64,
    ) -> Result<Self, LabError> {
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let vms = || report.vms.values().filter_map(|vm| Some(&vm.dedup.as_ref()?.value));
        let listed = after.listed - before.listed;
        let mut kernel = vec![(MAPPING, mib(listed * after.mappings.each))];
        for ((cache, before), after) in CACHES.into_iter().zip(&before.objects).zip(&after.objects)
        {
            kernel.push((cache, mib(after.growth_bytes(*before))));
        }
        kernel.push(("page tables", after.page_tables.as_mib() - before.page_tables.as_mib()));
        // Computed and not counted: any file that is read has such nodes.
        let (cache, room) = FILE_NODE;
        let pages = report.pool.0 as f64 / PAGE_LEN as f64;
        kernel.push((cache, mib((pages / room).ceil() * Objects::of(cache)?.each)));
        let counted = after.mappings.more_than(before.mappings);
        Ok(Self {
            saved: before.anonymous_mib - after.anonymous_mib - report.pool.as_mib(),
            pool: report.pool.as_mib(),
            scanned: scanned.as_mib(),
            dropped: vms().map(|vm| vm.dropped.as_mib()).sum(),
            shared_pages: vms().map(|vm| vm.shared.0 as f64 / PAGE_LEN as f64).sum(),
            mappings,
            kernel,
            worker: after.worker.as_mib() - before.worker.as_mib(),
            counter_error: (counted / listed - 1.0).abs(),
        })
    }

    fn kernel_mib(&self) -> f64 {
        self.kernel.iter().map(|(_, mib)| mib).sum()
    }

    fn in_words(&self) -> String {
        let parts = self.kernel.iter().map(|(what, mib)| format!("{what} {mib:.2}"));
        format!(
            "{:.2} MiB in the kernel ({}) for {:.0} MiB saved: {:.0} pages in {:.0} mappings of a pool of {:.0} MiB, \
             {:.0} MiB of zeros dropped",
            self.kernel_mib(),
            parts.collect::<Vec<_>>().join(", "),
            self.saved,
            self.shared_pages,
            self.mappings,
            self.pool,
            self.dropped
        )
    }

    fn worker_in_words(&self) -> String {
        let all = GUESTS as f64 * MEMORY.as_mib();
        let index = all / PAGE_LEN as f64 * BYTES_PER_PAGE;
        format!(
            "{:.2} MiB for {:.0} of {all:.0} MiB that are there: index and books {index:.2}, else {:.2}",
            self.worker,
            self.scanned,
            self.worker - index
        )
    }
}
