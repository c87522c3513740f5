//! Every kernel call of the shim fails, at every place, in every way. No byte is lost, no thread
//! waits for ever, and QEMU is ended only where a table says so.
//!
//! Each scenario runs once to record the calls of its steps. It then runs again for each call and
//! each way to fail. The remaining steps follow, everything is given back, and every page must
//! hold its expected content.

#![allow(clippy::unwrap_used, reason = "tests")]

mod bed;
#[path = "../common/mod.rs"]
mod common;
mod scenarios;
mod table;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sys::faults::{Call, Fault, How};

use bed::{Bed, End, PAGES};
use scenarios::FaultScenario;

/// The number of cases in `make test`, and of those among them that need a process of their own.
/// All cases take some minutes (`OVERBOOK_FAULTS_OF=`: those whose description contains these
/// words).
const SOME: usize = 1200;
const SOME_FRESH: usize = 60;
/// One more than the shim's retries while the kernel is busy.
const TOO_OFTEN: u64 = 9;

/// A call that fails: number `place` of its kind in a step, from 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FaultCase {
    scenario: &'static FaultScenario,
    step: usize,
    pub(crate) call: Call,
    pub(crate) place: u64,
    pub(crate) times: u64,
    pub(crate) how: How,
}

impl FaultCase {
    pub(crate) fn step(&self) -> &'static str {
        self.scenario.steps[self.step].0
    }

    /// Whether the shim retries for long.
    fn is_slow(&self) -> bool {
        let is_busy = self.how == How::Refuse(Errno::AGAIN) && self.call == Call::Move;
        (is_busy || self.call == Call::Scan) && self.times == u64::MAX
    }

    pub(crate) fn scenario(&self) -> &'static str {
        self.scenario.name
    }
}

impl std::fmt::Debug for FaultScenario {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name)
    }
}

impl std::fmt::Display for FaultCase {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { scenario, call, place, times, how, .. } = self;
        let times = match *times {
            u64::MAX => "for ever".to_owned(),
            times => format!("{times} times"),
        };
        let step = self.step();
        let how = match how {
            How::Refuse(errno) => format!("refused ({})", name(*errno)),
            How::Part { pages: 1, errno } => format!("one page, then {}", name(*errno)),
            How::Part { errno, .. } => format!("half of it, then {}", name(*errno)),
            How::Deny(errno) => format!("done, and denied ({})", name(*errno)),
            How::HoldBefore | How::HoldAfter => "held".to_owned(),
        };
        write!(formatter, "{}: {step}: {call:?} {place}: {how}, {times}", scenario.name)
    }
}

fn name(errno: Errno) -> &'static str {
    match errno {
        Errno::AGAIN => "EAGAIN",
        Errno::NOMEM => "ENOMEM",
        Errno::BUSY => "EBUSY",
        Errno::EXIST => "EEXIST",
        Errno::NOENT => "ENOENT",
        _ => "?",
    }
}

/// The ways in which a call can fail, and how often.
fn ways(call: Call) -> Vec<(How, u64)> {
    const ERRORS: [Errno; 5] =
        [Errno::AGAIN, Errno::NOMEM, Errno::BUSY, Errno::EXIST, Errno::NOENT];
    let mut ways: Vec<_> = ERRORS.map(|errno| (How::Refuse(errno), 1)).to_vec();
    let half = u64::MAX / 8192;
    match call {
        Call::Move | Call::Copy | Call::Zero => ways.extend([
            (How::Part { pages: 1, errno: Errno::AGAIN }, 1),
            (How::Part { pages: half, errno: Errno::BUSY }, 1),
            (How::Deny(Errno::EXIST), 1),
            (How::Deny(Errno::AGAIN), 1),
            (How::Part { pages: 1, errno: Errno::AGAIN }, TOO_OFTEN),
            (How::Refuse(Errno::AGAIN), TOO_OFTEN),
            (How::Refuse(Errno::BUSY), TOO_OFTEN),
        ]),
        Call::MapFresh | Call::MapPool | Call::Remap => {
            ways.push((How::Part { pages: half, errno: Errno::NOMEM }, 1));
        }
        Call::Register
        | Call::RegisterWrites
        | Call::Unregister
        | Call::Protect
        | Call::Unprotect
        | Call::DontNeed
        | Call::PageOut
        | Call::PopulateRead
        | Call::PopulateWrite => {
            ways.push((How::Part { pages: half, errno: Errno::NOMEM }, 1));
            ways.push((How::Refuse(Errno::AGAIN), TOO_OFTEN));
        }
        _ => {}
    }
    ways
}

/// Errors with which a call fails until the scenario is over. Calls without which nothing works
/// have none: their failure could not be noticed.
fn ways_for_ever(call: Call) -> &'static [Errno] {
    match call {
        Call::ReadFaults | Call::Poll | Call::Wake => &[],
        Call::Move | Call::Copy => &[Errno::NOMEM, Errno::BUSY, Errno::AGAIN],
        _ => &[Errno::NOMEM],
    }
}

/// The calls of each step of a scenario, each with its number.
fn record(scenario: &'static FaultScenario) -> Vec<(usize, Call, u64)> {
    let mut bed = if scenario.is_fresh { Bed::new() } else { Bed::ready() };
    let mut made = Vec::new();
    // Calls that a process makes only once are made in the first round.
    for _ in 0..if scenario.is_fresh { 1 } else { 2 } {
        made.clear();
        for (number, (name, step)) in scenario.steps.iter().enumerate() {
            let end = bed.attempt(|bed| {
                let calls = bed.record(step);
                made.extend(calls.into_iter().map(|(call, count)| (number, call, count)));
            });
            assert_eq!(end, End::Well, "{}, {name}, without a fault", scenario.name);
        }
        let end = bed.attempt(Bed::restore);
        assert_eq!(end, End::Well, "{}, at its end, without a fault", scenario.name);
        bed.refill();
        assert!(bed.is_as_new(), "{}", scenario.name);
    }
    made
}

/// All cases of a scenario. Each call of a step starts with its first place.
fn cases(scenario: &'static FaultScenario) -> Vec<FaultCase> {
    let mut cases = Vec::new();
    for (step, call, count) in record(scenario) {
        let case = |place, how, times| FaultCase { scenario, step, call, place, times, how };
        for place in 0..count {
            cases.extend(ways(call).into_iter().map(|(how, times)| case(place, how, times)));
        }
        let for_ever = ways_for_ever(call).iter();
        cases.extend(for_ever.map(|&errno| case(0, How::Refuse(errno), u64::MAX)));
    }
    cases
}

/// A stand-in for the next case, perhaps the same one again.
fn bed_for(scenario: &FaultScenario, before: Option<Bed>) -> Bed {
    let mut bed = match before.filter(|_| !scenario.is_fresh) {
        Some(bed) => bed,
        None if scenario.is_fresh => Bed::new(),
        None => Bed::ready(),
    };
    bed.strict = false;
    bed
}

/// Runs a case. Returns its end, the place in the code of the failed call, and the stand-in if it
/// can be used again.
fn run(case: &FaultCase, before: Option<Bed>) -> (End, String, Option<Bed>) {
    let mut bed = bed_for(case.scenario, before);
    let FaultCase { call, place, times, how, .. } = *case;
    let end = bed.attempt(|bed| {
        for (number, (_, step)) in case.scenario.steps.iter().enumerate() {
            if number == case.step {
                bed.plan(Fault { call, within: None, place, times, how });
            }
            step(bed);
        }
    });
    if end == End::Well {
        let site = bed.faults.site(0);
        let end = bed.attempt(Bed::restore);
        if end != End::Well {
            return (end, site, None);
        }
        let is_usable = !case.scenario.is_fresh
            && bed.attempt(|bed| {
                bed.refill();
                assert!(bed.is_as_new());
            }) == End::Well;
        return (end, site, is_usable.then_some(bed));
    }
    (end, bed.faults.site(0), None)
}

/// Runs these cases; returns the failures.
fn run_all(cases: &[FaultCase]) -> Vec<String> {
    let (mut bed, mut wrong, mut met, mut new) = (None, Vec::new(), 0, 0);
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    let began = Instant::now();
    for case in cases {
        let began = Instant::now();
        if std::env::var_os("OVERBOOK_FAULTS_TOLD").is_some() {
            eprintln!("{case}");
        }
        new += u32::from(bed.is_none());
        let (end, site, after) = run(case, bed.take());
        bed = after;
        met += u32::from(!site.is_empty());
        let took = began.elapsed();
        if took > Duration::from_secs(3) {
            println!("{took:?}: {case} at {site}");
        }
        let words = match (end, table::row(table::MAY_END, case)) {
            (End::Well, _) => continue,
            (End::Loudly(words), Some(why)) => {
                *ends.entry(format!("{why}: {words}")).or_default() += 1;
                continue;
            }
            (End::Loudly(words), None) => format!("ends: {words}"),
            (End::Silently(words), _) => format!("ends silently: {words}"),
            (End::Badly(words), _) => words,
        };
        let line = format!("{case} at {site}: {words}");
        println!("WRONG {line}");
        wrong.push(line);
    }
    println!(
        "{} cases, {met} met, {new} stand-ins, {:?}; ended as the table says: {ends:#?}",
        cases.len(),
        began.elapsed()
    );
    wrong
}

/// As many of the cases as `make test` has time for, sampled evenly: half of them at the first
/// place of a step, the rest at later places.
fn some(all: Vec<FaultCase>) -> Vec<FaultCase> {
    let (fresh, all): (Vec<FaultCase>, Vec<FaultCase>) =
        all.into_iter().partition(|case| case.scenario.is_fresh);
    let (slow, all): (Vec<FaultCase>, Vec<FaultCase>) =
        all.into_iter().partition(FaultCase::is_slow);
    let (first, rest): (Vec<FaultCase>, Vec<FaultCase>) =
        all.into_iter().partition(|case| case.place == 0);
    let mut some = evenly(first, SOME / 2);
    some.extend(evenly(rest, SOME - some.len()));
    // One stand-in serves many cases.
    some.sort_by_key(|case| case.scenario.name);
    some.extend(evenly(fresh, SOME_FRESH));
    some.extend(slow.into_iter().take(1));
    some
}

fn evenly(cases: Vec<FaultCase>, most: usize) -> Vec<FaultCase> {
    let every = cases.len().div_ceil(most.max(1)).max(1);
    cases.into_iter().step_by(every).collect()
}

#[test]
fn no_fault_loses_a_byte() {
    let all: Vec<FaultCase> = scenarios::ALL.iter().flat_map(cases).collect();
    let number = all.len();
    let all: Vec<FaultCase> = match std::env::var("OVERBOOK_FAULTS_OF") {
        Ok(words) => all.into_iter().filter(|case| case.to_string().contains(&words)).collect(),
        Err(_) => {
            let is_known = |case: &FaultCase| table::row(table::MAY_REFUSE, case).is_some();
            some(all.into_iter().filter(|case| !is_known(case)).collect())
        }
    };
    println!("{} of {number} cases", all.len());
    let wrong = run_all(&all);
    assert!(
        wrong.is_empty(),
        "{} cases, told above as WRONG; the first: {}",
        wrong.len(),
        wrong[0]
    );
}

/// Forces an interleaving: a call is held, the guest writes meanwhile, and the call continues.
#[test]
fn who_writes_to_a_page_while_it_comes_back_is_not_forgotten() {
    for how in [How::HoldBefore, How::HoldAfter] {
        let mut bed = Bed::ready();
        bed.track();
        bed.revoke(0..1);
        let within = Some(bed.memory(3..4));
        bed.plan(Fault { within, ..Fault::once(Call::Move, how) });
        let Bed { faults, stand_in, worker, .. } = &mut bed;
        let worker = worker.as_ref().unwrap();
        std::thread::scope(|scope| {
            let recall = scope.spawn(|| worker.recall([0]));
            assert!(faults.wait_until_held(0, Duration::from_secs(10)));
            stand_in.begin("stamp 0 3 1 7");
            // The page is not there yet: a thread that touches it waits. Later no thread need
            // wait.
            let waits = !stand_in.has_answer_within(Duration::from_millis(50));
            assert!(waits || how == How::HoldAfter);
            faults.go_on(0);
            assert_eq!(recall.join().unwrap(), 1);
        });
        stand_in.finish().unwrap();
        stand_in.expect("holds 0 3 1 7");
        bed.check(0..3);
        bed.check(4..PAGES);
    }
}
