//! Golden texts: the operator's text, letter by letter.

use super::*;
use crate::fixture;

#[test]
fn a_vm_that_is_given_memory_is_explained() {
    let last = LastChange {
        wall_ms: 1_780_000_000_000 - 180_000,
        text: "target raised to 192 MiB: it is short of memory".to_owned(),
    };
    let text = explain(&fixture::published(), &"web-1".into(), Some(&last));
    let expected = "\
web-1 may use 192 MiB of its 384 MiB of RAM; it belongs to group web (policy demand).

Limits       min 96 MiB, base 128 MiB (guaranteed), max 384 MiB
Of its base  all, and 64 MiB above it: a grant, which can be taken back
Guest says   12 MiB available, 8 MiB free, 192 MiB in all (800 ms before this tick)
Host counts  180 MiB occupied by it
Working set  150 MiB, 20 MiB of it in its swap; knowing it took 0.95 % of one vCPU in the last half minute
Shared pages 40 MiB, which saves 30 MiB; its group is scanned at 25 pages/ms: the host's CPUs are 40 % busy, so scanning slows no VM
Freed        60 MiB, of which the host can take 50 MiB; all but 20 MiB is taken: without what VMs have freed the host has 2 GiB left, less than 3 GiB: as much is taken, the oldest first
Disk         swap: half of its reads take less than 64 us; 0 B of it lie in 2 repositories
Overload     transient: it was overloaded in 2 of its last 12 intervals; 8 of them would make it sustained
Now          target raised to 202 MiB: it is short of memory (it swaps 3.1 MiB/s) and the group has 100 MiB to hand out
Not more     it is under pressure itself (it swaps in 3.1 MiB/s)
Lending      group shop lends group web 60 MiB: web-1 is short of memory (it swaps 3.1 MiB/s), and the lender leaves 300 MiB idle
Last change  3 min before this tick: target raised to 192 MiB: it is short of memory
";
    assert_eq!(text, expected);
}

#[test]
fn a_vm_that_does_not_follow_is_explained_with_what_to_do() {
    let text = explain(&fixture::published(), &"web-2".into(), None);
    let expected = "\
web-2 may use all of its 384 MiB of RAM; it belongs to group web (policy demand).

Limits       min 96 MiB, base 128 MiB (guaranteed), max 384 MiB
Of its base  all, and 256 MiB above it: a grant, which can be taken back
Guest says   12 MiB available, 8 MiB free, 384 MiB in all (800 ms before this tick)
Host counts  300 MiB occupied by it
Unsupported  free page reporting: the balloon was made without it
Unsupported  tracking: QEMU was started without Overbook's shim
Unchanged    uncooperative: its balloon stands at 384 MiB and has not moved towards 128 MiB for 40 s; next try in 60 s
Lending      group shop lends group web 60 MiB: web-1 is short of memory (it swaps 3.1 MiB/s), and the lender leaves 300 MiB idle
Last change  none is on record
To change it look into the guest: its balloon driver is missing, stuck or out of memory
";
    assert_eq!(text, expected);
}

#[test]
fn a_vm_without_group_whose_qemu_is_gone_is_explained() {
    let text = explain(&fixture::published(), &"db-1".into(), None);
    let expected = "\
db-1 may use all of its 512 MiB of RAM; it belongs to no group.

QEMU         no connection for 60 s: no such socket
Unchanged    no group's pattern matches it: it is watched, and its memory is left alone
Last change  none is on record
To change it add a pattern that matches `db-1` to a group's `vms`
";
    assert_eq!(text, expected);
}

#[test]
fn a_plan_that_is_not_carried_out_says_so() {
    let mut tick = fixture::published();
    tick.plan.mode = Mode::Recommend;
    let text = explain(&tick, &"web-1".into(), None);
    assert!(text.contains("\nRecommended  target raised to 202 MiB"), "{text}");
}

#[test]
fn what_the_last_balance_saved_is_said() {
    let mut tick = fixture::published();
    let (from, to) = (Bytes::mib(192), Bytes::mib(202));
    let at = Time(tick.at.0 - 20_000);
    let outcome = Outcome { at, from, to, expected: 120, saved: 90 };
    tick.plan.vms.get_mut(&"web-1".into()).unwrap().outcome = Some(outcome);
    let text = explain(&tick, &"web-1".into(), None);
    let line = "\nLast balance 20 s before this tick, from 192 MiB to 202 MiB: expected to save it 120 misses a \
                minute, this saved 90\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn an_unknown_vm_is_no_riddle() {
    let text = explain(&fixture::published(), &"nobody".into(), None);
    assert_eq!(text, "nobody is not on this host.\n");
}

#[test]
fn a_disk_that_has_lost_one_of_its_repositories_says_so() {
    let repositories = Some(model::RepositoriesReading {
        admits: true,
        connected: 2,
        held: Bytes::mib(5),
        ..model::RepositoriesReading::default()
    });
    let reading = DiskReading { repositories, read_us_median: 64, ..DiskReading::default() };
    let begin = "swap: half of its reads take less than 64 us; 5 MiB of it lie in 2 repositories";
    assert_eq!(disk("swap", &reading, 2), begin);
    assert_eq!(disk("swap", &reading, 3), format!("{begin}, and 1 of its 3 are not connected"));
}

#[test]
fn a_mechanism_that_is_switched_off_is_not_called_unsupported() {
    let mut tick = fixture::published();
    let vm = tick.view.vms.get_mut(&"web-2".into()).unwrap();
    for mechanism in [Mechanism::Dedup, Mechanism::Cold] {
        vm.limits.insert(mechanism, format!("{SWITCHED_OFF} for group web"));
    }
    let text = explain(&tick, &"web-2".into(), None);
    assert!(text.contains("\nSwitched off dedup, cold, by its group's configuration\n"), "{text}");
    assert_eq!(text.matches("Unsupported").count(), 2, "{text}");
}

#[test]
fn a_refused_connection_is_not_called_silence() {
    let mut tick = fixture::published();
    let why = "two sockets name this VM".to_owned();
    tick.view.vms.get_mut(&"db-1".into()).unwrap().link = Link::Down { since: tick.at, why };
    let text = explain(&tick, &"db-1".into(), None);
    assert!(
        text.contains("\nQEMU         no connection for 0 ms: two sockets name this VM\n"),
        "{text}"
    );
}
