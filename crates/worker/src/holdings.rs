//! What a VM holds of the host: what it occupies, and what of it the host has swapped out.
//!
//! No working set is larger than that and what it shares. An estimate can be: it stands for pieces
//! of memory of which the guest has one page, it needs a while to see that a program has ended, and
//! after a worker's start much of the guest is not known yet. So the kernel's counters are the
//! bound, read as often as a reading is made (some tens of microseconds). QEMU's own memory, which
//! they count as well and which hardly changes, the daemon measures now and then and passes on: to
//! measure it can mean to wait for QEMU.

use model::Bytes;
use sys::memory_of::Counters;
use sys::process::Identity;

/// What a VM holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    /// In memory, and its own: what it shares with others cannot go out.
    pub(super) resident: Bytes,
    /// In the host's swap.
    pub(super) swapped: Bytes,
}

impl Holdings {
    /// Of this QEMU process, when `own` of it is QEMU's; `None`: the process is gone.
    pub(super) fn of(process: Identity, own: Bytes) -> Option<Self> {
        let Counters { anonymous, hugetlb, swapped, .. } =
            process.still(Counters::of(process.pid).ok()?).ok()?;
        Some(Self { resident: anonymous.plus(hugetlb).minus(own), swapped })
    }

    pub(super) fn all(self) -> Bytes {
        self.resident.plus(self.swapped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_grows_with_what_is_touched_and_is_less_by_qemus_own() {
        let own_process = Identity::own().unwrap();
        let all = |own| Holdings::of(own_process, own).unwrap().all();
        let before = all(Bytes::ZERO);
        let block = vec![1_u8; 64 << 20];
        let after = all(Bytes::ZERO);
        assert!(after.minus(before) > Bytes::mib(32), "{before} {after}");
        std::hint::black_box(&block);
        assert_eq!(all(Bytes(u64::MAX)), Bytes::ZERO);
        assert_eq!(Holdings::of(Identity { pid: u32::MAX, ..own_process }, Bytes::ZERO), None);
    }
}
