//! `overdriver-fig5`: the number of VMs that fit, with all that is kept free for their overloads
//! (Overdriver §4.2, Figs. 5 and 6).
//!
//! The paper's own example, by the code that `overbook capacity` runs: VMs that were promised
//! 1,024 MB and are given 640 are overloaded for 16 % of the time, and 96 % of these overloads
//! last less than a minute. Its data centre has just under 100 GB. Where the paper says
//! "probability 0.97", its formula gives 0.968 for its own numbers, so 0.965 is used here. Figs.
//! 5 and 6 show other sizes, too. They are left out: only a plot (Fig. 3a) shows how often VMs of
//! those sizes are overloaded.

use std::fmt::Write;

use model::{Bytes, Together};
use policy::excess::{Need, Promise, most};

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::lab::LabError;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "overdriver-fig5",
    summary: "how many VMs fit beside the room for their overloads: the paper's example",
    run,
};

const PROMISED: Bytes = Bytes::mib(1024);
const GIVEN: Bytes = Bytes::mib(640);
const OVERLOADED: f64 = 0.16;
const TRANSIENT: f64 = 0.96;
const CERTAINTY: f64 = 0.965;
const MEMORY: Bytes = Bytes::mib(99 * 1024);
const VMS: usize = 150;

fn run(context: &Context) -> Result<Figures, LabError> {
    let transient = OVERLOADED * TRANSIENT;
    let sustained = OVERLOADED - transient;
    let vm = Promise { promised: PROMISED, given: GIVEN, transient, sustained };
    // Migration at each overload needs room for a whole VM each time.
    let migrated = Promise { transient: 0.0, sustained: OVERLOADED, ..vm };
    let whole = Promise { given: PROMISED, transient: 0.0, sustained: 0.0, ..vm };
    let need = Need::of(&[vm; VMS], &Together::default(), CERTAINTY);
    let mut table = String::from("                VMs   memory of VMs   to move to   for pages\n");
    let mut share = |name: &str, vm: Promise| {
        let (n, need) = most(vm, MEMORY, CERTAINTY, 1.0);
        let of = |bytes: Bytes| bytes.0 as f64 / MEMORY.0 as f64;
        let own = of(Bytes(vm.given.0 * u64::from(n)));
        // Writing to a string cannot fail.
        let _ = writeln!(
            table,
            "{name:<14}{n:>5}{:>14.1} %{:>10.1} %{:>9.1} %",
            own * 100.0,
            of(need.targets) * 100.0,
            of(need.repositories) * 100.0
        );
        (f64::from(n), own)
    };
    let (all, _) = share("as promised", whole);
    let (by_migration, migration_share) = share("migration", migrated);
    let (ours, our_share) = share("both", vm);
    eprint!("{table}");

    let mut figures = context.figures(SCENARIO.name, 1);
    let n = |n: u32| f64::from(n);
    let note = "of 150 VMs, in sustained overload at once, at most";
    let at_once = Figure::new(n(need.sustained.vms), "count", note);
    figures.add("sustained_150", at_once.target(Target::Equals(3.0)).paper("3"));
    let note = "of 150 VMs, in transient overload at once, at most";
    let at_once = Figure::new(n(need.transient.vms), "count", note);
    figures.add("transient_150", at_once.target(Target::Equals(31.0)).paper("31"));
    let note = "of the memory, what is left for VMs more than where each overload is migrated";
    let more = Figure::new((our_share - migration_share) * 100.0, "%", note);
    figures.add("more_for_vms", more.target(Target::AtLeast(12.0)).paper("12 %"));
    let note = "VMs to those where each overload is migrated";
    figures.add("vms_vs_migration", Figure::new(ours / by_migration, "ratio", note));
    let note = "VMs to those that are given all that they were promised";
    figures.add("vms_vs_whole", Figure::new(ours / all, "ratio", note));
    Ok(figures)
}
