//! Random events against a model of the shim: the strategy and the page states agree.

use std::collections::VecDeque;

use model::Bytes;
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, TestCaseError, prop_assert, prop_oneof, proptest};
use protocol::Region;

use super::super::probes::ProbeStrategy;
use super::{
    GranuleEvent, GranuleTable, Granules, LinkError, Millis, PageState, PageStates, RECALLED,
    Range, Time,
};

const GRANULES: u32 = 12;
const GRANULE_PAGES: u32 = 4;
/// A fraction of a vCPU that is large enough for a probe of each granule in each tick.
const BUDGET: f64 = 1.0;

#[derive(Clone, Copy, Debug)]
enum RandomEvent {
    /// The worker makes a step, this time after the last one.
    WorkerSteps { ms: u64 },
    /// The shim answers its oldest request.
    ShimServes,
    /// The guest touches a granule.
    GuestTouches(u32),
    /// The ring was full: unread traps are overwritten.
    TrapsAreLost,
    /// Search for identical pages needs a page.
    PageIsNeeded(u32),
    /// All pages of a granule are merged.
    GranuleIsMerged(u32),
    /// The shim gives everything back by itself.
    ShimGivesBack,
}

enum ShimRequest {
    Track,
    Revoke(Vec<u32>, Time),
    Recall(Vec<u32>),
}

enum ShimAnswer {
    Tracking,
    Revoked(Vec<u32>, Time),
    NotTracking,
}

/// A correct shim, its guest, and the messages under way.
#[derive(Default)]
struct ModelShim {
    /// One state a granule.
    states: Vec<PageState>,
    is_tracking: bool,
    has_given_back: bool,
    traps: Vec<u32>,
    has_lost: bool,
    requests: VecDeque<ShimRequest>,
    answers: VecDeque<ShimAnswer>,
}

impl PageStates for ModelShim {
    fn page_states(&self, pages: Range<u32>) -> Result<Vec<PageState>, LinkError> {
        Ok(pages.map(|page| self.states[(page / GRANULE_PAGES) as usize]).collect())
    }

    fn is_staged(&self, granule: u32, _: u32) -> Result<bool, LinkError> {
        Ok(self.states[granule as usize] == PageState::Staged)
    }
}

impl ModelShim {
    fn state(&mut self, granule: u32) -> &mut PageState {
        &mut self.states[granule as usize]
    }

    fn serve(&mut self) {
        let Some(request) = self.requests.pop_front() else { return };
        match request {
            ShimRequest::Track => {
                self.is_tracking = true;
                self.answers.push_back(ShimAnswer::Tracking);
            }
            ShimRequest::Revoke(..) if !self.is_tracking => {
                self.answers.push_back(ShimAnswer::NotTracking);
            }
            ShimRequest::Revoke(granules, at) => {
                for granule in &granules {
                    if *self.state(*granule) == PageState::Plain {
                        *self.state(*granule) = PageState::Staged;
                    }
                }
                self.answers.push_back(ShimAnswer::Revoked(granules, at));
            }
            ShimRequest::Recall(granules) => {
                for granule in granules {
                    if *self.state(granule) == PageState::Staged {
                        *self.state(granule) = PageState::Plain;
                    }
                }
            }
        }
    }

    fn touch(&mut self, granule: u32) {
        if *self.state(granule) == PageState::Staged {
            self.traps.push(granule);
        }
        *self.state(granule) = PageState::Plain;
    }

    fn give_back(&mut self) {
        for state in &mut self.states {
            if *state == PageState::Staged {
                *state = PageState::Plain;
            }
        }
        (self.is_tracking, self.has_given_back) = (false, true);
    }
}

struct TableRun {
    table: GranuleTable,
    shim: ModelShim,
    now: Time,
}

impl TableRun {
    fn new(seed: u64) -> Self {
        let region = Region { first_page: 0, pages: GRANULES * GRANULE_PAGES, address: 0 };
        let granules = Granules::new(&[region], Some(GRANULE_PAGES), Bytes::mib(64)).unwrap();
        let strategy = Box::new(ProbeStrategy::new(BUDGET, &granules, seed, Time(0)));
        let states = vec![PageState::Plain; GRANULES as usize];
        let shim = ModelShim { states, ..ModelShim::default() };
        Self { table: GranuleTable::new(granules, strategy), shim, now: Time(0) }
    }

    fn apply(&mut self, event: GranuleEvent) {
        self.table.apply(event, &self.shim).unwrap();
    }

    fn happens(&mut self, event: RandomEvent) {
        match event {
            RandomEvent::WorkerSteps { ms } => self.step(ms),
            RandomEvent::ShimServes => self.shim.serve(),
            RandomEvent::GuestTouches(granule) => self.shim.touch(granule),
            RandomEvent::TrapsAreLost => {
                self.shim.has_lost |= !self.shim.traps.is_empty();
                self.shim.traps.clear();
            }
            RandomEvent::PageIsNeeded(granule) => {
                let page = granule * GRANULE_PAGES + 1;
                self.table.note_recall(page, self.now, &self.shim).unwrap();
                self.send_recalls();
            }
            RandomEvent::GranuleIsMerged(granule) => {
                if *self.shim.state(granule) == PageState::Plain {
                    *self.shim.state(granule) = PageState::Merged;
                }
            }
            RandomEvent::ShimGivesBack => self.shim.give_back(),
        }
    }

    /// The order of `Linked::step`.
    fn step(&mut self, ms: u64) {
        self.now = self.now.after(Millis(ms));
        let now = self.now;
        while let Some(answer) = self.shim.answers.pop_front() {
            match answer {
                ShimAnswer::Tracking => {
                    self.shim.traps.clear();
                    self.apply(GranuleEvent::Started);
                }
                ShimAnswer::Revoked(granules, at) => {
                    self.apply(GranuleEvent::RevokeAnswered { granules, at });
                }
                ShimAnswer::NotTracking => self.apply(GranuleEvent::GivenBack { now }),
            }
        }
        for number in std::mem::take(&mut self.shim.traps) {
            self.apply(GranuleEvent::Touched { number, at: now });
        }
        if std::mem::take(&mut self.shim.has_lost) {
            self.apply(GranuleEvent::TouchesLost { now });
        }
        if std::mem::take(&mut self.shim.has_given_back) {
            self.apply(GranuleEvent::GivenBack { now });
        }
        self.send();
    }

    /// Search does so between the worker's steps as well.
    fn send_recalls(&mut self) {
        let requests = &mut self.shim.requests;
        if requests.iter().any(|it| matches!(it, ShimRequest::Recall(_))) {
            return;
        }
        let granules = self.table.take_recalls();
        if !granules.is_empty() {
            requests.push_back(ShimRequest::Recall(granules));
        }
    }

    fn send(&mut self) {
        self.send_recalls();
        let requests = &mut self.shim.requests;
        let awaits = |of: fn(&ShimRequest) -> bool| requests.iter().any(of);
        let is_starting = awaits(|it| matches!(it, ShimRequest::Track));
        let is_revoking = awaits(|it| matches!(it, ShimRequest::Revoke(..)))
            || self.shim.answers.iter().any(|it| matches!(it, ShimAnswer::Revoked(..)));
        if !self.table.is_on() && !is_starting {
            requests.push_back(ShimRequest::Track);
        }
        if !is_revoking {
            let indexes = self.table.due_revocations(self.now);
            if !indexes.is_empty() {
                requests.push_back(ShimRequest::Revoke(indexes, self.now));
            }
        }
    }

    /// Lets all messages arrive, and compares.
    fn compare(&mut self) -> Result<(), TestCaseError> {
        self.step(0);
        while !self.shim.requests.is_empty() {
            self.serve_all();
            self.step(0);
        }
        let now = self.now;
        for (granule, age) in self.table.ages(now) {
            let state = *self.shim.state(granule);
            let is_recalled = self.table.recalled.contains_key(&granule);
            prop_assert!(
                age.is_some() == (state == PageState::Staged || is_recalled),
                "granule {granule}: {age:?} by the strategy, {state:?} by the shim, {is_recalled}"
            );
        }
        Ok(())
    }

    fn serve_all(&mut self) {
        while !self.shim.requests.is_empty() {
            self.shim.serve();
        }
    }

    fn revoked(&self) -> usize {
        self.shim.states.iter().filter(|state| **state == PageState::Staged).count()
    }
}

fn events() -> impl Strategy<Value = Vec<RandomEvent>> {
    let granule = 0..GRANULES;
    let event = prop_oneof![
        6 => (1_u64..300).prop_map(|ms| RandomEvent::WorkerSteps { ms }),
        6 => Just(RandomEvent::ShimServes),
        6 => granule.clone().prop_map(RandomEvent::GuestTouches),
        1 => Just(RandomEvent::TrapsAreLost),
        4 => granule.clone().prop_map(RandomEvent::PageIsNeeded),
        1 => granule.prop_map(RandomEvent::GranuleIsMerged),
        1 => Just(RandomEvent::ShimGivesBack),
    ];
    vec(event, 1..400)
}

proptest! {
    #[test]
    fn the_strategy_and_the_shim_agree_once_no_message_is_under_way(
        seed: u64,
        events in events(),
    ) {
        let mut run = TableRun::new(seed);
        for event in events {
            run.happens(event);
        }
        run.compare()?;
    }
}

/// A run in which all granules are revoked.
fn revoked() -> TableRun {
    let mut run = TableRun::new(1);
    while run.revoked() < GRANULES as usize {
        run.step(100);
        run.serve_all();
    }
    run.step(0);
    run
}

#[test]
fn a_recall_that_was_not_sent_ends_with_a_touch() {
    let mut run = revoked();
    run.table.note_recall(7 * GRANULE_PAGES, run.now, &run.shim).unwrap();
    run.happens(RandomEvent::GuestTouches(7));
    run.apply(GranuleEvent::Touched { number: 7, at: run.now });
    assert_eq!(run.table.take_recalls(), [0_u32; 0]);
}

#[test]
fn a_recall_may_overtake_the_answer_to_the_revocation() {
    let mut run = TableRun::new(1);
    while run.revoked() == 0 {
        run.step(100);
        run.serve_all();
    }
    // The shim has revoked these granules, and the worker has not read the answer.
    for granule in 0..GRANULES {
        run.happens(RandomEvent::PageIsNeeded(granule));
        run.serve_all();
    }
    assert_eq!(run.revoked(), 0);
    run.compare().unwrap();
}

#[test]
fn a_recalled_granule_is_revoked_again_after_a_second_and_counts_as_untouched() {
    let mut run = revoked();
    run.happens(RandomEvent::PageIsNeeded(7));
    run.serve_all();
    run.step(0);
    assert_eq!(*run.shim.state(7), PageState::Plain);
    assert!(!run.table.due_revocations(run.now).contains(&7));
    let age = |run: &mut TableRun| run.table.ages(run.now)[7].1.unwrap();
    let before = age(&mut run);
    run.now = run.now.after(RECALLED);
    let indexes = run.table.due_revocations(run.now);
    assert!(indexes.contains(&7));
    run.shim.requests.push_back(ShimRequest::Revoke(indexes, run.now));
    run.shim.serve();
    run.step(0);
    assert!(age(&mut run) >= before + 10, "a tenth of a second each");
}
