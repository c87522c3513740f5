//! `kim-table2`: a group's spare memory as a cache of a guest's disk (Kim 2014 §6.2.3, Table 2).
//!
//! One guest reads at random from a file larger than its memory, on a disk with moving heads. It
//! does not swap, so `demand` gives it little. Four others compute pi and hold much that is the
//! same. Each policy in turn distributes the memory that merging saves there. In one more
//! setting, memory that no guest demands is a cache of the disk.
//!
//! Each setting has fresh guests. Merging finds identical pages in the warm-up; only the window
//! counts.

use std::sync::Arc;

use model::CacheReading;
use pageserver::layer;
use pageserver::layers::cache::{Cache, Space};
use pageserver::layers::memory::Memory;

use super::prelude::*;
use crate::kim::course::{self, SharingRun};
use crate::kim::jobs::{self, Job, PI};
use crate::kim::setting::{BASELINE, POLICIES, Setting};
use crate::remote_swap::{Disk, GROUP, RemoteSwap};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-table2",
    summary: "a guest that reads files, under each policy, and with a cache of what is to spare",
    measures: &[&[file!()], measured::MANAGED, measured::DISKS, measured::KIM],
    claims: claims! {
        "speed_demand_cache" >= 1.32 => "ratio",
            "A cache of the group's spare memory serves a guest that reads files", "1.32";
        "cache_vs_fair" >= 1.0 => "ratio",
            "The cache serves it more than any policy alone does", "1.08";
        "give_back_ms" <= 50.0 => "ms", "The cache gives 1 GiB back in an instant";
        "speed_fair" => "ratio", "The policy `fair` serves the guest that reads files", "1.22";
        "speed_entitlement" => "ratio",
            "The policy `entitlement` serves the guest that reads files", "1.03";
        "speed_demand" => "ratio", "The policy `demand` serves the guest that reads files", "1.06";
    },
    run,
};

/// Reads 16 KiB at random places of its data disk.
const FIO: Job = Job { name: "fio", command: "fileio --path /dev/data --mb 256" };
const FILE: Bytes = Bytes::mib(256);
/// 150 reads a second, as a disk with moving heads does.
const READ_US: u32 = 6_667;
const WARM_UP: Duration = Duration::from_secs(60);
const WINDOW: Duration = Duration::from_secs(60);
/// Size of each read, in KiB.
const READ_KIB: f64 = 16.0;
/// Memory that the cache is to give back.
const GIVEN_BACK: Bytes = Bytes::mib(1024);
const ROUNDS: u32 = 3;

fn run(context: &Context) -> Result<Figures, LabError> {
    let [fair, entitlement, demand] = POLICIES;
    let plain = [BASELINE, fair, entitlement, demand].map(|it| (it.name, (it, false)));
    let arms = plain.into_iter().chain([("demand_cache", (demand, true))]);
    let seen = Arms::once(context, &arms.collect::<Vec<_>>(), |_, (setting, has_cache)| {
        let course = course(context, setting, *has_cache)?;
        context.say(&course.in_words());
        for (at_s, cache) in caches(&course).step_by(10) {
            let (held, may) = (cache.held.as_mib(), cache.capacity.as_mib());
            context.say(&format!("  {at_s:4.0} s: the cache holds {held:.0} of {may:.0} MiB"));
        }
        Ok(course)
    })?;
    let mut figures = context.figures(SCENARIO.name, 1);
    add_figures(&mut figures, &seen);
    let times = (0..ROUNDS).map(|_| give_back_ms()).collect::<Result<Vec<_>, _>>()?;
    let note = format!("for the cache to give back 1 GiB, median of {ROUNDS} times");
    figures.tell("give_back_ms", median(times), "ms", note);
    Ok(figures)
}

/// `has_cache`: whether the disk has a cache under it.
fn course(context: &Context, setting: &Setting, has_cache: bool) -> Result<SharingRun, LabError> {
    let dir = context.dir.with_extension("disk");
    std::fs::create_dir_all(&dir)?;
    std::fs::write(RemoteSwap::file(&dir), content(context.seed))?;
    let [fio, others @ ..] = &mut jobs::group(GROUP, &[FIO, PI, PI, PI, PI], context.seed)[..]
    else {
        return Err(std::io::Error::other("no guests").into());
    };
    let disk = Disk { size: FILE, read_delay_us: READ_US, lent: Bytes::ZERO, cache: has_cache };
    let served = RemoteSwap::start(&dir, &fio.name, disk)?;
    let mut mix = vec![served.given_as_data(fio.clone())];
    mix.extend_from_slice(others);
    let lab = context.start(mix)?;
    served.make_known(&lab)?;
    let course = course::follow(lab, setting, WARM_UP, WINDOW)?;
    served.end()?;
    Ok(course)
}

/// Content of the file: no two pages are alike, or merging would find them.
fn content(seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let words = (0..FILE.0 / 8).flat_map(|_| random.between(0, u64::MAX - 1).to_le_bytes());
    words.collect()
}

fn add_figures(figures: &mut Figures, seen: &Arms<SharingRun>) {
    let speed = |name: &str| seen.number(name, |course| course.speed(0));
    for name in ["fair", "entitlement", "demand", "demand_cache"] {
        let note =
            format!("{:.0} KB/s, to {:.0}", speed(name) * READ_KIB, speed("baseline") * READ_KIB);
        let ratio = speed(name) / speed("baseline");
        figures.tell(&format!("speed_{name}"), ratio, "ratio", note);
    }
    let note = "speed of the guest that reads: demand and cache, to fair";
    figures.tell("cache_vs_fair", speed("demand_cache") / speed("fair"), "ratio", note);
    let caches: Vec<_> = seen.of("demand_cache").flat_map(caches).collect();
    let in_window = caches.iter().find(|(at_s, _)| *at_s >= WARM_UP.as_secs_f64());
    if let (Some((_, first)), Some((_, last))) = (in_window, caches.last()) {
        let note = "that the cache held when the window began, and at its end";
        let note = format!("{note}: {:.0}", last.held.as_mib());
        figures.tell("cache_held", first.held.as_mib(), "MiB", note);
        let (hits, misses) = (last.hits - first.hits, last.misses - first.misses);
        let hits = hits as f64 / (hits + misses).max(1) as f64;
        let note = "of the pages that the guest read from its disk in the window, in the cache";
        figures.tell("cache_hits", hits, "ratio", note);
    }
}

/// The cache's readings, by second.
fn caches(course: &SharingRun) -> impl Iterator<Item = (f64, &CacheReading)> {
    course.ticks.iter().filter_map(|tick| {
        let cache = tick.case.view.caches.values().next()?;
        Some((tick.at_s, &cache.value))
    })
}

/// The time that a full cache takes to give all back, in milliseconds.
fn give_back_ms() -> Result<f64, LabError> {
    const READ: usize = 1 << 20;
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        let space = Arc::new(Space::new());
        space.set_capacity(GIVEN_BACK.0).await;
        let cache = Cache::over(Arc::new(Memory::new(GIVEN_BACK.0)), space.clone());
        for at in (0..GIVEN_BACK.0).step_by(READ) {
            layer::read(&cache, at, READ).await.map_err(|_| std::io::Error::other("memory"))?;
        }
        let began = Instant::now();
        space.set_capacity(0).await;
        Ok(began.elapsed().as_secs_f64() * 1e3)
    })
}
