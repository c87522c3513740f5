//! Operations of QEMU that need guest RAM to stay in place: QEMU watches its memory itself, locks
//! it, hands it to a device, or changes its mappings.
//!
//! Ranges that QEMU has registered with a userfaultfd of its own are left to QEMU. The kernel
//! lets any userfaultfd change the protection of another's ranges and, up to Linux 6.16, end
//! their registration.

use std::borrow::Cow;
use std::sync::atomic::{AtomicI32, Ordering};

use protocol::layout::GiveBack;
use sys::memory_map::Range;

use crate::channel::EVERYTHING;
use crate::engine::{Engine, give_back_to_qemu, lock_first, userfaultfd};
use crate::qemu;
use crate::ram::overlap;
use crate::tracker::Tracker;

/// Operations of QEMU that exclude tracking.
pub(crate) struct Holds {
    /// `mlockall` was called.
    locked: bool,
    /// A device, or the kernel's part of one, has direct access to guest RAM.
    passed_through: bool,
    /// Number of mappings of guest RAM that are being changed.
    pub(crate) remapping: u32,
    /// Ranges that QEMU has registered with its own userfaultfd, each with that descriptor.
    registered: Vec<(i32, Range)>,
}

/// The descriptor with which QEMU has registered guest RAM, or -1. QEMU uses one at a time.
static QEMU_REGISTERS: AtomicI32 = AtomicI32::new(-1);

impl Holds {
    pub(crate) const fn new() -> Self {
        Self { locked: false, passed_through: false, remapping: 0, registered: Vec::new() }
    }

    /// Whether QEMU has registered a part of `range`, or is about to. Writes to merged pages
    /// there are let go on beforehand.
    pub(crate) fn are_qemus(&self, range: Range) -> bool {
        self.registered.iter().any(|(_, held)| overlap(*held, range))
    }

    fn unregistered(&mut self, fd: i32, range: Option<Range>) {
        self.registered.retain(|&(holder, held)| {
            holder != fd || range.is_some_and(|range| !overlap(range, held))
        });
    }
}

impl Engine {
    /// Why no page can be moved now. Does not allocate if there is a userfaultfd.
    pub(crate) fn obstacle(&self) -> Option<Cow<'static, str>> {
        let generation = self.ram.generation();
        let is_outdated =
            self.channel.as_ref().is_none_or(|channel| channel.generation() != generation);
        let outdated = || is_outdated.then_some("guest RAM has changed: say Hello again");
        self.objection().or_else(|| self.hold().or_else(outdated).map(Cow::Borrowed))
    }

    /// Why no page can ever be moved.
    pub(crate) fn objection(&self) -> Option<Cow<'static, str>> {
        let of_holds = || match &self.holds {
            Holds { locked: true, .. } => Some("QEMU locks its memory (-overcommit mem-lock=on)"),
            Holds { passed_through: true, .. } => Some(
                "a device is passed through (VFIO, vDPA) or runs in the kernel (vhost-scsi): it holds guest RAM",
            ),
            _ => None,
        };
        let words = self.ram.objection().or_else(of_holds).map(Cow::Borrowed);
        words.or_else(|| userfaultfd().err().map(|error| Cow::Owned(error.to_string())))
    }

    /// Why no page can be moved until QEMU has finished an operation.
    pub(crate) fn hold(&self) -> Option<&'static str> {
        if !self.holds.registered.is_empty() {
            return Some(GiveBack::QemuRegisters.words());
        }
        if self.holds.remapping > 0 {
            return Some(GiveBack::RegionsChanged.words());
        }
        if self.tracker.as_ref().is_some_and(Tracker::is_incomplete) {
            return Some(GiveBack::KernelRefused.words());
        }
        qemu::migration()
    }

    /// QEMU has ended its own registration: of a range, or of all ranges of its descriptor `fd`.
    pub(crate) fn qemu_unregistered(&mut self, fd: i32, range: Option<Range>) {
        self.holds.unregistered(fd, range);
        if self.holds.registered.is_empty() {
            QEMU_REGISTERS.store(-1, Ordering::Release);
            // Only an incoming migration or a snapshot ends this way: the guest runs here.
            qemu::guest_runs();
        }
    }
}

/// QEMU is about to register `range` with its own userfaultfd `fd`. It gets guest RAM as without
/// the shim, and keeps it until it unregisters. Returns whether guest RAM is concerned.
pub(crate) fn let_go(fd: i32, range: Range) -> bool {
    {
        let mut engine = lock_first();
        if !engine.ram.concerns(range) {
            return false;
        }
        // This comes first. Once the range is recorded as QEMU's, the shim may not let writes go
        // on, and a waiting thread would trap until everything is back.
        engine.let_all_write(range);
        engine.holds.registered.push((fd, range));
        QEMU_REGISTERS.store(fd, Ordering::Release);
    }
    give_back_to_qemu(GiveBack::QemuRegisters);
    true
}

/// Whether closing `fd` may end a registration of QEMU's.
pub(crate) fn qemu_has_registered(fd: i32) -> bool {
    fd >= 0 && QEMU_REGISTERS.load(Ordering::Acquire) == fd
}

/// A device is passed through and pins guest RAM, now and whenever RAM is mapped.
pub(crate) fn pass_through() {
    lock_first().holds.passed_through = true;
    give_back_to_qemu(GiveBack::MemoryLocked);
    lock_first().let_all_write(EVERYTHING);
}

/// QEMU is about to lock its memory, or could not.
pub(crate) fn lock_memory(locked: bool) {
    lock_first().holds.locked = locked;
    if locked {
        give_back_to_qemu(GiveBack::MemoryLocked);
        lock_first().let_all_write(EVERYTHING);
    }
}
