//! The counts of one VM's sharing.

use model::Bytes;
use model::dedup::Dedup;
use pages::dedup::{Book, Pool};

use super::super::granules::PAGE;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) merged: u64,
    pub(super) broken: u64,
    pub(super) dropped: u64,
    /// Pages that share slots of another pool: in this pass so far, and in the last one.
    pub(super) foreign: (u64, u64),
}

impl Counts {
    /// A pass over all pages is complete.
    pub(super) fn pass_ends(&mut self) {
        self.foreign = (0, self.foreign.0);
    }

    /// The counts in bytes; `slots` tells how many pages share each slot.
    pub(super) fn value(&self, book: &Book, slots: Option<&Pool>, passes: u64) -> Dedup {
        let bytes = |pages: u64| Bytes(pages * PAGE);
        let sharers = |slot| slots.map_or(1, |all| all.sharers(slot)).max(1);
        let saved: f64 = book.slots().map(|(_, slot)| 1.0 - 1.0 / f64::from(sharers(slot))).sum();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a VM's pages")]
        let saved = saved as u64;
        Dedup {
            shared: bytes(u64::from(book.merged_pages()) + self.foreign.1),
            saved: bytes(saved),
            merged: bytes(self.merged),
            broken: bytes(self.broken),
            dropped: bytes(self.dropped),
            passes,
        }
    }
}
