//! `meb-table3` to `meb-table8`: memory balanced between guests by their miss-ratio curves (Wang
//! 2016 §5.3).
//!
//! The guests are the paper's, a fifth as large where they are large (an eighth in Table 8), with
//! programs of the same kinds: `suite` for DaCapo, `graph` for Graph Analytics, `data` for Data
//! Analytics, `pi` for 186.crafty, `random-array` for 429.mcf. With fixed memory guests swap to a
//! disk of 3,000 operations per second, like a general volume of a cloud, and once more to the
//! compressed memory that the policies have. The paper's limits hold for both. There are three
//! rounds of all seven courses, which take an hour for a table.
//!
//! Table 8 has sixteen guests, for which the paper had as many CPUs. Here they share two.
//! Programs run at a pace that these can sustain, with time to spare, where there is enough
//! memory. So CPU time that one guest leaves unused for lack of memory does not speed up the
//! others. To keep a graph traversal within seconds at that pace, its vertices have properties
//! that no program reads. A guest's need is the memory that it holds when it misses nothing: some
//! 70 MB more than its programs' data. Memory moves for longer before the measurement begins.

use super::prelude::*;
use crate::meb::balancing::{Member, ROUNDS, Table};

/// The claims of a table: its own, and those that all have.
macro_rules! table_claims {
    ($($own:tt)*) => {
        claims! {
            $($own)*
            "misses_to_next" >= 1.0 => "ratio",
                "`balance` misses no more than the best of the other policies";
            "qos_mean_demand" => "ratio",
                "Under `demand` guests do this part of their work with enough memory";
            "qos_mean_entitlement" => "ratio", "Under `entitlement` they do this part of it";
            "qos_mean_fair" => "ratio", "Under `fair` they do this part of it";
        }
    };
}

pub(super) const TABLE_3: Scenario = Scenario {
    name: "meb-table3",
    summary: "memory balanced between a guest that needs the CPU and one that needs memory",
    measures: &[&[file!()], measured::MANAGED, measured::MEB],
    claims: table_claims! {
        "qos_suite" => "ratio",
            "The programs do this part of their work with enough memory", "0.95 to 0.98";
        "speedup_suite" >= 1.27 => "ratio",
            "Programs that need memory for a part of their time get it from a guest that needs \
             the CPU only",
            "1.27 to 1.35";
        "speedup_zram_suite" >= 1.27 => "ratio",
            "They are faster than with fixed memory on the same swap, too", "1.27 to 1.35";
        "speedup_pi" => "ratio", "The guest that needs the CPU only loses little", "1.00";
        "reversals_per_hour" => "count", "Memory goes not to and fro";
    },
    run: |context| measure(context, "meb-table3", &GUESTS_3),
};
pub(super) const TABLE_4: Scenario = Scenario {
    name: "meb-table4",
    summary: "memory balanced between two guests that run the same programs in opposite order",
    measures: &[&[file!()], measured::MANAGED, measured::MEB],
    claims: table_claims! {
        "speedup_suite" => "ratio", "The first of them is faster", "3.02";
        "speedup_reversed" => "ratio", "The second of them is faster", "3.19";
        "speedup_mean" >= 3.0 => "ratio",
            "Two guests that run the same programs in opposite order are faster than with fixed \
             memory",
            "3.1";
        "speedup_zram_mean" >= 3.0 => "ratio",
            "They are faster than with fixed memory on the same swap, too", "3.1";
        "qos_mean" >= 0.83 => "ratio", "They do nearly as much as with enough memory", "0.83";
    },
    run: |context| measure(context, "meb-table4", &GUESTS_4),
};
pub(super) const TABLE_5: Scenario = Scenario {
    name: "meb-table5",
    summary: "memory balanced between PageRank that lacks memory and k-means that does not",
    measures: &[&[file!()], measured::MANAGED, measured::MEB],
    claims: table_claims! {
        "qos_data" => "ratio", "K-means does this part of its work with enough memory", "0.95";
        "qos_graph" >= 0.95 => "ratio",
            "PageRank that lacks memory does nearly as much as with enough", "0.98";
        "speedup_data" >= 0.96 => "ratio",
            "K-means that has more than it needs loses little", "0.96";
        "speedup_zram_data" >= 0.96 => "ratio",
            "It loses little to fixed memory on the same swap, too", "0.96";
        "speedup_graph" => "ratio", "PageRank is faster than with fixed memory", "9.3";
        "speedup_zram_graph" => "ratio",
            "It is faster, by this factor, than with fixed memory on the same swap", "9.3";
    },
    run: |context| measure(context, "meb-table5", &GUESTS_5),
};
pub(super) const TABLE_6: Scenario = Scenario {
    name: "meb-table6",
    summary: "memory balanced between two PageRanks that do not both fit, one of which begins later",
    measures: &[&[file!()], measured::MANAGED, measured::MEB],
    claims: table_claims! {
        "qos_first" => "ratio", "The first does this part of its work with enough memory", "0.98";
        "qos_second" => "ratio", "The second does this part of it", "0.85";
        "speedup_first" => "ratio",
            "The first of two PageRanks that do not both fit is faster than with fixed memory",
            "9.4";
        "speedup_second" => "ratio", "The second one, which begins later, is faster, too", "8.1";
        "speedup_zram_first" => "ratio",
            "The first is faster, by this factor, than with fixed memory on the same swap", "9.4";
        "speedup_zram_second" => "ratio", "The second one is faster by this factor", "8.1";
    },
    run: |context| measure(context, "meb-table6", &GUESTS_6),
};
pub(super) const TABLE_7: Scenario = Scenario {
    name: "meb-table7",
    summary: "memory balanced between four guests of different kinds",
    measures: &[&[file!()], measured::MANAGED, measured::MEB],
    claims: table_claims! {
        "speedup_graph" => "ratio", "PageRank is faster than with fixed memory", "20.2";
        "speedup_suite" => "ratio", "The suite loses little", "0.99";
        "speedup_random" => "ratio", "The random array is faster than with fixed memory", "7.5";
        "speedup_pi" => "ratio", "Pi loses little", "0.99";
        "speedup_mean" >= 7.4 => "ratio",
            "Four guests of different kinds get from each other the memory that they lack", "7.4";
        "speedup_zram_mean" >= 7.4 => "ratio",
            "They are faster than with fixed memory on the same swap, too", "7.4";
        "qos_min" >= 0.92 => "ratio",
            "Each of them does nearly as much as with enough memory", "0.93";
    },
    run: |context| measure(context, "meb-table7", &GUESTS_7),
};
pub(super) const TABLE_8: Scenario = Scenario {
    name: "meb-table8",
    summary: "memory balanced between sixteen guests that together want 16 % more than there is",
    measures: &[&[file!()], measured::MANAGED, measured::MEB],
    claims: table_claims! {
        "qos_mean" >= 0.92 => "ratio",
            "Sixteen guests that together need 16 % more than there is do nearly as much as with \
             enough",
            "0.92";
        "speedup_mean" >= 4.54 => "ratio", "They are faster than with fixed memory", "4.54";
        "speedup_zram_mean" >= 4.54 => "ratio",
            "They are faster than with fixed memory on the same swap, too", "4.54";
    },
    run: |context| measure(context, "meb-table8", &GUESTS_8),
};
pub(super) const OSCILLATION: Scenario = Scenario {
    name: "meb-oscillation",
    summary: "two guests that want each other's memory in turn: balance does not chase them",
    measures: &[&[file!()], measured::MANAGED, measured::MEB],
    claims: claims! {
        "reversals_per_hour" <= 30.0 => "count",
            "Two guests that want each other's memory in turn, every 20 s, are not chased (15 \
             minutes)";
        "moves_per_hour_later" <= 300.0 => "count", "They are left alone more and more";
    },
    run: |context| SWINGING.moves(context, context.figures("meb-oscillation", 1)),
};

const LOW: Bytes = Bytes::mib(100);
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
    Table { members, low: LOW, warm_up: WARM_UP, window: Duration::from_secs(60) }
}

/// For workloads of several programs, one after the other: all of them count, from the first.
const fn long_table(members: &'static [Member]) -> Table {
    Table { warm_up: Duration::ZERO, window: Duration::from_secs(120), ..table(members) }
}

const GUESTS_3: Table =
    long_table(&[member("suite", "suite --mb 380", 300, 500), member("pi", "pi", 300, 500)]);

/// Each suite runs once, as in the paper; a suite that does not finish is slow enough for a
/// figure.
const GUESTS_4: Table = Table {
    warm_up: Duration::from_secs(30),
    window: Duration::from_secs(240),
    ..table(&[
        member("suite", "suite --mb 380 --once --after 30", 300, 500),
        member("reversed", "suite --mb 380 --once --after 30 --reversed", 300, 500),
    ])
};

const GUESTS_5: Table = table(&[
    member("graph", "graph --mb 295", 360, 500),
    member("data", "data --mb 220", 360, 500),
]);

const GUESTS_6: Table = table(&[
    member("first", "graph --mb 310", 360, 500),
    member("second", "graph --mb 310 --after 30", 360, 500),
]);

const GUESTS_7: Table = table(&[
    member("graph", "graph --mb 320", 256, 512),
    member("suite", "suite --mb 80", 256, 512),
    member("random", "random-array --mb 240", 256, 512),
    member("pi", "pi", 256, 512),
]);

const GUESTS_8: Table = Table {
    low: Bytes::mib(80),
    warm_up: Duration::from_secs(120),
    ..table(&[
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
    ])
};

/// Long enough for the pauses after mistakes to grow to minutes.
const SWINGING: Table = Table {
    window: Duration::from_secs(15 * 60),
    ..long_table(&[
        member("up", "random-array --phases 60:20+300:20", 256, 500),
        member("down", "random-array --phases 300:20+60:20", 256, 500),
    ])
};

fn measure(context: &Context, name: &str, table: &Table) -> Result<Figures, LabError> {
    let outcome = table.run(context)?;
    let mut figures = context.figures(name, ROUNDS);
    outcome.add_speeds(&mut figures);
    outcome.add_misses(&mut figures);
    Ok(figures)
}
