//! A hostile worker: it sends a shim all that the protocol allows, in random order, and much that
//! it forbids.
//!
//! **Idea.** It runs in a process of its own (`overbook-lab torment`), so that it can be killed
//! at any instant, in the middle of a message or of a release. A seed determines its actions. It
//! tracks with every mode and size of granule, revokes in bursts, pages out, merges and unshares.
//! It has freed memory handed over and takes it. It floods the socket without reading, sends
//! garbage, falls silent, disconnects and reconnects. Each answer is checked against the answers
//! that the protocol allows.
//!
//! **Invariants.** After a release, no page is staged. None of its actions may leave a request
//! unanswered for ten seconds, except by closing the connection. The other side checks whether
//! guest memory survived, which this side never sees.

use std::io::Write;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use protocol::layout::{Counter, PageState};
use protocol::ring::Consumer;
use protocol::{
    Answer, MAX_PACKET, MAX_REVOKE, MAX_TAKE_PAGES, MAX_UNSHARE, Pages, Refusal, Request, State,
    Status, Tracking, VERSION,
};
use sys::memory_map::PAGE_BYTES;
use sys::outside::Outside;
use sys::process::Identity;
use sys::seqpacket::SeqpacketError;
use sys::userfaultfd::Range;

use super::deeds::Deeds;
use super::link::{LinkError, StressLink, told};
use super::sharing::{SLOTS, Sharing, any_pages};
use crate::random::Random;

/// Interval between reports of its deeds.
const TELL: Duration = Duration::from_millis(100);
/// Retries of tracking, because QEMU may need its memory for itself meanwhile.
const TRACK_TRIES: u32 = 100;
/// The most runs of a take.
const TAKEN: u32 = 8;
/// The most pages that are paged out at once.
const MOST_PAGED_OUT: u64 = 512;
/// The number of pages that are searched for a freed one.
const NEAR: u32 = 8192;
/// Longer than the silence that a shim tolerates.
const SILENCE_MS: (u64, u64) = (2_300, 2_900);
/// Timeout for a shim to restore everything after a silence, on any machine. A shim that tracks
/// nothing has nothing to restore.
const LONGEST_SILENCE: Duration = Duration::from_secs(8);

/// Torments the shim of process `pid` for `life`, and writes its deeds to standard output.
pub(crate) fn live(pid: u32, seed: u64, life: Duration) -> std::io::Result<()> {
    let mut tormentor = Tormentor {
        pid,
        random: Random::new(seed),
        deeds: Deeds::default(),
        sharing: None,
        end: Instant::now() + life,
        told: Instant::now(),
    };
    while tormentor.has_time() {
        if let Err(error) = tormentor.hold_a_conversation()
            && !error.is_closed()
        {
            tormentor.deeds.complaints.push(error.to_string());
            tormentor.wait(20_000);
        }
        tormentor.deeds.disconnects += 1;
        tormentor.tell()?;
    }
    Ok(())
}

struct Tormentor {
    pid: u32,
    random: Random,
    deeds: Deeds,
    sharing: Option<Sharing>,
    end: Instant,
    told: Instant,
}

/// The next action.
#[derive(Clone, Copy, Debug)]
enum Whim {
    Revoke,
    Burst,
    PageOut,
    Status,
    ReadRing,
    Merge,
    Unshare,
    HandOver,
    Take,
    OtherMode,
    OtherGranule,
    Release,
    Garbage,
    OtherVersion,
    Intrude,
    Flood,
    FallSilent,
    HangUp,
    Wait,
}

/// Each action's share, of a thousand.
const WHIMS: [(u64, Whim); 19] = [
    (160, Whim::Revoke),
    (160, Whim::Burst),
    (60, Whim::PageOut),
    (40, Whim::Status),
    (80, Whim::ReadRing),
    (50, Whim::Merge),
    (50, Whim::Unshare),
    (20, Whim::HandOver),
    (80, Whim::Take),
    (70, Whim::OtherMode),
    (60, Whim::OtherGranule),
    (60, Whim::Release),
    (20, Whim::Garbage),
    (10, Whim::OtherVersion),
    (10, Whim::Intrude),
    (5, Whim::Flood),
    (3, Whim::FallSilent),
    (12, Whim::HangUp),
    (50, Whim::Wait),
];

impl Tormentor {
    fn has_time(&self) -> bool {
        Instant::now() < self.end
    }

    /// One connection, from Hello until one side disconnects.
    fn hold_a_conversation(&mut self) -> Result<(), LinkError> {
        self.deeds.connections += 1;
        if self.random.between(1, 10) == 1 {
            self.be_rude_first()?;
        }
        let mut link = StressLink::greet(self.pid)?;
        let mut ring = link.shared().map(|shared| Consumer::new(shared.ring()));
        let mut tracking = self.any_tracking();
        self.track(&mut link, tracking)?;
        self.hand_over(&mut link)?;
        while self.has_time() {
            self.note(&link);
            match self.next_whim() {
                Whim::Revoke => self.revoke(&mut link, &tracking, 1)?,
                Whim::Burst => {
                    let requests = self.random.between(10, 60);
                    self.revoke(&mut link, &tracking, requests)?;
                }
                Whim::PageOut => self.page_out(&mut link)?,
                Whim::Status => drop(self.status(&mut link)?),
                Whim::ReadRing => self.read_ring(&link, &mut ring, &tracking),
                Whim::Merge => self.merge(&mut link)?,
                Whim::Unshare => self.unshare(&mut link)?,
                Whim::HandOver => self.hand_over(&mut link)?,
                Whim::Take => self.take(&mut link)?,
                Whim::OtherMode => {
                    let granule_pages = tracking.granule_pages;
                    tracking = Tracking { granule_pages, ..self.any_tracking() };
                    self.track(&mut link, tracking)?;
                }
                Whim::OtherGranule => {
                    tracking = self.any_tracking();
                    self.track(&mut link, tracking)?;
                    self.read_ring(&link, &mut ring, &tracking);
                }
                Whim::Release => {
                    self.release(&mut link)?;
                    self.merge(&mut link)?;
                    self.unshare(&mut link)?;
                    self.track(&mut link, tracking)?;
                }
                Whim::Garbage => self.send_garbage(&mut link)?,
                Whim::OtherVersion => self.claim_another_version(&mut link)?,
                Whim::Intrude => self.intrude(),
                Whim::Flood => return self.flood(&link),
                Whim::FallSilent => self.fall_silent(&mut link)?,
                Whim::HangUp => return Ok(()),
                Whim::Wait => self.wait(20_000),
            }
            if self.random.between(1, 3) == 1 {
                self.wait(5_000);
            }
            // RAM that was added or removed has other page numbers and another shared memory.
            if self.status(&mut link)? {
                link.hello()?;
                ring = link.shared().map(|shared| Consumer::new(shared.ring()));
                self.track(&mut link, tracking)?;
            }
        }
        if self.random.between(0, 1) == 1 { self.release(&mut link) } else { Ok(()) }
    }

    fn next_whim(&mut self) -> Whim {
        let mut left = self.random.between(0, 999);
        for (share, whim) in WHIMS {
            if left < share {
                return whim;
            }
            left -= share;
        }
        Whim::Wait
    }

    fn any_tracking(&mut self) -> Tracking {
        let random = &mut self.random;
        let mut one_of = |values: &[u32]| {
            let most = values.len() as u64 - 1;
            values[usize::try_from(random.between(0, most)).unwrap_or(0)]
        };
        let granule_pages = one_of(&[1, 2, 4, 8, 16, 32, 32, 32, 64, 128, 512, 512]);
        let sample = one_of(&[u32::MAX, u32::MAX, u32::MAX, u32::MAX / 2, u32::MAX / 16]);
        let max_traps_per_s = one_of(&[u32::MAX, u32::MAX, u32::MAX, u32::MAX, 200_000, 500]);
        Tracking { granule_pages, hot_set: None, sample, max_traps_per_s }
    }

    /// Sends a request, and counts it.
    fn ask(&mut self, link: &mut StressLink, request: &Request) -> Result<Answer, LinkError> {
        self.deeds.requests += 1;
        let answer = link.ask(request)?;
        self.deeds.refusals += u64::from(matches!(answer, Answer::Refused(_)));
        let micros = u64::try_from(link.longest.as_micros()).unwrap_or(u64::MAX);
        self.deeds.longest_answer_us = self.deeds.longest_answer_us.max(micros);
        Ok(answer)
    }

    /// Starts tracking, as soon as QEMU allows it.
    fn track(&mut self, link: &mut StressLink, tracking: Tracking) -> Result<(), LinkError> {
        let request = Request::Track(tracking);
        for _ in 0..TRACK_TRIES {
            match self.ask(link, &request)? {
                Answer::Done { count } => {
                    self.deeds.revoked += u64::from(count);
                    return Ok(());
                }
                Answer::Refused(Refusal::NotTracking { .. }) if self.has_time() => {
                    self.wait(20_000);
                    // The refusal may be due to RAM that was added or removed.
                    if self.status(link)? {
                        link.hello()?;
                    }
                }
                Answer::Refused(Refusal::NotTracking { .. }) => return Ok(()),
                other => return Err(LinkError::unexpected(&told(&request), &other)),
            }
        }
        Ok(())
    }

    /// Sends `requests` requests ahead, then reads the answers.
    fn revoke(
        &mut self,
        link: &mut StressLink,
        tracking: &Tracking,
        requests: u64,
    ) -> Result<(), LinkError> {
        let last = link.regions.last().map_or(0, |last| last.first_page + last.pages);
        // Some of the granules do not exist.
        let most = u64::from(last / tracking.granule_pages + 3);
        let longest = 1 << self.random.between(0, MAX_REVOKE.ilog2().into());
        let mut sent = Vec::new();
        for _ in 0..requests {
            let count = self.random.between(1, longest);
            let any = |_| u32::try_from(self.random.between(0, most)).unwrap_or(u32::MAX);
            let granules = (0..count).map(any).collect();
            let request = if self.random.between(1, 5) == 1 {
                Request::Recall { granules }
            } else {
                Request::Revoke { granules }
            };
            match link.send(&request, None) {
                Ok(one) => sent.push((request, one)),
                Err(LinkError::Socket(SeqpacketError::Full)) => break,
                Err(error) => return Err(error),
            }
            self.deeds.requests += 1;
        }
        for (request, one) in sent {
            match link.receive(&one)?.0 {
                Answer::Done { .. } if matches!(request, Request::Recall { .. }) => {}
                Answer::Done { count } => self.deeds.revoked += u64::from(count),
                Answer::Refused(Refusal::NotTracking { .. }) => self.deeds.refusals += 1,
                other => return Err(LinkError::unexpected(&told(&request), &other)),
            }
        }
        Ok(())
    }

    /// Pages out some memory from outside: guest RAM in its place, or in staging. The shim may be
    /// moving it at that moment.
    fn page_out(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        let Answer::Status(Status { staging, .. }) = self.ask(link, &Request::Status)? else {
            return Ok(());
        };
        let last = link.regions.len().saturating_sub(1) as u64;
        let at = usize::try_from(self.random.between(0, last)).unwrap_or(0);
        let Some(region) = link.regions.get(at) else { return Ok(()) };
        let first = self.random.between(0, u64::from(region.pages) - 1);
        let pages = self.random.between(1, MOST_PAGED_OUT).min(u64::from(region.pages) - first);
        let start = match staging.get(at) {
            Some(staging) if self.random.between(0, 1) == 1 => *staging,
            _ => region.address,
        };
        let range = Range { start: start + first * PAGE_BYTES, len: pages * PAGE_BYTES };
        if let Some(memory) = Identity::of(self.pid).and_then(|it| Outside::of(it).ok()) {
            // A process that has ended has no memory.
            let _ = memory.page_out(&[range]);
        }
        Ok(())
    }

    /// Has pages merged that were the same a moment ago.
    fn merge(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        if self.sharing.is_none() {
            self.sharing = Sharing::with(self.pid);
            let pool = self.sharing.as_ref().and_then(Sharing::pool);
            let request = Request::Pool { slots: SLOTS };
            let sent = link.send(&request, pool.as_ref().map(AsFd::as_fd))?;
            match link.receive(&sent)?.0 {
                Answer::Done { count: 0 } => {}
                other => return Err(LinkError::unexpected(&told(&request), &other)),
            }
        }
        let runs = self.random.between(1, 8);
        let any = |_| self.sharing.as_mut()?.any_run(&mut self.random, &link.regions);
        let runs: Vec<_> = (0..runs).filter_map(any).collect();
        if runs.is_empty() {
            // The next merge uses a new pool.
            self.sharing = None;
            return Ok(());
        }
        let request = Request::Merge { runs };
        match self.ask(link, &request)? {
            Answer::Merged(merged) => self.deeds.merged += u64::from(merged.shared),
            Answer::Refused(Refusal::NotMerging { .. }) => {}
            other => return Err(LinkError::unexpected(&told(&request), &other)),
        }
        Ok(())
    }

    /// Has pages unshared, which this or another worker may have had merged.
    fn unshare(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        for _ in 0..self.random.between(1, 8) {
            let any = any_pages(&mut self.random, &link.regions, MAX_UNSHARE.into());
            let Some((page, pages)) = any else { return Ok(()) };
            let request = Request::Unshare { page, pages };
            match self.ask(link, &request)? {
                Answer::Done { count } => self.deeds.unshared += u64::from(count),
                // The page was unplugged meanwhile, or QEMU watches it.
                Answer::Refused(Refusal::Kernel { .. } | Refusal::NotMerging { .. }) => {}
                other => return Err(LinkError::unexpected(&told(&request), &other)),
            }
        }
        Ok(())
    }

    /// Sets how the shim hands over memory that the guest frees: lazily in three of four cases.
    fn hand_over(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        let request = Request::HandOver { lazily: self.random.between(1, 4) > 1 };
        match self.ask(link, &request)? {
            Answer::Done { .. } => Ok(()),
            other => Err(LinkError::unexpected(&told(&request), &other)),
        }
    }

    /// Takes handed-over memory of some pages, or leaves it to the guest.
    fn take(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        let Some(shared) = link.shared() else { return Ok(()) };
        let most = u64::from(MAX_TAKE_PAGES / TAKEN);
        let any = |_| {
            let (page, pages) = any_pages(&mut self.random, &link.regions, most)?;
            // The guest soon uses freed pages again, so a freed one is searched for.
            let mut near = page..page.saturating_add(NEAR);
            let freed = near.find(|&page| shared.state(page) == PageState::Freed);
            Some(Pages { page: freed.unwrap_or(page), pages })
        };
        let runs: Vec<Pages> = (0..TAKEN).filter_map(any).collect();
        let is_taken = self.random.between(1, 4) > 1;
        let request = if is_taken { Request::Take { runs } } else { Request::Keep { runs } };
        match self.ask(link, &request)? {
            Answer::Taken(taken) if is_taken => self.deeds.taken += u64::from(taken.taken),
            Answer::Done { .. } if !is_taken => {}
            Answer::Refused(Refusal::NotTaking { .. } | Refusal::Kernel { .. }) => {}
            other => return Err(LinkError::unexpected(&told(&request), &other)),
        }
        Ok(())
    }

    /// Whether RAM has changed since Hello.
    fn status(&mut self, link: &mut StressLink) -> Result<bool, LinkError> {
        match self.ask(link, &Request::Status)? {
            Answer::Status(status) => {
                Ok(link.shared().is_some_and(|shared| shared.generation() != status.generation))
            }
            other => Err(LinkError::unexpected("Status", &other)),
        }
    }

    fn release(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        match self.ask(link, &Request::Release)? {
            Answer::Done { .. } => {}
            other => return Err(LinkError::unexpected("Release", &other)),
        }
        let (marked, gauge) = link.staged();
        if marked > 0 || gauge > 0 {
            let complaint =
                format!("after a release {marked} pages are staged, the gauge: {gauge}");
            self.deeds.complaints.push(complaint);
        }
        self.deeds.releases += 1;
        Ok(())
    }

    fn read_ring(&mut self, link: &StressLink, ring: &mut Option<Consumer>, tracking: &Tracking) {
        let (Some(shared), Some(ring)) = (link.shared(), ring) else { return };
        let last = link.regions.last().map_or(0, |last| last.first_page + last.pages);
        let granules = last.div_ceil(tracking.granule_pages);
        // After a change of the granule size, traps may name granules that do not exist.
        let drained = ring.drain(shared.ring(), granules, |_| {});
        self.deeds.traps_read += drained.read + drained.invalid;
        self.deeds.traps_lost += drained.lost;
    }

    /// Sends a request before Hello.
    fn be_rude_first(&mut self) -> Result<(), LinkError> {
        let mut link = StressLink::connect(self.pid)?;
        let request = match self.random.between(0, 2) {
            0 => Request::Track(self.any_tracking()),
            1 => Request::Revoke { granules: vec![0] },
            _ => Request::Release,
        };
        self.deeds.garbage += 1;
        match self.ask(&mut link, &request)? {
            Answer::Refused(_) => Ok(()),
            other => Err(LinkError::unexpected(&told(&request), &other)),
        }
    }

    /// Bytes that are no message; sometimes too many, sometimes with a descriptor.
    fn send_garbage(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        let length = match self.random.between(0, 9) {
            0 => MAX_PACKET + 1,
            _ => usize::try_from(self.random.between(1, 100)).unwrap_or(1),
        };
        // No request begins with this byte.
        let mut packet = vec![0xff; length];
        packet[length / 2] = u8::try_from(self.random.between(0, 255)).unwrap_or(0);
        packet[0] = 0xff;
        let input = std::io::stdin();
        let fd = (self.random.between(0, 3) == 0).then(|| input.as_fd());
        self.deeds.garbage += 1;
        let sent = link.send_raw(&packet, fd)?;
        match link.receive(&sent)?.0 {
            Answer::Refused(Refusal::Malformed { .. }) => Ok(()),
            other => Err(LinkError::unexpected("garbage", &other)),
        }
    }

    fn claim_another_version(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        let request = Request::Hello { version: VERSION + 1 };
        self.deeds.garbage += 1;
        match self.ask(link, &request)? {
            Answer::Refused(Refusal::Version { .. }) => Ok(()),
            other => Err(LinkError::unexpected(&told(&request), &other)),
        }
    }

    /// Connects as a second worker, which the shim must refuse.
    fn intrude(&mut self) {
        self.deeds.garbage += 1;
        let hello = |mut link: StressLink| link.hello();
        match StressLink::connect(self.pid).and_then(hello) {
            Err(LinkError::Refused(Refusal::Busy { .. })) => {}
            Err(error) if error.is_closed() => {}
            other => self.deeds.complaints.push(format!("a second worker: {other:?}")),
        }
    }

    /// Sends requests without ever reading an answer, then disconnects.
    fn flood(&mut self, link: &StressLink) -> Result<(), LinkError> {
        let packet = Request::Status.encode(1)?;
        for _ in 0..2_000 {
            self.deeds.requests += 1;
            match link.connection.send(&packet, None) {
                Ok(()) => {}
                Err(SeqpacketError::Full) => self.wait(2_000),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends nothing until the shim must have restored everything.
    fn fall_silent(&mut self, link: &mut StressLink) -> Result<(), LinkError> {
        let given_back =
            |link: &StressLink| link.shared().map(|shared| shared.get(Counter::GivenBack));
        let (before, begun) = (given_back(link), Instant::now());
        let (least, most) = SILENCE_MS;
        std::thread::sleep(Duration::from_millis(self.random.between(least, most)));
        // Where many threads compete for the CPUs, the shim is late. A request would end the
        // silence.
        while given_back(link) == before && begun.elapsed() < LONGEST_SILENCE {
            self.wait(20_000);
        }
        let (marked, _) = link.staged();
        match self.ask(link, &Request::Status)? {
            Answer::Status(status) if matches!(status.state, State::On(_)) || marked > 0 => {
                let complaint = format!("after a silence {marked} pages are staged: {status:?}");
                self.deeds.complaints.push(complaint);
                Ok(())
            }
            Answer::Status(_) => Ok(()),
            other => Err(LinkError::unexpected("Status", &other)),
        }
    }

    fn wait(&mut self, most_us: u64) {
        std::thread::sleep(Duration::from_micros(self.random.between(0, most_us)));
    }

    fn note(&mut self, link: &StressLink) {
        if let Some(shared) = link.shared() {
            self.deeds.note(shared);
        }
        if self.told.elapsed() > TELL {
            // If standard output has no reader, the report at the end of the connection fails.
            let _ = self.tell();
        }
    }

    fn tell(&mut self) -> std::io::Result<()> {
        self.told = Instant::now();
        let line = serde_json::to_string(&self.deeds)? + "\n";
        std::io::stdout().write_all(line.as_bytes())
    }
}
