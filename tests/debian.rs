//! Guests that run a Debian from one image. Their programs work, and match their packages, while
//! identical pages are merged.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::{Duration, Instant};

use lab::cache::Cache;
use lab::debian::{self, Debian};
use lab::merger::Merger;
use lab::{Lab, MachineSpec};
use model::Bytes;
use overbook_tests::{Requirement, provisions, requires, take_turn};

const LIMIT: Duration = Duration::from_secs(180);
/// Part of the page cache of four guests that read the same files, and of their kernels: some 66
/// MiB.
const ENOUGH: u64 = 30 << 20;

#[test]
fn real_programs_work_and_are_what_was_packaged_while_their_pages_are_merged() {
    let (Some(_turn), Some(with)) = (take_turn(), provisions()) else { return };
    let Some(debian) = requires(Requirement::Packages, Debian::provide(&Cache::open().unwrap()))
    else {
        return;
    };
    assert!(debian.tree.join("usr/sbin/nginx").is_file());
    let guest = |name: &str, mb: u32, workload: &str| {
        let workload = format!("{workload} --check-s 3");
        let memory = Bytes::mib(mb.into());
        let spec = MachineSpec::new(name, "shop", memory, memory, &workload).with_debian(&debian);
        MachineSpec { shim: true, ..spec }
    };
    let guests = [
        guest("web", 192, "nginx --mb 8"),
        guest("database", 192, "redis --mb 8"),
        guest("builder", 320, "gcc"),
        guest("calm", 160, "shell"),
    ];
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    let mut lab = Lab::start(&dir.path().join("lab"), &with, &guests).unwrap();
    lab::fleet::wait_until_working(&lab).unwrap();
    let pids: Vec<u32> = lab.machines().iter().map(|machine| machine.process().pid).collect();
    let merger = Merger::start(&pids, None, None).unwrap();
    let begun = Instant::now();
    while merger.pool_bytes() < ENOUGH {
        assert!(begun.elapsed() < LIMIT, "{:?}", merger.readings());
        std::thread::sleep(Duration::from_millis(100));
    }
    let ops = |lab: &Lab| -> Vec<f64> {
        lab.machines().iter().map(|machine| machine.reported("ops")).collect()
    };
    let before = ops(&lab);
    lab.wait_for("all of them to go on", LIMIT, |lab| {
        Ok(ops(lab).iter().zip(&before).all(|(now, before)| now > before))
    })
    .unwrap();
    assert_eq!(debian::bad_bytes(&lab).unwrap(), 0);
    drop(merger);
    lab.stop().unwrap();
}
