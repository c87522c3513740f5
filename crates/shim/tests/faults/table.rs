//! Where the shim may end QEMU, and what is known to be wrong.

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

/// In these cases it does wrong, as yet; they are left out.
pub(crate) const KNOWN: &[Row] = &[
    // `moves::give` tries for 10 s to give back what was never taken, for it does not ask the page tables whether anything is
    // away.
    ("QEMU is ended because of pages that are at home", |case| {
        is_busy_for_ever(case) && begins_by_taking(case)
    }),
    // `merge::replace_by_fresh` writes zeros where nothing is mapped, if the kernel has unmapped what was there before it
    // failed, as it does before Linux 6.12.
    ("the shim writes to what is not mapped", |case| {
        case.call == Call::MapFresh && has_discard_merged(case) && is_half(case)
    }),
    // Who touches a page waits for longer than anybody here, and may wait for ever: it is not known which.
    ("nobody answers while the page tables do not", |case| {
        let is_taking = case.scenario() == "freeing" && case.step().starts_with("take");
        case.call == Call::Scan && case.times == u64::MAX && is_taking
    }),
    // Nobody looks at what `Userfaultfd::wake` answers. The kernel refuses it for wrong addresses only.
    ("nobody wakes who waits", |case| case.call == Call::Wake),
    // `UFFDIO_UNREGISTER` fails where the kernel has no memory to cut a mapping in two; then QEMU cannot register its memory
    // itself, and is told so.
    ("QEMU's own registration is refused", |case| {
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

fn has_discard_merged(case: &Case) -> bool {
    case.scenario().starts_with("merging")
}

fn is_half(case: &Case) -> bool {
    matches!(case.how, How::Part { .. })
}
