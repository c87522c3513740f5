//! A stand-in whose kernel calls fail as planned, its worker, and the expected content of each
//! page.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Stdio;
use std::time::{Duration, Instant};

use protocol::layout::Counter;
use protocol::{Answer, MAX_UNSHARE, Merged, Refusal, Request, State, Taken};
use sys::faults::{Call, Fault, Faults, PLAN_ENV};
use sys::memory_map::{PAGE_BYTES, Range};
use sys::pool_file::PoolFile;

use crate::common::{StandIn, TestWorker, by_name};

/// The shim tries for 10 s to give a page back.
const PATIENCE: Duration = Duration::from_secs(18);
const MIB: u32 = 32;
const SLOTS: u32 = 1024;
/// The pages that the scenarios use: a huge page's worth that is always there, and another one.
pub(crate) const PAGES: u32 = 1024;
/// The slot with the content of page 0.
pub(crate) const FIRST_SLOT: u32 = 100;
/// The seed of the initial content.
pub(crate) const SEED: u32 = 1;
/// These pages hold zeros at first. Pages from [`FULL`] on are holes.
pub(crate) const ZEROS: std::ops::Range<u32> = 112..128;
pub(crate) const FULL: u32 = 512;

/// The expected content of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpectedContent {
    Stamp(u32),
    Zeros,
    /// The content at the time when the page was freed, or zeros.
    Freed(u32),
}

/// How a scenario ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// All pages are where they belong.
    Well,
    /// The shim has ended the process with a message.
    Loudly(String),
    /// The process has ended in another way.
    Silently(String),
    /// A page has wrong content, a request or a touch gets no answer, or something is left
    /// behind.
    Badly(String),
}

pub(crate) struct Bed {
    pub(crate) faults: Faults,
    pub(crate) stand_in: StandIn,
    pub(crate) worker: Option<TestWorker>,
    pool: PoolFile,
    content: Vec<ExpectedContent>,
    /// No fault is planned, so every request must succeed.
    pub(crate) strict: bool,
    errors: File,
    _dir: tempfile::TempDir,
}

impl Bed {
    /// With nothing plugged yet.
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("plan");
        let faults = Faults::create(&path).unwrap();
        let errors = File::create_new(dir.path().join("stderr")).unwrap();
        let mut stand_in = StandIn::start(|command| {
            command.env(PLAN_ENV, &path).stderr(Stdio::from(errors.try_clone().unwrap()));
        });
        stand_in.patience = PATIENCE;
        let errors = File::open(dir.path().join("stderr")).unwrap();
        let pool = PoolFile::create("overbook-test", SLOTS).unwrap();
        let content = vec![ExpectedContent::Zeros; PAGES as usize];
        Self { faults, stand_in, worker: None, pool, content, strict: true, errors, _dir: dir }
    }

    /// Ready for a scenario.
    pub(crate) fn ready() -> Self {
        let mut bed = Self::new();
        bed.plug();
        bed.refill();
        bed.meet();
        bed.fill_pool();
        bed.use_pool();
        bed
    }

    pub(crate) fn plug(&mut self) {
        self.stand_in.expect(&format!("plug {MIB}"));
    }

    /// Restores the initial content of every page.
    pub(crate) fn refill(&mut self) {
        // Otherwise pages that the kernel has copied stay in the pool's mapping.
        self.tell(&format!("discard 0 0 {PAGES}"));
        self.is_now(0..PAGES, ExpectedContent::Zeros);
        self.fill();
    }

    /// Writes the initial content to untouched pages.
    pub(crate) fn fill(&mut self) {
        self.stamp(0..FULL, SEED);
        self.clear(ZEROS);
    }

    /// Copies the first pages to the pool.
    pub(crate) fn fill_pool(&mut self) {
        for page in 0..FULL {
            let bytes = self.stand_in.page(self.worker(), page);
            self.pool.write(FIRST_SLOT + page, &bytes).unwrap();
        }
    }

    pub(crate) fn use_pool(&mut self) {
        let answer = self.worker().use_pool(&self.pool, SLOTS);
        assert!(!self.strict || answer == Answer::Done { count: 0 }, "{answer:?}");
    }

    pub(crate) fn meet(&mut self) {
        let mut met = TestWorker::try_to_meet(&self.stand_in);
        // If the shim has no memory to share, a worker connects again later.
        if met.is_err() && !self.strict {
            self.faults.forget(0);
            met = TestWorker::try_to_meet(&self.stand_in);
        }
        self.worker = Some(met.unwrap_or_else(|answer| panic!("no welcome but {answer:?}")));
    }

    /// The worker's process ends.
    pub(crate) fn lose_worker(&mut self) {
        let gone = self.worker.take().unwrap().hang_up();
        gone.until_all_back();
        self.meet();
    }

    pub(crate) fn worker(&self) -> &TestWorker {
        self.worker.as_ref().unwrap()
    }

    // The steps of the scenarios.

    fn ask(&self, request: &Request) -> Answer {
        let answer = self.worker().ask(request);
        assert!(!self.strict || !matches!(answer, Answer::Refused(_)), "{answer:?}");
        answer
    }

    pub(crate) fn track(&self) {
        self.ask(&Request::Track(by_name()));
    }

    pub(crate) fn revoke(&self, granules: std::ops::Range<u32>) {
        let count = granules.len();
        let answer = self.ask(&Request::Revoke { granules: granules.collect() });
        assert!(
            !self.strict
                || matches!(answer, Answer::Done { count: done } if done as usize == count),
            "{answer:?} of {count}"
        );
    }

    pub(crate) fn recall(&self, granules: std::ops::Range<u32>) {
        self.ask(&Request::Recall { granules: granules.collect() });
    }

    pub(crate) fn release(&self) {
        self.ask(&Request::Release);
    }

    /// Merges pages with the slots that hold the same content; pages of zeros with none.
    pub(crate) fn merge(&self, pages: std::ops::Range<u32>) -> u32 {
        let slot = |page: u32| (!ZEROS.contains(&page)).then_some(FIRST_SLOT + page);
        let run = |page: u32, pages| (page, pages, slot(page));
        let runs = if pages.start < ZEROS.end && pages.end > ZEROS.end {
            vec![run(pages.start, ZEROS.end - pages.start), run(ZEROS.end, pages.end - ZEROS.end)]
        } else {
            vec![run(pages.start, pages.end - pages.start)]
        };
        let content =
            |slot: Option<u32>| slot.map_or(protocol::Content::Zeros, protocol::Content::Slot);
        let runs = runs.into_iter().map(|(page, pages, slot)| protocol::Merge {
            page,
            pages,
            content: content(slot),
        });
        match self.ask(&Request::Merge { runs: runs.collect() }) {
            Answer::Merged(Merged { shared, dropped, .. }) => shared + dropped,
            Answer::Refused(_) => 0,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn unshare(&self, page: u32, pages: u32) {
        self.ask(&Request::Unshare { page, pages });
    }

    pub(crate) fn hand_over(&self, lazily: bool) {
        self.ask(&Request::HandOver { lazily });
    }

    pub(crate) fn take(&mut self, pages: std::ops::Range<u32>) {
        let runs = vec![protocol::Pages { page: pages.start, pages: pages.end - pages.start }];
        let answer = self.ask(&Request::Take { runs });
        if let (true, Answer::Taken(Taken { taken, gone, .. })) = (self.strict, answer) {
            assert_eq!(taken + gone, pages.end - pages.start);
        }
    }

    fn is_now(&mut self, pages: std::ops::Range<u32>, content: ExpectedContent) {
        self.content[pages.start as usize..pages.end as usize].fill(content);
    }

    fn tell(&mut self, command: &str) {
        if let Err(error) = self.stand_in.tell(command) {
            panic!("{command}: {error}");
        }
    }

    /// The guest writes to these pages.
    pub(crate) fn stamp(&mut self, pages: std::ops::Range<u32>, seed: u32) {
        let (page, count) = (pages.start, pages.end - pages.start);
        self.tell(&format!("stamp 0 {page} {count} {seed}"));
        self.is_now(pages, ExpectedContent::Stamp(seed));
    }

    pub(crate) fn clear(&mut self, pages: std::ops::Range<u32>) {
        self.tell(&format!("clear 0 {} {}", pages.start, pages.end - pages.start));
        self.is_now(pages, ExpectedContent::Zeros);
    }

    /// QEMU discards these pages. If the kernel has not discarded them, QEMU gets an error.
    pub(crate) fn discard(&mut self, pages: std::ops::Range<u32>) {
        let command = format!("discard 0 {} {}", pages.start, pages.end - pages.start);
        let failed = self.stand_in.tell(&command).is_err();
        assert!(!failed || !self.strict, "{command}");
        for content in &mut self.content[pages.start as usize..pages.end as usize] {
            *content = match *content {
                ExpectedContent::Stamp(seed) | ExpectedContent::Freed(seed) if failed => {
                    ExpectedContent::Freed(seed)
                }
                _ => ExpectedContent::Zeros,
            };
        }
    }

    /// QEMU discards these pages; the kernel may drop them later.
    pub(crate) fn free(&mut self, pages: std::ops::Range<u32>) {
        let before = self.content.clone();
        self.discard(pages.clone());
        for page in pages {
            let content = &mut self.content[page as usize];
            if let ExpectedContent::Stamp(seed) | ExpectedContent::Freed(seed) =
                before[page as usize]
            {
                *content = ExpectedContent::Freed(seed);
            }
        }
    }

    /// Reads these pages, and panics unless they hold the expected content.
    pub(crate) fn check(&mut self, pages: std::ops::Range<u32>) {
        let mut from = pages.start;
        while from < pages.end {
            let content = self.content[from as usize];
            let same = |page: &u32| self.content[*page as usize] == content;
            let count = u32::try_from((from..pages.end).take_while(same).count()).unwrap();
            let command = match content {
                ExpectedContent::Stamp(seed) => format!("holds 0 {from} {count} {seed}"),
                ExpectedContent::Freed(seed) => format!("holds-or-zeros 0 {from} {count} {seed}"),
                ExpectedContent::Zeros => format!("zeros 0 {from} {count}"),
            };
            self.tell(&command);
            from += count;
        }
    }

    // The ends of a scenario.

    /// Runs `scenario`; returns how it ended.
    pub(crate) fn attempt(&mut self, scenario: impl FnOnce(&mut Self)) -> End {
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| scenario(self))) else {
            return End::Well;
        };
        let words = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|words| (*words).to_owned()))
            .unwrap_or_default();
        self.faults.forget(0);
        // A stand-in that has closed the connection may be about to end.
        let until = Instant::now() + Duration::from_secs(1);
        let ended = loop {
            match self.stand_in.has_ended() {
                None if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                ended => break ended,
            }
        };
        let mut said = String::new();
        self.errors.read_to_string(&mut said).unwrap();
        match ended {
            None => End::Badly(words),
            Some(status) => {
                let loud = said.lines().find(|line| {
                    line.starts_with("overbook shim: ")
                        && line.contains("ending QEMU rather than losing a guest's data")
                });
                match loud {
                    Some(line) if status.signal() == Some(libc::SIGABRT) => {
                        End::Loudly(line.to_owned())
                    }
                    _ => End::Silently(format!("{status}; {words}; {said}")),
                }
            }
        }
    }

    /// Checks that everything is as before: nothing is staged, merged, freed, or held, and every
    /// page holds the expected content.
    pub(crate) fn restore(&mut self) {
        self.faults.forget(0);
        self.check(0..PAGES);
        self.release();
        let staged = self.worker().count(Counter::StagedPages);
        assert_eq!(staged, 0, "pages stay staged");
        self.check(0..PAGES);
        self.hand_over(false);
        for page in (0..PAGES).step_by(MAX_UNSHARE as usize) {
            match self.worker().ask(&Request::Unshare { page, pages: MAX_UNSHARE }) {
                Answer::Done { .. } => {}
                Answer::Refused(Refusal::NotMerging { why } | Refusal::NotTracking { why }) => {
                    panic!("unshare: {why}")
                }
                other => panic!("{other:?}"),
            }
        }
        self.check(0..PAGES);
    }

    /// Whether another scenario can begin here. Otherwise a new stand-in is needed, which is not
    /// an error.
    pub(crate) fn is_as_new(&mut self) -> bool {
        let (state, _) = self.worker().status();
        let merged = self.worker().count(Counter::MergedPages);
        state == State::Off && merged == 0
    }

    /// The number of calls of each kind that `step` makes.
    pub(crate) fn record(&mut self, step: impl FnOnce(&mut Self)) -> Vec<(Call, u64)> {
        let count =
            |bed: &Self| Call::ALL.iter().map(|&call| bed.faults.calls(call)).collect::<Vec<_>>();
        let before = count(self);
        step(self);
        let after = count(self);
        let made = before.into_iter().zip(after).map(|(before, after)| after - before);
        Call::ALL.iter().copied().zip(made).filter(|(_, made)| *made > 0).collect()
    }

    /// The addresses of these pages.
    pub(crate) fn memory(&self, pages: std::ops::Range<u32>) -> Range {
        let start = self.worker().regions[0].address + u64::from(pages.start) * PAGE_BYTES;
        Range { start, len: u64::from(pages.end - pages.start) * PAGE_BYTES }
    }

    pub(crate) fn plan(&self, fault: Fault) {
        self.faults.plan(0, fault);
    }
}
