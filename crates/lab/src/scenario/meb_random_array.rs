//! `meb-random-array`: a known working set that grows and shrinks, compared with its estimate
//! every second (MEB §5.2.1, Fig. 9).
//!
//! A guest of 400 MB works at random over an array whose size changes every 30 to 40 s. One array
//! has between 40 and 350 MB, which fits. The other has between 40 and 700 MB, which does not fit
//! and spills into swap. The guest reports the swap in use, which is added to the working set.
//! Each phase has an array of its own. Of the 400 MB the guest's kernel keeps 43 for itself, and
//! some 35 more go to its programs and its reserve. So the array that fits spills some 30 MB as
//! well at 350 MB, for which its guest has a swap disk like any server's. Each of the two guests
//! has a twin that does the same at the same time under an ESX-style estimator
//! ([`sampler`](crate::meb::sampler)). All four work at the same pace, so that four fit on two
//! CPUs.
//!
//! The error is that of every second, including those right after a change: |estimate - array| /
//! array. Other memory that the guest needs (its kernel, its programs: some MB) counts as error.

use std::path::Path;

use super::prelude::*;
use crate::command::last_lines;
use crate::meb::modes;
use crate::meb::peek::Peek;
use crate::meb::progress::Line as Report;
use crate::meb::watch::Watch;
use crate::meb::workloads::cpu_of;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "meb-random-array",
    summary: "a known set growing and shrinking: estimated every second, beside ESX-style sampling",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SHIM, measured::MEB],
    claims: claims! {
        "error_mean" <= 0.1346 => "ratio",
            "The estimate follows a set that grows and shrinks", "0.1346";
        "error_esx" => "ratio",
            "Sampling as VMware ESX did it is far off on the same set", "0.7436";
        "error_fits" => "ratio", "Where the set fits into the guest's memory, it is off by this";
        "error_spills" => "ratio", "Where the set spills into swap, it is off by this";
        "error_esx_fits" => "ratio", "Where the set fits, that sampling is off by this";
        "error_esx_spills" => "ratio", "Where the set spills, that sampling is off by this";
    },
    run,
};

const MEMORY: Bytes = Bytes::mib(400);
const SWAP: Bytes = Bytes::mib(640);
/// Each granule is touched several times in each tenth of a second.
const ACCESSES_PER_S: u32 = 200_000;

/// Phases: MB and seconds.
const FITS: &[(u32, u32)] = &[
    (40, 40),
    (120, 40),
    (200, 35),
    (350, 40),
    (280, 30),
    (160, 40),
    (80, 35),
    (300, 40),
    (40, 40),
];
const SPILLS: &[(u32, u32)] =
    &[(40, 40), (200, 40), (350, 30), (500, 45), (700, 60), (450, 40), (250, 40), (40, 45)];
/// A guest reports each second, also while it swaps. A guest that is silent for this long has
/// lost its workload (out of memory, say), and its array is no longer known.
const SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// Counted from the first access: one period of the tracker's ageing.
const WARM_UP: Duration = Duration::from_secs(15);

/// One of the two arrays: one fits, one spills.
struct ArrayPart {
    name: &'static str,
    phases: &'static [(u32, u32)],
}

const PARTS: [ArrayPart; 2] =
    [ArrayPart { name: "fits", phases: FITS }, ArrayPart { name: "spills", phases: SPILLS }];

/// One second, in MiB.
#[derive(Debug, Clone, Copy)]
struct ArraySecond {
    at_s: f64,
    known: f64,
    tracked: Option<f64>,
    sampled: f64,
    /// The array of the sampled twin, which may be a second ahead or behind.
    known_sampled: f64,
}

/// A guest that is tracked, and its twin that is sampled.
struct Twins {
    part: &'static ArrayPart,
    watch: Watch,
    peek: Peek,
    seconds: Vec<ArraySecond>,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let specs: Vec<MachineSpec> =
        PARTS.iter().enumerate().flat_map(|(n, p)| p.guests(n, context)).collect();
    context.say("Two arrays of changing size, each in two guests of 400 MB, for five and a half minutes ...");
    let mut lab = context.start(specs)?;
    let mut all = Vec::new();
    for part in &PARTS {
        let pid = |name: String| lab.machine(&name).map(|machine| machine.process().pid);
        let watch =
            Watch::start(pid(part.tracked())?, modes::shipped(), &[], Duration::from_millis(200))?;
        let peek = Peek::start(pid(part.sampled())?, context.seed)?;
        all.push(Twins { part, watch, peek, seconds: Vec::new() });
    }
    progress::wait_until_working(&lab)?;
    let began = Instant::now();
    let length = PARTS.iter().map(|part| part.length()).max().unwrap_or_default();
    let mut next = began;
    while began.elapsed() < length {
        next += Duration::from_secs(1);
        for twins in &mut all {
            twins.look(&lab, began)?;
        }
        interrupt::sleep(next.saturating_duration_since(Instant::now()))?;
    }
    drop(lab.stop());
    let mut figures = figures(context, &all);
    page(&all).write(&context.dir, &mut figures)?;
    Ok(figures)
}

impl ArrayPart {
    fn tracked(&self) -> String {
        format!("{}-tracked", self.name)
    }

    fn sampled(&self) -> String {
        format!("{}-sampled", self.name)
    }

    fn length(&self) -> Duration {
        Duration::from_secs(self.phases.iter().map(|phase| u64::from(phase.1)).sum())
    }

    fn guests(&self, place: usize, context: &Context) -> [MachineSpec; 2] {
        let phases: Vec<String> =
            self.phases.iter().map(|(mb, seconds)| format!("{mb}:{seconds}")).collect();
        // Words of a workload are separated by commas on their way into the guest.
        let phases = phases.join("+");
        let workload = format!("random-array --phases {phases} --rate {ACCESSES_PER_S}");
        [self.tracked(), self.sampled()].map(|name| {
            let spec = MachineSpec::new(&name, "meb", MEMORY, MEMORY, &workload);
            let spec = spec.with_swap(SWAP, None);
            MachineSpec { seed: context.seed, shim: true, cpus: cpu_of(place), ..spec }
        })
    }
}

impl Twins {
    fn look(&mut self, lab: &Lab, began: Instant) -> Result<(), LabError> {
        let tracked = report_of(lab.machine(&self.part.tracked())?)?;
        let sampled = report_of(lab.machine(&self.part.sampled())?)?;
        let share = self.peek.active()?;
        let (Some(tracked), Some(sampled)) = (tracked, sampled) else { return Ok(()) };
        if let Some(kb) = tracked.value["swap_kb"].as_u64() {
            self.watch.set_swapped(Bytes::kib(kb));
        }
        let (Some(known), Some(known_sampled)) = (tracked.number("mb"), sampled.number("mb"))
        else {
            return Ok(());
        };
        if began.elapsed() >= WARM_UP && began.elapsed() < self.part.length() {
            let seen = self.watch.latest();
            let estimate = seen.and_then(|seen| seen.tracking.working_set).map(Bytes::as_mib);
            self.seconds.push(ArraySecond {
                at_s: began.elapsed().as_secs_f64(),
                known,
                tracked: estimate,
                sampled: share * MEMORY.as_mib(),
                known_sampled,
            });
        }
        Ok(())
    }

    /// The mean error; an unknown estimate counts as an estimate of zero.
    fn error(&self) -> f64 {
        mean(self.seconds.iter().map(|s| (s.tracked.unwrap_or(0.0) - s.known).abs() / s.known))
    }

    fn sampling_error(&self) -> f64 {
        mean(self.seconds.iter().map(|s| (s.sampled - s.known_sampled).abs() / s.known_sampled))
    }
}

/// The guest's last report, which must be recent.
fn report_of(machine: &Machine) -> Result<Option<Report>, LabError> {
    machine.ensure_alive()?;
    let report = Report::newest(machine);
    if let Some(report) = &report {
        let silence = report.arrived.elapsed();
        check_silence(&machine.spec().name, silence, &machine.files().console)?;
    }
    Ok(report)
}

fn check_silence(name: &str, silence: Duration, console: &Path) -> Result<(), LabError> {
    if silence <= SILENCE_LIMIT {
        return Ok(());
    }
    let console = std::fs::read(console).unwrap_or_default();
    let words = last_lines(&String::from_utf8_lossy(&console), 8);
    let what = format!("machine {name} to report; its last words:\n{words}");
    Err(LabError::Timeout { what, limit: SILENCE_LIMIT })
}

fn figures(context: &Context, all: &[Twins]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let seconds: f64 = all.iter().map(|twins| twins.seconds.len() as f64).sum();
    let over_all = |error: fn(&Twins) -> f64| {
        all.iter().map(|twins| error(twins) * twins.seconds.len() as f64).sum::<f64>() / seconds
    };
    let note =
        format!("|estimate - array| / array over {seconds} seconds, changes included, both parts");
    figures.tell("error_mean", over_all(Twins::error), "ratio", note);
    let note = "the same of ESX-style sampling";
    figures.tell("error_esx", over_all(Twins::sampling_error), "ratio", note);
    for twins in all {
        let name = twins.part.name;
        figures.tell(&format!("error_{name}"), twins.error(), "ratio", "of that part");
        let (error, note) = (twins.sampling_error(), "of that part, by sampling");
        figures.tell(&format!("error_esx_{name}"), error, "ratio", note);
    }
    figures
}

fn page(all: &[Twins]) -> Page {
    let mut page = Page::default();
    for twins in all {
        let line = |name: &str, value: &dyn Fn(&ArraySecond) -> Option<f64>| {
            Line::new(name, twins.seconds.iter().filter_map(|s| Some((s.at_s, value(s)?))))
        };
        let lines = vec![
            line("array", &|second| Some(second.known)),
            line("tracked", &|second| second.tracked),
            line("sampled", &|second| Some(second.sampled)),
        ];
        let chart = Chart::linear("MiB", "seconds", lines);
        page.add(&format!("An array that {} 400 MB", twins.part.name), chart);
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_has_lost_its_workload_ends_the_scenario_with_its_last_words() {
        let console = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(console.path(), "up\nworkload ended with exit code 137\n").unwrap();
        let check = |silence| check_silence("fits-tracked", silence, console.path());
        assert!(check(SILENCE_LIMIT).is_ok());
        let error = check(SILENCE_LIMIT + Duration::from_secs(1)).unwrap_err().to_string();
        assert!(error.contains("machine fits-tracked"), "{error}");
        assert!(error.ends_with("workload ended with exit code 137"), "{error}");
    }
}
