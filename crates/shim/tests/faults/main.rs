//! Every kernel call of the shim fails, at every place, in every way. No byte is lost, no thread
//! waits for ever, and QEMU is ended only where a table says so.
//!
//! Each scenario runs once to record the calls of its steps. It then runs again for each call and
//! each way to fail. The remaining steps follow, everything is given back, and every page must
//! hold its expected content.
//!
//! All cases take some minutes, so a run takes a sample of each kind of case, another one each
//! time. `OVERBOOK_FAULTS_SEED=` takes the same sample again, and `OVERBOOK_FAULTS_OF=` all cases
//! whose description contains these words.

#![allow(clippy::unwrap_used, reason = "tests")]

mod bed;
#[path = "../common/mod.rs"]
mod common;
mod scenarios;
mod table;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant, SystemTime};

use rustix::io::Errno;
use sys::faults::{Call, Fault, How};

use bed::{Bed, End, PAGES};
use scenarios::FaultScenario;

/// The number of cases in `make test`, and of those among them that need a process of their own.
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

    fn steps_before(&self) -> impl Iterator<Item = &'static str> {
        self.scenario.steps[..self.step].iter().map(|(name, _)| *name)
    }

    /// Whether the shim retries for long.
    fn is_slow(&self) -> bool {
        let is_busy = self.how == How::Refuse(Errno::AGAIN) && self.call == Call::Move;
        (is_busy || self.call == Call::Scan) && self.times == u64::MAX
    }

    pub(crate) fn scenario(&self) -> &'static str {
        self.scenario.name
    }

    /// The way in which the call fails.
    fn way(&self) -> String {
        let times = match self.times {
            u64::MAX => "for ever".to_owned(),
            times => format!("{times} times"),
        };
        let how = match self.how {
            How::Refuse(errno) => format!("refused ({})", name(errno)),
            How::Part { pages: 1, errno } => format!("one page, then {}", name(errno)),
            How::Part { errno, .. } => format!("half of it, then {}", name(errno)),
            How::Deny(errno) => format!("done, and denied ({})", name(errno)),
            How::HoldBefore | How::HoldAfter => "held".to_owned(),
        };
        format!("{how}, {times}")
    }

    /// Cases of one kind have the same call fail in the same way, at the first place of a step or
    /// later.
    fn kind(&self) -> (Call, String, bool) {
        (self.call, self.way(), self.place == 0)
    }
}

impl std::fmt::Debug for FaultScenario {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name)
    }
}

impl std::fmt::Display for FaultCase {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { scenario, call, place, .. } = self;
        write!(formatter, "{}: {}: {call:?} {place}: {}", scenario.name, self.step(), self.way())
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

/// Runs these cases; returns the failures. A fault of each call must have happened. Some calls are
/// made at some times only, so a call that was not made gets further cases of `others`.
fn run_all(cases: Vec<FaultCase>, others: &[FaultCase]) -> Vec<String> {
    let (mut bed, mut wrong, mut met, mut new) = (None, Vec::new(), 0, 0);
    let mut unmet: BTreeSet<Call> = cases.iter().map(|case| case.call).collect();
    unmet.remove(&table::MAY_NOT_HAPPEN);
    let number = cases.len();
    let mut queue = VecDeque::from(cases);
    let mut more = others.iter();
    let mut ends: BTreeMap<String, u32> = BTreeMap::new();
    let began = Instant::now();
    while let Some(case) =
        queue.pop_front().or_else(|| more.find(|case| unmet.contains(&case.call)).copied())
    {
        let began = Instant::now();
        if std::env::var_os("OVERBOOK_FAULTS_TOLD").is_some() {
            eprintln!("{case}");
        }
        new += u32::from(bed.is_none());
        let (end, site, after) = run(&case, bed.take());
        bed = after;
        if !site.is_empty() {
            met += 1;
            unmet.remove(&case.call);
        }
        let took = began.elapsed();
        if took > Duration::from_secs(3) {
            println!("{took:?}: {case} at {site}");
        }
        let words = match (end, table::row(table::MAY_END, &case)) {
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
        number,
        began.elapsed()
    );
    wrong.extend(unmet.into_iter().map(|call| format!("no fault of this call happened: {call:?}")));
    wrong
}

/// As many of the cases as `make test` has time for.
fn some(mut all: Vec<FaultCase>, seed: u64) -> Vec<FaultCase> {
    fastrand::Rng::with_seed(seed).shuffle(&mut all);
    let (fresh, all): (Vec<FaultCase>, Vec<FaultCase>) =
        all.into_iter().partition(|case| case.scenario.is_fresh);
    let (slow, all): (Vec<FaultCase>, Vec<FaultCase>) =
        all.into_iter().partition(FaultCase::is_slow);
    let mut some = of_each_kind(all, SOME);
    // One stand-in serves many cases.
    some.sort_by_key(|case| case.scenario.name);
    some.extend(of_each_kind(fresh, SOME_FRESH));
    some.extend(slow.into_iter().take(1));
    some
}

/// At most `most` of the cases: one of each kind, in their order, then a second of each …
fn of_each_kind(cases: Vec<FaultCase>, most: usize) -> Vec<FaultCase> {
    let mut met = BTreeMap::new();
    let mut ranked: Vec<(u32, FaultCase)> = Vec::new();
    for case in cases {
        let earlier: &mut u32 = met.entry(case.kind()).or_default();
        ranked.push((*earlier, case));
        *earlier += 1;
    }
    ranked.sort_by_key(|(earlier, _)| *earlier);
    ranked.into_iter().take(most).map(|(_, case)| case).collect()
}

/// The seed of this run's sample.
fn seed() -> u64 {
    match std::env::var("OVERBOOK_FAULTS_SEED") {
        Ok(seed) => seed.parse().unwrap(),
        Err(_) => SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs(),
    }
}

#[test]
fn no_fault_loses_a_byte() {
    let all: Vec<FaultCase> = scenarios::ALL.iter().flat_map(cases).collect();
    let (number, seed) = (all.len(), seed());
    let is_known = |case: &FaultCase| table::row(table::MAY_REFUSE, case).is_some();
    let others: Vec<_> = all.iter().copied().filter(|case| !is_known(case)).collect();
    let all: Vec<FaultCase> = match std::env::var("OVERBOOK_FAULTS_OF") {
        Ok(words) => all.into_iter().filter(|case| case.to_string().contains(&words)).collect(),
        Err(_) => some(others.clone(), seed),
    };
    println!("{} of {number} cases, OVERBOOK_FAULTS_SEED={seed}", all.len());
    assert!(!all.is_empty());
    let wrong = run_all(all, &others);
    assert!(wrong.is_empty(), "{} cases are wrong: {wrong:#?}", wrong.len());
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
