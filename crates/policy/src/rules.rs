//! The safety rules by name, so that each can be shown to matter.
//!
//! They are always on. Only the simulator switches one off, to prove that its scenario then fails:
//! a rule whose absence nobody notices protects nobody.

/// One safety rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Rule {
    /// Nothing is taken on stale statistics.
    FreshStats,
    /// Nothing is taken on statistics that cannot be true.
    PlausibleStats,
    /// No VM falls below its `min`.
    Minimum,
    /// Nothing is taken from a guest under pressure while there is cheaper memory, nor at all from
    /// one that has nowhere to put what it uses.
    Pressure,
    /// A guest keeps available what it could take before it is helped; without swap it gives only
    /// what it has left free for long, and gets back what it turns out to need.
    Margin,
    /// A guest without swap keeps what it uses, and its base in any case.
    Swapless,
    /// A balloon grows by a bounded step at a time.
    InflationCap,
    /// A guest in need below its base gets all of it back at once.
    GiveBack,
    /// A guest must have been calm for a while before memory is taken.
    Calm,
    /// After a failed shrink the next try waits, longer each time.
    BackOff,
    /// A migrating VM is left alone.
    Migration,
    /// A VM that does not follow its target is planned around.
    Uncooperative,
    /// Memory is taken first and handed out when the host has it.
    TakeFirst,
    /// The host's reserve is never handed out, and grants come back when it is touched.
    HostReserve,
    /// Nothing is granted beyond the limits of QEMU's cgroups.
    CgroupLimit,
    /// Memory that a balloon takes and the host does not get goes back.
    GivesBack,
}

impl Rule {
    /// Every rule.
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

/// Which rules are on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    off: u16,
}

impl Rules {
    /// All of them: the only setting outside of tests.
    pub const ALL: Self = Self { off: 0 };

    /// All but `rule`.
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
