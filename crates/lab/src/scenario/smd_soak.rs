//! `smd-soak`: real programs run on while their code is merged, and not a byte of them is lost.
//!
//! Four guests run a web server, a database, a compiler and a shell of one Debian, as fast as
//! they can. The group's worker knows the programs' code by a table, and [`Soak`] drives it.
//! Every answer is compared, and every ten seconds each guest compares its programs and libraries
//! with the checksums of their packages, as `debsums` does.

use super::prelude::*;
use crate::debian;
use crate::metrics;
use crate::smd::{GUESTS, Programs};
use crate::soak::Soak;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-soak",
    summary: "an hour of merging real programs, workers killed; each stays as packaged",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SHIM, measured::TABLES],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "Real programs lose no byte while their code is merged and workers are killed at \
             random";
        "left_shared_pages" == 0.0 => "pages", "No page is shared once all is unshared";
        "left_in_pools" == 0.0 => "B", "No byte is left in the pools then";
        "left_mappings" == 0.0 => "count", "No mapping of a pool is left then";
        "answer_ms_max" <= HANG_MS => "ms", "Services answer within this time meanwhile";
    },
    run,
};

const USUAL_MINUTES: u32 = 60;
const CHECK_S: &str = "10";
/// The guests that answer requests, which take milliseconds.
const SERVERS: [&str; 2] = ["web", "database"];
/// The longest that an answer may take.
const HANG_MS: f64 = 10_000.0;

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_MINUTES);
    let programs = Programs::provide(context)?;
    let spec = |guest| {
        let mut spec = programs.machine(guest);
        spec.workload.extend(["--check-s", CHECK_S].map(str::to_owned));
        MachineSpec { seed: context.seed, shim: true, ..spec }
    };
    let mut lab = context.start(GUESTS.iter().map(spec))?;
    fleet::wait_until_working(&lab)?;
    let mut soak = Soak::new(&lab, "code", Some(programs.write_table(&lab)?), context.seed)?;
    soak.run(length, |_, _| Ok(()))?;
    let rounds = lab.machines().iter().map(|machine| machine.told("checks"));
    let fewest = rounds.smallest();
    let mut figures = context.figures(SCENARIO.name, 1);
    soak.end(&mut figures)?;
    let note = "wrong bytes of answers, and wrong files among the programs";
    figures.tell("bad_bytes", debian::bad_bytes(&lab)? as f64, "B", note);
    let note = "times that each guest compared all its programs meanwhile, at least";
    figures.check("checks", fewest, "count", note, Target::AtLeast(1.0));
    let servers = SERVERS.map(|name| lab.machine(name).map_or(f64::NAN, longest_answer_ms));
    let note = "longest that web server or database took to answer";
    figures.tell("answer_ms_max", servers.into_iter().largest(), "ms", note);
    lab.stop()?;
    Ok(figures)
}

/// The result is up to 3 % too high. It assumes fewer than 10,000 answers in a second; with
/// more, the percentile could miss one.
fn longest_answer_ms(machine: &Machine) -> f64 {
    let lines = metrics::all_in(&machine.files().metrics);
    let us = lines.iter().filter_map(|line| line["p9999_us"].as_f64());
    us.largest() / 1000.0
}
