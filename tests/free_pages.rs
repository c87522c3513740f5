//! Freed memory end to end: a real guest that frees and takes memory, the daemon and its worker.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage};

/// Part of the 70 MiB that the guest frees at a time; its kernel reports them in parts, every two
/// seconds.
const ENOUGH: Bytes = Bytes::mib(30);

fn free_pages(stage: &Stage, field: &str) -> Bytes {
    Bytes(stage.vm("guest")["free_pages"][field].as_u64().unwrap_or(0))
}

fn resident(stage: &Stage) -> Bytes {
    let pid = stage.guest("guest").process().pid;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    Bytes::kib(line.trim().trim_end_matches(" kB").parse().unwrap())
}

#[test]
fn what_a_guest_frees_stays_until_the_host_would_be_short_and_no_byte_is_lost() {
    let guest = MachineSpec {
        shim: true,
        ..MachineSpec::new("guest", "shop", MAX, MAX, "verify --mb 140 --breathe 15")
    };
    let Some(stage) = Stage::start(Mode::Observe, &[guest]) else { return };
    fleet::wait_until_working(&stage.lab).unwrap();
    assert!(stage.vm("guest")["unsupported"]["free_pages"].as_str().unwrap().contains("\"off\""));
    // Tracking would hold back some of the freed pages.
    stage.configure(&[
        ("tracking = \"1 %\"", "tracking = \"off\""),
        ("free_pages = \"off\"", "free_pages = \"lazy\""),
    ]);

    stage.until("the guest's freed memory stays with it", |stage| {
        free_pages(stage, "lazy_bytes") > ENOUGH
    });
    assert!(free_pages(&stage, "handed_over_bytes_total") > ENOUGH);
    assert_eq!(free_pages(&stage, "taken_bytes_total"), Bytes::ZERO, "nobody needs it");
    let (resident_before, used) =
        (resident(&stage), stage.vm("guest")["used_bytes"].as_u64().unwrap());
    assert!(Bytes(used).plus(ENOUGH) < resident_before, "what is freed is not used: {used}");
    assert!(
        stage.says(&["explain", "guest"]).contains("it may have it back, for no other VM needs it")
    );

    // The next worker also knows of the pages that were handed over.
    stage.kill_worker("shop");
    stage.until("it knows of what was freed", |stage| free_pages(stage, "freed_bytes") > ENOUGH);

    stage.configure(&[("[host]", "[host]\nreserve = \"900GiB\"")]);
    stage.until("it is said why it is taken", |stage| {
        let why = "is taken: without what VMs have freed the host has";
        stage.says(&["explain", "guest"]).contains(why)
    });
    stage.until("it is taken", |stage| free_pages(stage, "taken_bytes_total") > ENOUGH);
    stage.until("the host has it", |stage| resident(stage).plus(ENOUGH) < resident_before);
    stage.until("the guest has touched it again", |stage| {
        free_pages(stage, "refaulted_bytes_total") > ENOUGH
    });
    assert_eq!(fleet::bad_bytes(&stage.lab).unwrap(), 0);
}
