//! Every step in every interleaving with a guest, a disk and a kernel that fails, does a part, or lies: over two pages.
//!
//! An explorer without any cleverness: a run asks for its choices one by one, and is repeated until all choices have been
//! made, depth first. Before each call of the kernel the other actor may do something, and the call may go wrong, as
//! often as a run's [`Budget`] allows.

use std::cell::{Cell, RefCell};

use protocol::Region;

use sys::memory_map::PAGE_LEN;

use super::*;

const HOME: u64 = 0x10_0000;
const AWAY: u64 = 0x20_0000;
const PAGES: usize = 2;
const RUN: Run =
    Run { home: Range { start: HOME, len: PAGES as u64 * PAGE_BYTES }, away: AWAY, page: 0 };
const REGION: Region = Region { first_page: 0, pages: 2, address: HOME };
/// What the pool's slots hold.
const POOL: [u64; PAGES] = [7, 8];

/// What is where a page belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Nothing,
    Own(u64),
    /// A slot of the pool, or the kernel's copy of it.
    Pool(usize, Option<u64>),
}

#[derive(Debug)]
struct World {
    home: [Home; PAGES],
    away: [Option<u64>; PAGES],
    /// What the guest and its disks have written last.
    expected: [u64; PAGES],
    /// A disk is reading into it.
    pinned: [bool; PAGES],
    /// Writes to the pool's pages trap.
    is_protected: bool,
    next_value: u64,
}

/// How much may happen in a run.
#[derive(Clone, Copy, Debug)]
struct Budget {
    faults: u32,
    deeds: u32,
}

struct Model<'a> {
    world: RefCell<World>,
    left: Cell<Budget>,
    choices: &'a Choices,
    /// Moves are refused until the step is over.
    is_busy: Cell<bool>,
    time: Cell<u64>,
}

/// The choices of a run: the first ones are given, the others are the first option.
#[derive(Default)]
struct Choices {
    made: RefCell<Vec<(usize, usize)>>,
    at: Cell<usize>,
}

impl Choices {
    fn choose(&self, options: usize) -> usize {
        let (mut made, at) = (self.made.borrow_mut(), self.at.get());
        self.at.set(at + 1);
        if at == made.len() {
            made.push((0, options));
        }
        made[at].0
    }

    /// The next run's; `false`: all have been made.
    fn next(&self) -> bool {
        self.at.set(0);
        let mut made = self.made.borrow_mut();
        while let Some((chosen, options)) = made.pop() {
            if chosen + 1 < options {
                made.push((chosen + 1, options));
                return true;
            }
        }
        false
    }
}

/// What ends QEMU, as a panic.
struct Ended(String);

impl Model<'_> {
    /// Whether this call goes wrong, and how: 0 means that it does not.
    fn fault(&self, ways: usize) -> usize {
        let left = self.left.get();
        if left.faults == 0 {
            return 0;
        }
        let way = self.choices.choose(ways + 1);
        self.left.set(Budget { faults: left.faults - u32::from(way > 0), ..left });
        way
    }

    /// The other actor's turn: it may read or write a page, have a disk begin to read into it, or have that end.
    fn others(&self) {
        let left = self.left.get();
        if left.deeds == 0 {
            return;
        }
        let deed = self.choices.choose(1 + 3 * PAGES);
        if deed == 0 {
            return;
        }
        self.left.set(Budget { deeds: left.deeds - 1, ..left });
        let (page, what) = ((deed - 1) / 3, (deed - 1) % 3);
        match what {
            0 => self.read(page),
            1 => self.write(page),
            _ if self.world.borrow().pinned[page] => self.unpin(page),
            _ => self.pin(page),
        }
    }

    fn read(&self, page: usize) {
        let world = self.world.borrow();
        let found = match world.home[page] {
            // It waits.
            Home::Nothing => return,
            Home::Own(value) | Home::Pool(_, Some(value)) => value,
            Home::Pool(slot, None) => POOL[slot],
        };
        assert_eq!(found, world.expected[page], "page {page}: {world:?}");
    }

    fn write(&self, page: usize) {
        let mut world = self.world.borrow_mut();
        let (value, is_protected) = (world.next_value, world.is_protected);
        match &mut world.home[page] {
            Home::Nothing => return,
            Home::Own(own) => *own = value,
            Home::Pool(_, Some(copy)) => *copy = value,
            Home::Pool(_, None) if is_protected => return,
            Home::Pool(_, copy) => *copy = Some(value),
        }
        world.expected[page] = value;
        world.next_value += 1;
    }

    /// To pin a page for writing is to write to it.
    fn pin(&self, page: usize) {
        let mut world = self.world.borrow_mut();
        let is_protected = world.is_protected;
        match &mut world.home[page] {
            Home::Nothing => return,
            Home::Pool(_, None) if is_protected => return,
            Home::Pool(slot, copy @ None) => *copy = Some(POOL[*slot]),
            Home::Own(_) | Home::Pool(_, Some(_)) => {}
        }
        world.pinned[page] = true;
    }

    fn unpin(&self, page: usize) {
        self.world.borrow_mut().pinned[page] = false;
        self.write(page);
    }

    fn put(&self, address: u64, value: Option<u64>) {
        let (page, is_home) = place(address);
        let mut world = self.world.borrow_mut();
        if is_home {
            world.home[page] = value.map_or(Home::Nothing, Home::Own);
        } else {
            world.away[page] = value;
        }
    }

    fn get(&self, address: u64) -> Option<u64> {
        let (page, is_home) = place(address);
        let world = self.world.borrow();
        if !is_home {
            return world.away[page];
        }
        match world.home[page] {
            Home::Nothing => None,
            Home::Own(value) | Home::Pool(_, Some(value)) => Some(value),
            Home::Pool(slot, None) => Some(POOL[slot]),
        }
    }

    /// Why a page cannot be moved from one address to the other.
    fn objection(&self, dst: u64, src: u64) -> Option<Errno> {
        if self.get(dst).is_some() {
            return Some(Errno::EXIST);
        }
        let (page, is_home) = place(src);
        let world = self.world.borrow();
        match world.home[page] {
            Home::Pool(..) if is_home => Some(Errno::INVAL),
            Home::Own(_) if is_home && world.pinned[page] => Some(Errno::BUSY),
            _ => None,
        }
    }

    /// Does what `each` does for page after page, until one cannot be done, or something goes wrong.
    fn pages(&self, dst: u64, src: u64, len: u64, each: impl Fn(u64, u64)) -> Progress {
        self.others();
        let fault = self.fault(6);
        let mut bytes = 0;
        self.is_busy.set(self.is_busy.get() || fault == 5);
        if self.is_busy.get() {
            return Progress { bytes, stopped: Some(Errno::AGAIN) };
        }
        if fault == 6 {
            return Progress { bytes, stopped: Some(Errno::NOMEM) };
        }
        while bytes < len {
            if fault == 1 || (fault == 2 && bytes > 0) {
                return Progress { bytes, stopped: Some(Errno::AGAIN) };
            }
            if let Some(errno) = self.objection(dst + bytes, src + bytes) {
                return Progress { bytes, stopped: Some(errno) };
            }
            each(dst + bytes, src + bytes);
            bytes += PAGE_BYTES;
        }
        self.others();
        match fault {
            // All of it is done, and the kernel says that nothing is, as Linux 6.18 does.
            3 => Progress { bytes: 0, stopped: Some(Errno::EXIST) },
            4 => Progress { bytes: 0, stopped: Some(Errno::NOMEM) },
            _ => Progress { bytes, stopped: None },
        }
    }
}

fn place(address: u64) -> (usize, bool) {
    let is_home = address < AWAY;
    let offset = address - if is_home { HOME } else { AWAY };
    (usize::try_from(offset / PAGE_BYTES).unwrap_or(usize::MAX), is_home)
}

impl Kernel for Model<'_> {
    unsafe fn move_pages(&self, dst: u64, src: u64, len: u64) -> Progress {
        self.pages(dst, src, len, |dst, src| {
            let value = self.get(src);
            self.put(src, None);
            self.put(dst, value);
        })
    }

    unsafe fn copy_pages(&self, dst: u64, src: u64, len: u64) -> Progress {
        self.others();
        let fault = self.fault(4);
        let mut bytes = 0;
        if fault == 4 {
            return Progress { bytes, stopped: Some(Errno::NOMEM) };
        }
        while bytes < len {
            if fault == 1 || (fault == 2 && bytes > 0) {
                return Progress { bytes, stopped: Some(Errno::AGAIN) };
            }
            if self.get(dst + bytes).is_some() {
                return Progress { bytes, stopped: Some(Errno::EXIST) };
            }
            let value = self.get(src + bytes).expect("to copy from a hole is to wait for oneself");
            self.put(dst + bytes, Some(value));
            bytes += PAGE_BYTES;
        }
        let stopped = (fault == 3).then_some(Errno::NOMEM);
        Progress { bytes: if fault == 3 { 0 } else { bytes }, stopped }
    }

    unsafe fn discard(&self, ours: Range) -> Result<(), Errno> {
        self.others();
        if self.fault(1) > 0 {
            return Err(Errno::AGAIN);
        }
        for at in (ours.start..ours.start + ours.len).step_by(PAGE_LEN) {
            self.put(at, None);
        }
        Ok(())
    }

    fn populated(&self, range: Range) -> Result<PageSet, Errno> {
        self.others();
        if self.fault(1) > 0 {
            return Err(Errno::NOMEM);
        }
        let mut set = PageSet::default();
        for at in (range.start..range.start + range.len).step_by(PAGE_LEN) {
            if self.get(at).is_some() {
                set.add(range, Range { start: at, len: PAGE_BYTES });
            }
        }
        Ok(set)
    }

    fn now(&self) -> Nanos {
        self.time.set(self.time.get() + 400_000);
        Nanos(self.time.get())
    }

    fn pause(&self) {}

    fn tried(&self, _: Range, _: &PageSet) {}

    fn end(&self, what: &str, _: Errno) -> ! {
        std::panic::panic_any(Ended(format!("{what}: {:?}", self.world.borrow())))
    }
}

impl Fresh for Model<'_> {
    type Kernel = Self;

    fn kernel(&self) -> &Self {
        self
    }

    unsafe fn map_fresh(&self, home: Range) -> bool {
        self.others();
        if self.fault(1) > 0 {
            return false;
        }
        for at in (home.start..home.start + home.len).step_by(PAGE_LEN) {
            let (page, _) = place(at);
            assert!(!self.world.borrow().pinned[page], "a disk is reading into page {page}");
            self.put(at, None);
        }
        true
    }
}

impl Mapper for Model<'_> {
    fn judge(&self, aside: Range, content: Content, verdicts: &mut [Verdict]) {
        self.others();
        for (page, verdict) in verdicts.iter_mut().enumerate() {
            let Some(found) = self.get(aside.start + page as u64 * PAGE_BYTES) else { continue };
            let same = match content {
                Content::Zeros => found == 0,
                Content::Slot(slot) => found == POOL[slot as usize + page],
            };
            *verdict = if same { Verdict::Same } else { Verdict::Different };
        }
    }

    unsafe fn map_slots(&self, slot: u32, home: Range) -> bool {
        self.others();
        if self.fault(1) > 0 {
            return false;
        }
        for (n, at) in (home.start..home.start + home.len).step_by(PAGE_LEN).enumerate() {
            let (page, _) = place(at);
            assert!(self.get(at).is_none(), "page {page} is not empty");
            self.world.borrow_mut().home[page] = Home::Pool(slot as usize + n, None);
        }
        true
    }
}

/// Whether what is known of each page is so, and no byte is lost.
fn check(model: &Model<'_>, channel: &Channel) {
    let world = model.world.borrow();
    for page in 0..PAGES {
        let state = state(channel.shared(), RUN, page);
        let at_home = match world.home[page] {
            Home::Nothing => None,
            Home::Own(value) | Home::Pool(_, Some(value)) => Some(value),
            Home::Pool(slot, None) => Some(POOL[slot]),
        };
        let is_pools = matches!(world.home[page], Home::Pool(..));
        assert_eq!(is_pools, state == PageState::Merged, "page {page}, {state:?}: {world:?}");
        let content = match state {
            PageState::Plain | PageState::Merged => at_home,
            _ => at_home.or(world.away[page]),
        };
        let is_there_only = state == PageState::Plain || state == PageState::Merged;
        let in_two = world.away[page].is_some() && (is_there_only || at_home.is_some());
        assert!(!in_two, "page {page}, {state:?}: {world:?}");
        let found = content.unwrap_or(0);
        assert_eq!(found, world.expected[page], "page {page}, {state:?}: {world:?}");
    }
}

/// Brings everything home that is not: then nothing fails any more.
fn recover(model: &Model<'_>, channel: &Channel) {
    model.left.set(Budget { faults: 0, deeds: 0 });
    model.is_busy.set(false);
    for page in 0..PAGES {
        let part = RUN.part(page, 1);
        match state(channel.shared(), RUN, page) {
            PageState::Staged => {
                // SAFETY: a model.
                unsafe { unstage(model, channel.shared(), part) };
            }
            PageState::Aside => {
                // SAFETY: a model.
                assert!(unsafe { put_back(model, channel, part) });
            }
            _ => {}
        }
        let state = state(channel.shared(), RUN, page);
        assert!(matches!(state, PageState::Plain | PageState::Merged), "{state:?}");
    }
    check(model, channel);
}

/// Runs `act` with every choice, from both contents of each page; answers how many runs that were.
fn explore(budget: Budget, is_protected: bool, act: impl Fn(&Model<'_>, &Channel)) -> u32 {
    let channel = Channel::new(vec![REGION], 1, None).expect("shared memory");
    let mut runs = 0;
    for homes in [
        [Home::Own(POOL[0]), Home::Own(POOL[1])],
        [Home::Own(POOL[0]), Home::Nothing],
        [Home::Own(0), Home::Own(POOL[1])],
    ] {
        let choices = Choices::default();
        loop {
            channel.set(RUN.home, PageState::Plain);
            let expected = homes.map(|home| if let Home::Own(value) = home { value } else { 0 });
            let world = World {
                home: homes,
                away: [None; PAGES],
                expected,
                pinned: [false; PAGES],
                is_protected,
                next_value: 100,
            };
            let model = Model {
                world: RefCell::new(world),
                left: Cell::new(budget),
                choices: &choices,
                is_busy: Cell::new(false),
                time: Cell::new(1),
            };
            act(&model, &channel);
            check(&model, &channel);
            recover(&model, &channel);
            runs += 1;
            if !choices.next() {
                break;
            }
        }
    }
    runs
}

/// With few failures and much going on beside, and the other way round.
fn explore_all(act: impl Fn(&Model<'_>, &Channel) + Copy) {
    let few = Budget { faults: 1, deeds: 2 };
    let many = Budget { faults: 2, deeds: 1 };
    let runs: u32 = [few, many]
        .into_iter()
        .flat_map(|budget| [false, true].map(|protected| explore(budget, protected, act)))
        .sum();
    assert!(runs > 1_000, "{runs} runs");
    eprintln!("{runs} runs");
}

#[test]
fn what_is_staged_comes_home() {
    explore_all(|model, channel| {
        // SAFETY: a model.
        unsafe { stage(model, channel.shared(), RUN) };
        check(model, channel);
        model.is_busy.set(false);
        for page in 0..PAGES {
            if state(channel.shared(), RUN, page) == PageState::Staged {
                // SAFETY: as above.
                unsafe { unstage(model, channel.shared(), RUN.part(page, 1)) };
            }
        }
    });
}

#[test]
fn what_is_equal_is_shared_and_what_is_not_goes_back() {
    for content in [Content::Slot(0), Content::Zeros] {
        explore_all(|model, channel| {
            // SAFETY: a model.
            unsafe { merge(model, channel, RUN, content) };
        });
    }
}

#[test]
fn what_is_shared_is_replaced_by_the_guests_own() {
    let replace_after = |budget: Budget, fails_while_merging: bool| {
        explore(budget, true, |model, channel| {
            let whole = model.left.get();
            if !fails_while_merging {
                model.left.set(Budget { faults: 0, deeds: 0 });
            }
            // SAFETY: a model.
            unsafe { merge(model, channel, RUN, Content::Slot(0)) };
            check(model, channel);
            model.is_busy.set(false);
            model.left.set(if fails_while_merging { model.left.get() } else { whole });
            for page in 0..PAGES {
                let is_unwritten = matches!(model.world.borrow().home[page], Home::Pool(_, None));
                let is_known = state(channel.shared(), RUN, page) == PageState::Merged;
                if is_unwritten && is_known {
                    // SAFETY: as above; nobody can write to it, for writes trap.
                    unsafe { replace(model, channel, RUN.part(page, 1)) };
                    check(model, channel);
                }
            }
        })
    };
    assert!(replace_after(Budget { faults: 2, deeds: 1 }, false) > 1_000);
    assert!(replace_after(Budget { faults: 1, deeds: 1 }, true) > 1_000);
}

#[test]
fn what_is_mapped_anew_keeps_its_content() {
    explore_all(|model, channel| {
        // SAFETY: a model.
        unsafe { map_anew(model, channel, RUN) };
    });
}

#[test]
fn a_page_that_lay_where_none_should_be_is_found_and_never_taken_for_another() {
    explore_all(|model, channel| {
        // What no step leaves behind: the content of a page whose state says that it is home.
        {
            let mut world = model.world.borrow_mut();
            if let Home::Own(value) = world.home[0] {
                world.home[0] = Home::Nothing;
                world.away[0] = Some(value);
            }
        }
        // SAFETY: a model.
        unsafe { stage(model, channel.shared(), RUN) };
        for _ in 0..3 {
            // The kernel may have failed to be asked.
            let budget = model.left.replace(Budget { faults: 0, deeds: 0 });
            // SAFETY: as above.
            unsafe { stage(model, channel.shared(), RUN) };
            model.left.set(budget);
        }
    });
}

#[test]
fn a_step_from_another_state_does_nothing() {
    let budget = Budget { faults: 1, deeds: 1 };
    let runs = explore(budget, true, |model, channel| {
        // SAFETY: a model.
        unsafe { stage(model, channel.shared(), RUN.part(1, 1)) };
        // Of these two pages one is staged, and no other step is for that.
        // SAFETY: as above.
        unsafe {
            merge(model, channel, RUN, Content::Slot(0));
            map_anew(model, channel, RUN);
            replace(model, channel, RUN);
            stage(model, channel.shared(), RUN);
        }
        check(model, channel);
    });
    assert!(runs > 100, "{runs}");
}

#[test]
fn what_lay_in_the_buffer_passes_for_no_page() {
    explore(Budget { faults: 2, deeds: 2 }, false, |model, channel| {
        // A copy of what the pool holds, which nobody could discard; the guest's page holds something else.
        let stale = POOL[0];
        {
            let mut world = model.world.borrow_mut();
            world.home[0] = Home::Own(5);
            (world.expected[0], world.away[0]) = (5, Some(stale));
        }
        // SAFETY: a model.
        let merged = unsafe { merge(model, channel, RUN, Content::Slot(0)) };
        assert_eq!(merged.shared, 0);
        let mut world = model.world.borrow_mut();
        assert!([Some(stale), None].contains(&world.away[0]), "{world:?}");
        world.away[0] = None;
    });
}

#[test]
fn a_page_in_two_places_ends_qemu() {
    let choices = Choices::default();
    let channel = Channel::new(vec![REGION], 1, None).expect("shared memory");
    let world = World {
        home: [Home::Own(1), Home::Nothing],
        away: [Some(2), None],
        expected: [2, 0],
        pinned: [false; PAGES],
        is_protected: false,
        next_value: 100,
    };
    let model = Model {
        world: RefCell::new(world),
        left: Cell::new(Budget { faults: 0, deeds: 0 }),
        choices: &choices,
        is_busy: Cell::new(false),
        time: Cell::new(1),
    };
    // SAFETY: a model.
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| unsafe {
        unstage(&model, channel.shared(), RUN)
    }));
    let ended = *ended.expect_err("it went on").downcast::<Ended>().expect("it ends QEMU");
    assert!(ended.0.starts_with(TWO_PLACES), "{}", ended.0);
}
