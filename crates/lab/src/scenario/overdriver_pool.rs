//! `overdriver-pool` and `overdriver-thresholds`: a simulated day of a pool under the real policy
//! (Overdriver §4.1, §5.2, Tables 2 and 3).
//!
//! Hosts have 16 GiB, and 20 VMs of the paper's example ([`example`]), which `overdriver-fig5` has
//! as well: promised 1,024 MB, given 640, and overloaded for 16 % of the time on average, with the
//! paper's durations for that size. All
//! courses have the same overloads: only the remedies differ.
//!
//! **Space** is the memory that remedies take at other hosts, as a mean over the day. A VM that
//! is moved takes the memory that it is given there, from the decision on until the overloaded VM
//! gives it back, ten minutes after its last overload. Pages in repositories take the memory that
//! was written, which is half of the paging, and never more than the VM lacks, until the overload
//! ends: the VM's disk has them too, and the repository may drop them. The memory that moves free
//! at the source hosts counts in a figure of its own.
//!
//! The paging rate of an overloaded VM is an input, and traffic is proportional to it. Two rates
//! are used: 2,000 pages a second, and 5,127, which corresponds to Table 3's 2.1 GB in 100 s. A
//! threshold takes effect only where an overload has by then paged as much as a move sends:
//! nothing is moved before. That takes 82 s at 2,000 pages a second, so thresholds are compared
//! at 5,127.

use std::fmt::Write;

use model::OverloadSpec;
use sim::pool::{Excess, Outcome, Pool, Setting, Strategy, example};

use super::prelude::*;

pub(super) const POOL: Scenario = Scenario {
    name: "overdriver-pool",
    summary: "traffic and space of a simulated pool with both remedies, and with each one alone",
    measures: &[&[file!()], measured::POLICY, measured::SIM],
    claims: claims! {
        "traffic_vs_migration" <= 0.25 => "ratio",
            "A day of a simulated pool sends less with both remedies than where each overload is \
             migrated",
            "over a factor of four";
        "traffic_vs_each_moved" => "ratio", "It sends less than one move for each overload would";
        "excess_vs_migration" <= 0.15 => "ratio", "It takes less space at other hosts", "0.15";
        "excess_swap_vs_migration" => "ratio", "Pages alone take this part of that space";
        "moves_vs_migration" => "ratio", "It makes fewer moves";
        "mitigated_share" => "ratio",
            "Overloads have memory of other hosts, none is left on a disk";
        "long_vs_swap" => "ratio",
            "Of the share that long overloads have with swap alone, this is left";
    },
    run: pool,
};

pub(super) const THRESHOLDS: Scenario = Scenario {
    name: "overdriver-thresholds",
    summary: "how long overloads wait for a move, with thresholds that are fixed and learned",
    measures: &[&[file!()], measured::POLICY, measured::SIM],
    claims: claims! {
        "learned_vs_120" < 1.0 => "ratio",
            "A learned threshold has long overloads wait less for a move than 120 s do",
            "a lower one helps";
        "traffic_learned_vs_120" => "ratio", "The learned threshold sends as much";
    },
    run: thresholds,
};

const HOURS: u64 = 24;
/// A twentieth of the hosts misbehaves in the second run.
const BAD: f64 = 0.05;
const TABLE_3_RATE: u64 = 2_100_000_000 / 100 / 4096;
/// 8 of 12 intervals.
const FIXED: (u32, u32) = (12, 8);

const SETTING: Setting = Setting {
    hosts: 150,
    vms_per_host: 20,
    memory: Bytes::mib(16 * 1024),
    promised: example::PROMISED,
    given: example::GIVEN,
    overloaded: example::OVERLOADED,
    pages_per_s: 2_000,
    overload: OverloadSpec {
        interval_s: 10,
        pages_per_s: 200,
        window: FIXED.0,
        sustained: FIXED.1,
    },
    learns: true,
    misbehaving: 0.0,
    calm_s: 600,
    strategy: Strategy::Both,
    excess: Excess::Idle,
};

/// Simulates a day, from the scenario's seed.
fn day(context: &Context, setting: Setting) -> Result<Outcome, LabError> {
    let mut pool = Pool::new(context.seed, setting);
    let mut outcome = Outcome::default();
    for _ in 0..HOURS {
        outcome = pool.run(1);
        interrupt::sleep(std::time::Duration::ZERO)?;
    }
    pool.check().map_err(std::io::Error::other)?;
    Ok(outcome)
}

/// Outcomes of both remedies, migration alone, swap alone.
fn three(context: &Context, misbehaving: f64) -> Result<[Outcome; 3], LabError> {
    let run = |strategy| day(context, Setting { strategy, misbehaving, ..SETTING });
    Ok([run(Strategy::Both)?, run(Strategy::Migrate)?, run(Strategy::Swap)?])
}

fn pool(context: &Context) -> Result<Figures, LabError> {
    let well = three(context, 0.0)?;
    let bad = three(context, BAD)?;
    let busy = day(context, Setting { pages_per_s: TABLE_3_RATE, ..SETTING })?;
    let mut table = String::from(HEAD);
    let names = ["both", "migration", "swap", "both*", "migration*", "swap*", "both, 5127/s"];
    for (name, outcome) in names.iter().zip(well.iter().chain(&bad).chain([&busy])) {
        row(&mut table, name, outcome);
    }
    eprintln!("{table}*: a twentieth of the hosts misbehaves");
    let mut figures = context.figures(POOL.name, 1);
    add_ratios(&mut figures, &well, &bad, &busy);
    let [both, migrate, swap] = &well;
    let note = "moves to those of migration alone";
    figures.add("moves_vs_migration", ratio(both.moves as f64, migrate.moves as f64, note));
    let note = "share of overloaded VM seconds that are not on a disk";
    let mitigated = 1.0 - share(both.disk_s, both);
    figures.tell("mitigated_share", mitigated, "ratio", note);
    let note = "share of overloaded VM seconds in sustained overloads, to that of swap alone";
    figures.add("long_vs_swap", ratio(share(both.long_s, both), share(swap.long_s, swap), note));
    let note = "VM seconds of overload to those of swap alone: who was moved has no more of them";
    figures
        .add("overloaded_vs_swap", ratio(both.overloaded_s as f64, swap.overloaded_s as f64, note));
    Ok(figures)
}

fn add_ratios(figures: &mut Figures, well: &[Outcome; 3], bad: &[Outcome; 3], busy: &Outcome) {
    let [both, migrate, swap] = well;
    let traffic = |outcome: &Outcome| outcome.traffic.0 as f64;
    let space = |outcome: &Outcome| outcome.excess_byte_s as f64;
    let note = "sent in the day, to migration alone";
    let figure = ratio(traffic(both), traffic(migrate), note);
    figures.add("traffic_vs_migration", figure);
    let note = "the same, a twentieth of the hosts misbehaves";
    figures.add("traffic_vs_migration_bad", ratio(traffic(&bad[0]), traffic(&bad[1]), note));
    let note = "the same, where overloads page as in Table 3";
    figures.add("traffic_vs_migration_busy", ratio(traffic(busy), traffic(migrate), note));
    // Migration alone has fewer overloads: a moved VM keeps its memory through the next ones.
    let each = |outcome: &Outcome| outcome.overloads as f64 * SETTING.given.0 as f64;
    let note = "sent, to one VM's memory for each overload that there was";
    figures.add("traffic_vs_each_moved", ratio(traffic(both), each(both), note));
    let note = "space taken at other hosts, mean, to migration alone";
    let figure = ratio(space(both), space(migrate), note);
    figures.add("excess_vs_migration", figure);
    let note = "the same, a twentieth of the hosts misbehaves";
    figures.add("excess_vs_migration_bad", ratio(space(&bad[0]), space(&bad[1]), note));
    let note = "the same, less what moves set free where VMs were";
    let net = |outcome: &Outcome| outcome.net_byte_s as f64;
    figures.add("excess_net_vs_migration", ratio(net(both), net(migrate), note));
    let most = |outcome: &Outcome| outcome.excess_most.0 as f64;
    let note = "the most at once, to migration alone";
    figures.add("excess_most_vs_migration", ratio(most(both), most(migrate), note));
    let note = "space of swap alone to that of migration alone";
    figures.add("excess_swap_vs_migration", ratio(space(swap), space(migrate), note));
}

fn thresholds(context: &Context) -> Result<Figures, LabError> {
    let run = |(window, sustained), learns| {
        let overload = OverloadSpec { window, sustained, ..SETTING.overload };
        day(context, Setting { overload, learns, pages_per_s: TABLE_3_RATE, ..SETTING })
    };
    // Two thirds of the window are overloaded, as in 8 of 12.
    let fixed = [("100 s", (10, 7)), ("120 s", FIXED), ("150 s", (15, 10)), ("200 s", (20, 14))];
    let mut table = String::from(HEAD);
    let mut figures = context.figures(THRESHOLDS.name, 1);
    let mut wait = |figures: &mut Figures, name: &str, outcome: &Outcome| {
        row(&mut table, name, outcome);
        let note = "mean s that overloads of two minutes and more wait in swap, or until they end";
        let each = outcome.long_wait_s as f64 / outcome.long_ones as f64;
        let name = name.trim_end_matches(" s");
        figures.tell(&format!("wait_{name}"), each, "s", note);
        each
    };
    let mut at_120 = None;
    for (name, threshold) in fixed {
        let outcome = run(threshold, false)?;
        let each = wait(&mut figures, name, &outcome);
        if threshold == FIXED {
            at_120 = Some((each, outcome));
        }
    }
    let learned = run(FIXED, true)?;
    let each = wait(&mut figures, "learned", &learned);
    eprint!("{table}");
    let (usual, outcome) = at_120.unwrap_or((f64::NAN, Outcome::default()));
    let note = "that wait, learned from 120 s on, to fixed at 120 s";
    let figure = ratio(each, usual, note);
    figures.add("learned_vs_120", figure);
    let note = "moves, learned to fixed";
    figures.add("moves_learned_vs_120", ratio(learned.moves as f64, outcome.moves as f64, note));
    let note = "moves for overloads of less than two minutes, learned to fixed";
    let needless = (learned.needless as f64, outcome.needless as f64);
    figures.add("needless_learned_vs_120", ratio(needless.0, needless.1, note));
    let note = "traffic, learned to fixed";
    let traffic = (learned.traffic.0 as f64, outcome.traffic.0 as f64);
    figures.add("traffic_learned_vs_120", ratio(traffic.0, traffic.1, note));
    let note = "space at other hosts, learned to fixed";
    let space = (learned.excess_byte_s as f64, outcome.excess_byte_s as f64);
    figures.add("excess_learned_vs_120", ratio(space.0, space.1, note));
    Ok(figures)
}

fn ratio(ours: f64, theirs: f64, note: &str) -> Figure {
    Figure::new(ours / theirs, "ratio", note)
}

fn share(seconds: u64, of: &Outcome) -> f64 {
    seconds as f64 / of.overloaded_s as f64
}

const HEAD: &str = "                 overloads   VM h  short %  long %  disk %   moves  needless  \
                    sent TB  space GiB   net  most\n";

fn row(table: &mut String, name: &str, outcome: &Outcome) {
    let gib = |byte_s: u64| byte_s as f64 / (HOURS * 3600) as f64 / (1_u64 << 30) as f64;
    let percent = |seconds: u64| share(seconds, outcome) * 100.0;
    // Writing to a string cannot fail.
    let _ = writeln!(
        table,
        "{name:<14}{:>12}{:>7}{:>9.1}{:>8.1}{:>8.1}{:>8}{:>10}{:>9.1}{:>11.0}{:>6.0}{:>6.0}",
        outcome.overloads,
        outcome.overloaded_s / 3600,
        percent(outcome.short_s),
        percent(outcome.long_s),
        percent(outcome.disk_s),
        outcome.moves,
        outcome.needless,
        outcome.traffic.0 as f64 / 1e12,
        gib(outcome.excess_byte_s),
        gib(outcome.net_byte_s),
        outcome.excess_most.0 as f64 / (1_u64 << 30) as f64,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both remedies send a fifth and take a tenth of what migration alone does.
    fn outcomes() -> [Outcome; 3] {
        let of = |gib: u64, byte_s: u64| Outcome {
            traffic: Bytes(gib << 30),
            excess_byte_s: byte_s,
            net_byte_s: byte_s,
            excess_most: Bytes(byte_s),
            overloads: 1000,
            ..Outcome::default()
        };
        [of(10, 100), of(50, 1000), of(40, 50)]
    }

    fn figures(well: &[Outcome; 3]) -> Figures {
        Figures::invented(POOL.name, |figures| add_ratios(figures, well, well, &well[0]))
    }

    #[test]
    fn both_remedies_are_set_against_migration_alone() {
        let well = figures(&outcomes());
        for (name, wanted) in [("traffic_vs_migration", 0.2), ("excess_vs_migration", 0.1)] {
            let figure = well.get(name).unwrap();
            assert!((figure.value - wanted).abs() < 1e-9 && figure.met(), "{name}");
        }
    }

    #[test]
    fn remedies_that_are_swapped_and_a_day_without_migration_miss() {
        let [both, migrate, swap] = outcomes();
        for bad in [[migrate, both, swap], [both, Outcome::default(), swap]] {
            let bad = figures(&bad);
            assert!(!bad.met("traffic_vs_migration"));
            assert!(!bad.met("excess_vs_migration"));
        }
    }
}
