//! `kim-table1`: memory that is shareable among all VMs, within groups only, and within each VM
//! only (Kim 2014, Table 1).
//!
//! Two groups of four guests work for a while. Then engines scan for identical pages at full
//! speed until nothing more is found: one engine for all guests, one for each group, or one for
//! each guest. An engine knows only the guests that it is given. Each case has fresh guests of
//! the same seeds, because pages that were merged once stay separate from the others. The figures
//! count the saving of sharing: of each content all pages but one. Pages of zeros are dropped and
//! counted separately.
//!
//! Unlike in the paper, both groups always run the same system, and `graph` stands for NPB BT. A
//! guest's only software besides the kernel is its small program, so fewer pages are the same
//! than with a full system.

use model::Dedup as Reading;

use super::prelude::*;
use crate::merger::Merger;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-table1",
    summary: "what can be shared system-wide, within groups and within VMs, for idle, pi and graph guests",
    measures: &[&[file!()], measured::PAGES, measured::SHIM, measured::KIM],
    claims: &[],
    run,
};

const MEMORY: Bytes = Bytes::mib(128);
const GUESTS_OF_GROUP: usize = 4;
/// The time that the guests work before their sharing is measured.
const WORK: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Scanning ends when this time passes with no more than [`LITTLE`] saved, or at last after
/// [`LOOK_LIMIT`].
const QUIET: Duration = Duration::from_secs(4);
const LITTLE: f64 = 0.5;
const LOOK_LIMIT: Duration = Duration::from_secs(25);

/// The workloads of the two groups, and the paper's row for them.
struct Mix {
    name: &'static str,
    work: [&'static str; 2],
    paper: SharingRow,
}

/// The result of each grouping.
struct SharingRow {
    system: SharedPages,
    group: SharedPages,
    vm: SharedPages,
}

impl SharingRow {
    fn cases(&self) -> [(&'static str, &SharedPages); 3] {
        [("system", &self.system), ("group", &self.group), ("vm", &self.vm)]
    }
}

/// The result of one grouping, in MiB (in the paper: MB).
struct SharedPages {
    /// Without pages of zeros.
    saved: f64,
    zeros: f64,
}

impl SharedPages {
    /// From the paper's form: the total, and the part that is zeros.
    const fn printed(all: f64, zeros: f64) -> Self {
        Self { saved: all - zeros, zeros }
    }
}

const MIXES: [Mix; 3] = [
    Mix {
        name: "idle_idle",
        work: ["idle", "idle"],
        paper: SharingRow {
            system: SharedPages::printed(1761.0, 187.0),
            group: SharedPages::printed(1500.0, 184.0),
            vm: SharedPages::printed(222.0, 181.0),
        },
    },
    Mix {
        name: "pi_pi",
        work: ["pi", "pi"],
        paper: SharingRow {
            system: SharedPages::printed(3384.0, 1490.0),
            group: SharedPages::printed(2757.0, 1492.0),
            vm: SharedPages::printed(1611.0, 1471.0),
        },
    },
    Mix {
        name: "pi_graph",
        work: ["pi", "graph --mb 24"],
        paper: SharingRow {
            system: SharedPages::printed(2399.0, 740.0),
            group: SharedPages::printed(2128.0, 739.0),
            vm: SharedPages::printed(835.0, 723.0),
        },
    },
];

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    for mix in &MIXES {
        let all = 2 * GUESTS_OF_GROUP;
        let row = SharingRow {
            system: shared(context, mix, all)?,
            group: shared(context, mix, GUESTS_OF_GROUP)?,
            vm: shared(context, mix, 1)?,
        };
        add(&mut figures, mix, &row);
    }
    Ok(figures)
}

/// Memory shared when each engine has `together` guests.
fn shared(context: &Context, mix: &Mix, together: usize) -> Result<SharedPages, LabError> {
    let guest = |number: usize| {
        let group = number / GUESTS_OF_GROUP;
        context
            .guest(&format!("guest-{number}"), &format!("group-{group}"), MEMORY, mix.work[group])
            .seeded(number as u64)
            .with_shim(true)
    };
    let mut lab = context.start((0..2 * GUESTS_OF_GROUP).map(guest))?;
    progress::wait_until_working(&lab)?;
    interrupt::sleep(WORK)?;
    let pids = lab.pids();
    let engines = pids.chunks(together).map(|pids| Merger::start(pids, None, None));
    let engines = engines.collect::<Result<Vec<_>, _>>()?;
    let shared = until_quiet(&engines)?;
    drop(engines);
    lab.stop()?;
    context.say(&format!(
        "{} of {together} together: {:.1} MiB saved, {:.1} MiB of zeros",
        mix.name, shared.saved, shared.zeros
    ));
    Ok(shared)
}

/// The saving when nothing more is found.
fn until_quiet(engines: &[Merger]) -> Result<SharedPages, LabError> {
    let began = Instant::now();
    let mut last_change = (Instant::now(), 0.0);
    loop {
        interrupt::sleep(LOOK_EVERY)?;
        let readings: Vec<Reading> = engines.iter().flat_map(Merger::readings).collect();
        let sum = |what: fn(&Reading) -> Bytes| readings.iter().map(what).sum::<Bytes>().as_mib();
        let shared = SharedPages { saved: sum(|of| of.saved), zeros: sum(|of| of.dropped) };
        if (shared.saved - last_change.1).abs() > LITTLE {
            last_change = (Instant::now(), shared.saved);
        }
        if last_change.0.elapsed() > QUIET || began.elapsed() > LOOK_LIMIT {
            return Ok(shared);
        }
    }
}

fn add(figures: &mut Figures, mix: &Mix, row: &SharingRow) {
    for ((name, shared), (_, paper)) in row.cases().into_iter().zip(mix.paper.cases()) {
        let apart = |shared: &SharedPages| format!("{:.0} of zeros apart", shared.zeros);
        let paper = format!("{:.0} MB, {}", paper.saved, apart(paper));
        let figure = Figure::new(shared.saved, "MiB", apart(shared)).paper(paper);
        figures.add(&format!("shared_{}_{name}", mix.name), figure);
    }
    for ((name, shared), (_, paper)) in row.cases().into_iter().zip(mix.paper.cases()).skip(1) {
        let percent = |part: &SharedPages, all: &SharedPages, of: fn(&SharedPages) -> f64| {
            format!("{:.1} %", (1.0 - of(part) / of(all)) * 100.0)
        };
        let with_zeros = |shared: &SharedPages| shared.saved + shared.zeros;
        let note = format!(
            "what is lost to sharing system-wide, zeros apart; {} with them",
            percent(shared, &row.system, with_zeros)
        );
        let paper = format!(
            "{}, {} with zeros",
            percent(paper, &mix.paper.system, |shared| shared.saved),
            percent(paper, &mix.paper.system, with_zeros)
        );
        let lost = 1.0 - shared.saved / row.system.saved;
        let figure = Figure::new(lost, "ratio", note).paper(paper);
        figures.add(&format!("reduction_{}_{name}", mix.name), figure);
    }
}
