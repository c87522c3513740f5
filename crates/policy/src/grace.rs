//! The time for which nothing is taken after a change by the operator, and from a VM that was just
//! found. A host that runs short does not wait.

use model::{Millis, Reason, Time};
use serde::{Deserialize, Serialize};

/// The end of the time of grace after the operator has changed the configuration or resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Grace(Option<Time>);

impl Grace {
    /// A time of grace from now on.
    pub(crate) fn from_now(length: Millis, now: Time) -> Self {
        Self(Some(now.after(length)))
    }

    /// Why nothing is taken from any VM yet.
    pub(crate) fn refusal(self, now: Time) -> Option<Reason> {
        let left = self.0?.since(now);
        (left > Millis(0)).then_some(Reason::Grace { left })
    }
}

/// Why nothing is taken yet from a VM that was found at `seen_at`.
pub(crate) fn of_new_vm(seen_at: Time, grace: Millis, now: Time) -> Option<Reason> {
    let left = seen_at.after(grace).since(now);
    (left > Millis(0)).then_some(Reason::NewVm { left })
}
