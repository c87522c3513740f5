//! What a shim is asked for, and which references wait for its answer.

/// What a page is to be replaced by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Zeros,
    Slot(u32),
}

/// A page, and what it is to be replaced by.
pub(super) type Wish = (u32, Target);

/// What the shim was asked for.
#[derive(Debug)]
pub(super) enum Asked {
    Pool,
    Merge(Vec<Wish>),
    Unshare,
}

impl Asked {
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

/// The slot of a page that is to share one.
pub(super) fn slot_of((_, target): &Wish) -> Option<u32> {
    match target {
        Target::Zeros => None,
        Target::Slot(slot) => Some(*slot),
    }
}

/// How many pages are to be dropped: more cannot have been, whatever a shim says.
pub(super) fn zeros(wishes: &[Wish]) -> u64 {
    wishes.iter().filter(|(_, target)| *target == Target::Zeros).count() as u64
}
