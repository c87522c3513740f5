use super::*;
use crate::Trap;
use crate::ring::{Consumer, Producer};

const LAYOUT: Layout = Layout { pages: 1000 };

struct LayoutMemory {
    words: Vec<AtomicU64>,
    states: Vec<AtomicU8>,
}

impl LayoutMemory {
    fn new(layout: Layout) -> Self {
        let words = (0..layout.words()).map(|_| AtomicU64::new(0)).collect();
        let states = (0..layout.bytes()).map(|_| AtomicU8::new(0)).collect();
        Self { words, states }
    }

    fn initialise(&self) -> Shared<'_> {
        Shared::initialise(LAYOUT, 3, &self.words, &self.states).unwrap()
    }

    fn open(&self) -> Result<Shared<'_>, LayoutError> {
        Shared::open(LAYOUT, &self.words, &self.states)
    }
}

#[test]
fn the_worker_reads_what_the_shim_wrote() {
    let memory = LayoutMemory::new(LAYOUT);
    let shim = memory.initialise();
    let worker = memory.open().ok().unwrap();
    assert_eq!((worker.generation(), worker.last_given_back()), (3, None));
    shim.set_state(64, PageState::Staged);
    shim.add(Counter::Traps, 2);
    shim.set(Counter::StagedPages, 1);
    shim.note_given_back(GiveBack::Fuse);
    let mut producer = Producer::new();
    producer.push(shim.ring(), Trap { granule: 2, at_us: 9 });
    assert_eq!((worker.state(64), worker.state(65)), (PageState::Staged, PageState::Plain));
    assert_eq!((worker.get(Counter::Traps), worker.get(Counter::StagedPages)), (2, 1));
    assert_eq!(worker.get(Counter::GivenBack), 1);
    assert_eq!(worker.last_given_back(), Some(GiveBack::Fuse));
    let mut seen = Vec::new();
    Consumer::default().drain(worker.ring(), 32, |trap| seen.push(trap));
    assert_eq!(seen, [Trap { granule: 2, at_us: 9 }]);
}

#[test]
fn a_granule_is_staged_when_one_of_its_pages_is() {
    let memory = LayoutMemory::new(LAYOUT);
    let shared = memory.initialise();
    shared.set_state(95, PageState::Staged);
    shared.set_state(320, PageState::Staged);
    let staged: Vec<u32> = (0..32).filter(|&granule| shared.is_staged(granule, 32)).collect();
    assert_eq!(staged, [2, 10]);
    assert!(!shared.is_staged(u32::MAX, 32), "there is no such granule");
}

#[test]
fn pages_and_granules_that_do_not_exist_are_neither_read_nor_written() {
    let memory = LayoutMemory::new(LAYOUT);
    let shared = memory.initialise();
    shared.set_state(1000, PageState::Staged);
    assert_eq!(shared.state(1000), PageState::Unknown);
    assert!(!shared.is_staged(u32::MAX, 512));
    memory.states[5].store(77, Ordering::Relaxed);
    assert_eq!(shared.state(5), PageState::Unknown);
}

#[test]
fn no_word_of_the_header_stands_on_another() {
    let memory = LayoutMemory::new(LAYOUT);
    let shared = memory.initialise();
    Producer::new().push(shared.ring(), Trap { granule: 0, at_us: 0 });
    shared.set(Counter::GivenBack, u64::MAX - 1);
    shared.note_given_back(GiveBack::MemoryLocked);
    assert!(memory.open().is_ok());
    assert_eq!(shared.generation(), 3);
    assert_eq!(shared.get(Counter::Traps), 0);
    assert!(WORD_COUNTERS + (Counter::GivenBack as usize) < HEADER_WORDS);
}

#[test]
fn a_header_of_another_release_is_named() {
    for (word, field) in
        [(WORD_MAGIC, "magic"), (WORD_VERSION, "layout version"), (WORD_CAPACITY, "ring capacity")]
    {
        let memory = LayoutMemory::new(LAYOUT);
        memory.initialise();
        memory.words[word].store(999, Ordering::Relaxed);
        let error = memory.open().err().unwrap().to_string();
        assert!(error.starts_with(&format!("shared memory: {field} is 999; expected")), "{error}");
    }
    let other = LayoutMemory::new(LAYOUT);
    Shared::initialise(LAYOUT, 0, &other.words, &other.states).ok().unwrap();
    other.words[WORD_PAGES].store(2000, Ordering::Relaxed);
    let error = other.open().err().unwrap().to_string();
    assert_eq!(error, "shared memory: pages is 2000; expected 1000");
}

#[test]
fn views_of_another_size_are_refused() {
    let memory = LayoutMemory::new(LAYOUT);
    memory.initialise();
    let few = Shared::open(LAYOUT, &memory.words[1..], &memory.states).err().unwrap();
    assert_eq!(few.to_string(), "shared memory: words: 66049; the layout asks for 66050");
    assert!(Shared::open(Layout::new(1001), &memory.words, &memory.states).is_err());
}

/// For any data from the other side: no panic, no endless loop, no trap of a granule that does
/// not exist.
#[test]
fn random_words_everywhere_do_no_harm() {
    let mut random = fastrand::Rng::with_seed(3);
    let memory = LayoutMemory::new(LAYOUT);
    let shared = memory.initialise();
    let mut consumer = Consumer::new(shared.ring());
    for word in &memory.words[HEADER_WORDS..] {
        word.store(random.u64(..), Ordering::Relaxed);
    }
    for state in &memory.states {
        state.store(random.u8(..), Ordering::Relaxed);
    }
    for _ in 0..50 {
        for word in &memory.words[..HEADER_WORDS] {
            let value = random.u64(..) >> random.u32(0..64);
            word.store(value, Ordering::Relaxed);
        }
        let mut passed_on = 0;
        let drained = consumer.drain(shared.ring(), 32, |trap| {
            assert!(trap.granule < 32);
            passed_on += 1;
        });
        assert_eq!(drained.read, passed_on);
        assert!(drained.read + drained.invalid < RING_CAPACITY as u64);
        assert!(memory.open().is_err());
        let _ = (shared.generation(), shared.last_given_back(), shared.state(random.u32(..)));
        let _ = shared.is_staged(random.u32(..), 512);
    }
}

#[test]
fn every_reason_for_giving_back_comes_through_by_its_number() {
    let reasons: Vec<u64> = (0..=255).filter(|&n| GiveBack::from_number(n).is_some()).collect();
    assert_eq!(reasons, (1..=GiveBack::Migrating as u64).collect::<Vec<_>>());
    assert!(
        reasons.iter().all(|&n| GiveBack::from_number(n).map(|reason| reason as u64) == Some(n))
    );
}

#[test]
fn the_sample_is_the_share_that_was_asked_for() {
    let share = |sample| (0..100_000).filter(|&granule| is_sampled(granule, sample)).count();
    assert_eq!(share(u32::MAX), 100_000);
    assert_eq!(share(0), 0);
    let sixteenth = share(u32::MAX / 16);
    assert!((6_000..6_500).contains(&sixteenth), "{sixteenth}");
}

#[test]
fn the_layout_covers_the_last_region() {
    let region = |first_page, pages| Region { first_page, pages, address: 0 };
    assert_eq!(Layout::of_regions(&[]).bytes(), 0);
    let layout = Layout::of_regions(&[region(0, 1000), region(1024, 7)]);
    assert_eq!((layout.words(), layout.bytes()), (66_051, 1031));
}

/// Workers and shims of several releases read each other's memory.
#[test]
fn the_layout_has_its_version_and_no_counter_moves() {
    let memory = LayoutMemory::new(LAYOUT);
    memory.initialise();
    assert_eq!(memory.words[WORD_VERSION].load(Ordering::Relaxed), 9);
    let counters = [
        Counter::Traps,
        Counter::TrapNs,
        Counter::MovedOut,
        Counter::MovedIn,
        Counter::Pinned,
        Counter::Discarded,
        Counter::StagedPages,
        Counter::RoundTripNs,
        Counter::ControlNs,
        Counter::GivenBack,
        Counter::MergedPages,
        Counter::HandedOver,
        Counter::LongestWaitNs,
        Counter::LongestHoldNs,
        Counter::Stalls,
    ];
    assert_eq!(counters.map(|counter| counter as usize), std::array::from_fn(|place| place));
}
