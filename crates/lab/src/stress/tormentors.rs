//! One tormentor after another, each ended at random, and a check of the shim after each.

use std::fs::File;
use std::io::{Read, Seek};
use std::time::{Duration, Instant};

use sys::process::{Identity, Signal, Spawn};

use super::deeds::Deeds;
use super::link::StressLink;
use crate::inside::built;
use crate::interrupt;
use crate::lab::LabError;
use crate::random::Random;

const LIFE_MS: (u64, u64) = (100, 5_000);
/// Tormentors of a hundred that are killed; the others end by themselves.
const KILLED: u64 = 60;
/// A tormentor that has not ended by then hangs.
const OVERTIME: Duration = Duration::from_secs(20);
/// Timeout for the shim to restore everything after its worker has gone.
const GIVE_BACK_LIMIT: Duration = Duration::from_secs(2);

/// The result of all tormentors of one shim.
#[derive(Debug, Default)]
pub struct FuzzerCounts {
    /// Their deeds and observations.
    pub deeds: Deeds,
    /// Their number.
    pub lives: u64,
    /// The number of those that were killed.
    pub kills: u64,
    /// The longest time until everything was restored after a tormentor was gone.
    pub longest_give_back: Duration,
}

/// Has the shim of `process` tormented until `until`. `watch` is called between two tormentors;
/// its error ends the torment.
pub(crate) fn torment(
    process: Identity,
    seed: u64,
    until: Instant,
    mut watch: impl FnMut() -> Result<(), LabError>,
) -> Result<FuzzerCounts, LabError> {
    let mut random = Random::new(seed);
    let mut toll = FuzzerCounts::default();
    let (least, most) = LIFE_MS;
    while Instant::now() < until {
        let life = Duration::from_millis(random.between(least, most));
        let is_killed = random.between(0, 99) < KILLED;
        let seed = random.between(0, u64::MAX - 1);
        live_one(&mut toll, process, seed, life, is_killed)?;
        watch()?;
        inspect(&mut toll, process.pid)?;
    }
    Ok(toll)
}

fn live_one(
    toll: &mut FuzzerCounts,
    process: Identity,
    seed: u64,
    life: Duration,
    is_killed: bool,
) -> Result<(), LabError> {
    let mut output = tempfile::tempfile()?;
    let own_end = if is_killed { life + OVERTIME } else { life };
    let mut child = Spawn::new(built("overbook-lab")?)
        .args(["torment", "--pid", &process.pid.to_string(), "--seed", &seed.to_string()])
        .args(["--millis", &own_end.as_millis().to_string()])
        .stdout(output.try_clone()?)
        .die_with_parent()
        .spawn()?;
    toll.lives += 1;
    if is_killed {
        interrupt::sleep(life)?;
        child.signal(Signal::KILL)?;
        toll.kills += 1;
    }
    if child.wait_for(life + OVERTIME)?.is_none() {
        toll.deeds.complaints.push(format!("the tormentor of seed {seed} does not end"));
        child.signal(Signal::KILL)?;
    }
    child.end(Duration::from_secs(1))?;
    if let Some(deeds) = last_deeds(&mut output)? {
        toll.deeds.add(deeds);
    }
    Ok(())
}

fn last_deeds(output: &mut File) -> Result<Option<Deeds>, LabError> {
    let mut text = String::new();
    output.rewind()?;
    output.read_to_string(&mut text)?;
    // The last line of a killed one may be half written.
    Ok(text.lines().rev().take(2).find_map(|line| serde_json::from_str(line).ok()))
}

/// The worker is gone: the shim must soon restore all that it had staged.
fn inspect(toll: &mut FuzzerCounts, pid: u32) -> Result<(), LabError> {
    let begun = Instant::now();
    let link = match StressLink::greet(pid) {
        Ok(link) => link,
        Err(error) => {
            toll.deeds.complaints.push(format!("after a worker was gone: {error}"));
            return Ok(());
        }
    };
    while link.staged() != (0, 0) {
        if begun.elapsed() > GIVE_BACK_LIMIT {
            let (marked, gauge) = link.staged();
            let complaint = format!("{marked} pages are staged without a worker, gauge {gauge}");
            toll.deeds.complaints.push(complaint);
            break;
        }
        interrupt::sleep(Duration::from_millis(1))?;
    }
    toll.longest_give_back = toll.longest_give_back.max(begun.elapsed());
    if let Some(shared) = link.shared() {
        toll.deeds.note(shared);
    }
    Ok(())
}
