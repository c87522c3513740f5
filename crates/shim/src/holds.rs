//! QEMU's operations that need guest RAM to stay in place, as QEMU is about to begin them: every
//! page is given back first. [`Inhibitors`](crate::inhibitors::Inhibitors) records them.

use protocol::layout::GiveBack;
use sys::memory_map::Range;

use crate::channel::EVERYTHING;
use crate::engine::{Engine, give_back_to_qemu, lock_first};
use crate::ram::GuestRam;

/// QEMU is about to register `range` with its own userfaultfd `fd`. It gets guest RAM as without
/// the shim, and keeps it until it unregisters. Returns whether guest RAM is concerned.
pub(crate) fn let_go(fd: i32, range: Range) -> bool {
    {
        let mut engine = lock_first();
        if !engine.ops.ram.concerns(range) {
            return false;
        }
        // This comes first. Once the range is recorded as QEMU's, the shim may not let writes go
        // on, and a waiting thread would trap until everything is back.
        engine.let_all_write(range);
        engine.inhibitors.qemu_registers(fd, range);
    }
    give_back_to_qemu(GiveBack::QemuRegisters);
    true
}

/// A device is passed through and pins guest RAM, now and whenever RAM is mapped.
pub(crate) fn pass_through() {
    lock_first().inhibitors.passed_through = true;
    give_back_to_qemu(GiveBack::MemoryLocked);
    lock_first().let_all_write(EVERYTHING);
}

/// QEMU is about to lock its memory, or could not.
pub(crate) fn lock_memory(locked: bool) {
    lock_first().inhibitors.locked = locked;
    if locked {
        give_back_to_qemu(GiveBack::MemoryLocked);
        lock_first().let_all_write(EVERYTHING);
    }
}

/// QEMU is changing mappings of guest RAM; nothing is tracked until this is dropped.
#[must_use]
pub(crate) struct Remapping(());

/// Gives back guest RAM in `range`, because QEMU is about to change its mappings.
pub(crate) fn before_remapping(range: Range) -> Option<Remapping> {
    before_change(|ram| ram.concerns(range))
}

/// The same because `range` is about to become guest RAM: this changes page numbers and the
/// memory that holds page states.
pub(crate) fn before_growing(range: Range) -> Option<Remapping> {
    before_change(|ram| ram.is_candidate(range))
}

fn before_change(concerns: impl FnOnce(&GuestRam) -> bool) -> Option<Remapping> {
    let remapping = {
        let mut engine = lock_first();
        if !concerns(&engine.ops.ram) {
            return None;
        }
        engine.inhibitors.remapping += 1;
        // From here on the hold ends in any case, even with a panic.
        Remapping(())
    };
    give_back_to_qemu(GiveBack::RegionsChanged);
    Some(remapping)
}

impl Remapping {
    /// The change is done.
    pub(crate) fn done(self, change: impl FnOnce(&mut Engine)) {
        change(&mut lock_first());
    }
}

impl Drop for Remapping {
    fn drop(&mut self) {
        let mut engine = lock_first();
        engine.inhibitors.remapping = engine.inhibitors.remapping.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::lock;

    #[test]
    fn a_panic_while_qemu_changes_its_mappings_does_not_forbid_tracking_for_ever() {
        let range = Range { start: 1 << 40, len: 64 << 20 };
        lock().ops.ram.mapped(range, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let panics = std::panic::catch_unwind(|| {
            let _remapping = before_growing(range).expect("it is a candidate");
            assert_eq!(lock().inhibitors.hold(), Some(GiveBack::RegionsChanged.words()));
            panic!("on purpose");
        });
        assert!(panics.is_err());
        assert_eq!(lock().inhibitors.remapping, 0);
        lock().ops.ram.unmapped(range);
    }
}
