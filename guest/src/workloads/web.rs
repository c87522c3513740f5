//! `web`: answers requests over a working set; a service with a latency promise.
//!
//! A request touches eight random pages, reads them whole, and writes a little into each.
//!
//! * With `--rate` the load is open: requests arrive by a Poisson process whether or not the
//!   service keeps up, and latency counts from the arrival (no coordinated omission). A client
//!   waits at most 10 s: then its request is dropped unserved, and counted in `dropped` and in
//!   the percentiles. Without `--rate` one client sends one request after the other.
//! * `--burst factor:on_s:off_s` multiplies the rate for `on_s` of every `off_s + on_s` seconds,
//!   beginning calm.
//! * With `--burst-mb` the clients of a burst have sessions of their own: additional memory that
//!   requests go to as well. It is mapped when a burst begins, allocated as it is touched, and
//!   freed when the burst ends.

use std::hint::black_box;
use std::time::Duration;

use clap::Args;

use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::WorkMemory;
use crate::rng::{Rng, mix};
use crate::run::Worker;

const PAGES_PER_REQUEST: usize = 8;
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the working set
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Bursts: the rate times FACTOR for ON_S seconds after every OFF_S
    #[arg(long, value_name = "FACTOR:ON_S:OFF_S", value_parser = burst, requires = "rate")]
    burst: Option<Burst>,
    /// Growth of the working set in bursts
    #[arg(long, value_name = "N", value_parser = megabytes, requires = "burst")]
    burst_mb: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Burst {
    factor: f64,
    on_s: f64,
    off_s: f64,
}

fn burst(text: &str) -> Result<Burst, String> {
    let bad = |why: String| format!("{why}; valid is factor:on_s:off_s");
    let parts: Vec<&str> = text.split(':').collect();
    let &[factor, on_s, off_s] = parts.as_slice() else {
        return Err(bad(format!("{} parts instead of 3", parts.len())));
    };
    Ok(Burst {
        factor: ranged(factor, 0.01, 1000.0)
            .map_err(|range| bad(format!("for factor, {range}")))?,
        on_s: ranged(on_s, 0.1, 86_400.0).map_err(|range| bad(format!("for on_s, {range}")))?,
        off_s: ranged(off_s, 0.1, 86_400.0).map_err(|range| bad(format!("for off_s, {range}")))?,
    })
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    let memory = WorkMemory::filled(options.mb, &mut rng, &worker.shared)?;
    let sessions_mb = options.burst_mb.unwrap_or_default();
    let mut service = Service { memory, rng, sessions_mb };
    match worker.rate {
        Some(rate) => {
            let arrivals = Arrivals::new(rate, options.burst, worker.seed);
            serve_open(worker.shared.now(), arrivals, &mut service, worker)
        }
        None => {
            serve_closed(&mut service, worker);
            Ok(())
        }
    }
}

fn serve_open(
    opened: Duration,
    mut arrivals: Arrivals,
    service: &mut Service,
    worker: &Worker,
) -> Result<(), WorkError> {
    let shared = &worker.shared;
    let calm_mb = service.memory.len_mb();
    let (mut dropped, mut was_bursting) = (0, false);
    shared.dropped.set(dropped);
    loop {
        let arrival = opened + arrivals.next_arrival();
        if !shared.sleep_until(arrival) {
            return Ok(());
        }
        if arrivals.bursting != was_bursting {
            was_bursting = arrivals.bursting;
            service.resize(calm_mb, was_bursting)?;
            shared.mb.set(service.memory.len_mb());
        }
        if shared.now().saturating_sub(arrival) > PATIENCE {
            dropped += 1;
            shared.dropped.set(dropped);
            shared.latency.record(PATIENCE);
            continue;
        }
        service.answer();
        shared.latency.record(shared.now() - arrival);
        worker.done(1);
    }
}

fn serve_closed(service: &mut Service, worker: &Worker) {
    while !worker.shared.stopping() {
        let start = worker.shared.now();
        service.answer();
        worker.shared.latency.record(worker.shared.now() - start);
        worker.done(1);
    }
}

/// The working set and the choice of pages.
struct Service {
    memory: WorkMemory,
    rng: Rng,
    /// Memory of the sessions in a burst.
    sessions_mb: usize,
}

impl Service {
    /// Adds or frees the sessions' memory.
    fn resize(&mut self, calm_mb: usize, is_bursting: bool) -> Result<(), WorkError> {
        let sessions_mb = if is_bursting { self.sessions_mb } else { 0 };
        self.memory.shrink(calm_mb);
        for _ in 0..sessions_mb {
            self.memory.grow()?;
        }
        Ok(())
    }

    fn answer(&mut self) {
        let mut answer = 0;
        for _ in 0..PAGES_PER_REQUEST {
            let page = self.rng.below(self.memory.pages());
            let (words, _) = self.memory.page(page).as_chunks_mut::<8>();
            answer = words.iter().fold(answer, |sum, word| mix(sum ^ u64::from_le_bytes(*word)));
            if let Some(first) = words.first_mut() {
                *first = answer.to_le_bytes();
            }
        }
        black_box(answer);
    }
}

/// The times at which requests arrive: a Poisson process whose rate switches between calm and
/// burst.
struct Arrivals {
    rng: Rng,
    rate: f64,
    burst: Option<Burst>,
    bursting: bool,
    segment_end_s: f64,
    last_s: f64,
}

impl Arrivals {
    fn new(rate: f64, burst: Option<Burst>, seed: u64) -> Self {
        let segment_end_s = burst.map_or(f64::INFINITY, |burst| burst.off_s);
        Self { rng: Rng::new(!seed), rate, burst, bursting: false, segment_end_s, last_s: 0.0 }
    }

    /// The next arrival, as time since the opening.
    fn next_arrival(&mut self) -> Duration {
        // The expected number of arrivals before the next one. Each segment uses up rate * length
        // of it.
        let mut mass = self.rng.exponential();
        loop {
            let factor = self.burst.filter(|_| self.bursting).map_or(1.0, |burst| burst.factor);
            let rate = self.rate * factor;
            let arrival_s = self.last_s + mass / rate;
            if arrival_s <= self.segment_end_s {
                self.last_s = arrival_s;
                return Duration::from_secs_f64(arrival_s);
            }
            mass -= (self.segment_end_s - self.last_s) * rate;
            self.last_s = self.segment_end_s;
            self.bursting = !self.bursting;
            let length_s =
                self.burst.map_or(f64::INFINITY, |b| if self.bursting { b.on_s } else { b.off_s });
            self.segment_end_s += length_s;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_mb() -> Service {
        let mut memory = WorkMemory::default();
        memory.grow().unwrap();
        Service { memory, rng: Rng::new(1), sessions_mb: 2 }
    }

    #[test]
    fn arrivals_follow_the_rate_and_the_bursts() {
        let burst = Some(burst("5:1:3").unwrap());
        let mut arrivals = Arrivals::new(100.0, burst, 1);
        let mut per_second = [0_u32; 400];
        let mut next = || usize::try_from(arrivals.next_arrival().as_secs()).unwrap();
        while let Some(slot) = per_second.get_mut(next()) {
            *slot += 1;
        }
        let sum = |phase| per_second.iter().skip(phase).step_by(4).sum::<u32>();
        let [calm, burst] = [sum(0) + sum(1) + sum(2), sum(3)];
        assert!((29_000..31_000).contains(&calm), "{calm}");
        assert!((49_000..51_000).contains(&burst), "{burst}");
    }

    #[test]
    fn a_stall_shows_in_the_latency_of_all_that_arrived_meanwhile() {
        let worker = Worker::for_test();
        let mut service = one_mb();
        let opened = worker.shared.now();
        std::thread::sleep(Duration::from_millis(300));
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            shared.sleep_until(opened + Duration::from_millis(500));
            shared.stop();
        });
        serve_open(opened, Arrivals::new(1000.0, None, 1), &mut service, &worker).unwrap();
        stopper.join().unwrap();
        // Three fifths of the arrivals had waited, evenly from 300 ms down to none.
        let latency = worker.shared.latency.snapshot();
        assert!(latency.percentile_us(9_900).unwrap() > 250_000);
        // No more than have arrived until the stop.
        let most = 1.2 * 1000.0 * (worker.shared.now() - opened).as_secs_f64();
        assert!((worker.shared.ops() as f64) < most, "{} in {most}", worker.shared.ops());
        assert_eq!(worker.shared.dropped.get(), Some(0));
    }

    #[test]
    fn requests_that_waited_too_long_are_dropped_and_still_counted_as_slow() {
        let shared = crate::run::RunState::started(Duration::from_secs(20));
        let worker = Worker::new(std::sync::Arc::new(shared), 1, None);
        let mut service = one_mb();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.ops() < 10 {
                std::thread::yield_now();
            }
            shared.stop();
        });
        serve_open(Duration::ZERO, Arrivals::new(100.0, None, 1), &mut service, &worker).unwrap();
        stopper.join().unwrap();
        let dropped = worker.shared.dropped.get().unwrap();
        // At most the arrivals of all but the last ten seconds, even if the stop came late.
        let most = 1.1 * 100.0 * (worker.shared.now().as_secs_f64() - 10.0);
        assert!(dropped >= 900 && (dropped as f64) < most, "{dropped} of {most}");
        let latency = worker.shared.latency.snapshot();
        // Some are served before the stop comes.
        assert!(latency.percentile_us(1_000).unwrap() >= 9_000_000);
    }

    #[test]
    fn sessions_have_memory_for_as_long_as_the_burst_lasts() {
        let mut service = one_mb();
        service.resize(1, true).unwrap();
        assert_eq!(service.memory.len_mb(), 3);
        service.resize(1, false).unwrap();
        assert_eq!(service.memory.len_mb(), 1);
    }

    #[test]
    fn without_a_rate_it_serves_as_fast_as_it_can() {
        let mut worker = Worker::for_test();
        let stopper = worker.stop_after(100);
        run(&Options { mb: 1, burst: None, burst_mb: None }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() >= 100);
        assert_eq!(worker.shared.dropped.get(), None);
    }
}
