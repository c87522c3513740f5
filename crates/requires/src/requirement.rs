//! The properties of a machine that tests need.

use std::fmt::{Display, Formatter, Result};

/// A property of the machine that a test needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    /// The rights of root.
    Root,
    /// An installed program.
    Program(&'static str),
    /// A program of this project, built.
    Built(&'static str),
    /// The files that a target of the Makefile builds.
    Target(&'static str),
    /// Programs of packages, installed or downloaded.
    Packages,
    /// A C compiler with the kernel's headers.
    Compiler,
    /// vCPUs under KVM.
    Kvm,
    /// Frame numbers in `/proc/PID/pagemap`.
    Frames,
    /// A cgroup v2 tree.
    CgroupV2,
    /// A new cgroup for a process.
    Cgroup,
    /// A new cgroup with a limit of memory.
    MemoryCgroup,
    /// A new cgroup with a limit of disk operations.
    DiskCgroup,
    /// A compressed swap device in memory.
    Zram,
    /// A compressed cache for swap.
    Zswap,
    /// A kernel with KSM.
    Ksm,
    /// KSM that the test may set, and that is not at work.
    IdleKsm,
    /// A host where no process has mergeable memory.
    NothingMergeable,
    /// A kernel with FUSE.
    Fuse,
    /// A system with all programs below `/usr`.
    MergedUsr,
    /// A mount namespace.
    MountNamespace,
    /// An overlay file system, mounted in a namespace.
    Overlay,
    /// Real-time priorities.
    Priorities,
    /// Memory that is locked.
    LockedMemory,
    /// A file for direct I/O.
    DirectIo,
    /// Memory that I/O pins.
    Pinning,
    /// Huge pages in the kernel's pool.
    HugePagePool,
    /// Transparent huge pages, and page tables that go with their pages.
    HugePagesAgain,
    /// `userfaultfd` that ordinary users are denied.
    DeniedUserfaultfd,
    /// A limit of mappings that a test can reach.
    FewMappings,
    /// The kernel's driver for NBD.
    Nbd,
}

impl Display for Requirement {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        formatter.write_str(match self {
            Self::Root => "root",
            Self::Program(name) => return write!(formatter, "the program {name}"),
            Self::Built(name) => return write!(formatter, "{name}, which `make e2e` builds"),
            Self::Target(target) => return write!(formatter, "the files of `make {target}`"),
            Self::Packages => "programs of packages",
            Self::Compiler => "a C compiler with the kernel's headers",
            Self::Kvm => "vCPUs under KVM",
            Self::Frames => "frame numbers from the kernel",
            Self::CgroupV2 => "a cgroup v2 tree",
            Self::Cgroup => "a new cgroup",
            Self::MemoryCgroup => "a new cgroup with a limit of memory",
            Self::DiskCgroup => "a new cgroup with a limit of disk operations",
            Self::Zram => "zram",
            Self::Zswap => "zswap",
            Self::Ksm => "a kernel with KSM",
            Self::IdleKsm => "KSM that it may set and that is not at work",
            Self::NothingMergeable => "a host where no process has mergeable memory",
            Self::Fuse => "a kernel with FUSE",
            Self::MergedUsr => "a system with all programs below /usr",
            Self::MountNamespace => "a mount namespace",
            Self::Overlay => "an overlay file system in a namespace",
            Self::Priorities => "real-time priorities",
            Self::LockedMemory => "locked memory",
            Self::DirectIo => "direct I/O",
            Self::Pinning => "memory that I/O pins",
            Self::HugePagePool => "huge pages in the kernel's pool",
            Self::HugePagesAgain => "transparent huge pages and Linux 6.14",
            Self::DeniedUserfaultfd => "userfaultfd that ordinary users are denied",
            Self::FewMappings => "vm.max_map_count of at most 96,000",
            Self::Nbd => "the kernel's driver for NBD",
        })
    }
}
