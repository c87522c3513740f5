//! A guest whose swap is in a repository's memory, or whose data disk has a cache, when the
//! serving processes die.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::{Duration, Instant};

use lab::daemon::Daemon;
use lab::remote_swap::{Disk, GROUP, RemoteSwap};
use lab::{Lab, MachineSpec};
use model::{Bytes, DiskReading, Mode, RepositoriesReading};
use overbook_tests::{provisions, take_turn};

const GUEST: &str = "swaps";
const MEMORY: Bytes = Bytes::mib(80);
const DISK: Disk =
    Disk { size: Bytes::mib(128), read_delay_us: 0, lent: Bytes::mib(128), cache: false };
const LIMIT: Duration = Duration::from_secs(180);

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn status(swap: &RemoteSwap) -> (DiskReading, RepositoriesReading) {
    let disk = swap.status().unwrap_or_default();
    let repositories = disk.repositories.unwrap_or_default();
    (disk, repositories)
}

#[test]
fn a_guest_loses_nothing_when_those_who_serve_its_swap_die() {
    let (Some(_turn), Some(with)) = (take_turn(), provisions()) else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let mut swap = RemoteSwap::start(&dir.path().join("swap"), GUEST, DISK).unwrap();
    let guest = MachineSpec::new(GUEST, GROUP, MEMORY, MEMORY, "verify --mb 96");
    let specs = [swap.given_to(guest)];
    let mut lab = Lab::start(&dir.path().join("lab"), &with, &specs).unwrap();
    lab::fleet::wait_until_working(&lab).unwrap();
    until("the repository answers reads", || status(&swap).1.reads > 0);

    swap.kill_repository().unwrap();
    until("the disk knows", || status(&swap).1.connected == 0);
    let before = status(&swap).1.misses;
    until("the file answers instead", || status(&swap).1.misses > before + 100);
    swap.start_repository().unwrap();
    until("it is connected again", || status(&swap).1.connected == 1);
    let before = status(&swap).1.reads;
    until("it answers reads again", || status(&swap).1.reads > before);

    swap.silence_repository(true).unwrap();
    let before = status(&swap).0.reads;
    until("reads are answered all the same", || status(&swap).0.reads > before + 20);
    swap.silence_repository(false).unwrap();

    let (disk, repositories) = status(&swap);
    assert_eq!((disk.errors, repositories.forged), (0, 0));
    swap.kill_disks().unwrap();
    until("the guest reads and writes again", || {
        let disk = status(&swap).0;
        disk.reads > 0 && disk.writes > 0
    });
    assert_eq!(lab::fleet::bad_bytes(&lab).unwrap(), 0);
    assert_eq!(status(&swap).0.errors, 0);
    lab.stop().unwrap();
    swap.end().unwrap();
}

#[test]
fn what_a_group_has_to_spare_is_a_cache_of_its_disks_as_long_as_somebody_says_so() {
    let (Some(_turn), Some(with)) = (take_turn(), provisions()) else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let disk = Disk { lent: Bytes::ZERO, cache: true, ..DISK };
    let served = RemoteSwap::start(&dir.path().join("disk"), GUEST, disk).unwrap();
    // Only a part of the disk fits into the guest's memory. Its neighbour's untouched memory is
    // spare.
    let guest = MachineSpec::new(GUEST, GROUP, MEMORY, MEMORY, "fileio --path /dev/data --mb 128");
    let much = Bytes::mib(384);
    let specs = [served.given_as_data(guest), MachineSpec::new("rests", GROUP, much, much, "idle")];
    let mut lab = Lab::start(&dir.path().join("lab"), &with, &specs).unwrap();
    lab::fleet::wait_until_working(&lab).unwrap();
    assert_eq!(served.cache().unwrap().held, Bytes::ZERO, "nobody has said anything yet");

    served.make_known(&lab).unwrap();
    let daemon = Daemon::start(&mut lab, Mode::Observe).unwrap();
    until("pages are found in the cache", || {
        served.cache().is_some_and(|cache| cache.hits > 500 && !cache.held.is_zero())
    });
    let plan = daemon.case().unwrap().decide();
    assert!(!plan.caches[&GROUP.into()].amount.is_zero());

    daemon.kill(&mut lab).unwrap();
    until("nothing is held for a daemon that is no more", || {
        served.cache().is_some_and(|cache| cache.held.is_zero() && cache.capacity.is_zero())
    });
    let before = served.status().unwrap().reads;
    until("the disk is read all the same", || served.status().unwrap().reads > before + 50);
    assert_eq!(served.status().unwrap().errors, 0);
    lab.stop().unwrap();
    served.end().unwrap();
}
