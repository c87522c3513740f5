//! The guests that the lab brings up, and questions to all of them.

use std::time::Duration;

use model::Bytes;

use crate::lab::{Lab, LabError, Machine};
use crate::machine::MachineSpec;

/// Operations per second of a hard disk that seeks (7200 rpm: about 8 ms per operation).
pub const HARD_DISK_IOPS: u32 = 150;

/// Memory that each guest is provisioned with.
pub const BASE: Bytes = Bytes::mib(128);
const MAX: Bytes = Bytes::mib(384);
const SWAP: Bytes = Bytes::mib(512);

/// The number of small guests, their memory, and the most that one may have.
const MANY: usize = 40;
const SMALL: Bytes = Bytes::mib(80);
const SMALL_MAX: Bytes = Bytes::mib(96);

/// The guest of `shop` that needs more than it has.
pub const HUNGRY: &str = "shop-1";

/// Timeout for guests to fill their memory, partly into swap or on an emulated host.
const FILL_LIMIT: Duration = Duration::from_secs(240);

/// Timeout for a guest to verify its memory twice, which takes two seconds at its own pace.
const VERIFY_LIMIT: Duration = Duration::from_secs(240);

/// Two tenants. In `shop`, one guest of four works on about 100 MB more than it has, while the
/// others idle. In `research`, both guests are busy, and no other tenant gets their memory.
///
/// A guest of 128 MB has some 76 MB for its programs; the rest is its kernel's. Each tenant has a
/// CPU of its own where there are two. `research` works at a pace that leaves some of its CPU
/// idle, so that the figures depend on memory alone.
pub fn quickstart(seed: u64) -> Vec<MachineSpec> {
    let has_two = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() >= 2);
    let guest = |name: &str, group: &str, workload: &str| MachineSpec {
        seed,
        cpus: if has_two { vec![usize::from(group == "research")] } else { Vec::new() },
        ..MachineSpec::new(name, group, BASE, MAX, workload).with_swap(SWAP, Some(HARD_DISK_IOPS))
    };
    vec![
        guest(HUNGRY, "shop", "random-array --mb 172 --record-kb 64"),
        guest("shop-2", "shop", "idle"),
        guest("shop-3", "shop", "idle"),
        guest("shop-4", "shop", "idle"),
        guest("research-1", "research", "verify --mb 40 --rate 40"),
        guest("research-2", "research", "pi --rate 4000"),
    ]
}

/// The same guests under the shim, the first one's group under the name of `group`.
pub fn managed(guests: Vec<MachineSpec>, group: &str) -> Vec<MachineSpec> {
    let first = guests.first().map(|guest| guest.group.clone()).unwrap_or_default();
    let of = |guest: MachineSpec| {
        let name = if guest.group == first { group.to_owned() } else { guest.group.clone() };
        MachineSpec { shim: true, group: name, ..guest }
    };
    guests.into_iter().map(of).collect()
}

/// Forty small guests in four groups under the shim, the first of which is called `group`. Nine of
/// ten idle; the others verify their memory.
pub fn many(seed: u64, group: &str) -> Vec<MachineSpec> {
    let groups = [group, "red", "green", "blue"];
    let guest = |number: usize| {
        let work = if number % 10 == 9 { "verify --mb 12 --rate 12" } else { "idle --common-mb 8" };
        let name = format!("small-{number}");
        let spec = MachineSpec::new(&name, groups[number % groups.len()], SMALL, SMALL_MAX, work);
        MachineSpec { seed: seed + number as u64, shim: true, ..spec }
    };
    (0..MANY).map(guest).collect()
}

/// Waits until the hungry guest works on its whole set, and every guest reports.
pub fn wait_until_working(lab: &Lab) -> Result<(), LabError> {
    lab.wait_for("every guest to work", FILL_LIMIT, |lab| {
        Ok(lab.machines().iter().all(|machine| {
            machine.last_metric().is_some_and(|m| m.value["ops"].as_u64().unwrap_or(0) > 0)
        }))
    })
}

/// Waits until every guest has filled `mb` MB of memory.
pub fn wait_until_filled(lab: &Lab, mb: u32) -> Result<(), LabError> {
    lab.wait_for("every guest to have filled its memory", FILL_LIMIT, |lab| {
        Ok(lab.machines().iter().all(|machine| machine.reported("mb") >= f64::from(mb)))
    })
}

/// Wrong bytes that the guests running `verify` have found, after they have checked all their
/// memory once more from now on. An old report says nothing about what happened since.
///
/// # Errors
/// When no guest runs it, or one does not finish its check: then nothing is proven.
pub fn bad_bytes(lab: &Lab) -> Result<u64, LabError> {
    let verifies = |m: &&Machine| m.spec().workload.first().is_some_and(|w| w == "verify");
    let mut total = None;
    for machine in lab.machines().iter().filter(verifies) {
        let unproven = || LabError::NothingVerified(machine.spec().name.clone());
        lab.wait_for("`verify` to begin", VERIFY_LIMIT, |_| Ok(Verified::of(machine).is_some()))?;
        let begun = Verified::of(machine).ok_or_else(unproven)?;
        // One operation verifies one MB, in order. The newest report is at most a second old
        // while the guest lives; the second round makes up for an older one.
        let enough = begun.ops.saturating_add(begun.mb.saturating_mul(2));
        lab.wait_for("`verify` to look at all its memory again", VERIFY_LIMIT, |_| {
            Ok(Verified::of(machine).is_some_and(|now| now.ops >= enough))
        })?;
        let found = Verified::of(machine).ok_or_else(unproven)?.bad_bytes;
        total = Some(found.saturating_add(total.unwrap_or(0)));
    }
    total.ok_or_else(|| LabError::NothingVerified("the lab".to_owned()))
}

/// The latest report of `verify`.
struct Verified {
    ops: u64,
    mb: u64,
    bad_bytes: u64,
}

impl Verified {
    fn of(machine: &Machine) -> Option<Self> {
        let report = machine.last_metric()?.value;
        let number = |name: &str| report[name].as_u64();
        Some(Self { ops: number("ops")?, mb: number("mb")?, bad_bytes: number("bad_bytes")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn managed_guests_have_the_shim_and_the_first_groups_name_is_another() {
        let of = |guests: &[MachineSpec], group: &str| {
            assert!(guests.iter().all(|guest| guest.shim));
            guests.iter().filter(|guest| guest.group == group).count()
        };
        assert_eq!(of(&managed(quickstart(1), "served"), "served"), 4);
        let many = many(1, "served");
        assert_eq!((many.len(), of(&many, "served"), of(&many, "blue")), (40, 10, 10));
        let verifying = many.iter().filter(|guest| guest.workload[0] == "verify").count();
        assert_eq!(verifying, 4);
    }
}
