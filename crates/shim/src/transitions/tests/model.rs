//! A kernel, a guest and a disk, over two pages.

use std::cell::{Cell, RefCell};

use protocol::Region;
use rustix::io::Errno;
use sys::memory_map::PAGE_LEN;
use sys::userfaultfd::Progress;

use crate::time::Nanos;
use crate::transitions::*;

pub(super) const HOME: u64 = 0x10_0000;
pub(super) const AWAY: u64 = 0x20_0000;
pub(super) const PAGES: usize = 2;
pub(super) const RUN: PageRun =
    PageRun { home: Range { start: HOME, len: PAGES as u64 * PAGE_BYTES }, away: AWAY, page: 0 };
pub(super) const REGION: Region = Region { first_page: 0, pages: 2, address: HOME };
/// The content of the pool's slots.
pub(super) const POOL: [u64; PAGES] = [7, 8];

/// The content of a page's own place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    Nothing,
    Own(u64),
    /// A slot of the pool, or the kernel's copy of it.
    Pool(usize, Option<u64>),
}

#[derive(Debug)]
pub(super) struct ModelState {
    pub(super) home: [Home; PAGES],
    pub(super) away: [Option<u64>; PAGES],
    /// The value last written by the guest or its disks.
    pub(super) expected: [u64; PAGES],
    /// A disk is reading into the page.
    pub(super) pinned: [bool; PAGES],
    /// Writes to the pool's pages trap.
    pub(super) is_protected: bool,
    pub(super) next_value: u64,
}

/// Number of events allowed in a run: failing calls, and deeds of the other actor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    pub(super) faults: u32,
    pub(super) deeds: u32,
}

pub(super) struct Model<'a> {
    pub(super) world: RefCell<ModelState>,
    pub(super) left: Cell<Budget>,
    pub(super) choices: &'a Choices,
    /// Moves are refused until the step is over.
    pub(super) is_busy: Cell<bool>,
    pub(super) time: Cell<u64>,
}

/// The choices of a run: the first ones are given, the others take the first option.
#[derive(Default)]
pub(super) struct Choices {
    pub(super) made: RefCell<Vec<(usize, usize)>>,
    pub(super) at: Cell<usize>,
}

impl Choices {
    pub(super) fn choose(&self, options: usize) -> usize {
        let (mut made, at) = (self.made.borrow_mut(), self.at.get());
        self.at.set(at + 1);
        if at == made.len() {
            made.push((0, options));
        }
        made[at].0
    }

    /// Moves on to the choices of the next run; `false`: all have been made.
    pub(super) fn next(&self) -> bool {
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

/// The panic payload that stands for the end of QEMU.
pub(super) struct Ended(pub(super) String);

impl Model<'_> {
    /// Whether this call goes wrong, and how: 0 means that it does not.
    pub(super) fn fault(&self, ways: usize) -> usize {
        let left = self.left.get();
        if left.faults == 0 {
            return 0;
        }
        let way = self.choices.choose(ways + 1);
        self.left.set(Budget { faults: left.faults - u32::from(way > 0), ..left });
        way
    }

    /// The other actor's turn. It may read or write a page, or start or end a disk's read into a
    /// page.
    pub(super) fn others(&self) {
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

    pub(super) fn read(&self, page: usize) {
        let world = self.world.borrow();
        let found = match world.home[page] {
            // The guest waits.
            Home::Nothing => return,
            Home::Own(value) | Home::Pool(_, Some(value)) => value,
            Home::Pool(slot, None) => POOL[slot],
        };
        assert_eq!(found, world.expected[page], "page {page}: {world:?}");
    }

    pub(super) fn write(&self, page: usize) {
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

    /// Pins a page for writing, which is a write to it.
    pub(super) fn pin(&self, page: usize) {
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

    pub(super) fn unpin(&self, page: usize) {
        self.world.borrow_mut().pinned[page] = false;
        self.write(page);
    }

    pub(super) fn put(&self, address: u64, value: Option<u64>) {
        let (page, is_home) = place(address);
        let mut world = self.world.borrow_mut();
        if is_home {
            world.home[page] = value.map_or(Home::Nothing, Home::Own);
        } else {
            world.away[page] = value;
        }
    }

    pub(super) fn get(&self, address: u64) -> Option<u64> {
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

    /// The reason why a page cannot be moved from one address to the other.
    pub(super) fn objection(&self, dst: u64, src: u64) -> Option<Errno> {
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

    /// Applies `each` to page after page, until one cannot be done, or a fault occurs.
    pub(super) fn pages(&self, dst: u64, src: u64, len: u64, each: impl Fn(u64, u64)) -> Progress {
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
            // All of it is done, and the kernel reports that nothing is, as Linux 6.18 does.
            3 => Progress { bytes: 0, stopped: Some(Errno::EXIST) },
            4 => Progress { bytes: 0, stopped: Some(Errno::NOMEM) },
            _ => Progress { bytes, stopped: None },
        }
    }
}

pub(super) fn place(address: u64) -> (usize, bool) {
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

    fn pause(&self, _: u32) {}

    fn tried(&self, _: Range, _: &PageSet) {}

    fn end(&self, what: &str, _: Errno) -> ! {
        std::panic::panic_any(Ended(format!("{what}: {:?}", self.world.borrow())))
    }
}

impl HasKernel for Model<'_> {
    type Kernel = Self;

    fn kernel(&self) -> &Self {
        self
    }
}

impl Fresh for Model<'_> {
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
    fn judge(&self, aside: Range, content: Content, verdicts: &mut [PageComparison]) {
        self.others();
        for (page, verdict) in verdicts.iter_mut().enumerate() {
            let Some(found) = self.get(aside.start + page as u64 * PAGE_BYTES) else { continue };
            let same = match content {
                Content::Zeros => found == 0,
                Content::Slot(slot) => found == POOL[slot as usize + page],
            };
            *verdict = if same { PageComparison::Same } else { PageComparison::Different };
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
