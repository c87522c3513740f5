//! Selects the loans in a plan that are worth a line in the log and in the history.
//!
//! A loan grows and shrinks a little in every tick. News is that a loan begins, ends, or changes
//! its reason; a change of its amount is only reported once in a while.

use std::collections::BTreeMap;
use std::mem::{Discriminant, discriminant};

use model::{Bytes, GroupName, Loan, Plan, Reason};

/// Interval at which a loan that only changes its amount is reported again.
const ECHO_MS: u64 = 60_000;

/// The last report on each lender's loan.
#[derive(Debug, Default)]
pub(crate) struct LoanNews {
    said: BTreeMap<GroupName, ReportedLoan>,
}

#[derive(Debug)]
struct ReportedLoan {
    borrower: GroupName,
    why: Discriminant<Reason>,
    amount: Bytes,
    at_ms: u64,
}

impl LoanNews {
    /// The loans of `plan` that are news at `now_ms`, with their lenders.
    pub(crate) fn of<'a>(&mut self, plan: &'a Plan, now_ms: u64) -> Vec<(&'a GroupName, &'a Loan)> {
        self.said.retain(|lender, _| plan.loans.contains_key(lender));
        plan.loans.iter().filter(|(lender, loan)| self.is_news(lender, loan, now_ms)).collect()
    }

    fn is_news(&mut self, lender: &GroupName, loan: &Loan, now_ms: u64) -> bool {
        let why = discriminant(&loan.reason);
        let is_known = self.said.get(lender).is_some_and(|said| {
            let is_recent = now_ms.saturating_sub(said.at_ms) < ECHO_MS;
            said.borrower == loan.borrower
                && said.why == why
                && (said.amount == loan.amount || is_recent)
        });
        if !is_known {
            let Loan { borrower, amount, .. } = loan.clone();
            self.said.insert(lender.clone(), ReportedLoan { borrower, why, amount, at_ms: now_ms });
        }
        !is_known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loan_is_news_when_it_begins_changes_its_reason_or_has_grown_for_a_minute() {
        let mut news = LoanNews::default();
        let mut at = |second: u64, loan: Option<(u64, Reason)>| {
            let loan = loan.map(|(mib, reason)| {
                (
                    GroupName::from("a"),
                    Loan { borrower: "b".into(), amount: Bytes::mib(mib), reason },
                )
            });
            let plan = Plan { loans: loan.into_iter().collect(), ..Plan::default() };
            news.of(&plan, second * 1000).len()
        };
        assert_eq!(at(0, Some((10, Reason::LoanUsed))), 1);
        assert_eq!(at(1, Some((20, Reason::LoanUsed))), 0);
        assert_eq!(at(2, Some((20, Reason::LoanUnneeded))), 1);
        assert_eq!(at(30, Some((9, Reason::LoanUnneeded))), 0);
        assert_eq!(at(63, Some((8, Reason::LoanUnneeded))), 1);
        assert_eq!(at(200, Some((8, Reason::LoanUnneeded))), 0);
        assert_eq!(at(201, None), 0);
        assert_eq!(at(202, Some((8, Reason::LoanUnneeded))), 1);
    }
}
