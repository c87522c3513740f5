//! `smd-fig12`: the time until the guests' common code is shared: with a table made before they
//! run, by scanning as they run, and by the kernel's KSM (SMD §4.4, Figs. 12 to 14).
//!
//! Four guests run real programs from one Debian: a web server, a database, a compiler, a shell.
//! The table is made of the executables' code. Merging begins with the last guest, at the same
//! rate for all ways. "Code" is every page of a guest that the table names. A page of code could
//! be shared when another one equals it; the frames show which are shared. In the three ways that
//! are compared the guests do not check their programs: that reads whole files, most of which
//! never runs. One course more, with the table, has guests that check theirs every
//! [`CHECK_S`] seconds. It tells the share of all code that they ever bring in which is shared
//! after a second: code that a guest has not read yet cannot be shared. Reading all pages takes
//! seconds, so guests, merging and the clock pause meanwhile.
//!
//! **Models.** Figs. 13 and 14 are not measured on a running kernel: comparisons are counted over
//! the guests' memory at the end. KSM's are those of a model of its trees, with and without the
//! paper's classes; ours are those of the worker's index. An index hashes each page, which the
//! number of comparisons leaves out. So the bytes that each of both reads are counted, too: hashed
//! (KSM's checksums in every pass, our hashes), and compared up to the first difference.

use std::collections::HashMap;

use pages::dedup::{ContentLocation, Index, KnownPages};
use pages::offline::{Sampled, Sampling, hash};
use serde_json::json;

use super::prelude::*;
use crate::alike::{GuestPage, Named, pages};
use crate::ksm::{self, Ksm};
use crate::ksm_trees::{self, Comparisons};
use crate::merger::{Merger, Merging};
use crate::smd::{GUESTS, Programs};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-fig12",
    summary: "how soon guests share their programs' code: known before, found as they run, by KSM",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::TABLES,
        measured::ARMS,
        measured::MERGER,
    ],
    claims: claims! {
        "code_shared_1s" >= 0.9 => "ratio",
            "Of the code that is ever shared, nearly all is a second after all guests work",
            "all of it";
        "code_shared_1s_checked" => "ratio",
            "Where guests also read whole program files to check them, this part of the code \
             that can be shared in the end is shared then";
        "comparisons_vs_ksm" <= 0.32 => "ratio",
            "By a model, an index needs few of the comparisons of KSM's trees",
            "0.32 to 0.34";
        "futile_vs_ksm" <= 0.1 => "ratio",
            "By the same model, hardly any of them is futile", "0.78";
        "bytes_vs_ksm" => "ratio",
            "By the same model, it reads this part of the bytes that KSM reads, hashed ones \
             included";
    },
    run,
};

/// Pages scanned in a millisecond: KSM's usual rate is half of it.
const RATE: u32 = 10;
/// Times of the samples, in seconds after the programs of all guests have begun to work.
const LOOKS: [f64; 17] = [
    1.0, 3.0, 6.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 150.0, 180.0, 210.0, 240.0,
    270.0, 300.0,
];
/// Seconds between two checks of a guest's programs.
const CHECK_S: u32 = 20;
/// A course lasts at least this long, and ends when [`NEARLY`] of the code is shared.
const LEAST_S: f64 = 90.0;
const NEARLY: f64 = 0.9;
/// KSM merges in its second pass, and all that it finds by its third.
const PASSES: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum ScanArm {
    Static,
    Dynamic,
    Kernel,
}

/// Guests that check their programs, with the table.
const CHECKED: &str = "static, programs checked";
/// The ways, and the seconds between two checks; 0: none.
const WAYS: [(&str, (ScanArm, u32)); 4] = [
    ("static", (ScanArm::Static, 0)),
    ("dynamic", (ScanArm::Dynamic, 0)),
    ("ksm", (ScanArm::Kernel, 0)),
    (CHECKED, (ScanArm::Static, CHECK_S)),
];

/// Result of a sample.
struct ScanSample {
    /// Seconds after the programs began to work.
    at: f64,
    /// Pages of code that could be shared, and the number of these that are.
    alike: u64,
    shared: u64,
}

impl ScanSample {
    fn share(&self) -> f64 {
        ratio(self.shared, self.alike)
    }
}

type Course = Vec<ScanSample>;

fn run(context: &Context) -> Result<Figures, LabError> {
    let programs = Programs::provide(context)?;
    let mut last = Vec::new();
    let courses = Arms::once(context, &WAYS, |_, (way, check_s)| {
        let (course, seen) = course(context, &programs, *way, *check_s)?;
        for look in &course {
            let (at, share, alike) = (look.at, look.share() * 100.0, look.alike);
            context.say(&format!("  {at:.1} s: {share:.1} % of {alike}"));
        }
        if *way == ScanArm::Kernel {
            last = seen;
        }
        Ok(course)
    })?;
    let mut figures = context.figures(SCENARIO.name, 1);
    add_shares(&mut figures, &courses);
    add_comparisons(&mut figures, &last);
    let lines = courses.iter().map(|(name, course)| {
        Line::new(name, course.iter().map(|look| (look.at, look.share() * 100.0)))
    });
    let chart = Chart::linear("% of the code that could be shared", "seconds", lines);
    Page::of("Code of four guests that is shared", chart).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// Reads all pages, while nothing changes them.
fn look(lab: &Lab, merging: Option<&Merging>, pids: &[u32]) -> Result<Vec<GuestPage>, LabError> {
    let tell = |what| lab.machines().iter().try_for_each(|it| it.qmp(what, json!({})).map(drop));
    let scan = |works: bool| {
        match merging {
            Some(Merging::Ours(merger)) => merger.set_rate(if works { RATE } else { 0 }),
            Some(Merging::Kernel(ksm)) if works => ksm.go_on()?,
            Some(Merging::Kernel(ksm)) => ksm.stop()?,
            None => {}
        }
        Ok::<_, LabError>(())
    };
    tell("stop")?;
    scan(false)?;
    let seen = pages(pids)?;
    scan(true)?;
    tell("cont")?;
    Ok(seen)
}

fn course(
    context: &Context,
    programs: &Programs,
    way: ScanArm,
    check_s: u32,
) -> Result<(Course, Vec<GuestPage>), LabError> {
    let table = programs.table()?;
    let spec = |guest| {
        let mut spec = programs.machine(guest);
        spec.workload.extend(["--check-s".to_owned(), check_s.to_string()]);
        MachineSpec { shim: way != ScanArm::Kernel, ..spec }
    };
    let specs: Vec<MachineSpec> = GUESTS.iter().map(spec).collect();
    let mut merging = None;
    let mut lab = Lab::start_in_turn(&context.dir, &context.provisions, &specs, |lab| {
        let pids = lab.pids();
        if pids.len() == GUESTS.len() {
            merging = Some(match way {
                ScanArm::Static => {
                    let known = KnownPages::of(&table);
                    Merging::Ours(Merger::start_knowing(&pids, Some(RATE), known)?)
                }
                ScanArm::Dynamic => Merging::Ours(Merger::start(&pids, Some(RATE), None)?),
                ScanArm::Kernel => Merging::Kernel(Ksm::start(ksm::pages_per_ms(RATE))?),
            });
        }
        Ok(())
    })?;
    fleet::wait_until_working(&lab)?;
    let (mut since, mut at) = (Instant::now(), Duration::ZERO);
    let pids = lab.pids();
    let named = Named::by(&table);
    let (mut course, mut seen) = (Vec::new(), Vec::new());
    for due in LOOKS {
        if due > LEAST_S && course.last().is_some_and(|look: &ScanSample| look.share() >= NEARLY) {
            break;
        }
        let due = Duration::from_secs_f64(due);
        interrupt::sleep(due.saturating_sub(at + since.elapsed()))?;
        at += since.elapsed();
        seen = look(&lab, merging.as_ref(), &pids)?;
        since = Instant::now();
        let (alike, shared) = named.alike(&seen);
        course.push(ScanSample { at: at.as_secs_f64(), alike, shared });
    }
    drop(merging);
    lab.stop()?;
    Ok((course, seen))
}

/// The share of all code that could be shared at the end of a course which was shared at its
/// first look; NaN where one of both is missing.
fn shared_at_first(course: &[ScanSample]) -> f64 {
    match course {
        [first, .., last] => ratio(first.shared, last.alike),
        _ => f64::NAN,
    }
}

fn add_shares(figures: &mut Figures, courses: &Arms<Course>) {
    let at_first = |name: &str| courses.number(name, |course| shared_at_first(course));
    let note =
        "of the code that can be shared in the end, is shared a second after all guests work";
    figures.tell("code_shared_1s", at_first("static"), "ratio", note);
    figures.tell("code_shared_1s_dynamic", at_first("dynamic"), "ratio", note);
    figures.tell("code_shared_1s_ksm", at_first("ksm"), "ratio", note);
    let note = "the same with the table, where guests read whole program files";
    figures.tell("code_shared_1s_checked", at_first(CHECKED), "ratio", note);
    let least = |course: &Course| course.iter().map(ScanSample::share).smallest();
    let note = "with the table, at the worst of all looks, of what could be shared then";
    figures.tell("code_shared_least", courses.number("static", least), "ratio", note);
    for name in ["static", "dynamic", "ksm"] {
        let done = courses.number(name, |course| {
            course.iter().find(|look| look.share() >= NEARLY).map_or(f64::NAN, |look| look.at)
        });
        let note = "until 0.9 of what could be was seen to be shared";
        figures.tell(&format!("shared_after_{name}"), done, "s", note);
    }
}

fn add_comparisons(figures: &mut Figures, seen: &[GuestPage]) {
    let contents: Vec<&[u8]> = seen.iter().map(|page| &page.content[..]).collect();
    let (kernel, shared, _) = ksm_trees::scan(&contents, PASSES);
    let classes = by_class(seen);
    let in_classes = classes.values().map(|pages| ksm_trees::scan(pages, PASSES).0);
    let classified = in_classes.fold(Comparisons::default(), Comparisons::plus);
    let ours = with_index(seen);
    let note =
        format!("comparisons to KSM's, over {} pages of which {shared} are shared", seen.len());
    figures.tell("comparisons_vs_ksm", ratio(ours.all, kernel.all), "ratio", note);
    let note = "bytes hashed and compared, to KSM's";
    figures.tell("bytes_vs_ksm", ratio(ours.bytes, kernel.bytes), "ratio", note);
    let note = "of these, comparisons of pages that are not equal, to KSM's";
    figures.tell("futile_vs_ksm", ratio(ours.futile, kernel.futile), "ratio", note);
    let note = "KSM's trees for each of the paper's classes, to KSM's";
    figures.tell("classes_vs_ksm", ratio(classified.all, kernel.all), "ratio", note);
    let note = "of KSM's comparisons";
    let futile = Figure::new(ratio(kernel.futile, kernel.all), "ratio", note);
    figures.add("futile_ksm", futile.paper("0.8"));
}

fn ratio(one: u64, other: u64) -> f64 {
    one as f64 / other as f64
}

fn by_class(seen: &[GuestPage]) -> HashMap<Sampled, Vec<&[u8]>> {
    let mut classes: HashMap<Sampled, Vec<&[u8]>> = HashMap::new();
    for page in seen {
        let class = Sampling::default().sample(&page.content);
        classes.entry(class).or_default().push(&page.content[..]);
    }
    classes
}

/// Comparisons where an index of hashes proposes pages: a page with its twin, and both with their
/// slot; each further page with the slot.
fn with_index(seen: &[GuestPage]) -> Comparisons {
    let mut counted = Comparisons::default();
    let most = u32::try_from(seen.len()).unwrap_or(u32::MAX);
    let mut index = Index::new(most);
    let mut slots: Vec<&GuestPage> = Vec::new();
    for (page, number) in seen.iter().zip(0..) {
        counted.read(&page.content[..]);
        #[expect(clippy::cast_possible_truncation, reason = "its low half is a hash, too")]
        let short = hash(&page.content) as u64;
        match index.meet(short, number) {
            None => {}
            Some(ContentLocation::Pool(slot)) => {
                counted.compare(&page.content[..], &slots[slot as usize].content[..]);
            }
            Some(ContentLocation::Guest(twin)) => {
                let twin = &seen[twin as usize];
                let order = counted.compare(&page.content[..], &twin.content[..]);
                if order == std::cmp::Ordering::Equal {
                    let slot = u32::try_from(slots.len()).unwrap_or(u32::MAX);
                    slots.push(page);
                    index.set(short, ContentLocation::Pool(slot));
                    counted.compare(&page.content[..], &page.content[..]);
                    counted.compare(&twin.content[..], &page.content[..]);
                }
            }
        }
    }
    counted
}

#[cfg(test)]
mod tests;
