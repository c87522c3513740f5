//! `meb-table3` to `meb-table8`: memory balanced between guests by their miss-ratio curves (Wang
//! 2016 §5.3).
//!
//! The guests are the paper's, a fifth as large where they are large (an eighth in Table 8), with
//! programs of the same kinds: `suite` for DaCapo, `graph` for Graph Analytics, `data` for Data
//! Analytics, `pi` for 186.crafty, `random-array` for 429.mcf. Swap lies on a disk of 3,000
//! operations per second, like a general volume of a cloud.
//!
//! Table 8 has sixteen guests, for which the paper had as many CPUs. Here they share two.
//! Programs run at a pace that these can sustain, with time to spare, where there is enough
//! memory. So CPU time that one guest leaves unused for lack of memory does not speed up the
//! others. To keep a graph traversal within seconds at that pace, its vertices have properties
//! that no program reads. A guest's need is the memory that it holds when it misses nothing: some
//! 70 MB more than its programs' data. Memory moves for longer before the measurement begins.

use std::time::Duration;

use model::Bytes;

use super::{Context, Scenario};
use crate::figures::Figures;
use crate::lab::LabError;
use crate::meb::balancing::{Member, Paper, Table};

pub(super) const TABLE_3: Scenario = Scenario {
    name: "meb-table3",
    summary: "memory balanced between a guest that needs the CPU and one that needs memory",
    run: |context| table_3(context),
};
pub(super) const TABLE_4: Scenario = Scenario {
    name: "meb-table4",
    summary: "memory balanced between two guests that run the same programs in opposite order",
    run: |context| table_4(context),
};
pub(super) const TABLE_5: Scenario = Scenario {
    name: "meb-table5",
    summary: "memory balanced between PageRank that lacks memory and k-means that does not",
    run: |context| table_5(context),
};
pub(super) const TABLE_6: Scenario = Scenario {
    name: "meb-table6",
    summary: "memory balanced between two PageRanks that do not both fit, one of which begins later",
    run: |context| table_6(context),
};
pub(super) const TABLE_7: Scenario = Scenario {
    name: "meb-table7",
    summary: "memory balanced between four guests of different kinds",
    run: |context| table_7(context),
};
pub(super) const TABLE_8: Scenario = Scenario {
    name: "meb-table8",
    summary: "memory balanced between sixteen guests that together want 16 % more than there is",
    run: |context| table_8(context),
};
pub(super) const OSCILLATION: Scenario = Scenario {
    name: "meb-oscillation",
    summary: "two guests that want each other's memory in turn: balance does not chase them",
    run: |context| oscillation(context),
};

const LOW: Bytes = Bytes::mib(100);
const MINUTE: Duration = Duration::from_secs(60);
/// Somewhat longer than memory takes to move.
const WARM_UP: Duration = Duration::from_secs(40);

const fn member(name: &'static str, command: &'static str, initial: u64, high: u64) -> Member {
    let mut at = 0;
    while at < command.len() {
        assert!(command.as_bytes()[at] != b',', "a comma ends a word on the kernel's command line");
        at += 1;
    }
    Member { name, command, initial: Bytes::mib(initial), high: Bytes::mib(high) }
}

const fn table(members: &'static [Member]) -> Table {
    Table { members, low: LOW, swap_iops: 3_000, warm_up: WARM_UP, window: MINUTE, rounds: 1 }
}

/// For workloads of several programs, one after the other: all of them count, from the first.
const fn long_table(members: &'static [Member]) -> Table {
    Table { warm_up: Duration::ZERO, window: Duration::from_secs(120), ..table(members) }
}

fn table_3(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 2] =
        [member("suite", "suite --mb 380", 300, 500), member("pi", "pi", 300, 500)];
    let paper = [
        ("speedup_suite", "1.27 to 1.35", Some(1.27)),
        ("speedup_pi", "1.00", None),
        ("qos_suite", "0.95 to 0.98", None),
    ];
    measure(context, TABLE_3.name, &long_table(&GUESTS), &paper)
}

/// Each suite runs once, as in the paper; a suite that does not finish is slow enough for a
/// figure.
fn table_4(context: &Context) -> Result<Figures, LabError> {
    const BEGINNING: Duration = Duration::from_secs(30);
    const LIMIT: Duration = Duration::from_secs(240);
    const GUESTS: [Member; 2] = [
        member("suite", "suite --mb 380 --once --after 30", 300, 500),
        member("reversed", "suite --mb 380 --once --after 30 --reversed", 300, 500),
    ];
    let paper = [
        ("speedup_suite", "3.02", None),
        ("speedup_reversed", "3.19", None),
        ("speedup_mean", "3.1", Some(3.0)),
        ("qos_mean", "0.83", None),
    ];
    let table = Table { warm_up: BEGINNING, window: LIMIT, ..table(&GUESTS) };
    measure(context, TABLE_4.name, &table, &paper)
}

fn table_5(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 2] =
        [member("graph", "graph --mb 295", 360, 500), member("data", "data --mb 220", 360, 500)];
    let paper = [
        ("speedup_graph", "9.3", None),
        ("speedup_data", "0.96", Some(0.96)),
        ("qos_graph", "0.98", Some(0.95)),
        ("qos_data", "0.95", None),
    ];
    measure(context, TABLE_5.name, &table(&GUESTS), &paper)
}

fn table_6(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 2] = [
        member("first", "graph --mb 310", 360, 500),
        member("second", "graph --mb 310 --after 30", 360, 500),
    ];
    let paper = [
        ("speedup_first", "9.4", None),
        ("speedup_second", "8.1", None),
        ("qos_first", "0.98", None),
        ("qos_second", "0.85", None),
    ];
    measure(context, TABLE_6.name, &table(&GUESTS), &paper)
}

fn table_7(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 4] = [
        member("graph", "graph --mb 320", 256, 512),
        member("suite", "suite --mb 80", 256, 512),
        member("random", "random-array --mb 240", 256, 512),
        member("pi", "pi", 256, 512),
    ];
    let paper = [
        ("speedup_graph", "20.2", None),
        ("speedup_suite", "0.99", None),
        ("speedup_random", "7.5", None),
        ("speedup_pi", "0.99", None),
        ("speedup_mean", "7.4", None),
        ("qos_min", "0.93", Some(0.92)),
    ];
    measure(context, TABLE_7.name, &table(&GUESTS), &paper)
}

fn table_8(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 16] = [
        member("graph-1250", "graph --mb 156 --properties 112 --rate 200000", 190, 286),
        member("graph-1500", "graph --mb 188 --properties 112 --rate 200000", 190, 286),
        member("graph-1750", "graph --mb 219 --properties 112 --rate 200000", 254, 350),
        member("graph-2000", "graph --mb 250 --properties 112 --rate 200000", 254, 414),
        member("graph-2250", "graph --mb 281 --properties 112 --rate 200000", 318, 414),
        member("graph-2500", "graph --mb 313 --properties 112 --rate 200000", 318, 478),
        member("web", "web --mb 29 --rate 250", 126, 158),
        member("data", "data --mb 200 --rate 200000", 190, 350),
        member("suite", "suite --mb 61 --rate 1000000", 126, 222),
        member("pi", "pi --rate 1", 126, 158),
        member("mcf", "random-array --mb 210 --rate 50000", 254, 350),
        member("bwaves", "matrix --mb 84 --rate 2", 126, 222),
        member("milc", "random-array --mb 82 --record-kb 64 --rate 150", 126, 222),
        member("zeusmp", "scan --mb 91 --rate 10000", 126, 222),
        member("cactus", "kv --mb 87 --rate 1500", 126, 222),
        member("gems", "phases --mb 103 --parts 4 --length 20 --rate 50000", 190, 222),
    ];
    let paper = [("speedup_mean", "4.54", None), ("qos_mean", "0.92", Some(0.92))];
    let table = Table { low: Bytes::mib(80), warm_up: 2 * MINUTE, ..table(&GUESTS) };
    measure(context, TABLE_8.name, &table, &paper)
}

/// Long enough for the pauses after mistakes to grow to minutes.
fn oscillation(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 2] = [
        member("up", "random-array --phases 60:20+300:20", 256, 500),
        member("down", "random-array --phases 300:20+60:20", 256, 500),
    ];
    let table = Table { window: 15 * MINUTE, ..long_table(&GUESTS) };
    table.moves(context, context.figures(OSCILLATION.name, table.rounds))
}

fn measure(
    context: &Context,
    name: &str,
    table: &Table,
    paper: &[Paper],
) -> Result<Figures, LabError> {
    let outcome = table.run(context)?;
    let mut figures = context.figures(name, table.rounds);
    outcome.add_speeds(&mut figures, paper);
    outcome.add_misses(&mut figures);
    Ok(figures)
}
