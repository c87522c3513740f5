//! The ledger of a group: the location of its memory, in physical bytes (Kim 2014 §4.2.2).
//!
//! ```text
//!   budget ├───────────── used ─────────────┼─ promised ─┼─ surplus ─┼─ reserve ─┤
//! ```
//!
//! `used` is the memory that the VMs occupy on the host. So untouched memory, memory that a guest
//! reported free and ballooned memory have the same effect: `used` falls. `promised` is memory
//! granted above base and not touched yet: it will be, so it is not granted twice. Untouched
//! memory *below* base is lent softly: its owner may touch it at any moment without asking. That
//! may cause a deficit, and then grants come back. The reserve covers that moment, writes to
//! merged pages, and reuse of freed ones. It is a part of the budget, but never more than all
//! that could come back in this way.
//!
//! A loan to another group reduces the surplus, and borrowed memory adds to the budget
//! ([`crate::lending`]): the sum over all groups stays the same.
//!
//! A VM that cannot be counted on the host counts as using all that it may. That is the safe side
//! for handing out, but not for taking back: a daemon that has just started knows no VM's memory
//! yet, and must not revoke grants for a deficit that is only a guess.

use model::{Bytes, Ledger};

use crate::{member::GroupVm, tuning};

/// Draws up the ledger of a group that pays for `budget` (`None`: the sum of its members' base).
pub(crate) fn draw_up(budget: Option<Bytes>, members: &[GroupVm]) -> Ledger {
    let budget = budget.unwrap_or_else(|| members.iter().map(|member| member.paid).sum());
    let used: Bytes = members.iter().map(|m| m.used).sum();
    let promised: Bytes = members.iter().map(GroupVm::promised).sum();
    let could_come_back: Bytes = members.iter().map(could_come_back).sum();
    let reserve = budget.percent(tuning::RESERVE_PERCENT).min(could_come_back);
    let spoken_for = used.plus(promised);
    let is_guess = members.iter().any(|member| member.is_guessed);
    Ledger {
        budget,
        used,
        promised,
        reserve,
        lent: Bytes::ZERO,
        borrowed: Bytes::ZERO,
        surplus: budget.minus(spoken_for.plus(reserve)),
        deficit: if is_guess { Bytes::ZERO } else { spoken_for.minus(budget) },
    }
}

/// Memory that a member may occupy beyond the counted amount, without a further grant.
fn could_come_back(member: &GroupVm) -> Bytes {
    member.limit().minus(member.used.plus(member.promised()))
}

/// Lends `amount` of the idle memory of `ledger` to another group: at most its surplus.
pub(crate) fn lend(ledger: &mut Ledger, amount: Bytes) {
    ledger.lent = ledger.lent.plus(amount);
    ledger.surplus = ledger.surplus.minus(amount);
}

/// Borrows `amount` of another group's budget for the group of `ledger`.
pub(crate) fn borrow(ledger: &mut Ledger, amount: Bytes) {
    let spoken_for = ledger.used.plus(ledger.promised).plus(ledger.reserve).plus(ledger.lent);
    ledger.borrowed = ledger.borrowed.plus(amount);
    ledger.surplus = ledger.budget.plus(ledger.borrowed).minus(spoken_for);
    ledger.deficit = ledger.deficit.minus(amount);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_that_just_ended_does_not_make_free_what_the_group_lends_itself() {
        let mut ledger = draw_up(Some(Bytes::mib(100)), &[]);
        lend(&mut ledger, Bytes::mib(30));
        borrow(&mut ledger, Bytes::ZERO);
        assert_eq!((ledger.surplus, ledger.lent), (Bytes::mib(70), Bytes::mib(30)));
    }
}
