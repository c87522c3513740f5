//! What a guest's processors do under KVM: the same accesses as [`vcpu`](crate::vcpu), made by a
//! guest ([`machine`](crate::machine)).
//!
//! A thread owns some pages of a piece of RAM, puts on its vCPU's list what each must hold and what
//! to do with it, and runs the guest until all is done. From time to time a signal takes vCPUs out
//! of the guest, or out of the fault that they wait in, as QEMU does to tell them something.

use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use crate::crew::{Hand, Pace, Shared};
use crate::guest::{Job, MOST_JOBS, Order, Wrong};
use crate::machine::{Machine, RAM_BEGINS, Vcpu};
use crate::page::{Content, Harm, Owned, PAGE};
use crate::ram::Held;
use crate::watch::Kind;

/// vCPUs of each machine: one has its page tables for itself, and several change them together.
pub(crate) const MACHINES: [usize; 2] = [1, 3];
/// Most pages of a round: a way in and out of the guest takes some 80 µs where KVM is a slow one.
const ROUND: usize = 32;
const _: () = assert!(ROUND <= MOST_JOBS);
/// Pages of the hot window.
const WINDOW: usize = 1024;
/// In rounds.
const PACE: Pace = Pace { stay: 1_000, spell: 8, rest: Duration::from_millis(1) };
/// Longest between two signals.
const KICK: Duration = Duration::from_millis(4);
/// A vCPU that has not come back by then does not run.
const PROBE_LIMIT: Duration = Duration::from_secs(5);
const SIGNAL: libc::c_int = libc::SIGUSR1;

/// Whether KVM runs such a guest: a small one is run.
///
/// # Errors
/// Why it does not.
pub(crate) fn probe() -> io::Result<()> {
    let (sender, outcome) = mpsc::channel();
    // If it hangs it is left behind.
    std::thread::spawn(move || {
        let run = || {
            let (_machine, mut vcpus) = Machine::new(1, RAM_BEGINS)?;
            vcpus.iter_mut().try_for_each(|vcpu| vcpu.run(0..0).map(drop))
        };
        // Who asked may have gone.
        let _ = sender.send(run());
    });
    let nothing = |_| io::Error::other(format!("a vCPU has not come back in {PROBE_LIMIT:?}"));
    outcome.recv_timeout(PROBE_LIMIT).map_err(nothing)?
}

/// All machines, and their vCPUs, whose memory ends at `end`.
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

/// A page of a round: its number, who owns it, and what becomes of it.
type Share<'a> = (usize, Owned<'a>, Order);

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
            0..55 if !content.is_freed => Order::Modify,
            0..80 => Order::Rewrite(hand.shared.fresh()),
            _ => Order::Check,
        };
        vcpu.mailbox()
            .put(shares.len(), &Job { address: held.guest_address(page), content, order });
        shares.push((page, owned, order));
    }
    let done = hand.time(Kind::KvmRound, || Some(run(hand.shared, vcpu, &held, &shares)));
    done.transpose()?;
    hand.shared.watch.count(Kind::KvmAccess, shares.len());
    Ok(())
}

/// Runs the guest until it has done all jobs; what it finds wrong is told, and put right.
fn run(shared: &Shared, vcpu: &mut Vcpu, held: &Held<'_>, shares: &[Share<'_>]) -> io::Result<()> {
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

/// What a guest saw was wrong. Host and guest may see different pages: each is told.
fn complain(
    shared: &Shared,
    vcpu: &Vcpu,
    held: &Held<'_>,
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

/// The threads that run vCPUs, for who wants them out of their guests.
#[derive(Debug)]
pub(crate) struct Kicks([AtomicI32; MACHINES[0] + MACHINES[1]]);

/// A thread that can be kicked until this is dropped.
struct Seat<'a>(&'a AtomicI32);

impl Kicks {
    /// Nobody yet.
    pub(crate) fn new() -> Self {
        Self(Default::default())
    }

    /// This thread, from now on.
    fn sit_down(&self) -> Option<Seat<'_>> {
        // SAFETY: asks for a number.
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
    // SAFETY: plain numbers, for which zero is a value.
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
            // SAFETY: a signal that does nothing, to a thread of ours or, if it has just ended, to
            // nobody.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, SIGNAL) };
        }
    }
    Ok(())
}
