//! `meb-table3` to `meb-table8`: memory balanced between guests by their miss-ratio curves (Wang 2016 §5.3).
//!
//! The paper's guests, a fifth as large where they are large (an eighth in Table 8), with programs of the same kinds: `suite` for
//! DaCapo, `graph` for Graph Analytics, `data` for Data Analytics, `pi` for 186.crafty, `random-array` for 429.mcf. Swap lies on a
//! disk of 1,000 operations per second.

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
pub(super) const TABLE_7: Scenario = Scenario {
    name: "meb-table7",
    summary: "memory balanced between four guests of different kinds",
    run: |context| table_7(context),
};

const LOW: Bytes = Bytes::mib(100);
const ROUNDS: u32 = 3;

const fn member(name: &'static str, command: &'static str, initial: u64, high: u64) -> Member {
    Member { name, command, initial: Bytes::mib(initial), high: Bytes::mib(high) }
}

const fn table(members: &'static [Member]) -> Table {
    let (warm_up, window) = (Duration::from_secs(60), Duration::from_secs(90));
    Table { members, low: LOW, warm_up, window, rounds: ROUNDS }
}

fn table_3(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 2] =
        [member("suite", "suite --mb 380", 300, 500), member("pi", "pi", 300, 500)];
    let paper = [
        ("speedup_suite", "1.27 to 1.35", Some(1.27)),
        ("speedup_pi", "1.00", None),
        ("qos_suite", "0.95 to 0.98", None),
    ];
    measure(context, TABLE_3.name, &table(&GUESTS), &paper)
}

fn table_4(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 2] = [
        member("suite", "suite --mb 380", 300, 500),
        member("reversed", "suite --mb 380 --reversed", 300, 500),
    ];
    let paper = [
        ("speedup_suite", "3.02", None),
        ("speedup_reversed", "3.19", None),
        ("speedup_mean", "3.1", Some(3.0)),
        ("qos_mean", "0.83", None),
    ];
    measure(context, TABLE_4.name, &table(&GUESTS), &paper)
}

fn table_5(context: &Context) -> Result<Figures, LabError> {
    const GUESTS: [Member; 2] =
        [member("graph", "graph --mb 300", 360, 500), member("data", "data --mb 200", 360, 500)];
    let paper = [
        ("speedup_graph", "9.3", None),
        ("speedup_data", "0.96", Some(0.96)),
        ("qos_graph", "0.98", Some(0.95)),
        ("qos_data", "0.95", None),
    ];
    measure(context, TABLE_5.name, &table(&GUESTS), &paper)
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

fn measure(
    context: &Context,
    name: &str,
    table: &Table,
    paper: &[Paper],
) -> Result<Figures, LabError> {
    let outcome = table.run(context)?;
    let mut figures = context.figures(name, ROUNDS);
    outcome.add_speeds(&mut figures, paper);
    outcome.add_misses(&mut figures);
    Ok(figures)
}
