//! Loans of memory between groups, now and in the past.

use model::{Bytes, GroupName, Loan};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Words;

/// Idle surplus of one group that another may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoanStatus {
    /// The group that lends.
    pub lender: String,
    /// The group that may use it.
    pub borrower: String,
    /// The amount; 0: the loan has just ended.
    pub amount_bytes: u64,
    /// The reason for the amount.
    pub reason: Words,
}

impl LoanStatus {
    /// The loan as an API object.
    pub fn of(lender: &GroupName, loan: &Loan) -> Self {
        Self {
            lender: lender.to_string(),
            borrower: loan.borrower.to_string(),
            amount_bytes: loan.amount.0,
            reason: Words::of(&loan.reason),
        }
    }

    /// The loan and its reason in words.
    pub fn words(&self) -> String {
        let Self { lender, borrower, .. } = self;
        let text = &self.reason.text;
        match Bytes(self.amount_bytes) {
            Bytes::ZERO => format!("group {lender} lends group {borrower} nothing more: {text}"),
            amount => format!("group {lender} lends group {borrower} {amount}: {text}"),
        }
    }
}

/// A past decision about a loan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LoanRow {
    /// Time in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// The mode at the time; only `enforce` carries decisions out.
    pub mode: String,
    /// The loan that was decided.
    #[serde(flatten)]
    pub loan: LoanStatus,
}
