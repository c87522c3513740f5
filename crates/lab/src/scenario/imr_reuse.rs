//! `imr-reuse`: the cost of memory that is freed and taken back again and again, while the host
//! has plenty.
//!
//! A guest pays for its own page faults in any case, and under emulation they hide everything
//! else. So a program that treats its memory as QEMU does runs the loop, with the real shim and
//! the real kernel under it. It reports all of its memory as free (in blocks of 2 MiB, as guests
//! do), and writes to it again. The time of the writing counts, since a guest waits for it. Three
//! ways alternate: handed over, discarded at once, and not reported at all.
//!
//! The program writes a word to each page: writing or clearing all of the page is the guest's own
//! cost. Whole pages are measured, too.

use worker::{FreedOrder, Mode, STEP, Settings, Tracked};

use super::prelude::*;
use crate::program::Program;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "imr-reuse",
    summary: "memory that is freed and taken back in a loop: handed over, discarded, and not reported",
    measures: &[&[file!()], measured::SHIM],
    claims: claims! {
        "vs_discard" >= 1.5 => "ratio",
            "Freed memory that is used again costs less than where it is discarded at once";
        "vs_none" <= 0.03 => "ratio",
            "It costs as much as where nothing is reported, when a word is written to each page";
        "vs_none_whole" <= 0.03 => "ratio", "It costs as much when all of each page is written";
        "vs_discard_whole" => "ratio",
            "When all of each page is written, discarding costs this much more";
    },
    run,
};

const MIB: u32 = 512;
const PAGES: u32 = MIB * 256;
const ROUNDS: usize = 41;
/// Time for the shim to receive its order.
const HEARD: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum ReuseArm {
    Lazy,
    Discard,
    NotReported,
}

/// Bytes that are written to each page.
const WORD: u32 = 8;
const WHOLE: u32 = 4096;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut loops = Loop::start()?;
    let word = Times::of(&mut loops, WORD)?;
    let whole = Times::of(&mut loops, WHOLE)?;
    let figure = word.vs_discard("a word is written to each page");
    figures.add("vs_discard", figure);
    figures.add("vs_none", word.vs_none());
    figures.add("vs_discard_whole", whole.vs_discard("all of each page is written"));
    figures.add("vs_none_whole", whole.vs_none());
    Ok(figures)
}

/// Seconds to write to all pages: handed over before, discarded, not reported.
struct Times([Vec<f64>; 3]);

impl Times {
    fn of(loops: &mut Loop, bytes: u32) -> Result<Self, LabError> {
        let mut all: [Vec<f64>; 3] = Default::default();
        for _ in 0..ROUNDS {
            for (way, times) in
                [ReuseArm::Lazy, ReuseArm::Discard, ReuseArm::NotReported].into_iter().zip(&mut all)
            {
                times.push(loops.round(way, bytes)?);
            }
            interrupt::sleep(Duration::ZERO)?;
        }
        Ok(Self(all))
    }

    /// The median of the ratios within a turn.
    fn ratio(&self, of: usize, to: usize) -> Median {
        let pairs = self.0[of].iter().zip(&self.0[to]);
        Median::of(pairs.map(|(one, other)| one / other).collect())
    }

    fn vs_discard(&self, what: &str) -> Figure {
        let us = |of: usize| Median::of(self.0[of].clone()).value * 1e6 / f64::from(PAGES);
        let note = format!(
            "{what}: {:.3} us for a page that was handed over, {:.3} discarded, {:.3} not reported",
            us(0),
            us(1),
            us(2)
        );
        Figure::new(self.ratio(1, 0).value, "ratio", note)
    }

    fn vs_none(&self) -> Figure {
        let Median { value, low, high, .. } = self.ratio(0, 2);
        let note = format!("longer than without reports, {:.3} to {:.3}", low - 1.0, high - 1.0);
        Figure::new(value - 1.0, "ratio", note)
    }
}

/// The program, and a worker for its shim.
struct Loop {
    program: Program,
    worker: Tracked,
}

impl Loop {
    fn start() -> Result<Self, LabError> {
        let mut program = Program::start()?;
        let worker = Tracked::new(program.identity(), Settings::new(Mode::Untracked));
        program.tell(&format!("plug {MIB}"))?;
        program.tell(&format!("use 0 0 {PAGES} {WHOLE}"))?;
        Ok(Self { program, worker })
    }

    /// Frees all of it and takes it back; returns the time to take it back, in seconds.
    fn round(&mut self, way: ReuseArm, bytes: u32) -> Result<f64, LabError> {
        self.worker.set_freed(FreedOrder { is_lazy: way == ReuseArm::Lazy, keep: None });
        let until = Instant::now() + HEARD;
        while Instant::now() < until {
            self.worker.step();
            interrupt::sleep(STEP / 10)?;
        }
        if way != ReuseArm::NotReported {
            self.program.tell(&format!("report 0 0 {PAGES}"))?;
        }
        let us = self.program.tell(&format!("use 0 0 {PAGES} {bytes}"))?;
        Ok(us.parse::<f64>().unwrap_or(f64::NAN) / 1e6)
    }
}
