//! Asks QEMU whether it is migrating.
//!
//! During a migration all pages stay in place. An outgoing migration would touch every granule,
//! and incoming pages are not yet part of a working set. No interposed call shows the start of
//! either. But the QEMU program exports its functions (for its own modules), so the shim can call
//! them, in one short read:
//!
//! * `migration_is_running` (QEMU 9.1; earlier versions take a state as argument, and return
//!   false for 0);
//! * `runstate_is_running`: after `-incoming`, the guest is here once it runs for the first time.
//!   Without that function this is known from the first `KVM_RUN`, or from the end of QEMU's own
//!   registration (postcopy).
//!
//! For a QEMU that exports nothing, the shim relies on QEMU's calls (`UFFDIO_REGISTER`), and on
//! the worker, which asks over QMP.

use std::ffi::CStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

type Question = unsafe extern "C" fn(i32) -> bool;

/// Whether the guest has run in this process.
static HAS_RUN: AtomicBool = AtomicBool::new(false);

/// The guest has run: all incoming memory is here.
pub(crate) fn guest_runs() {
    if !HAS_RUN.load(Ordering::Relaxed) {
        HAS_RUN.store(true, Ordering::Relaxed);
    }
}

/// The migration that excludes tracking now.
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
    // SAFETY: a function of this name in QEMU takes nothing or an `int`, and returns a `bool`.
    // One register too many does no harm in the C calling convention.
    (!address.is_null()).then(|| unsafe { std::mem::transmute::<_, Question>(address) })
}

fn ask(question: Option<Question>) -> Option<bool> {
    // SAFETY: as `find` states; these functions read a variable of QEMU's.
    question.map(|question| unsafe { question(0) })
}
