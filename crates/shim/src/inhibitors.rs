//! Operations of QEMU that need guest RAM to stay in place: QEMU watches its memory itself, locks
//! it, hands it to a device, changes its mappings, or migrates.
//!
//! Ranges that QEMU has registered with a userfaultfd of its own are left to QEMU. The kernel
//! lets any userfaultfd change the protection of another's ranges and, up to Linux 6.16, end
//! their registration.

use std::sync::atomic::{AtomicI32, Ordering};

use protocol::layout::GiveBack;
use sys::memory_map::Range;

use crate::qemu;
use crate::ram::overlap;

/// Operations of QEMU that exclude moving pages.
pub(crate) struct Inhibitors {
    /// `mlockall` was called.
    pub(crate) locked: bool,
    /// A device, or the kernel's part of one, has direct access to guest RAM.
    pub(crate) passed_through: bool,
    /// Number of mappings of guest RAM that are being changed.
    pub(crate) remapping: u32,
    /// Ranges that QEMU has registered with its own userfaultfd, each with that descriptor.
    registered: Vec<(i32, Range)>,
}

/// The descriptor with which QEMU has registered guest RAM, or -1. QEMU uses one at a time.
static QEMU_REGISTERS: AtomicI32 = AtomicI32::new(-1);

/// Whether closing `fd` may end a registration of QEMU's. Takes no lock.
pub(crate) fn qemu_has_registered(fd: i32) -> bool {
    fd >= 0 && QEMU_REGISTERS.load(Ordering::Acquire) == fd
}

impl Inhibitors {
    pub(crate) const fn new() -> Self {
        Self { locked: false, passed_through: false, remapping: 0, registered: Vec::new() }
    }

    /// Why no page can ever be moved.
    pub(crate) fn objection(&self) -> Option<&'static str> {
        match self {
            Self { locked: true, .. } => Some("QEMU locks its memory (-overcommit mem-lock=on)"),
            Self { passed_through: true, .. } => Some(
                "a device is passed through (VFIO, vDPA) or runs in the kernel (vhost-scsi): it holds guest RAM",
            ),
            _ => None,
        }
    }

    /// Why no page can be moved until QEMU has finished an operation on its memory.
    pub(crate) fn hold(&self) -> Option<&'static str> {
        if !self.registered.is_empty() {
            return Some(GiveBack::QemuRegisters.words());
        }
        if self.remapping > 0 {
            return Some(GiveBack::RegionsChanged.words());
        }
        None
    }

    /// Whether QEMU has registered a part of `range`, or is about to. Writes to merged pages
    /// there are let go on beforehand.
    pub(crate) fn are_qemus(&self, range: Range) -> bool {
        self.registered.iter().any(|(_, held)| overlap(*held, range))
    }

    /// QEMU is about to register `range` with its userfaultfd `fd`.
    pub(crate) fn qemu_registers(&mut self, fd: i32, range: Range) {
        self.registered.push((fd, range));
        QEMU_REGISTERS.store(fd, Ordering::Release);
    }

    /// QEMU has ended its own registration: of a range, or of all ranges of its descriptor `fd`.
    pub(crate) fn qemu_unregistered(&mut self, fd: i32, range: Option<Range>) {
        self.registered.retain(|&(holder, held)| {
            holder != fd || range.is_some_and(|range| !overlap(range, held))
        });
        if self.registered.is_empty() {
            QEMU_REGISTERS.store(-1, Ordering::Release);
            // Only an incoming migration or a snapshot ends this way: the guest runs here.
            qemu::guest_runs();
        }
    }
}
