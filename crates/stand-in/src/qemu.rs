//! Operations of QEMU itself on guest RAM: discards, hot-plug, forks, and its own userfaultfd.

use std::io;
use std::time::Duration;

use crate::crew::{CrewState, Hand};
use crate::watch::WorkKind;

/// Most pages of a discard: free-page reports come in huge pages, balloons in pages.
const MOST_DISCARDED: usize = 512;
/// The longest life of a forked child.
const CHILD_MOST_MS: usize = 1_500;
/// A forked child closes what it inherits below this.
const CHILD_CLOSES: libc::c_int = 64;
/// The longest time for which QEMU watches its own memory.
const WATCHED: Duration = Duration::from_millis(80);

/// Discards runs of pages until the end.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn discard(hand: &mut Hand<'_>) -> io::Result<()> {
    loop {
        let most = if hand.rng.chance(70) { 16 } else { MOST_DISCARDED };
        if let Some(run) = hand.own_any(most) {
            if hand.rng.chance(30) {
                run.check(hand.shared, "a look before a discard");
            }
            let is_report = hand.rng.chance(60);
            let result = hand.time(WorkKind::Discard, || {
                Some(run.held.discard(run.first, &run.pages, is_report))
            });
            result.transpose()?;
            if hand.rng.chance(60) {
                run.check(hand.shared, "a look after a discard");
            }
        }
        if !hand.rest(Duration::from_millis(4)) {
            return Ok(());
        }
    }
}

/// Plugs and unplugs the RAM of all slots but the first until the end. The first slot's RAM is
/// removed from the machines and added again.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn plug(hand: &mut Hand<'_>) -> io::Result<()> {
    while hand.rest(Duration::from_secs(3)) {
        let CrewState { slots, machines, .. } = hand.shared;
        let slot = hand.rng.below(slots.len());
        let result = hand.time(WorkKind::Plug, || {
            Some(if slot == 0 { slots[0].remap(machines) } else { slots[slot].replug(machines) })
        });
        result.transpose()?;
    }
    Ok(())
}

/// Forks until the end. Children end at once, run a program, or live on with everything that they
/// inherit.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn fork(hand: &mut Hand<'_>) -> io::Result<()> {
    let mut children = Vec::new();
    while hand.rest(Duration::from_millis(400)) {
        if hand.rng.chance(30) {
            let mut program = std::process::Command::new("/bin/true");
            let status = hand.time(WorkKind::Fork, || Some(program.status()));
            status.transpose()?;
        } else {
            let life_ms = if hand.rng.chance(50) { 0 } else { hand.rng.below(CHILD_MOST_MS) };
            let child = hand.time(WorkKind::Fork, || Some(child_for(life_ms)));
            children.extend(child.transpose()?);
        }
        children.retain(|child| !has_ended(*child));
    }
    while children.iter().any(|child| !has_ended(*child)) {
        std::thread::sleep(Duration::from_millis(10));
        children.retain(|child| !has_ended(*child));
    }
    Ok(())
}

/// Forks a child that sleeps for `life_ms` milliseconds and does nothing else.
fn child_for(life_ms: usize) -> io::Result<libc::pid_t> {
    let life = libc::timespec { tv_sec: 0, tv_nsec: 1_000_000 };
    // SAFETY: the child makes only calls that are allowed after the fork of a program with
    // threads, and ends without running any code of its parent.
    match unsafe { libc::fork() } {
        0 => {
            // Like the launcher of a helper program, through the symbol that QEMU calls.
            for fd in 3..CHILD_CLOSES {
                // SAFETY: as above; the child does not use them.
                unsafe { libc::close(fd) };
            }
            for _ in 0..life_ms {
                // SAFETY: as above.
                unsafe { libc::nanosleep(&raw const life, std::ptr::null_mut()) };
            }
            // SAFETY: as above.
            unsafe { libc::_exit(0) }
        }
        child if child > 0 => Ok(child),
        _ => Err(io::Error::last_os_error()),
    }
}

fn has_ended(child: libc::pid_t) -> bool {
    // SAFETY: the kernel writes nothing.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::WNOHANG) != 0 }
}

/// Registers RAM with a userfaultfd of QEMU's own until the end, as a background snapshot does.
///
/// # Errors
/// When the kernel refuses: the shim must have unregistered its ranges.
pub(crate) fn register(hand: &mut Hand<'_>) -> io::Result<()> {
    let Some(watcher) = Watcher::open() else {
        eprintln!(
            "overbook-stand-in: no userfaultfd of its own here: QEMU's snapshots are left out"
        );
        return Ok(());
    };
    while hand.rest(Duration::from_secs(8)) {
        let Some(held) = hand.any_ram() else { continue };
        let (start, bytes) = held.range();
        let range = Range { start: start.expose_provenance() as u64, bytes: bytes as u64 };
        let result = hand.time(WorkKind::Register, || Some(watcher.register(range)));
        result.transpose()?;
        hand.rest(WATCHED);
        let result = hand.time(WorkKind::Register, || Some(watcher.unregister(range)));
        result.transpose()?;
    }
    Ok(())
}

/// `struct uffdio_range`
#[derive(Clone, Copy)]
#[repr(C)]
struct Range {
    start: u64,
    bytes: u64,
}

/// `struct uffdio_register`
#[repr(C)]
struct Registration {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_api`
#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
/// Writes to protected pages are reported; none is ever protected here.
const MODE_WRITE_PROTECTED: u64 = 2;

/// A userfaultfd of QEMU's own.
struct Watcher(libc::c_int);

impl Watcher {
    fn open() -> Option<Self> {
        // SAFETY: makes a descriptor, or not.
        let made = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC) };
        let watcher = Self(libc::c_int::try_from(made).ok().filter(|fd| *fd >= 0)?);
        let mut api = Api { api: 0xaa, features: 0, ioctls: 0 };
        watcher.ask(UFFDIO_API, &raw mut api).ok()?;
        Some(watcher)
    }

    fn register(&self, range: Range) -> io::Result<()> {
        let mut order = Registration { range, mode: MODE_WRITE_PROTECTED, ioctls: 0 };
        self.ask(UFFDIO_REGISTER, &raw mut order)
    }

    fn unregister(&self, mut range: Range) -> io::Result<()> {
        self.ask(UFFDIO_UNREGISTER, &raw mut range)
    }

    fn ask<T>(&self, request: libc::c_ulong, order: *mut T) -> io::Result<()> {
        // SAFETY: each caller passes the structure of its request.
        let result = unsafe { libc::ioctl(self.0, request, order) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        // SAFETY: this value's own descriptor, which is no longer in use.
        unsafe { libc::close(self.0) };
    }
}
