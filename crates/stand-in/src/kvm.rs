//! A guest's processors under KVM: the same accesses as in [`vcpu`](crate::vcpu), made by a guest
//! ([`machine`](crate::machine)).
//!
//! A thread owns some pages of a piece of RAM. It puts each page's expected content and operation
//! on its vCPU's list, and runs the guest until all is done. From time to time a signal takes
//! vCPUs out of the guest, or out of a fault in which they wait. QEMU does that to notify its
//! vCPUs.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::crew::{CrewState, Hand, Pace};
use crate::guest::{GuestOrder, Job, MOST_JOBS, Wrong};
use crate::machine::{Machine, RAM_BEGINS, Vcpu};
use crate::page::{Content, Harm, Owned, PAGE};
use crate::ram::HeldPages;
use crate::watch::WorkKind;

/// vCPUs of each machine: one vCPU has page tables of its own, and three change theirs together.
pub(crate) const MACHINES: [usize; 2] = [1, 3];
/// Most pages of a round: entering and leaving the guest takes some 80 µs where KVM is slow.
const ROUND: usize = 32;
const _: () = assert!(ROUND <= MOST_JOBS);
/// Pages of the hot window.
const WINDOW: usize = 1024;
/// The pace, counted in rounds.
const PACE: Pace = Pace { stay: 1_000, spell: 8, rest: Duration::from_millis(1) };
/// The longest time between two signals.
const KICK: Duration = Duration::from_millis(4);
/// A vCPU that has not returned by then does not run.
const PROBE_LIMIT: Duration = Duration::from_secs(5);
const SIGNAL: libc::c_int = libc::SIGUSR1;

/// Runs a small guest, to find out whether KVM runs such guests.
///
/// # Errors
/// Why KVM does not run it.
pub(crate) fn probe() -> io::Result<()> {
    let (sender, outcome) = mpsc::channel();
    // If the thread hangs it is left behind.
    std::thread::spawn(move || {
        let run = || {
            let (_machine, mut vcpus) = Machine::new(1, RAM_BEGINS)?;
            vcpus.iter_mut().try_for_each(|vcpu| vcpu.run(0..0).map(drop))
        };
        // The receiver may have gone.
        let _ = sender.send(run());
    });
    let nothing = |_| io::Error::other(format!("a vCPU has not come back in {PROBE_LIMIT:?}"));
    outcome.recv_timeout(PROBE_LIMIT).map_err(nothing)?
}

/// All machines and their vCPUs; guest RAM ends at `end`.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn machines(end: u64) -> io::Result<(Vec<Machine>, Vec<Vcpu>)> {
    let made: Vec<_> =
        MACHINES.iter().map(|&vcpus| Machine::new(vcpus, end)).collect::<io::Result<_>>()?;
    let (machines, vcpus): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    Ok((machines, vcpus.into_iter().flatten().collect()))
}

/// Runs a vCPU until the end.
///
/// # Errors
/// When the guest does what it should not, or the kernel cannot run it.
pub(crate) fn work(hand: &mut Hand<'_>, mut vcpu: Vcpu) -> io::Result<()> {
    let _kicked = hand.shared.kicks.sit_down();
    hand.roam(&PACE, |hand, window| round(hand, &mut vcpu, window))
}

/// A page of a round: its number, its ownership, and the operation on it.
type Share<'a> = (usize, Owned<'a>, GuestOrder);

fn round(hand: &mut Hand<'_>, vcpu: &mut Vcpu, window: usize) -> io::Result<()> {
    let Some(held) = hand.any_ram() else { return Ok(()) };
    let pages = held.range().1 / PAGE;
    let mut shares: Vec<Share<'_>> = Vec::new();
    for _ in 0..=hand.rng.below(ROUND) {
        let page = if hand.rng.chance(60) {
            (window + hand.rng.below(WINDOW)) % pages
        } else {
            hand.rng.below(pages)
        };
        let Some(owned) = held.entry(page).own() else { continue };
        let content = owned.content();
        let order = match hand.rng.below(100) {
            0..55 if !content.is_freed => GuestOrder::Modify,
            0..80 => GuestOrder::Rewrite(hand.shared.fresh()),
            _ => GuestOrder::Check,
        };
        vcpu.mailbox()
            .put(shares.len(), &Job { address: held.guest_address(page), content, order });
        shares.push((page, owned, order));
    }
    let done = hand.time(WorkKind::KvmRound, || Some(run(hand.shared, vcpu, &held, &shares)));
    done.transpose()?;
    hand.shared.watch.count(WorkKind::KvmAccess, shares.len());
    Ok(())
}

/// Runs the guest until it has done all jobs; reports and repairs each wrong page.
fn run(
    shared: &CrewState,
    vcpu: &mut Vcpu,
    held: &HeldPages<'_>,
    shares: &[Share<'_>],
) -> io::Result<()> {
    let mut first = 0;
    while first < shares.len() {
        let (stop, wrong) = vcpu.run(first..shares.len())?;
        for (_, owned, order) in &shares[first..stop] {
            owned.set(order.outcome(owned.content()));
        }
        first = stop;
        if let Some(wrong) = wrong {
            let (page, owned, _) = &shares[stop];
            complain(shared, vcpu, held, *page, owned.content(), wrong);
            first += 1;
        }
    }
    Ok(())
}

/// Reports a word that a guest found wrong. Host and guest may see different pages, so both are
/// checked.
fn complain(
    shared: &CrewState,
    vcpu: &Vcpu,
    held: &HeldPages<'_>,
    page: usize,
    content: Content,
    wrong: Wrong,
) {
    let words = held.words(page);
    let for_host = if content.compare(words).is_some() { "wrong" } else { "right" };
    let again = content.compare(vcpu.mailbox().copy());
    let for_guest = if again.is_some() { "wrong" } else { "right" };
    let harm = again.unwrap_or_else(|| Harm::of_word(content, wrong.index, wrong.found));
    let during = format!(
        "a vCPU's look (found {:#x} at offset {}; then {for_guest} for the guest, {for_host} for the host)",
        wrong.found,
        wrong.index * size_of::<u64>()
    );
    shared.watch.harm(&during, page, &harm);
    content.fill(words);
}

/// The threads that run vCPUs, for the thread that interrupts them.
#[derive(Debug)]
pub(crate) struct Kicks([AtomicI32; MACHINES[0] + MACHINES[1]]);

/// Registers a thread as one that can be kicked, until this is dropped.
struct Seat<'a>(&'a AtomicI32);

impl Kicks {
    /// No thread is registered yet.
    pub(crate) fn new() -> Self {
        Self(Default::default())
    }

    /// Registers this thread.
    fn sit_down(&self) -> Option<Seat<'_>> {
        // SAFETY: returns a number.
        let thread = unsafe { libc::gettid() };
        let is_free = |seat: &&AtomicI32| {
            seat.compare_exchange(0, thread, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        self.0.iter().find(is_free).map(Seat)
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Sends signals to threads that run vCPUs, until the end.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn kick(hand: &mut Hand<'_>) -> io::Result<()> {
    extern "C" fn nothing(_signal: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: plain numbers, for which zero is a valid value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as usize;
    // SAFETY: the handler does nothing, which is allowed anywhere.
    if unsafe { libc::sigaction(SIGNAL, &raw const action, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    while hand.rest(KICK) {
        let seats = &hand.shared.kicks.0;
        let thread = seats[hand.rng.below(seats.len())].load(Ordering::Relaxed);
        if thread != 0 {
            // SAFETY: a signal that does nothing, to a thread of this process. If the thread has
            // just ended, the call fails.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
        }
    }
    Ok(())
}
