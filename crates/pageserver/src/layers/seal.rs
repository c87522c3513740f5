//! `seal`: protects pages in a layer that is not trusted from being read, or changed unnoticed.
//!
//! Each page is encrypted and authenticated (AES-GCM) before it goes down. Its tag stays here,
//! with the number of its write. So a page that comes back wrong, old, or from another place is
//! detected, and its read fails. The key belongs to this layer alone and never leaves the
//! process. No write number is used twice with it, as AES-GCM demands of nonces.
//!
//! Only pages that were written through this layer can be read through it; reads of others fail.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::aead::{AES_128_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::{self, Extent};
use crate::nbd::wire;

/// Size of a page in bytes: the unit of sealing.
pub const PAGE: usize = 4096;
/// Pages that share a lock.
const SHARD: usize = 4096;

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

/// State of a page.
#[derive(Clone, Copy, Default)]
struct Known {
    /// Number of the write that began last.
    begun: u64,
    /// Mark of the page in the layer below; `None`: its content there is unknown.
    mark: Option<Mark>,
}

/// Seals pages for the layer below.
pub struct Seal {
    below: Arc<dyn Layer>,
    sealer: Sealer,
    /// State of all pages, in shards. An empty shard has unknown pages only, and takes no memory.
    shards: Vec<Mutex<Box<[Known]>>>,
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

    fn shard(&self, place: u64) -> (MutexGuard<'_, Box<[Known]>>, usize) {
        let place = usize::try_from(place).unwrap_or(usize::MAX);
        let shard = self.shards[place / SHARD].lock();
        (shard.unwrap_or_else(PoisonError::into_inner), place % SHARD)
    }

    fn known(&self, place: u64) -> Option<Mark> {
        let (shard, place) = self.shard(place);
        shard.get(place)?.mark
    }

    /// Begins a write of this number; the content of the page is unknown until it is done.
    fn begin(&self, place: u64, write: u64) {
        let (mut shard, place) = self.shard(place);
        if shard.is_empty() {
            *shard = vec![Known::default(); SHARD].into_boxed_slice();
        }
        // Another write to the same page may have begun later and got here first.
        if write >= shard[place].begun {
            shard[place] = Known { begun: write, mark: None };
        }
    }

    /// Ends the write of this mark: its page is in the layer below, unless another write began
    /// since.
    fn done(&self, place: u64, mark: Mark) {
        let (mut shard, place) = self.shard(place);
        if let Some(known) = shard.get_mut(place).filter(|known| known.begun == mark.write) {
            known.mark = Some(mark);
        }
    }

    async fn open(&self, offset: u64, marks: Vec<Mark>) -> Result<Vec<u8>, Errno> {
        let mut data = layer::read(&*self.below, offset, marks.len() * PAGE).await?;
        let first = offset / PAGE as u64;
        for ((page, mark), place) in data.chunks_exact_mut(PAGE).zip(&marks).zip(first..) {
            if !self.sealer.open(mark, place, page) {
                // A write that came in between has another mark.
                if self.known(place).is_some_and(|now| now.write == mark.write) {
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
        let marks: Option<Vec<Mark>> =
            (first..).take(into.len() / PAGE).map(|place| self.known(place)).collect();
        match marks {
            Some(marks) => Read::Later(Box::pin(self.open(offset, marks))),
            None => Read::Now(Err(Errno::Io)),
        }
    }

    fn write<'a>(&'a self, offset: u64, data: &[u8]) -> Answer<'a> {
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
        Answer::Later(Box::pin(async move {
            self.below.write(offset, &sealed).result().await?;
            for (mark, place) in marks.into_iter().zip(first..) {
                self.done(place, mark);
            }
            Ok(())
        }))
    }

    /// Trims the range below. Zeros are not kept: the pages become unknown, and reads of them
    /// fail.
    fn zero(&self, offset: u64, length: u64, _: Zeros) -> Answer<'_> {
        let first = offset / PAGE as u64;
        let write = self.sealer.number();
        for place in first..first + length / PAGE as u64 {
            // Where no page was ever written there is none to forget: a disk may be trimmed as a
            // whole before it is used.
            if !self.shard(place).0.is_empty() {
                self.begin(place, write);
            }
        }
        self.below.zero(offset, length, Zeros::Trim)
    }

    fn flush(&self) -> Answer<'_> {
        self.below.flush()
    }

    /// Holes are pages that the layer below does not have, or that are unknown here.
    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        let below = self.below.extents(offset, length).into_iter();
        let below = below
            .flat_map(|extent| std::iter::repeat_n(extent.is_hole, extent.length as usize / PAGE));
        let first = offset / PAGE as u64;
        reply::join((first..).zip(below).map(|(place, is_hole)| Extent {
            length: wire::length(PAGE),
            is_hole: is_hole || self.known(place).is_none(),
        }))
    }
}
