//! What the shim asks QEMU: whether it is migrating.
//!
//! During a migration everything stays in its place: copying out would touch every granule, and
//! what comes in is nobody's working set yet. QEMU's call that starts neither is seen. But its
//! program exports its functions (for its own modules), so it can be asked, in one short read:
//!
//! * `migration_is_running` (QEMU 9.1; earlier ones had a state as argument: given 0, they say no);
//! * `runstate_is_running`: after `-incoming`, the guest running for the first time means that it
//!   is here. Without that function: the first `KVM_RUN`, or QEMU's end of its own registration
//!   (postcopy).
//!
//! A QEMU that exports nothing is protected by what it does (`UFFDIO_REGISTER`) and by the worker,
//! who knows from QMP.

use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

type Question = unsafe extern "C" fn(i32) -> bool;

/// Whether the guest has run in this process.
static HAS_RUN: AtomicBool = AtomicBool::new(false);

/// The guest has run: whatever came in is here.
pub(crate) fn guest_runs() {
    if !HAS_RUN.load(Ordering::Relaxed) {
        HAS_RUN.store(true, Ordering::Relaxed);
    }
}

/// Which migration forbids tracking now.
pub(crate) fn migration() -> Option<&'static str> {
    if awaits_incoming() {
        return Some("an incoming migration is not over");
    }
    static RUNNING: OnceLock<Option<Question>> = OnceLock::new();
    let running = RUNNING.get_or_init(|| find(c"migration_is_running"));
    ask(*running)?.then_some("QEMU migrates the VM")
}

fn awaits_incoming() -> bool {
    static EXPECTED: OnceLock<bool> = OnceLock::new();
    static RUNNING: OnceLock<Option<Question>> = OnceLock::new();
    if HAS_RUN.load(Ordering::Relaxed) || !*EXPECTED.get_or_init(incoming_was_asked_for) {
        return false;
    }
    let running = RUNNING.get_or_init(|| find(c"runstate_is_running"));
    if ask(*running) == Some(true) {
        guest_runs();
    }
    !HAS_RUN.load(Ordering::Relaxed)
}

fn incoming_was_asked_for() -> bool {
    std::fs::read("/proc/self/cmdline").is_ok_and(|line| {
        line.split(|&byte| byte == 0).any(|word| word == b"-incoming" || word == b"--incoming")
    })
}

fn find(name: &CStr) -> Option<Question> {
    // SAFETY: the name ends with a zero byte.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    // SAFETY: a function of this name in QEMU takes nothing or an `int`, and answers a `bool`; one
    // register too many does no harm in the C calling convention.
    (!address.is_null()).then(|| unsafe { std::mem::transmute::<_, Question>(address) })
}

fn ask(question: Option<Question>) -> Option<bool> {
    // SAFETY: as `find` says; these functions read a variable of QEMU's.
    question.map(|question| unsafe { question(0) })
}
