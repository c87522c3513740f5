//! The host memory of a VM: resident, and in the host's swap.
//!
//! No working set is larger than this and the VM's shared memory. An estimate can be: it counts
//! whole granules of which the guest uses one page, it lags behind when a program ends, and after a
//! worker's start much of the guest is still unknown. So the kernel's counters bound it. They are
//! read for each reading, which takes some tens of microseconds. They include QEMU's own memory,
//! which hardly changes. The daemon measures that now and then and passes it on, since measuring it
//! may have to wait for QEMU.

use model::Bytes;
use sys::memory_of::Counters;
use sys::process::Identity;

/// The host memory of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Holdings {
    /// Resident, without shared pages, which cannot be paged out.
    pub(super) resident: Bytes,
    /// In the host's swap.
    pub(super) swapped: Bytes,
}

impl Holdings {
    /// Reads the counters of this QEMU process, of whose memory `own` is QEMU's; `None`: the
    /// process is gone.
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
