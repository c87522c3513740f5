//! `imr-reuse`: what memory costs that is freed and taken back again and again, while the host has plenty.
//!
//! A guest pays for its own page faults in any case, and under emulation they hide everything else. So the loop is that of a
//! program that treats its memory as QEMU does, with the real shim and the real kernel under it: it writes all of its
//! memory, says that it is free (in blocks of 2 MiB, as guests do), and writes it again. The time of the writing counts: what
//! a guest waits for. Three ways in turn: handed over, discarded at once, and not reported at all.

use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use overbook::worker::{FreedOrder, Mode, STEP, Settings, Tracked};
use sys::process::{Child, Spawn};

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::inside::{SHIM, built};
use crate::interrupt;
use crate::lab::LabError;
use crate::meb::pairs::Median;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "imr-reuse",
    summary: "memory that is freed and taken back in a loop: handed over, discarded, and not reported",
    run,
};

const MIB: u32 = 512;
const PAGES: u32 = MIB * 256;
const ROUNDS: usize = 61;
/// In which the shim has heard what to do.
const HEARD: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Lazy,
    Discard,
    NotReported,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut loops = Loop::start()?;
    let ways = [Way::Lazy, Way::Discard, Way::NotReported];
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for (way, times) in ways.into_iter().zip(&mut times) {
            times.push(loops.round(way)?);
        }
        interrupt::sleep(Duration::ZERO)?;
    }
    let ratio = |of: usize, to: usize| {
        Median::of(times[of].iter().zip(&times[to]).map(|(one, other)| one / other).collect())
    };
    let median = |of: usize| Median::of(times[of].clone()).value * 1e6 / f64::from(PAGES);
    let note = format!(
        "time to write a page of 4 KiB: {:.3} us handed over, {:.3} discarded, {:.3} not reported",
        median(0),
        median(1),
        median(2)
    );
    let figure = Figure::new(ratio(1, 0).value, "ratio", note);
    figures.add("vs_discard", figure.target(Target::AtLeast(1.5)));
    let vs_none = ratio(0, 2);
    let note = format!(
        "longer than without reports, {:.3} to {:.3}",
        vs_none.low - 1.0,
        vs_none.high - 1.0
    );
    let figure = Figure::new(vs_none.value - 1.0, "ratio", note);
    figures.add("vs_none", figure.target(Target::AtMost(0.03)));
    Ok(figures)
}

/// The program, and a worker for its shim.
struct Loop {
    _child: Child,
    commands: PipeWriter,
    answers: BufReader<PipeReader>,
    worker: Tracked,
}

impl Loop {
    fn start() -> Result<Self, LabError> {
        let ((stdin, commands), (answers, stdout)) = (std::io::pipe()?, std::io::pipe()?);
        let child = Spawn::new(built("overbook-shim-stand-in")?)
            .env("LD_PRELOAD", built(SHIM)?)
            .stdin(OwnedFd::from(stdin))
            .stdout(OwnedFd::from(stdout))
            .die_with_parent()
            .spawn()?;
        let worker = Tracked::new(child.identity().pid, Settings::new(Mode::Untracked));
        let mut loops = Self { _child: child, commands, answers: BufReader::new(answers), worker };
        loops.tell(&format!("plug {MIB}"))?;
        loops.tell(&format!("use 0 0 {PAGES}"))?;
        Ok(loops)
    }

    /// Frees all of it and takes it back; answers how long that took, in seconds.
    fn round(&mut self, way: Way) -> Result<f64, LabError> {
        self.worker.set_freed(FreedOrder { is_lazy: way == Way::Lazy, keep: None });
        let until = Instant::now() + HEARD;
        while Instant::now() < until {
            self.worker.step();
            interrupt::sleep(STEP / 10)?;
        }
        if way != Way::NotReported {
            self.tell(&format!("report 0 0 {PAGES}"))?;
        }
        let us = self.tell(&format!("use 0 0 {PAGES}"))?;
        Ok(us.parse::<f64>().unwrap_or(f64::NAN) / 1e6)
    }

    fn tell(&mut self, command: &str) -> Result<String, LabError> {
        writeln!(self.commands, "{command}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        match line.trim_end().split_once(' ') {
            Some(("ok", answer)) => Ok(answer.to_owned()),
            _ if line.trim_end() == "ok" => Ok(String::new()),
            _ => Err(std::io::Error::other(format!("{command}: {line}")).into()),
        }
    }
}
