//! Lending: one group's idle memory serves another group that is short (Kim 2014 §7.1).
//!
//! Only a right moves, the right to physical bytes, from one ledger to another and only between
//! groups that both take part: all that say `lend = true`, or all that name the same circle. No
//! page ever does: groups share nothing, and see nothing of each other.
//!
//! ```text
//! idle (lender)   = surplus − reserve, once none of its VMs has been short for LEND_AFTER
//! held (borrower) = memory that it occupies, was granted and keeps in reserve beyond its budget
//! loan            = min(idle, min(held, loan before) + the grants possible now to its short VMs)
//! ```
//!
//! A loan is computed afresh in each tick, so no event that should end it can be missed. It ends
//! in the tick in which a VM of the lender is short, a group withdraws its consent, or the host
//! is short. The borrower's ledger then shows a deficit, for which grants are taken back
//! ([`crate::revoke`]). The lender does not wait for that: it hands out its own memory as long as
//! the host has it ([`crate::headroom`]), and base needs no surplus at all.
//!
//! While the loan lasts, the lender's worker scans for identical pages at the borrower's cost,
//! and as fast as the borrower's swapping requires ([`crate::scan_rate`]). One worker has one
//! payer, so a group lends to one other group at a time.
//!
//! The loss of all loans (a restart) is harmless: borrowed memory then is a deficit.

use std::{cmp::Reverse, collections::BTreeMap};

use model::spec::LendSpec;
use model::{Bytes, GroupName, Loan, Reason, Time, VmName, reason::Pressure};

use crate::tuning;

/// The data about a group that lending needs.
#[derive(Clone, Debug)]
pub(crate) struct Party {
    /// The groups that it lends to and borrows from.
    pub(crate) lend: LendSpec,
    /// Memory that the group's VMs leave unused, its reserve left out; before any loan.
    pub(crate) surplus: Bytes,
    /// The group's own reserve.
    pub(crate) reserve: Bytes,
    /// The excess over the budget of occupied, granted and reserved memory.
    pub(crate) held: Bytes,
    /// A VM of the group that is short, regardless of the group's surplus.
    pub(crate) short: Option<(VmName, Pressure)>,
    /// The need of the group's short VMs beyond its own surplus.
    pub(crate) lacking: Option<Lacking>,
}

/// An amount that a group would grant if it had it.
#[derive(Clone, Debug)]
pub(crate) struct Lacking {
    pub(crate) vm: VmName,
    pub(crate) sign: Pressure,
    pub(crate) amount: Bytes,
}

/// State from tick to tick.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Book {
    /// The current loans, by lender.
    loans: BTreeMap<GroupName, Loan>,
    /// The start of each group's time without a shortage.
    calm_since: BTreeMap<GroupName, Time>,
}

impl Book {
    /// Decides all loans until the next tick; `forbidden` is the reason why there can be none at
    /// all.
    pub(crate) fn settle(
        &mut self,
        parties: &BTreeMap<GroupName, Party>,
        forbidden: Option<&Reason>,
        now: Time,
    ) -> BTreeMap<GroupName, Loan> {
        self.calm_since.retain(|name, _| parties.contains_key(name));
        for (name, party) in parties {
            let since = self.calm_since.entry(name.clone()).or_insert(now);
            if party.short.is_some() {
                *since = now;
            }
        }
        let last = std::mem::take(&mut self.loans);
        let loans = match forbidden {
            Some(reason) => last.into_iter().map(|(l, old)| (l, ended(&old, reason))).collect(),
            None => self.share_out(parties, &last, now),
        };
        let stands = |loan: &Loan| !loan.amount.is_zero();
        self.loans = loans.clone().into_iter().filter(|(_, loan)| stands(loan)).collect();
        loans
    }

    /// Renews current loans, then lends the rest of idle memory to the groups that lack most.
    fn share_out(
        &self,
        parties: &BTreeMap<GroupName, Party>,
        last: &BTreeMap<GroupName, Loan>,
        now: Time,
    ) -> BTreeMap<GroupName, Loan> {
        let mut idle: BTreeMap<&GroupName, Bytes> =
            parties.iter().map(|(name, party)| (name, self.idle(name, party, now))).collect();
        let mut wanted = wanted(parties, last);
        let mut loans = BTreeMap::new();
        for (lender, old) in last {
            let idle = idle.get_mut(lender);
            let wanted = wanted.get_mut(&old.borrower);
            let loan = match (parties.get(lender), idle, wanted) {
                (Some(owner), Some(idle), Some(wanted))
                    if owner.lend.includes(&parties[&old.borrower].lend) =>
                {
                    let loan = renewed(old, owner, *idle, *wanted);
                    *wanted = wanted.minus(loan.amount);
                    *idle = idle.minus(loan.amount);
                    loan
                }
                _ => ended(old, &Reason::LoanNotConsented),
            };
            loans.insert(lender.clone(), loan);
        }
        let mut short: Vec<(&GroupName, Bytes, &Lacking)> = wanted
            .into_iter()
            .filter_map(|(name, wanted)| Some((name, wanted, parties[name].lacking.as_ref()?)))
            .collect();
        short.sort_by_key(|(_, _, lacking)| Reverse(lacking.amount));
        for (borrower, wanted, lacking) in short {
            let lend = &parties[borrower].lend;
            let mut idle: BTreeMap<&GroupName, &mut Bytes> = idle
                .iter_mut()
                .filter(|(name, _)| **name != borrower && parties[**name].lend.includes(lend))
                .map(|(name, idle)| (*name, idle))
                .collect();
            extend(borrower, lacking, wanted, &mut idle, &mut loans);
        }
        loans
    }

    /// The amount that `party` can lend.
    fn idle(&self, name: &GroupName, party: &Party, now: Time) -> Bytes {
        let is_calm = now.since(self.calm_since[name]) >= tuning::LEND_AFTER;
        if party.lend.takes_part() && is_calm {
            party.surplus.minus(party.reserve.max(tuning::UNIT)).floor_mib()
        } else {
            Bytes::ZERO
        }
    }
}

/// The total amount that each group that takes part may borrow.
fn wanted<'a>(
    parties: &'a BTreeMap<GroupName, Party>,
    last: &BTreeMap<GroupName, Loan>,
) -> BTreeMap<&'a GroupName, Bytes> {
    let had = |name: &GroupName| -> Bytes {
        last.values().filter(|loan| loan.borrower == *name).map(|loan| loan.amount).sum()
    };
    let consenting = parties.iter().filter(|(_, party)| party.lend.takes_part());
    consenting
        .map(|(name, party)| {
            let lacking = party.lacking.as_ref().map_or(Bytes::ZERO, |lacking| lacking.amount);
            (name, party.held.min(had(name)).plus(lacking))
        })
        .collect()
}

/// The part of a loan that both sides still allow.
fn renewed(old: &Loan, owner: &Party, idle: Bytes, wanted: Bytes) -> Loan {
    let stands = old.amount.min(idle).min(wanted);
    let amount = if stands < tuning::STEP_MIN { Bytes::ZERO } else { stands };
    let reason = match &owner.short {
        Some((vm, sign)) => Reason::LoanRecalled { needed_by: vm.clone(), sign: *sign },
        None if idle < old.amount.min(wanted) => Reason::LoanCut { idle },
        None if amount < old.amount => Reason::LoanUnneeded,
        None => Reason::LoanUsed,
    };
    Loan { borrower: old.borrower.clone(), amount, reason }
}

fn ended(old: &Loan, reason: &Reason) -> Loan {
    Loan { borrower: old.borrower.clone(), amount: Bytes::ZERO, reason: reason.clone() }
}

/// Lends `borrower` up to `wanted` more of what these groups have `idle`: from its current lenders,
/// then from groups without a loan, the largest idle amount first.
fn extend(
    borrower: &GroupName,
    lacking: &Lacking,
    mut wanted: Bytes,
    idle: &mut BTreeMap<&GroupName, &mut Bytes>,
    loans: &mut BTreeMap<GroupName, Loan>,
) {
    let mut lenders: Vec<(&GroupName, &mut Bytes)> = idle
        .iter_mut()
        .filter(|(name, _)| loans.get(**name).is_none_or(|loan| loan.borrower == *borrower))
        .map(|(name, idle)| (*name, &mut **idle))
        .collect();
    lenders.sort_by_key(|(name, idle)| (!loans.contains_key(*name), Reverse(**idle)));
    for (lender, idle) in lenders {
        let more = wanted.min(*idle);
        if more < tuning::STEP_MIN {
            continue;
        }
        let before = loans.get(lender).map_or(Bytes::ZERO, |loan| loan.amount);
        let reason = Reason::Lend {
            needed_by: lacking.vm.clone(),
            sign: lacking.sign,
            idle: before.plus(*idle),
        };
        let loan = Loan { borrower: borrower.clone(), amount: before.plus(more), reason };
        loans.insert(lender.clone(), loan);
        wanted = wanted.minus(more);
        *idle = idle.minus(more);
    }
}

#[cfg(test)]
mod tests;
