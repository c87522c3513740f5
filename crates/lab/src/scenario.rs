//! Scenarios: experiments on real guests that end in figures with targets.
//!
//! A scenario is one file with one function and one line in [`SCENARIOS`]. It begins with the names
//! of `prelude`. It gets a [`Context`], runs its own [`Lab`] and removes all that it made on every
//! path. Every loop polls [`interrupted`](crate::interrupt::interrupted) (the lab's own waits do).

mod attached_accuracy;
mod attached_kvm;
mod attached_large;
mod boot;
mod cluster_kill;
mod cold_choice;
mod cold_circles;
mod cold_density;
mod cold_return;
mod cold_soak;
mod coop_swap;
mod daemon_cost;
mod daemon_kill;
mod dedup_cost;
mod dedup_overhead;
mod dedup_soak;
mod dedup_vs_ksm;
mod free_soak;
mod group_isolation;
mod imr_fleet;
mod imr_regain;
mod imr_reuse;
mod imr_table8;
mod imr_vs_ksm_swap;
mod kim_allocations;
mod kim_controllers;
mod kim_fig1;
mod kim_fig17;
mod kim_isolation;
mod kim_lending;
mod kim_policies;
mod kim_scan_rates;
mod kim_table1;
mod kim_table2;
mod kvm_host;
mod let_go;
mod measured;
mod meb_accuracy;
mod meb_balance;
mod meb_imt;
mod meb_overhead;
mod meb_random_array;
mod overdriver_excess;
mod overdriver_fig5;
mod overdriver_fig8;
mod overdriver_pool;
mod overdriver_table1;
mod overdriver_table2;
mod page_server_kill;
mod page_server_vs;
mod pool_idle;
mod quickstart;
mod readings;
mod reclaimed;
mod shim_idle;
mod shim_stress;
mod smd_fig1;
mod smd_fig10;
mod smd_fig12;
mod smd_fig2;
mod smd_saved;
mod smd_soak;
mod starve;
mod truth;
mod walls;
mod worker_kill;

/// The names that most scenarios use.
mod prelude {
    pub(super) use std::time::{Duration, Instant};

    pub(super) use model::{Bytes, Mode};
    pub(super) use sys::memory_of::{Counters, Overhead};

    pub(super) use super::{Context, Scenario, measured};
    pub(super) use crate::arms::{ArmOrder, Arms, across, geometric_mean};
    pub(super) use crate::chart::{Chart, Line};
    pub(super) use crate::daemon::{Daemon, DaemonSettings, Overbooked};
    pub(super) use crate::evidence::claim::claims;
    pub(super) use crate::figures::{Figure, Figures, Target};
    pub(super) use crate::lab::{Lab, LabError, Machine};
    pub(super) use crate::machine::MachineSpec;
    pub(super) use crate::meb::page::Page;
    pub(super) use crate::meb::pairs::{Median, Pairs};
    pub(super) use crate::meb::progress;
    pub(super) use crate::memory_group::MemoryGroup;
    pub(super) use crate::random::Random;
    pub(super) use crate::recording::{Extremes, mean, median};
    pub(super) use crate::worker_process::{Wanted, WorkerProcess};
    pub(super) use crate::zram::Zram;
    pub(super) use crate::{fleet, interrupt};
}

use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use model::Bytes;

use crate::evidence::claim::Claim;
use crate::figures::Figures;
use crate::lab::{Lab, LabError, Provisions};
use crate::machine::MachineSpec;

/// The parameters of a scenario's run.
#[derive(Debug)]
pub struct Context {
    /// Its state directory.
    pub dir: PathBuf,
    /// QEMU, image and accelerator.
    pub provisions: Provisions,
    /// The seed of everything random.
    pub seed: u64,
    /// The length in minutes, for scenarios with a variable length.
    pub minutes: Option<u32>,
    /// The kernels, for scenarios that boot kernels of their own; empty: all that the scenario
    /// knows.
    pub kernels: Vec<String>,
}

impl Context {
    /// Makes its state directory, closed to other users, for a scenario that keeps more than a
    /// lab there.
    pub fn make_dir(&self) -> std::io::Result<()> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)
    }

    /// An empty set of figures, with the machine that the scenario runs on.
    pub fn figures(&self, scenario: &str, runs: u32) -> Figures {
        Figures::new(scenario, self.machine(), self.seed, runs)
    }

    /// A guest that has all its memory from the beginning, and the scenario's seed.
    pub fn guest(&self, name: &str, group: &str, memory: Bytes, workload: &str) -> MachineSpec {
        MachineSpec { seed: self.seed, ..MachineSpec::new(name, group, memory, memory, workload) }
    }

    /// Starts these guests, and returns when all are up.
    pub fn start(&self, guests: impl IntoIterator<Item = MachineSpec>) -> Result<Lab, LabError> {
        Lab::start(&self.dir, &self.provisions, &guests.into_iter().collect::<Vec<_>>())
    }

    /// Prints progress for the user.
    pub fn say(&self, text: &str) {
        eprintln!("{text}");
    }

    fn machine(&self) -> String {
        let cpus = std::thread::available_parallelism().map_or(0, usize::from);
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let kernel = read("/proc/sys/kernel/osrelease");
        let meminfo = read("/proc/meminfo");
        let total_kib = meminfo.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
        let gib = total_kib.unwrap_or_default() >> 20;
        let (qemu, accel) = (self.provisions.qemu.version, self.provisions.accel);
        format!("{cpus} CPUs, {gib} GiB, Linux {}, QEMU {qemu} {accel}", kernel.trim())
    }
}

/// One experiment.
#[derive(Debug)]
pub struct Scenario {
    /// Its name for `lab run`.
    pub name: &'static str,
    /// Its purpose, in one line.
    pub summary: &'static str,
    /// Its own source (`file!()`), and the files and directories that it measures.
    pub measures: &'static [&'static [&'static str]],
    /// Its claims, and figures that are told.
    pub claims: &'static [Claim],
    /// Runs it.
    pub run: fn(&Context) -> Result<Figures, LabError>,
}

impl Scenario {
    /// All sources whose change makes its record stale.
    pub fn sources(&self) -> impl Iterator<Item = &'static str> {
        self.measures.iter().copied().flatten().copied()
    }
}

/// All scenarios, in the order of `lab list`.
pub const SCENARIOS: &[Scenario] = &[
    boot::SCENARIO,
    quickstart::SCENARIO,
    cluster_kill::SCENARIO,
    daemon_kill::SCENARIO,
    daemon_cost::SCENARIO,
    truth::SCENARIO,
    walls::SCENARIO,
    attached_accuracy::SCENARIO,
    attached_kvm::SCENARIO,
    attached_large::SCENARIO,
    meb_accuracy::SCENARIO,
    meb_random_array::SCENARIO,
    meb_overhead::SCENARIO,
    meb_imt::SCENARIO,
    meb_balance::TABLE_3,
    meb_balance::TABLE_4,
    meb_balance::TABLE_5,
    meb_balance::TABLE_6,
    meb_balance::TABLE_7,
    meb_balance::TABLE_8,
    meb_balance::OSCILLATION,
    dedup_vs_ksm::SCENARIO,
    dedup_cost::SCENARIO,
    dedup_overhead::SCENARIO,
    dedup_soak::SCENARIO,
    imr_regain::TABLE_9,
    imr_regain::TABLE_10,
    imr_reuse::SCENARIO,
    imr_fleet::FIG_7,
    imr_fleet::FIG_8,
    imr_fleet::FIG_9,
    imr_table8::SCENARIO,
    imr_vs_ksm_swap::SCENARIO,
    free_soak::SCENARIO,
    group_isolation::SCENARIO,
    kim_table1::SCENARIO,
    kim_fig1::SCENARIO,
    kim_controllers::SINGLE,
    kim_controllers::MIXED,
    kim_scan_rates::SCENARIO,
    kim_policies::SCENARIO,
    kim_table2::SCENARIO,
    kim_fig17::SCENARIO,
    kim_allocations::SETS,
    kim_allocations::WITHIN,
    kim_isolation::HOG,
    kim_isolation::SWAPPER,
    kim_isolation::BUSY,
    kim_lending::SPEEDS,
    kim_lending::MEMORY,
    cold_choice::SCENARIO,
    cold_circles::SCENARIO,
    cold_density::SCENARIO,
    cold_return::SCENARIO,
    cold_soak::SCENARIO,
    coop_swap::SCENARIO,
    overdriver_table1::SCENARIO,
    overdriver_excess::SCENARIO,
    overdriver_fig5::SCENARIO,
    overdriver_fig8::SCENARIO,
    overdriver_table2::TABLE_2,
    overdriver_table2::DEMO,
    overdriver_pool::POOL,
    overdriver_pool::THRESHOLDS,
    pool_idle::SCENARIO,
    smd_fig1::SCENARIO,
    smd_fig2::SCENARIO,
    smd_fig10::SCENARIO,
    smd_fig10::FIG_11,
    smd_fig12::SCENARIO,
    smd_saved::SCENARIO,
    smd_soak::SCENARIO,
    starve::SCENARIO,
    page_server_kill::SCENARIO,
    page_server_vs::SCENARIO,
    reclaimed::SCENARIO,
    kvm_host::SCENARIO,
    readings::SCENARIO,
    shim_idle::SCENARIO,
    shim_stress::SCENARIO,
    let_go::SCENARIO,
    worker_kill::SCENARIO,
];

/// The scenario of this name.
pub fn find(name: &str) -> Option<&'static Scenario> {
    SCENARIOS.iter().find(|scenario| scenario.name == name)
}
