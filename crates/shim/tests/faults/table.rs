//! The cases in which the shim may end QEMU, and those in which a call of QEMU itself fails.

use rustix::io::Errno;
use sys::faults::{Call, How};

use crate::FaultCase;

/// A class of cases: a reason, and a test for the cases that it covers.
pub(crate) type Row = (&'static str, fn(&FaultCase) -> bool);

/// The shim may end QEMU in these cases, and in no others.
pub(crate) const MAY_END: &[Row] = &[
    ("what is away cannot be moved back for 10 s, nor copied", |case| {
        is_busy_for_ever(case) && !is_the_first_to_take(case)
    }),
    ("for 10 s the page tables do not say whether what was away is back", |case| {
        case.call == Call::Scan && case.times == u64::MAX
    }),
];

/// This call is only made where the kernel has given a huge page, which it need not.
pub(crate) const MAY_NOT_HAPPEN: Call = Call::Policy;

/// In these cases a call of QEMU itself fails and returns an error; they are left out.
pub(crate) const MAY_REFUSE: &[Row] = &[
    // The kernel has no memory to split a mapping. QEMU's migration or snapshot fails then; the
    // guest runs on.
    ("what we have registered cannot be unregistered, and QEMU cannot register it", |case| {
        case.call == Call::Unregister && case.scenario() == "QEMU's own userfaultfd"
    }),
];

/// The reason of the first row that covers a case.
pub(crate) fn row(rows: &[Row], case: &FaultCase) -> Option<&'static str> {
    rows.iter().find(|(_, holds)| holds(case)).map(|(why, _)| *why)
}

fn is_busy_for_ever(case: &FaultCase) -> bool {
    let is_busy = case.how == How::Refuse(Errno::AGAIN) && case.call == Call::Move;
    is_busy && case.times == u64::MAX
}

/// Whether the step begins by moving pages away, and no step before it has moved any: then nothing
/// is away.
fn is_the_first_to_take(case: &FaultCase) -> bool {
    const TAKING: [&str; 4] = ["track", "revoke", "merge", "merge more"];
    TAKING.contains(&case.step()) && !case.steps_before().any(|step| TAKING.contains(&step))
}
