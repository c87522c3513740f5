//! The requests to a shim, and the references that wait for its answers.

/// The replacement of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Zeros,
    Slot(u32),
}

/// A page and its replacement.
pub(super) type Wish = (u32, Target);

/// A request to the shim.
#[derive(Debug)]
pub(super) enum DedupRequest {
    Pool,
    Merge(Vec<Wish>),
    Unshare,
}

impl DedupRequest {
    pub(super) fn wishes(&self) -> &[Wish] {
        match self {
            Self::Pool | Self::Unshare => &[],
            Self::Merge(wishes) => wishes,
        }
    }

    pub(super) fn into_wishes(self) -> Vec<Wish> {
        match self {
            Self::Pool | Self::Unshare => Vec::new(),
            Self::Merge(wishes) => wishes,
        }
    }
}

/// The slot that a page is to share.
pub(super) fn slot_of((_, target): &Wish) -> Option<u32> {
    match target {
        Target::Zeros => None,
        Target::Slot(slot) => Some(*slot),
    }
}

/// The number of pages to drop: no more can have been dropped, for any answer of a shim.
pub(super) fn zeros(wishes: &[Wish]) -> u64 {
    wishes.iter().filter(|(_, target)| *target == Target::Zeros).count() as u64
}
