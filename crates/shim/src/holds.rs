//! What QEMU does that needs guest RAM to stay where it is: it watches its memory itself, locks it,
//! hands it to a device, or changes what is mapped there.
//!
//! What it watches with a userfaultfd of its own is its own in every respect: the kernel lets any
//! userfaultfd change how any other's ranges are protected, and up to Linux 6.16 end their
//! registration.

use std::borrow::Cow;
use std::sync::atomic::{AtomicI32, Ordering};

use protocol::layout::GiveBack;
use sys::memory_map::Range;

use crate::channel::EVERYTHING;
use crate::engine::{Engine, give_back_to_qemu, lock_first, userfaultfd};
use crate::qemu;
use crate::ram::overlap;
use crate::tracker::Tracker;

/// What QEMU is doing that leaves no room for tracking.
pub(crate) struct Holds {
    /// `mlockall` was called.
    locked: bool,
    /// A device or the kernel's part of one has guest RAM for itself.
    passed_through: bool,
    /// Mappings of guest RAM that are being changed.
    pub(crate) remapping: u32,
    /// Ranges that QEMU has registered with its own userfaultfd, and that descriptor.
    registered: Vec<(i32, Range)>,
}

/// The descriptor with which QEMU has registered guest RAM, or -1: it uses one at a time.
static QEMU_REGISTERS: AtomicI32 = AtomicI32::new(-1);

impl Holds {
    pub(crate) const fn new() -> Self {
        Self { locked: false, passed_through: false, remapping: 0, registered: Vec::new() }
    }

    /// Whether QEMU has registered a part of `range`, or is about to: writes to what is merged
    /// there are let go on before.
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
    /// Why no page can be moved now. Does not allocate where there is a userfaultfd.
    pub(crate) fn obstacle(&self) -> Option<Cow<'static, str>> {
        let generation = self.ram.generation();
        let is_outdated =
            self.channel.as_ref().is_none_or(|channel| channel.generation() != generation);
        let outdated = || is_outdated.then_some("guest RAM has changed: say Hello again");
        self.objection().or_else(|| self.hold().or_else(outdated).map(Cow::Borrowed))
    }

    /// Why none ever can.
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

    /// Why none can until QEMU has done what it does.
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

    /// QEMU's own registration is over: of a range, or of everything that its descriptor `fd` had.
    pub(crate) fn qemu_unregistered(&mut self, fd: i32, range: Option<Range>) {
        self.holds.unregistered(fd, range);
        if self.holds.registered.is_empty() {
            QEMU_REGISTERS.store(-1, Ordering::Release);
            // Only a migration into this process or a snapshot ends so: the guest is here.
            qemu::guest_runs();
        }
    }
}

/// QEMU is about to register `range` with its own userfaultfd `fd`: it gets guest RAM as if we were
/// not there, and keeps it until it unregisters. Answers whether guest RAM is concerned.
pub(crate) fn let_go(fd: i32, range: Range) -> bool {
    {
        let mut engine = lock_first();
        if !engine.ram.concerns(range) {
            return false;
        }
        // First: later nobody may let a write go on, and who waited would trap until everything is
        // back.
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

/// A device is passed through: it pins guest RAM, now and whenever it is mapped.
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
