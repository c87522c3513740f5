//! `smd-fig1`: the identical pages of guests: by segment, on the same and on different systems,
//! and the number of times that each is shared (SMD §2.1, §4.2, Figs. 1, 6, 7 and 9).
//!
//! Three web servers and three databases run, once all on one Debian, once on three releases.
//! Overbook merges their pages, with a table of the code of these systems. Then each guest
//! reports the use of each page ([`crate::census`]) and is paused, and all pages are read. Two
//! pages are identical when their contents are equal, and shared when they have the same frame.
//! Pages of zeros are left out.
//!
//! The paper's Figs. 6 and 7 show speed where memory is short. That speed depends on the amount
//! of sharing, which is measured here. All guests run one kernel, so systems are compared by the
//! pages of their programs.

use std::collections::{HashMap, HashSet};

use pages::dedup::KnownPages;
use pages::offline::{TableRef, hash, overlap};

use super::prelude::*;
use crate::alike;
use crate::cache::Cache;
use crate::census::{self, Census, PageOwner};
use crate::debian::{self, Debian};
use crate::merger::Merger;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-fig1",
    summary: "which pages guests share: by segment, on the same or other systems, how often",
    measures: &[&[file!()], measured::PAGES, measured::TABLES],
    claims: claims! {
        "identical_code" => "ratio",
            "Code is the part that two services have in common (nginx and redis on one system)";
        "code_above_others" >= 0.1 => "ratio",
            "Code has more of it than data and stacks", "the most of three segments";
        "same_vs_different" >= 2.0 => "ratio",
            "Guests on the same system share more than those on different ones", "more";
        "shared_of_identical" >= 0.97 => "ratio", "All that is identical is shared";
        "times_shared_2" => "pages", "Two guests share a frame this often, where it is shared";
        "times_shared_4" => "pages", "Four guests share a frame more often";
        "times_shared_6" => "pages", "Six guests share a frame still more often";
    },
    run,
};

const SYSTEMS: [&str; 3] = ["bullseye", "bookworm", "trixie"];
/// The system of all guests where they have the same.
const SAME: usize = 1;
const PROGRAMS: [(&str, &str); 2] =
    [("web", "nginx --mb 8 --check-s 0"), ("database", "redis --mb 8 --check-s 0")];
const MEMORY: Bytes = Bytes::mib(192);
/// One guest for each program on each system, in turn: the first three are on different systems,
/// and the first two, four and six have equal numbers of both programs.
const GUESTS: usize = SYSTEMS.len() * PROGRAMS.len();
/// Sizes of fleets for which the figures show how many times pages are shared.
const SIZES: [usize; 3] = [2, 4, 6];
/// The time that programs work before the measurement.
const SETTLE: Duration = Duration::from_secs(10);
/// Merging has ended when it has grown by less than a thousandth between two samples.
const LOOK_EVERY: Duration = Duration::from_secs(3);
const MOST_LOOKS: u32 = 30;

/// A page of a guest.
struct SharingSample {
    kind: PageOwner,
    hash: u128,
    frame: u64,
}

type Guest = Vec<SharingSample>;

fn run(context: &Context) -> Result<Figures, LabError> {
    let cache = Cache::open()?;
    let systems = SYSTEMS.map(|codename| Debian::of_release(&cache, codename));
    let systems: Vec<Debian> = systems.into_iter().collect::<Result<_, _>>()?;
    let known = debian::code(&systems.iter().collect::<Vec<_>>())?;
    let known = KnownPages::of(&TableRef::parse(&known).map_err(std::io::Error::other)?);
    let fleet = |name: &str, systems: [&Debian; SYSTEMS.len()]| {
        context.say(&format!("six guests on {name} ..."));
        fleet(context, systems, &known)
    };
    let same = fleet("the same system", [&systems[SAME]; 3])?;
    let different = fleet("different systems", [&systems[0], &systems[1], &systems[2]])?;
    let mut figures = context.figures(SCENARIO.name, 1);
    by_segment(&mut figures, &same);
    by_system(&mut figures, &same, &different);
    tables(&mut figures, &systems)?;
    by_times(&mut figures, &same);
    page(&same, &different).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// The pages of each guest of a fleet, once its pages are merged.
fn fleet(
    context: &Context,
    systems: [&Debian; SYSTEMS.len()],
    known: &KnownPages,
) -> Result<Vec<Guest>, LabError> {
    let guest = |number: usize| {
        let (name, work) = PROGRAMS[number % PROGRAMS.len()];
        let name = format!("{name}-{number}");
        let spec = MachineSpec::new(&name, "systems", MEMORY, MEMORY, work);
        let spec = census::counting(spec.with_debian(systems[number % systems.len()]));
        // With equal seeds all databases would have the same values.
        MachineSpec { shim: true, seed: context.seed + number as u64, ..spec }
    };
    let specs: Vec<MachineSpec> = (0..GUESTS).map(guest).collect();
    let mut lab = context.start(specs.clone())?;
    progress::wait_until_working(&lab)?;
    let pids = lab.pids();
    let merger = Merger::start_knowing(&pids, None, known.clone())?;
    interrupt::sleep(SETTLE)?;
    let census = |machine| Census::take(&lab, machine);
    let censuses = lab.machines().iter().map(census).collect::<Result<_, _>>()?;
    let guests = when_merged(&pids, censuses)?;
    drop(merger);
    lab.stop()?;
    for (spec, guest) in specs.iter().zip(&guests) {
        context.say(&format!("  {}: pages {}", spec.name, in_words(guest)));
    }
    Ok(guests)
}

/// The number of its pages of each kind.
fn in_words(guest: &Guest) -> String {
    let kinds = [
        ("of code", PageOwner::Code),
        ("of constants", PageOwner::Constant),
        ("of data", PageOwner::Data),
        ("of stacks", PageOwner::Stack),
        ("of files", PageOwner::File),
        ("of the kernel", PageOwner::System),
        ("free", PageOwner::Free),
    ];
    let count = |kind: PageOwner| guest.iter().filter(|page| page.kind == kind).count();
    kinds.map(|(name, kind)| format!("{name} {}", count(kind))).join(", ")
}

/// Samples until nothing more is merged.
fn when_merged(pids: &[u32], censuses: Vec<Census>) -> Result<Vec<Guest>, LabError> {
    let mut last = 0;
    for _ in 0..MOST_LOOKS {
        let mut guests = Vec::new();
        for (pid, census) in pids.iter().zip(&censuses) {
            let pages = alike::pages(&[*pid])?;
            let seen = |page: &alike::GuestPage| {
                let kind = census.kind_of(page.address)?;
                Some(SharingSample { kind, hash: hash(&page.content), frame: page.frame })
            };
            guests.push(pages.iter().filter_map(seen).collect());
        }
        let merged = Counted::of(&guests, |_| true).merged();
        if merged <= last + last / 1000 {
            return Ok(guests);
        }
        last = merged;
        interrupt::sleep(LOOK_EVERY)?;
    }
    let limit = LOOK_EVERY * MOST_LOOKS;
    Err(LabError::Timeout { what: "merging to end".to_owned(), limit })
}

/// The number of pages, and of their different contents and frames.
struct Counted {
    pages: usize,
    contents: usize,
    frames: usize,
}

impl Counted {
    fn of(guests: &[Guest], which: impl Fn(PageOwner) -> bool) -> Self {
        let (mut pages, mut contents, mut frames) = (0, HashSet::new(), HashSet::new());
        for page in guests.iter().flatten().filter(|page| which(page.kind)) {
            pages += 1;
            contents.insert(page.hash);
            frames.insert(page.frame);
        }
        Self { pages, contents: contents.len(), frames: frames.len() }
    }

    fn merged(&self) -> usize {
        self.pages - self.frames
    }

    /// The share of all pages that are not needed, since another has the same frame.
    fn saved(&self) -> f64 {
        ratio(self.merged(), self.pages)
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

/// Of two guests' pages of one kind: those that are in both, and all.
fn in_both(one: &Guest, other: &Guest, kind: PageOwner) -> (usize, usize) {
    let contents = |guest: &Guest| guest.iter().map(|page| page.hash).collect::<HashSet<_>>();
    let sides = [(one, contents(other)), (other, contents(one))];
    let (mut all, mut both) = (0, 0);
    for (guest, others) in &sides {
        for page in guest.iter().filter(|page| page.kind == kind) {
            all += 1;
            both += usize::from(others.contains(&page.hash));
        }
    }
    (both, all)
}

/// Figure 1: two services, each in a guest of its own.
fn by_segment(figures: &mut Figures, same: &[Guest]) {
    let kinds = [
        ("identical_code", PageOwner::Code, "of executable segments"),
        ("identical_constants", PageOwner::Constant, "of other segments, not written to"),
        ("identical_data", PageOwner::Data, "of data: written, heap"),
        ("identical_stack", PageOwner::Stack, "of stacks"),
        ("identical_files", PageOwner::File, "of files that no program has mapped"),
        ("identical_kernel", PageOwner::System, "of the kernel and the lab's programs"),
    ];
    let mut code = f64::NAN;
    let mut others = Vec::new();
    for (name, kind, what) in kinds {
        let (both, all) = in_both(&same[0], &same[1], kind);
        let note = format!("of {all} pages {what}, a web server's and a database's, are in both");
        let share = ratio(both, all);
        let mut figure = Figure::new(share, "ratio", note);
        match kind {
            PageOwner::Code => {
                code = share;
                figure = figure.paper("the highest of the three segments (no number)");
            }
            PageOwner::Data | PageOwner::Stack => {
                others.push(share);
                figure = figure.paper("low (no number)");
            }
            _ => {}
        }
        figures.add(name, figure);
    }
    let next = others.into_iter().largest();
    let note = "identical_code less identical_data or identical_stack, the larger of both";
    figures.tell("code_above_others", code - next, "ratio", note);
}

/// Figures 6 and 7, by the amount of sharing.
fn by_system(figures: &mut Figures, same: &[Guest], different: &[Guest]) {
    let programs = |guests: &[Guest]| Counted::of(guests, PageOwner::is_of_programs);
    for count in [SYSTEMS.len(), GUESTS] {
        for (name, guests) in [("same", same), ("different", different)] {
            let all = Counted::of(&guests[..count], |_| true);
            let mib = |pages: usize| (pages >> 8).to_string();
            let note = format!(
                "of {} MiB of {count} guests is saved; {:.3} could be",
                mib(all.pages),
                ratio(all.pages - all.contents, all.pages)
            );
            figures.tell(&format!("saved_{name}_{count}"), all.saved(), "ratio", note);
            let all = programs(&guests[..count]);
            let note = format!("the same of the {} MiB of their programs", mib(all.pages));
            figures.tell(&format!("programs_{name}_{count}"), all.saved(), "ratio", note);
        }
    }
    let count = SYSTEMS.len();
    let [one, other] = [same, different].map(|guests| programs(&guests[..count]).saved());
    let note = format!("programs_same_{count} to programs_different_{count}");
    figures.tell("same_vs_different", one / other, "ratio", note);
    let all = Counted::of(same, |_| true);
    let note = "of what could be shared on the same system, is, with the guests paused";
    figures.add(
        "shared_of_identical",
        Figure::new(ratio(all.merged(), all.pages - all.contents), "ratio", note),
    );
}

/// Overlap of the systems' tables, without a guest.
fn tables(figures: &mut Figures, systems: &[Debian]) -> Result<(), LabError> {
    let bytes: Vec<Vec<u8>> =
        systems.iter().map(|system| debian::code(&[system])).collect::<Result<_, _>>()?;
    let parsed = bytes.iter().map(|bytes| TableRef::parse(bytes));
    let tables: Vec<TableRef<'_>> =
        parsed.collect::<Result<_, _>>().map_err(std::io::Error::other)?;
    for (one, other) in [(0, 1), (1, 2), (0, 2)] {
        let found = overlap(&tables[one], &tables[other]).map_err(std::io::Error::other)?;
        let note = format!("of {} pages of code of the first are in the second", tables[one].len());
        let share = found.both as f64 / tables[one].len() as f64;
        let name = format!("code_{}_{}", SYSTEMS[one], SYSTEMS[other]);
        figures.tell(&name, share, "ratio", note);
    }
    Ok(())
}

/// By number of pages that share a frame: the percentage of these guests' frames.
fn times(guests: &[Guest]) -> Vec<f64> {
    let mut pages: HashMap<u64, usize> = HashMap::new();
    for page in guests.iter().flatten() {
        *pages.entry(page.frame).or_default() += 1;
    }
    let mut frames = vec![0; GUESTS + 2];
    for times in pages.values() {
        frames[(*times).min(GUESTS + 1)] += 1;
    }
    frames.into_iter().map(|count: usize| 100.0 * ratio(count, pages.len())).collect()
}

/// Figure 9.
fn by_times(figures: &mut Figures, same: &[Guest]) {
    for size in SIZES {
        let times = times(&same[..size]);
        let words: Vec<String> = times[1..].iter().map(|share| format!("{share:.1}")).collect();
        let note = format!(
            "pages that share a frame, on average, where more than one does: {size} guests on the \
             same system; frames with 1, 2, ... and {} pages or more, in %: {}",
            times.len() - 1,
            words.join(", ")
        );
        let shared = || times.iter().enumerate().skip(2);
        let pages: f64 = shared().map(|(times, share)| times as f64 * share).sum();
        let mean = pages / shared().map(|(_, share)| share).sum::<f64>();
        let figure = Figure::new(mean, "pages", note);
        let paper = "the more VMs, the more times (no number)";
        figures.add(&format!("times_shared_{size}"), figure.paper(paper));
    }
}

fn page(same: &[Guest], different: &[Guest]) -> Page {
    let both = [("same system", same), ("different systems", different)];
    let saved = |which: fn(PageOwner) -> bool| {
        let line = |(name, guests): (&str, &[Guest])| {
            Line::new(
                name,
                (1..=GUESTS).map(|count| {
                    let saved = Counted::of(&guests[..count], which).saved();
                    (count as f64, saved * 100.0)
                }),
            )
        };
        Chart::linear("% saved", "guests", both.map(line))
    };
    let line = |size: &usize| {
        Line::new(format!("{size} guests"), (0..).map(f64::from).zip(times(&same[..*size])).skip(1))
    };
    let times = Chart::linear("% of frames", "times", SIZES.iter().map(line));
    let mut page = Page::default();
    page.add("Memory that is saved", saved(|_| true));
    page.add("Memory of programs that is saved", saved(PageOwner::is_of_programs));
    page.add("How many times frames are shared", times);
    page
}
