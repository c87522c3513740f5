//! `seal`: protects pages in a layer that is not trusted from being read, or changed unnoticed.
//!
//! Each page is encrypted and authenticated (AES-GCM) before it goes down. Its tag stays here,
//! with the number of its write. So a page that comes back wrong, old, or from another place is
//! detected, and its read fails. The key belongs to this layer alone and never leaves the
//! process. No write number is used twice with it, as AES-GCM demands of nonces.
//!
//! Only pages that were written or zeroed through this layer can be read through it; reads of
//! others fail. A zeroed page is only a state here: it has no place below, and reads of it do not
//! go there.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::{self, Extent};
use crate::nbd::wire;

/// Size of a page in bytes: the unit of sealing.
pub const PAGE: usize = 4096;
/// Pages that share a lock.
const SHARD: usize = 4096;
/// Length of a page's tag.
const TAG_LEN: usize = MAX_TAG_LEN;

/// Seals pages with a key of its own.
pub struct Sealer {
    key: LessSafeKey,
    next: AtomicU64,
}

/// Data by which a page is verified.
#[derive(Clone, Copy)]
pub struct Mark {
    /// Number of its write; never 0.
    write: u64,
    tag: Tag,
}

impl Sealer {
    /// A sealer with a new key; `None`: the kernel has no random numbers.
    #[must_use]
    pub fn new() -> Option<Self> {
        let mut key = [0; 16];
        SystemRandom::new().fill(&mut key).ok()?;
        let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &key).ok()?);
        Some(Self { key, next: AtomicU64::new(1) })
    }

    /// Number for a new write.
    fn number(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Seals a page for page number `place`, in the buffer.
    ///
    /// # Errors
    ///
    /// The buffer is not one page.
    fn seal(&self, write: u64, place: u64, page: &mut [u8]) -> Result<Mark, Errno> {
        let aad = Aad::from(place.to_be_bytes());
        let tag = self.key.seal_in_place_separate_tag(nonce(write), aad, page);
        tag.map(|tag| Mark { write, tag }).map_err(|_| Errno::Io)
    }

    /// Decrypts the page of number `place`, in the buffer, and returns whether it is authentic.
    /// If it is not, the content of the buffer is meaningless.
    #[must_use]
    fn open(&self, mark: &Mark, place: u64, page: &mut [u8]) -> bool {
        let aad = Aad::from(place.to_be_bytes());
        self.key.open_in_place_separate_tag(nonce(mark.write), aad, mark.tag, page, 0..).is_ok()
    }
}

fn nonce(write: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[NONCE_LEN - 8..].copy_from_slice(&write.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Content of a page.
#[derive(Clone, Copy)]
enum PageContent {
    /// It was never written, or a write to it is not done yet.
    Unknown,
    /// It is zeros; the layer below is not asked.
    Zeros,
    /// It is in the layer below, with this mark.
    Sealed(Mark),
}

/// State of a page, packed: there is one for each page.
#[derive(Clone, Copy, Default)]
struct PageSeal {
    /// Number of the write that began last, with [`ZEROS`] or [`SEALED`].
    begun: u64,
    /// The tag of that write, if the page is sealed.
    tag: [u8; TAG_LEN],
}

/// The page is zeros.
const ZEROS: u64 = 1 << 62;
/// The page is in the layer below.
const SEALED: u64 = 1 << 63;
const _: () = assert!(size_of::<PageSeal>() == 24);

impl PageSeal {
    fn unknown(write: u64) -> Self {
        Self { begun: write, tag: Default::default() }
    }

    fn zeros(write: u64) -> Self {
        Self { begun: write | ZEROS, tag: Default::default() }
    }

    fn begun(&self) -> u64 {
        self.begun & !(ZEROS | SEALED)
    }

    /// The write of this mark has ended; it is the one that began last.
    fn seal(&mut self, mark: &Mark) {
        self.begun = mark.write | SEALED;
        self.tag.copy_from_slice(mark.tag.as_ref());
    }

    fn content(&self) -> PageContent {
        if self.begun & SEALED != 0 {
            return PageContent::Sealed(Mark { write: self.begun(), tag: self.tag.into() });
        }
        if self.begun & ZEROS != 0 { PageContent::Zeros } else { PageContent::Unknown }
    }
}

/// State of [`SHARD`] pages.
#[derive(Default)]
struct Shard {
    /// State of each page; empty: all have the state `all`, and the shard takes no memory.
    each: Box<[PageSeal]>,
    all: PageSeal,
}

impl PageContent {
    fn mark(&self) -> Option<&Mark> {
        match self {
            Self::Sealed(mark) => Some(mark),
            Self::Unknown | Self::Zeros => None,
        }
    }

    fn is_zeros(&self) -> bool {
        matches!(self, Self::Zeros)
    }

    fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown)
    }
}

impl Shard {
    fn page(&self, page: usize) -> &PageSeal {
        self.each.get(page).unwrap_or(&self.all)
    }

    /// Begins writes to these pages.
    fn begin(&mut self, pages: Range<usize>, known: PageSeal) {
        if self.each.is_empty() {
            self.each = vec![self.all; SHARD].into_boxed_slice();
        }
        for page in &mut self.each[pages] {
            // Another write to the same page may have begun later and got here first.
            if known.begun() >= page.begun() {
                *page = known;
            }
        }
    }

    /// Begins a write to all pages.
    fn begin_all(&mut self, known: PageSeal) {
        let is_latest = |page: &PageSeal| known.begun() >= page.begun();
        if is_latest(&self.all) && self.each.iter().all(is_latest) {
            *self = Self { each: Box::default(), all: known };
        } else {
            self.begin(0..SHARD, known);
        }
    }
}

/// Seals pages for the layer below.
pub struct Seal {
    below: Arc<dyn Layer>,
    sealer: Sealer,
    /// State of all pages.
    shards: Vec<Mutex<Shard>>,
    forged: AtomicU64,
}

impl Seal {
    /// Seals pages in `below`, whose content is unknown at first. `None`: the kernel has no
    /// random numbers.
    #[must_use]
    pub fn over(below: Arc<dyn Layer>) -> Option<Self> {
        let pages = usize::try_from(below.size() / PAGE as u64).ok()?;
        let shards = (0..pages.div_ceil(SHARD)).map(|_| Mutex::default()).collect();
        Some(Self { below, sealer: Sealer::new()?, shards, forged: AtomicU64::new(0) })
    }

    /// Number of pages that came back and were not authentic.
    #[must_use]
    pub fn forged(&self) -> u64 {
        self.forged.load(Ordering::Relaxed)
    }

    fn shard(&self, place: u64) -> (MutexGuard<'_, Shard>, usize) {
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        let shard = self.shards[place / SHARD].lock();
        (shard.unwrap_or_else(PoisonError::into_inner), place % SHARD)
    }

    fn content(&self, place: u64) -> PageContent {
        let (shard, place) = self.shard(place);
        shard.page(place).content()
    }

    /// Begins a write of this number; the content of the page is unknown until it is done.
    fn begin(&self, place: u64, write: u64) {
        let (mut shard, place) = self.shard(place);
        shard.begin(place..place + 1, PageSeal::unknown(write));
    }

    /// Ends the write of this mark: its page is in the layer below, unless another write began
    /// since.
    fn done(&self, place: u64, mark: Mark) {
        let (mut shard, place) = self.shard(place);
        if let Some(known) = shard.each.get_mut(place).filter(|known| known.begun() == mark.write) {
            known.seal(&mark);
        }
    }

    /// Zeroes pages of one shard, as the write of this number.
    fn zero_pages(&self, places: Range<u64>, write: u64, zeros: Zeros) {
        let is_last = places.end == self.size() / PAGE as u64;
        let (mut shard, first) = self.shard(places.start);
        let end = if is_last { SHARD } else { first + places.count() };
        if zeros == Zeros::Trim && shard.each.is_empty() && shard.all.content().is_unknown() {
            // No page was ever written there: a disk may be trimmed as a whole before it is used.
            return;
        }
        let known = PageSeal::zeros(write);
        if (first, end) == (0, SHARD) {
            shard.begin_all(known);
        } else {
            shard.begin(first..end, known);
        }
    }

    /// Reads pages, none of which is unknown.
    async fn open(&self, offset: u64, pages: Vec<PageContent>) -> Result<Vec<u8>, Errno> {
        let mut data = Vec::new();
        for run in pages.chunk_by(|page, next| page.is_zeros() == next.is_zeros()) {
            let read = match run {
                [PageContent::Zeros, ..] => vec![0; run.len() * PAGE],
                _ => self.open_sealed(offset + data.len() as u64, run).await?,
            };
            if data.is_empty() {
                data = read;
            } else {
                data.extend_from_slice(&read);
            }
        }
        Ok(data)
    }

    /// Reads pages, all of which are sealed.
    async fn open_sealed(&self, offset: u64, pages: &[PageContent]) -> Result<Vec<u8>, Errno> {
        let mut data = layer::read(&*self.below, offset, pages.len() * PAGE).await?;
        let marks = pages.iter().filter_map(PageContent::mark);
        let first = offset / PAGE as u64;
        for ((page, mark), place) in data.chunks_exact_mut(PAGE).zip(marks).zip(first..) {
            if !self.sealer.open(mark, place, page) {
                // A write that came in between has another mark.
                if self.content(place).mark().is_some_and(|now| now.write == mark.write) {
                    self.forged.fetch_add(1, Ordering::Relaxed);
                }
                return Err(Errno::Io);
            }
        }
        Ok(data)
    }
}

impl Layer for Seal {
    fn size(&self) -> u64 {
        self.below.size()
    }

    fn describe(&self) -> String {
        format!("seal over {}", self.below.describe())
    }

    fn block(&self) -> u32 {
        self.below.block().max(4096)
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let first = offset / PAGE as u64;
        let pages: Vec<PageContent> =
            (first..).take(into.len() / PAGE).map(|place| self.content(place)).collect();
        if pages.iter().any(PageContent::is_unknown) {
            return Read::Now(Err(Errno::Io));
        }
        if pages.iter().all(PageContent::is_zeros) {
            into.fill(0);
            return Read::Now(Ok(()));
        }
        Read::Later(Box::pin(self.open(offset, pages)))
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        let first = offset / PAGE as u64;
        let mut sealed = data.to_vec();
        let mut marks = Vec::with_capacity(data.len() / PAGE);
        for (page, place) in sealed.chunks_exact_mut(PAGE).zip(first..) {
            let write = self.sealer.number();
            self.begin(place, write);
            match self.sealer.seal(write, place, page) {
                Ok(mark) => marks.push(mark),
                Err(errno) => return Answer::Now(Err(errno)),
            }
        }
        let done = move |result: Result<(), Errno>| {
            result?;
            for (mark, place) in marks.into_iter().zip(first..) {
                self.done(place, mark);
            }
            Ok(())
        };
        match self.below.write(offset, sealed.into()) {
            Answer::Now(result) => Answer::Now(done(result)),
            Answer::Later(future) => Answer::Later(Box::pin(async move { done(future.await) })),
        }
    }

    /// Records that the pages are zeros, and trims the range below.
    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        let write = self.sealer.number();
        let (mut place, end) = (offset / PAGE as u64, (offset + length) / PAGE as u64);
        while place < end {
            let next = (place / SHARD as u64 + 1) * SHARD as u64;
            self.zero_pages(place..next.min(end), write, zeros);
            place = next;
        }
        self.below.zero(offset, length, Zeros::Trim)
    }

    fn flush(&self) -> Answer<'_> {
        self.below.flush()
    }

    /// Holes are unknown pages, and pages that the layer below has lost. Zeros are none: this
    /// layer has them.
    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        let below = self.below.extents(offset, length).into_iter();
        let below = below
            .flat_map(|extent| std::iter::repeat_n(extent.is_hole, extent.length as usize / PAGE));
        let first = offset / PAGE as u64;
        reply::join((first..).zip(below).map(|(place, is_hole)| Extent {
            length: wire::length(PAGE),
            is_hole: match self.content(place) {
                PageContent::Unknown => true,
                PageContent::Zeros => false,
                PageContent::Sealed(_) => is_hole,
            },
        }))
    }
}
