//! `let-go`: for how long a thread of QEMU's waits until all of a large VM's memory is in its
//! place.
//!
//! Before QEMU registers guest RAM with a userfaultfd of its own (postcopy, a background snapshot),
//! hands it to a device, or changes what is mapped there, everything that is out of reach must be
//! back, and QEMU's thread waits for that, as a rule with the lock that all of QEMU needs. So the
//! shim lets no more than 1 GiB be out of reach at a time. Here that much is, of 16 GiB that are
//! tracked in granules of 128 KiB, in small pages; then the program does what QEMU does.
//!
//! No memory beyond that GiB is touched: what is not there is not out of reach either.

use std::time::{Duration, Instant};

use protocol::layout::Counter;
use protocol::{MAX_REVOKE, Request, Tracking};

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::lab::LabError;
use crate::meb::pairs::Median;
use crate::program::Program;
use crate::stress::link::{Link, LinkError};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "let-go",
    summary: "how long QEMU's threads wait for all of 16 GiB to be in its place",
    run,
};

const MIB: u32 = 16 << 10;
const GRANULE_PAGES: u32 = 32;
/// So many are out of reach, as many as may be.
const GRANULES: u32 = 8_192;
const ROUNDS: usize = 9;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut program = Program::start()?;
    program.tell(&format!("plug {MIB}"))?;
    program.tell(&format!("use 0 0 {} 8", GRANULES * GRANULE_PAGES))?;
    let (mut registered, mut grown, mut longest_ms) = (Vec::new(), Vec::new(), 0.0_f64);
    let mut staged = u64::MAX;
    for _ in 0..ROUNDS {
        for (command, after, times) in
            [("register 0", "unregister 0", &mut registered), ("plug 32", "unplug 1", &mut grown)]
        {
            let mut link = Link::greet(program.pid()).map_err(of_shim)?;
            staged = staged.min(take_out_of_reach(&mut link)?);
            let began = Instant::now();
            let number = program.tell(command)?;
            times.push(began.elapsed().as_secs_f64() * 1e3);
            link.ask(&Request::Status).map_err(of_shim)?;
            let waited = link.shared().map_or(0, |shared| shared.get(Counter::LongestWaitNs));
            longest_ms = longest_ms.max(Duration::from_nanos(waited).as_secs_f64() * 1e3);
            let after =
                if number.is_empty() { after.to_owned() } else { format!("unplug {number}") };
            program.tell(&after)?;
            interrupt::sleep(Duration::ZERO)?;
        }
    }
    let note = format!("the longest of {} as the shim counted them", 2 * ROUNDS);
    figures.add("wait_ms_max", Figure::new(longest_ms, "ms", note).target(Target::AtMost(100.0)));
    for (name, times) in [("register_ms", registered), ("grow_ms", grown)] {
        let Median { value, low, high, .. } = Median::of(times);
        let note = format!("median, {low:.1} to {high:.1}, the program's own call included");
        figures.add(name, Figure::new(value, "ms", note));
    }
    #[expect(clippy::cast_precision_loss, reason = "pages of a VM")]
    let mib = staged as f64 / 256.0;
    let note = "out of reach each time, at least".to_owned();
    figures.add("staged_mib", Figure::new(mib, "MiB", note).target(Target::AtLeast(1024.0)));
    Ok(figures)
}

/// Takes as much out of reach as may be; answers how many pages that are.
fn take_out_of_reach(link: &mut Link) -> Result<u64, LabError> {
    let tracking = Tracking {
        granule_pages: GRANULE_PAGES,
        hot_set: None,
        sample: u32::MAX,
        max_traps_per_s: u32::MAX,
    };
    link.ask(&Request::Track(tracking)).map_err(of_shim)?;
    let all: Vec<u32> = (0..GRANULES).collect();
    for granules in all.chunks(MAX_REVOKE) {
        link.ask(&Request::Revoke { granules: granules.to_vec() }).map_err(of_shim)?;
    }
    Ok(link.staged().1)
}

#[expect(clippy::needless_pass_by_value, reason = "what map_err calls")]
fn of_shim(error: LinkError) -> LabError {
    LabError::Shim(error.to_string())
}
