//! Where the shim may end QEMU, and where QEMU is told that a call of its own has failed.

use rustix::io::Errno;
use sys::faults::{Call, How};

use crate::Case;

/// What a case is of: of these a row says why, and of which cases it says so.
pub(crate) type Row = (&'static str, fn(&Case) -> bool);

/// The shim may end QEMU in these cases, and in no others.
pub(crate) const MAY_END: &[Row] = &[
    ("what is away cannot be moved back for 10 s, nor copied", |case| {
        is_busy_for_ever(case) && !begins_by_taking(case)
    }),
    ("for 10 s the page tables do not say whether what was away is back", |case| {
        case.call == Call::Scan && case.times == u64::MAX
    }),
];

/// In these cases QEMU's own call fails, and QEMU is told so; they are left out.
pub(crate) const MAY_REFUSE: &[Row] = &[
    // The kernel has no memory to cut a mapping in two. Its migration or snapshot fails then; the
    // guest runs on.
    ("what we have registered cannot be unregistered, and QEMU cannot register it", |case| {
        case.call == Call::Unregister && case.scenario() == "QEMU's own userfaultfd"
    }),
];

/// The reason of the first row that a case is of.
pub(crate) fn row(rows: &[Row], case: &Case) -> Option<&'static str> {
    rows.iter().find(|(_, holds)| holds(case)).map(|(why, _)| *why)
}

fn is_busy_for_ever(case: &Case) -> bool {
    let is_busy = case.how == How::Refuse(Errno::AGAIN) && case.call == Call::Move;
    is_busy && case.times == u64::MAX
}

/// The first pages that its step moves it takes away.
fn begins_by_taking(case: &Case) -> bool {
    const TAKING: [&str; 4] = ["track", "revoke", "merge", "merge more"];
    TAKING.contains(&case.step())
}
