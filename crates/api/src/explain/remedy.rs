//! The operator's remedy for a reason, or the event that will end it by itself.

use model::{Reason, VmLimits, VmName};

/// One sentence. `None`: nothing needs to be done, or nothing can be.
pub(super) fn remedy(reason: &Reason, vm: &VmName, limits: Option<VmLimits>) -> Option<String> {
    let fixed = match reason {
        Reason::NoGroup => {
            return Some(format!("add a pattern that matches `{vm}` to a group's `vms`"));
        }
        Reason::AtMax { .. } | Reason::AboveMax { .. } | Reason::OverloadItsOwn { .. } => {
            return Some(format!("a larger `max` in [vm.\"{vm}\"] or its group"));
        }
        Reason::AtFloor { floor } if limits.is_some_and(|limits| *floor > limits.min) => {
            return Some(format!(
                "a smaller `base` in [vm.\"{vm}\"] or its group; or `swap = true` there, if the guest has \
                 swap: then what lies idle is taken down to `min`"
            ));
        }
        Reason::AtFloor { .. } => {
            return Some(format!("a smaller `min` in [vm.\"{vm}\"] or its group"));
        }
        Reason::Swapless { .. } => {
            return Some(format!("give the guest swap, and say `swap = true` in [vm.\"{vm}\"]"));
        }
        Reason::DedupOff
        | Reason::ScanFixed
        | Reason::CpuIdle { .. }
        | Reason::CpuBusy { .. }
        | Reason::CpuUnknown
        | Reason::ScanForSwapping { .. }
        | Reason::ScanProductive { .. }
        | Reason::ScanSlow { .. }
        | Reason::ScanUnproductive { .. }
        | Reason::FreedOverBudget { .. }
        | Reason::FreedHostShort { .. }
        | Reason::FreedHostPressed { .. }
        | Reason::Lend { .. }
        | Reason::LoanUsed
        | Reason::LoanUnneeded
        | Reason::LoanCut { .. }
        | Reason::LoanRecalled { .. }
        | Reason::LoanNotConsented
        | Reason::NoLender
        | Reason::Spare { .. }
        | Reason::NothingSpare
        | Reason::OverloadNone { .. }
        | Reason::OverloadTransient { .. }
        | Reason::OverloadSustained { .. }
        | Reason::Demand { .. }
        | Reason::Share { .. }
        | Reason::Balance { .. }
        | Reason::WorthLess { .. }
        | Reason::Saved { .. }
        | Reason::GiveBack { .. }
        | Reason::Returned { .. }
        | Reason::Restore { .. }
        | Reason::Withheld { .. }
        | Reason::Paged
        | Reason::Ahead { .. }
        | Reason::Returns { .. }
        | Reason::Idle { .. }
        | Reason::Content
        | Reason::NothingIdle { .. }
        | Reason::UnderPressure { .. } => return None,
        Reason::BlindGiveBack { .. } | Reason::NoStats => {
            "check the guest's virtio_balloon driver: without statistics nothing is taken from it"
        }
        Reason::NotPaged => {
            "it goes on by itself when the group's worker tracks the VM again: `overbook vm` says why it does not"
        }
        Reason::KilledGiveBack { .. } | Reason::Killed { .. } => {
            "more memory for the guest: a larger `base`, or swap in the guest; taking goes on by itself when the wait is over"
        }
        Reason::StaysOver { .. } => {
            "a larger `budget` of the group, fewer VMs in it, or swap in its guests: Overbook takes nothing that a guest would die without"
        }
        Reason::Deficit { .. } | Reason::NoSurplus { .. } | Reason::BestElsewhere => {
            "a larger `budget` of the group, or other VMs of the group that need less"
        }
        Reason::HostShort { .. } | Reason::HostReserve { .. } => {
            "free memory on the host, or a smaller `host.reserve` if it is more than is needed"
        }
        Reason::KeptForOverloads { .. } => {
            "another host in the pool; or, to keep nothing, `certainty_percent = 0` in the controller's [pool]"
        }
        Reason::CgroupLimit { .. } | Reason::CgroupExceeded { .. } => {
            "a higher limit of QEMU's cgroup (libvirt's `memtune`, systemd's `MemoryMax=`), or a smaller `max`"
        }
        Reason::HostUnknown => "check that the daemon may read /proc/meminfo",
        Reason::Unreachable { .. } => {
            "check that QEMU runs and that its QMP socket is not held by another client"
        }
        Reason::NoBalloon { .. } => "start the VM with virtio-balloon-pci and its guest's driver",
        Reason::Migrating => "it goes on by itself when the migration has ended",
        Reason::StaleStats { .. } => "it goes on by itself when the guest sends statistics again",
        Reason::ImplausibleStats { .. } | Reason::CountersWentBack => {
            "it goes on by itself when the guest's statistics make sense again"
        }
        Reason::Grace { .. } | Reason::NewVm { .. } => {
            "`overbook plan` says what follows; `overbook pause` keeps it from that"
        }
        Reason::BackOff { .. }
        | Reason::NotCalm { .. }
        | Reason::NotWatched { .. }
        | Reason::InFlight { .. } => "it goes on by itself when the wait is over",
        Reason::Uncooperative { .. } => {
            "look into the guest: its balloon driver is missing, stuck or out of memory"
        }
        Reason::GivesNothingBack { .. } => {
            "start the VM without `mem-lock`, preallocated or huge pages, and VFIO devices; or put it into no group"
        }
        Reason::MovedByOthers { .. } => "let only one program set this balloon; stop the other one",
        Reason::ManagersBalloon { remedy } => return Some(format!("`{remedy}`")),
        Reason::Paused => "`overbook resume`",
        Reason::PausedAlone { name } => return Some(format!("`overbook resume {name}`")),
        Reason::Observing => "`balloon = \"enforce\"` in [mode]",
    };
    Some(fixed.to_owned())
}
