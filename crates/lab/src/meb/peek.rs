//! The pages of the ESX-style sampler, through the shim of a guest: 100 random pages are revoked.
//! A page that is accessible again has been touched.
//!
//! It is a minimal client of the shim's protocol: it waits for each answer.

use std::time::{Duration, Instant};

use protocol::layout::{Layout, PageState, Shared};
use protocol::{Answer, MAX_PACKET, Region, Request, State, Status, Tracking, VERSION};
use sys::process::Identity;
use sys::seqpacket::Connection;
use sys::shared_memory::SharedMemory;
use worker::shim_of;

use super::sampler::{PAGES, PERIOD, Sampler};
use crate::lab::LabError;
use crate::random::Random;

const PATIENCE: Duration = Duration::from_secs(5);
/// A hundred pages cause hardly any traps; the protocol only requires some limit.
const MOST_TRAPS_PER_S: u32 = 100_000;

/// A guest that is sampled.
#[derive(Debug)]
pub struct Peek {
    connection: Connection,
    memory: SharedMemory,
    layout: Layout,
    regions: Vec<Region>,
    random: Random,
    sampler: Sampler,
    chosen: Vec<u32>,
    began: Instant,
}

impl Peek {
    /// Begins to sample the guest of QEMU process `pid`.
    pub fn start(pid: u32, seed: u64) -> Result<Self, LabError> {
        let connection = Connection::connect(&address_of_shim(pid)?, PATIENCE).map_err(failed)?;
        let (answer, fd) = ask(&connection, &Request::Hello { version: VERSION })?;
        let (Answer::Welcome { regions, .. }, Some(fd)) = (answer, fd) else {
            return Err(failed("it does not welcome"));
        };
        let layout = Layout::of_regions(&regions);
        let (words, bytes) = (layout.words(), layout.bytes());
        let memory =
            SharedMemory::open(std::os::fd::AsFd::as_fd(&fd), words, bytes).map_err(failed)?;
        let mut peek = Self {
            connection,
            memory,
            layout,
            regions,
            random: Random::new(seed),
            sampler: Sampler::default(),
            chosen: Vec::new(),
            began: Instant::now(),
        };
        peek.track()?;
        Ok(peek)
    }

    /// Begins a period with a new sample.
    fn track(&mut self) -> Result<(), LabError> {
        let tracking = Tracking {
            granule_pages: 1,
            hot_set: None,
            sample: u32::MAX,
            max_traps_per_s: MOST_TRAPS_PER_S,
        };
        done(&self.connection, &Request::Track(tracking))?;
        self.choose()
    }

    /// The share of the guest's memory that is active. Call it every second: the shim restores
    /// all pages when its client is silent for longer, as this one is while the disk is busy. A
    /// period is lost then.
    pub fn active(&mut self) -> Result<f64, LabError> {
        let (answer, _) = ask(&self.connection, &Request::Status)?;
        match answer {
            Answer::Status(Status { state: State::On(_), .. }) => {}
            Answer::Status(Status { state: State::Off, .. }) => self.track()?,
            other => return Err(failed(format!("{other:?}"))),
        }
        if self.began.elapsed() >= PERIOD {
            let share = self.touched()?;
            self.sampler.end_period(share);
            self.choose()?;
        }
        Ok(self.sampler.active(self.touched()?))
    }

    /// The share of the chosen pages that was touched.
    fn touched(&self) -> Result<f64, LabError> {
        let (words, states) = (self.memory.words(), self.memory.bytes());
        let shared = Shared::open(self.layout, words, states).map_err(failed)?;
        let back =
            self.chosen.iter().filter(|page| shared.state(**page) == PageState::Plain).count();
        Ok(share(back, self.chosen.len()))
    }

    /// Revokes a new sample. A page of an older sample that was not touched since may be in the
    /// new one, still revoked.
    fn choose(&mut self) -> Result<(), LabError> {
        let total: u64 = self.regions.iter().map(|region| u64::from(region.pages)).sum();
        self.chosen.clear();
        while self.chosen.len() < PAGES {
            let mut index = self.random.between(0, total.saturating_sub(1));
            for region in &self.regions {
                if index < u64::from(region.pages) {
                    self.chosen.push(region.first_page + u32::try_from(index).unwrap_or(0));
                    break;
                }
                index -= u64::from(region.pages);
            }
        }
        self.began = Instant::now();
        done(&self.connection, &Request::Revoke { granules: self.chosen.clone() })
    }
}

fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn done(connection: &Connection, request: &Request) -> Result<(), LabError> {
    match ask(connection, request)?.0 {
        Answer::Done { .. } => Ok(()),
        other => Err(failed(format!("{other:?}"))),
    }
}

fn address_of_shim(pid: u32) -> Result<String, LabError> {
    let found = Identity::of(pid).and_then(|process| shim_of(process).ok().flatten());
    found.ok_or_else(|| failed("it has no shim"))
}

fn ask(
    connection: &Connection,
    request: &Request,
) -> Result<(Answer, Option<std::os::fd::OwnedFd>), LabError> {
    // There is one request at a time, so all may have the same number.
    let id = request.numbered(1);
    connection.send(&request.encode(id).map_err(failed)?, None).map_err(failed)?;
    if !connection.wait(PATIENCE).map_err(failed)? {
        return Err(failed("it does not answer"));
    }
    let mut buffer = vec![0; MAX_PACKET];
    let packet = connection.receive(&mut buffer).map_err(failed)?;
    let packet = packet.ok_or_else(|| failed("it does not answer"))?;
    let (answered, answer) = Answer::decode(&buffer[..packet.length]).map_err(failed)?;
    if answered != id {
        return Err(failed(format!("it answers request {answered}, not {id}: {answer:?}")));
    }
    Ok((answer, packet.fd))
}

fn failed(what: impl ToString) -> LabError {
    LabError::Shim(what.to_string())
}
