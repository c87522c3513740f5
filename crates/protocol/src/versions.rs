//! The versions of the protocol: which two sides agree on one, and what each version has added.
//!
//! **Problem.** QEMU keeps the shim that it was started with, for months perhaps. The worker
//! changes with every upgrade of the package, and goes back with a downgrade.
//!
//! **Idea.** The bytes of a message never change. A version only adds messages, at the ends of
//! [`Request`], [`Answer`] and the types in them. [`Request::since`] and [`Answer::since`] are the
//! one list of the additions, and [`Request::encode_for`] and [`Answer::encode_for`] send nothing
//! that is newer than the version of the other side. A field that a message lacks comes in a new
//! message, which takes the place of the old one between newer peers.
//!
//! ```text
//!   worker  Hello { its newest }                ──►  shim
//!           ◄──  Welcome { that version }            if the shim speaks it
//!           ◄──  Refused(Version { its newest })     if not
//!   worker  Hello { the shim's newest }         ──►  if the worker speaks that
//! ```
//!
//! So both sides name their newest version only, and find the highest one that both speak. Version
//! 9, which knew nothing of other versions, already answered in this way.
//!
//! **Invariants.** A release speaks its newest version and the three before it, but none before 9.
//! The memory that a shim shares is made before it knows the worker, so it has one layout for all
//! versions ([`crate::layout`]).

use crate::{Answer, Request};

/// The first version that a later release can speak.
const FIRST: u16 = 9;
/// The number of versions before its own that a release speaks.
const BEFORE: u16 = 3;

/// The newest version of the protocol that this release speaks. It changes with each new message.
///
/// The feature `older` builds the version before, for the test of upgrades.
pub const VERSION: u16 = if cfg!(feature = "older") { 9 } else { 10 };

/// The versions that this release speaks.
pub const VERSIONS: Versions = Versions::of_release(VERSION);

/// The versions of the protocol that one side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    /// The oldest.
    pub oldest: u16,
    /// The newest.
    pub newest: u16,
}

impl Versions {
    /// The versions of the release whose newest is this one.
    #[must_use]
    pub const fn of_release(newest: u16) -> Self {
        let oldest = newest.saturating_sub(BEFORE);
        Self { oldest: if oldest < FIRST { FIRST } else { oldest }, newest }
    }

    /// Whether this side speaks a version.
    #[must_use]
    pub const fn contain(self, version: u16) -> bool {
        self.oldest <= version && version <= self.newest
    }

    /// The version to try after the other side, whose newest is `theirs`, has refused `refused`;
    /// `None`: there is no common one. It is always an older one, so the tries end.
    #[must_use]
    pub const fn after_refusal(self, refused: u16, theirs: u16) -> Option<u16> {
        if theirs < refused && self.contain(theirs) { Some(theirs) } else { None }
    }
}

impl Request {
    /// The version that added this request.
    #[must_use]
    pub const fn since(&self) -> u16 {
        match self {
            Self::Hello { .. }
            | Self::Track(_)
            | Self::Revoke { .. }
            | Self::Recall { .. }
            | Self::Release
            | Self::Status
            | Self::Pool { .. }
            | Self::Merge { .. }
            | Self::Unshare { .. }
            | Self::HandOver { .. }
            | Self::Take { .. }
            | Self::Keep { .. } => FIRST,
            Self::About => 10,
        }
    }
}

impl Answer {
    /// The version that added this answer.
    #[must_use]
    pub const fn since(&self) -> u16 {
        match self {
            Self::Welcome { .. }
            | Self::Done { .. }
            | Self::Refused(_)
            | Self::Status(_)
            | Self::Merged(_)
            | Self::Taken(_) => FIRST,
            Self::About { .. } => 10,
        }
    }
}

#[cfg(test)]
mod tests;
