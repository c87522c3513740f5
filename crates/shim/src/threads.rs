//! The shim's threads inside QEMU, and a guard against interposing the shim's own calls.
//!
//! QEMU handles signals in its main loop, so the shim's threads block them all. They have small
//! stacks and end with the process. Calls of the shim's threads are not interposed, nor are those
//! of QEMU's threads while they run the shim's code ([`BypassGuard`]).

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

/// The shim's threads make few nested calls and keep no large arrays on the stack.
const STACK_BYTES: usize = 128 << 10;

/// Set in a forked child: it has no thread of the shim and no guest RAM.
static INERT: AtomicBool = AtomicBool::new(false);

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// While an instance exists, this thread's calls go straight to the C library.
#[derive(Debug)]
pub(crate) struct BypassGuard(());

impl BypassGuard {
    /// `None` when this thread runs the shim's code already, or when the shim is inert.
    pub(crate) fn enter() -> Option<Self> {
        if INERT.load(Ordering::Relaxed) {
            return None;
        }
        // Constructed only when needed: dropping an unneeded one would clear the flag.
        INSIDE.with(|inside| (!inside.replace(true)).then(|| Self(())))
    }
}

impl Drop for BypassGuard {
    fn drop(&mut self) {
        INSIDE.with(|inside| inside.set(false));
    }
}

/// Starts a thread of the shim.
pub(crate) fn start(name: &str, body: fn()) -> std::io::Result<()> {
    let all = block_signals();
    let started = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES).spawn(
        move || {
            let _inside = BypassGuard::enter();
            body();
        },
    );
    restore_signals(&all);
    started.map(drop)
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: a signal set is plain bytes, and each call gets pointers to local sets.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: a set that the kernel filled in.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
}

/// Makes forked children inert. Called once, when there is something that a child must leave
/// alone.
pub(crate) fn guard_forks() {
    extern "C" fn in_child() {
        INERT.store(true, Ordering::Relaxed);
        crate::descriptors::close_all_in_child();
    }
    // SAFETY: the handler stores a flag and makes system calls, which is allowed after a fork.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
}

/// Ends QEMU where the guest would otherwise see wrong memory.
pub(crate) fn end_process(what: &str, errno: Errno) -> ! {
    eprintln!("overbook shim: {what}: {errno}; ending QEMU rather than losing a guest's data");
    std::process::abort();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_enters_once_and_again_after_it_left() {
        let first = BypassGuard::enter();
        assert!(first.is_some() && BypassGuard::enter().is_none());
        assert!(BypassGuard::enter().is_none(), "being refused is no way out");
        drop(first);
        assert!(BypassGuard::enter().is_some());
    }
}
