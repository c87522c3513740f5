//! Lending end to end: a group of real guests that is short, one that is not, the daemon and its
//! workers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::MachineSpec;
use model::Mode;
use overbook_tests::{BASE, Requirement, Stage, ensure, hungry, idle, requires};
use sys::process::{Identity, Signal};

/// A guest of group `cafe` that has more memory than it needs.
fn content(name: &str) -> MachineSpec {
    MachineSpec { group: "cafe".to_owned(), shim: true, ..idle(name) }
}

fn lent(stage: &Stage) -> u64 {
    stage.json(&["group", "cafe"])["lent_bytes"].as_u64().unwrap()
}

/// The worker of `cafe`, and the name of its cgroup.
fn worker(stage: &Stage) -> Option<(Identity, String)> {
    let worker = stage.worker("cafe")?;
    let cgroup = sys::cgroup::of_process(worker.pid).ok()??;
    Some((worker, cgroup.file_name().unwrap_or_default().to_string_lossy().into_owned()))
}

fn sits_in(stage: &Stage, group: &str) -> bool {
    worker(stage).is_some_and(|(_, cgroup)| cgroup == format!("overbook-worker-{group}"))
}

#[test]
fn a_group_lends_and_its_worker_is_the_borrowers_until_it_does_not_consent_any_more() {
    let guests = [hungry(), content("one"), content("two")];
    let Some(stage) = Stage::start(Mode::Enforce, &guests) else { return };
    stage.configure(&[("dedup = \"off\"", "dedup = 200")]);
    stage.until("cafe has a worker", |stage| worker(stage).is_some());
    let found = ensure(sits_in(&stage, "cafe"), format!("a worker in {:?}", worker(&stage)));
    let has_cgroups = requires(Requirement::Cgroup, found).is_some();
    stage.configure(&[("lend = false", "lend = true")]);
    stage.until("cafe lends", |stage| lent(stage) > 0);
    stage.until("shop's guest has what it never had", |stage| stage.balloon("hungry") > BASE);
    assert!(stage.says(&["explain", "hungry"]).contains("group cafe lends group shop"));
    if has_cgroups {
        stage.until("shop pays", |stage| sits_in(stage, "shop"));
        let (killed, _) = worker(&stage).unwrap();
        killed.signal(Signal::KILL).unwrap();
        stage.until("shop pays for the next worker, too", |stage| {
            worker(stage).is_some_and(|(next, _)| next != killed) && sits_in(stage, "shop")
        });
    }

    stage.configure(&[("lend = true", "lend = false")]);
    stage.until("cafe lends nothing", |stage| lent(stage) == 0);
    stage.until("shop's guest gives it back", |stage| stage.balloon("hungry") <= BASE);
    let past = stage.says(&["history", "cafe", "--loans"]);
    assert!(past.contains("one of the two groups takes no part in lending any more"), "{past}");
    if has_cgroups {
        stage.until("cafe pays for itself", |stage| sits_in(stage, "cafe"));
    }
}
