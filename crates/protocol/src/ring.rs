//! The ring of traps: from the shim's fault thread to the worker, without a lock or a system call.
//!
//! Problem: the fault thread must never wait, because a guest waits for it; the worker may be
//! slow, dead, or hostile. Idea: the producer **never reads the consumer's state**. It overwrites
//! the oldest trap, and the consumer derives from the head how many traps it missed. So the
//! worker cannot delay the fault thread and needs no write access, and the newest traps survive a
//! flood.
//!
//! ```text
//! position   p = number of the trap since the beginning; its slot: p modulo a power of two
//! producer   slot[head] ← trap (release);   head ← head + 1 (release)
//! consumer   trap ← slot[p] (acquire);  whole if afterwards head < p + capacity
//! ```
//!
//! Why the check suffices: slot p is overwritten by trap p + capacity, after head became p +
//! capacity. A reader that sees the new value (acquire) sees that head too. A trap is one word,
//! so it is never torn.
//!
//! A head that jumps, forward or backward, costs the consumer at most one round over the ring,
//! and is reported as loss. After a loss the page states show which pages are revoked.
//!
//! Checked by loom over all interleavings (`tests/loom.rs`). Source: the sequence lock (Boehm, "Can
//! seqlocks get along with programming language memory models?", MSPC 2012), one per slot.

use crate::Trap;
use crate::sync::{AtomicU64, Ordering};

impl Trap {
    fn to_word(self) -> u64 {
        u64::from(self.at_us) << 32 | u64::from(self.granule)
    }

    fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = word.to_le_bytes();
        Self { granule: u32::from_le_bytes([a, b, c, d]), at_us: u32::from_le_bytes([e, f, g, h]) }
    }
}

/// The ring's memory in either process.
#[derive(Clone, Copy)]
pub struct Ring<'a> {
    head: &'a AtomicU64,
    slots: &'a [AtomicU64],
}

impl<'a> Ring<'a> {
    /// A ring over `slots`, whose number must be a power of two.
    ///
    /// # Panics
    /// When it is not: [`crate::layout::Shared::ring`] passes the right number.
    #[must_use]
    pub fn new(head: &'a AtomicU64, slots: &'a [AtomicU64]) -> Self {
        assert!(slots.len().is_power_of_two(), "{} slots: not a power of two", slots.len());
        Self { head, slots }
    }

    fn capacity(self) -> u64 {
        self.slots.len() as u64
    }

    fn slot(self, position: u64) -> &'a AtomicU64 {
        let mask = self.slots.len() - 1;
        // Bits lost by the cast do not matter, because of the mask.
        #[allow(clippy::cast_possible_truncation)]
        let index = position as usize & mask;
        &self.slots[index]
    }
}

/// The writing end; only one thread has it.
#[derive(Debug, Default)]
pub struct Producer {
    head: u64,
}

impl Producer {
    /// A producer for a fresh ring.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a trap, over the oldest one if the ring is full.
    pub fn push(&mut self, ring: Ring<'_>, trap: Trap) {
        ring.slot(self.head).store(trap.to_word(), Ordering::Release);
        self.head = self.head.wrapping_add(1);
        ring.head.store(self.head, Ordering::Release);
    }
}

/// The result of [`Consumer::drain`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// The number of traps passed on.
    pub read: u64,
    /// Traps that were overwritten before they could be read; after a backward jump of the head,
    /// the whole ring.
    pub lost: u64,
    /// Traps of a granule that does not exist.
    pub invalid: u64,
}

/// The reading end.
#[derive(Debug, Default)]
pub struct Consumer {
    tail: u64,
}

impl Consumer {
    /// A consumer that starts at the next trap.
    #[must_use]
    pub fn new(ring: Ring<'_>) -> Self {
        Self { tail: ring.head.load(Ordering::Acquire) }
    }

    /// Skips the traps so far: after a [`crate::Request::Track`] was answered they are of another
    /// granule size. Returns their number.
    pub fn skip(&mut self, ring: Ring<'_>) -> u64 {
        let head = ring.head.load(Ordering::Acquire);
        let skipped = head.wrapping_sub(self.tail);
        self.tail = head;
        skipped
    }

    /// Passes on the traps since the last call, oldest first, whose granule is below `granules`.
    /// The ring's capacity bounds the work for any content of the memory.
    pub fn drain(&mut self, ring: Ring<'_>, granules: u32, mut each: impl FnMut(Trap)) -> Drained {
        let capacity = ring.capacity();
        let head = ring.head.load(Ordering::Acquire);
        let mut drained = Drained::default();
        let waiting = head.wrapping_sub(self.tail);
        if waiting > u64::MAX / 2 {
            self.tail = head;
            return Drained { lost: capacity, ..drained };
        }
        // The producer may be overwriting the oldest slot.
        drained.lost = waiting.saturating_sub(capacity - 1);
        let mut position = self.tail.wrapping_add(drained.lost);
        while position != head {
            let trap = Trap::from_word(ring.slot(position).load(Ordering::Acquire));
            let age = ring.head.load(Ordering::Relaxed).wrapping_sub(position);
            if age >= capacity {
                drained.lost += 1;
            } else if trap.granule >= granules {
                drained.invalid += 1;
            } else {
                drained.read += 1;
                each(trap);
            }
            position = position.wrapping_add(1);
        }
        self.tail = head;
        drained
    }
}

#[cfg(test)]
mod tests;
