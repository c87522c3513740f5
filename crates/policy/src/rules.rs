//! The safety rules by name, so that tests can show that each matters.
//!
//! They are always on. Only the simulator switches one off, to prove that its scenario then
//! fails: a rule without an effect in any scenario protects no guest.

/// One safety rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rule {
    /// Nothing is taken on stale statistics.
    FreshStats,
    /// Nothing is taken on implausible statistics.
    PlausibleStats,
    /// No VM falls below its `min`.
    Minimum,
    /// Nothing is taken from a guest under pressure while there is cheaper memory. Nothing at all
    /// is taken from one that has no swap to put its memory into.
    Pressure,
    /// A guest keeps available the memory that it could take before a grant arrives. Without swap
    /// it gives only memory that was free for long, and gets back memory that it turns out to
    /// need.
    Margin,
    /// A guest without swap keeps the memory that it uses, and always its base.
    Swapless,
    /// A balloon grows by a bounded step at a time.
    InflationCap,
    /// A guest in need below its base gets all of its base back at once.
    GiveBack,
    /// A guest must have been calm for a while before memory is taken.
    Calm,
    /// After a failed shrink the next try waits, longer each time.
    BackOff,
    /// A migrating VM is left alone.
    Migration,
    /// A VM that does not follow its target is planned around.
    Uncooperative,
    /// Memory is taken first, and handed out once the host has it.
    TakeFirst,
    /// The host's reserve is never handed out, and grants come back when it is touched.
    HostReserve,
    /// Nothing is granted beyond the limits of QEMU's cgroups.
    CgroupLimit,
    /// Memory that a balloon takes and the host does not receive goes back.
    GivesBack,
}

impl Rule {
    /// All rules.
    pub const ALL: [Self; 16] = [
        Self::FreshStats,
        Self::PlausibleStats,
        Self::Minimum,
        Self::Pressure,
        Self::Margin,
        Self::Swapless,
        Self::InflationCap,
        Self::GiveBack,
        Self::Calm,
        Self::BackOff,
        Self::Migration,
        Self::Uncooperative,
        Self::TakeFirst,
        Self::HostReserve,
        Self::CgroupLimit,
        Self::GivesBack,
    ];
}

/// The rules that are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    off: u16,
}

impl Rules {
    /// All rules on: the only setting outside of tests.
    pub const ALL: Self = Self { off: 0 };

    /// These rules without `rule`.
    #[must_use]
    pub const fn without(self, rule: Rule) -> Self {
        Self { off: self.off | 1 << rule as u8 }
    }

    /// Whether `rule` is on.
    #[must_use]
    pub const fn has(self, rule: Rule) -> bool {
        self.off & 1 << rule as u8 == 0
    }
}
