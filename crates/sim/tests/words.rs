//! The words that users read, on plans of several kinds. `UPDATE_GOLDEN=1` rewrites the golden
//! files.

use std::{env, fs, path::PathBuf};

use model::{Bytes, Policy, Time};
use sim::{Fake, Load, Nature, Run, Scenario, limits};

/// The plan of one second as text: the ledgers, then each VM with its change and the reasons.
fn words(run: &Run, second: usize) -> String {
    let plan = &run.seconds[second].plan;
    let mut text = format!("after {second} s\n");
    for reason in &plan.host {
        text += &format!("host: {reason}\n");
    }
    for (name, ledger) in &plan.groups {
        text += &format!(
            "{name}: uses {} of {}, promised {}, surplus {}, deficit {}\n",
            ledger.used, ledger.budget, ledger.promised, ledger.surplus, ledger.deficit
        );
    }
    for (vm, decision) in &plan.vms {
        let target = decision.target.unwrap_or_default();
        text += &match &decision.change {
            Some(change) if change.is_take => {
                format!("  {vm}: down to {target}: {}\n", change.reason)
            }
            Some(change) => format!("  {vm}: up to {target}: {}\n", change.reason),
            None => format!("  {vm}: stays at {target}\n"),
        };
        for refusal in &decision.refusals {
            text += &format!("      because {refusal}\n");
        }
    }
    text
}

fn assert_golden(name: &str, run: &Run, seconds: &[usize]) {
    let text = seconds.iter().map(|second| words(run, *second)).collect::<Vec<_>>().join("\n");
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/words").join(name);
    if env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &text).expect("golden file can be written");
    }
    let golden = fs::read_to_string(&path).expect("golden file can be read");
    assert_eq!(text, golden, "{name} reads differently");
}

fn shop(fakes: impl IntoIterator<Item = Fake>) -> Scenario {
    Scenario::new(1).group("shop", Policy::Demand, limits(64, 128, 384), fakes)
}

fn at_base(name: &str) -> Fake {
    Fake::idle(name).standing_at(128)
}

#[test]
fn a_hungry_guest_is_served_from_the_surplus() {
    let run =
        shop([at_base("a"), at_base("b"), Fake::busy("hungry", 190).standing_at(128)]).run(40);
    assert_golden("surplus.txt", &run, &[3, 39]);
}

#[test]
fn idle_memory_moves_and_everybody_who_cannot_give_says_why() {
    let run = shop([
        at_base("frozen").preallocated().that(Nature::FrozenStats { from: 2 }),
        at_base("idle").preallocated(),
        at_base("migrating").preallocated().that(Nature::Migrating { from: 0, until: 99 }),
        at_base("plain").preallocated().that(Nature::NoBalloonDriver).with_ram(128),
        at_base("stuck").preallocated().that(Nature::StuckBalloon { from: 0 }),
        at_base("swapless").preallocated().that(Nature::Swapless),
        at_base("waking").preallocated().then(19, 98),
        Fake::busy("hungry", 400).standing_at(128),
    ])
    .run(60);
    assert_golden("idle.txt", &run, &[4, 19, 20]);
}

#[test]
fn a_short_host_and_a_group_over_its_budget_take_grants_back() {
    let others = Load::Steps(vec![(0, Bytes::ZERO), (40, Bytes::mib(1_000))]);
    let run =
        shop([Fake::idle("booted"), Fake::busy("hungry", 190).standing_at(128), at_base("a")])
            .host(1_400, 200, others)
            .run(60);
    assert_eq!(run.seconds[0].plan.at, Time(1_000_000));
    assert_golden("shortage.txt", &run, &[1, 41]);
}
