//! `let-go`: the time that a thread of QEMU waits until all of a large VM's memory is mapped
//! again.
//!
//! QEMU may register guest RAM with a userfaultfd of its own (postcopy, a background snapshot),
//! hand it to a device, or change its mappings. Before that, all revoked memory must be back.
//! QEMU's thread waits for that, usually with the lock that all of QEMU needs. So the shim limits
//! the memory that is revoked at a time. Here all of that limit is revoked, of 16 GiB that are
//! tracked in granules of 128 KiB, and in those of 2 MiB, as large VMs are. Then the program does
//! what QEMU does.
//!
//! No memory beyond the limit is touched: memory that is not resident is not revoked either.

use protocol::layout::Counter;
use protocol::{MAX_REVOKE, Request, Tracking, most_revoked};

use super::prelude::*;
use crate::program::Program;
use crate::stress::link::{LinkError, StressLink};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "let-go",
    summary: "how long QEMU's threads wait for all of 16 GiB to be in its place",
    measures: &[&[file!()], measured::SHIM],
    claims: claims! {
        "wait_ms_max" <= 100.0 => "ms",
            "QEMU's threads wait little until 16 GiB that are tracked are in their places";
    },
    run,
};

const MIB: u32 = 16 << 10;
const ROUNDS: usize = 9;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut longest_ms = 0.0_f64;
    for (granule_pages, of_size) in [(32, "128k"), (512, "2m")] {
        let waits = Waits::measure(granule_pages)?;
        longest_ms = longest_ms.max(waits.longest_ms);
        for (call, times) in [("register", waits.registered), ("grow", waits.grown)] {
            let Median { value, low, high, .. } = Median::of(times);
            let note = format!(
                "median, {low:.1} to {high:.1}, the program's own call included; {} MiB were moved out",
                waits.mib
            );
            figures.tell(&format!("{call}_{of_size}_ms"), value, "ms", note);
        }
    }
    let note = format!("the longest of {} as the shim counted them", 4 * ROUNDS);
    figures.tell("wait_ms_max", longest_ms, "ms", note);
    Ok(figures)
}

/// The program's waiting times, in milliseconds.
#[derive(Default)]
struct Waits {
    /// When the program registered its memory itself.
    registered: Vec<f64>,
    /// When the program mapped more.
    grown: Vec<f64>,
    longest_ms: f64,
    /// Memory that was revoked each time.
    mib: u64,
}

impl Waits {
    fn measure(granule_pages: u32) -> Result<Self, LabError> {
        let granules = most_revoked(granule_pages);
        let mut program = Program::start()?;
        program.tell(&format!("plug {MIB}"))?;
        program.tell(&format!("use 0 0 {} 8", granules * granule_pages))?;
        let mut waits = Self { mib: u64::from(granules * granule_pages) / 256, ..Self::default() };
        for _ in 0..ROUNDS {
            let ms = waits.of(&mut program, granule_pages, "register 0", "unregister 0")?;
            waits.registered.push(ms);
            let ms = waits.of(&mut program, granule_pages, "plug 32", "unplug")?;
            waits.grown.push(ms);
            interrupt::sleep(Duration::ZERO)?;
        }
        Ok(waits)
    }

    /// The program's time for `command`, while as much as allowed is revoked; `undo` gets the
    /// number that the program prints.
    fn of(
        &mut self,
        program: &mut Program,
        granule_pages: u32,
        command: &str,
        undo: &str,
    ) -> Result<f64, LabError> {
        let mut link = StressLink::greet(program.pid()).map_err(of_shim)?;
        let tracking =
            Tracking { granule_pages, hot_set: None, sample: u32::MAX, max_traps_per_s: u32::MAX };
        link.ask(&Request::Track(tracking)).map_err(of_shim)?;
        let all: Vec<u32> = (0..most_revoked(granule_pages)).collect();
        for granules in all.chunks(MAX_REVOKE) {
            link.ask(&Request::Revoke { granules: granules.to_vec() }).map_err(of_shim)?;
        }
        let staged_mib = link.staged().1 / 256;
        if staged_mib < self.mib {
            return Err(LabError::Shim(format!("only {staged_mib} MiB are moved out")));
        }
        let began = Instant::now();
        let number = program.tell(command)?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        link.ask(&Request::Status).map_err(of_shim)?;
        let counters = link.shared().ok_or_else(|| LabError::Shim("no counters".to_owned()))?;
        let waited = counters.get(Counter::LongestWaitNs);
        self.longest_ms = self.longest_ms.max(Duration::from_nanos(waited).as_secs_f64() * 1e3);
        program.tell(format!("{undo} {number}").trim_end())?;
        Ok(ms)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "what map_err calls")]
fn of_shim(error: LinkError) -> LabError {
    LabError::Shim(error.to_string())
}
