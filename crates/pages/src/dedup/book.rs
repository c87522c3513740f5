//! The results of the last looks at each page of one VM.
//!
//! A page that was never seen is offered at once: most content of a guest lasts, and waiting for
//! a second look would double the time to a merge. A page that changed between two looks, or
//! whose merge broke, is *restless*. Its count of restlessness rises by one for each change, and
//! to [`AFTER_BREAK`] after a break; each look that finds the page unchanged lowers it by one,
//! and at 0 the page is offered again. So a page that is written all the time costs one merge,
//! and one that has settled comes back.
//!
//! A page that was found unchanged again and again is *calm*: it is due in every second pass
//! only, then in every fourth, up to every thirty-second. Other pages still find it in the index,
//! so no merge is delayed; a pass over memory that hardly changes costs a small part of the
//! first.
//!
//! Each page has one word: unknown; absent; seen, with 22 bits of the hash, its restlessness and
//! its calm; asked for, while its merge is under way; or merged, with its slot.

/// Bytes of the book for each page.
pub(super) const BYTES_PER_PAGE: f64 = size_of::<Word>() as f64;

/// The highest restlessness.
const MOST: u32 = 15;
/// The restlessness of a page whose merge broke.
const AFTER_BREAK: u32 = 3;

/// Two bits of kind, thirty bits of content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word(u32);

const KIND_SEEN: u32 = 1 << 30;
const KIND_MERGED: u32 = 2 << 30;
const KIND_ASKED: u32 = 3 << 30;
const CONTENT: u32 = KIND_SEEN - 1;
const TAG_BITS: u32 = 22;
const CALM_AT: u32 = TAG_BITS + 4;
/// The highest calm: the page is due in one of 2^5 passes.
const MOST_CALM: u32 = 5;
const UNKNOWN: Word = Word(0);
/// Looked at, but the page did not exist.
const ABSENT: Word = Word(1);

/// Whether a page is worth being offered for a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is calm enough.
    Offer,
    /// It changes too often.
    Restless,
    /// It is merged to present knowledge, or its merge is under way.
    Merged,
}

/// The book of one VM.
#[derive(Clone, Debug)]
pub struct Book {
    words: Vec<Word>,
    merged: u32,
}

impl Book {
    /// Pages that are due together: those of one huge page.
    pub const TOGETHER: u32 = 512;

    /// The most slots that a pool can have: 4 TiB.
    pub const MOST_SLOTS: u32 = CONTENT;

    /// A book for a VM of `pages` pages, none of which was seen.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self { words: vec![UNKNOWN; pages as usize], merged: 0 }
    }

    /// Whether a page is to be looked at in this pass.
    #[must_use]
    pub fn is_due(&self, page: u32, pass: u32) -> bool {
        let seen = self.words.get(page as usize).and_then(|word| word.seen());
        is_turn(page, pass, seen.map_or(0, |seen| seen.calm))
    }

    /// Whether a page existed when it was last looked at, and is not due in this pass.
    #[must_use]
    pub fn rests(&self, page: u32, pass: u32) -> bool {
        let seen = self.words.get(page as usize).and_then(|word| word.seen());
        seen.is_some_and(|seen| !is_turn(page, pass, seen.calm))
    }

    /// The same for a page that must be recalled before it can be looked at, or even be known to
    /// exist: an absent page is due as seldom as the calmest one.
    #[must_use]
    pub fn is_due_for_recall(&self, page: u32, pass: u32) -> bool {
        if self.words.get(page as usize) == Some(&ABSENT) {
            return is_turn(page, pass, MOST_CALM);
        }
        self.is_due(page, pass)
    }

    /// The page does not exist now: it was never there, or the guest has given it up.
    pub fn absent(&mut self, page: u32) {
        let is_free = |word: &&mut Word| word.slot().is_none() && word.0 != KIND_ASKED;
        if let Some(word) = self.words.get_mut(page as usize).filter(is_free) {
            *word = ABSENT;
        }
    }

    /// A look found the page with this content. A page outside the VM is always restless.
    pub fn look(&mut self, page: u32, hash: u64) -> Verdict {
        let Some(word) = self.words.get_mut(page as usize) else { return Verdict::Restless };
        let tag = tag(hash);
        if word.slot().is_some() || word.0 == KIND_ASKED {
            return Verdict::Merged;
        }
        let seen = match word.seen() {
            None => LastScan { tag, restless: 0, calm: 0 },
            Some(last) if last.tag == tag => LastScan {
                restless: last.restless.saturating_sub(1),
                calm: if last.restless == 0 { (last.calm + 1).min(MOST_CALM) } else { 0 },
                ..last
            },
            Some(last) => LastScan { tag, restless: (last.restless + 1).min(MOST), calm: 0 },
        };
        *word = seen.word();
        if seen.restless == 0 { Verdict::Offer } else { Verdict::Restless }
    }

    /// Whether a page was never looked at, to present knowledge, and neither shares a slot nor is
    /// about to.
    #[must_use]
    pub fn is_unread(&self, page: u32) -> bool {
        self.is_free(page) && self.words.get(page as usize).is_some_and(|it| it.seen().is_none())
    }

    /// Whether a page had changed at its last look or at a recent one.
    #[must_use]
    pub fn is_restless(&self, page: u32) -> bool {
        let seen = self.words.get(page as usize).and_then(|word| word.seen());
        seen.is_some_and(|seen| seen.restless > 0)
    }

    /// Whether a page neither shares a slot nor is about to, to present knowledge.
    #[must_use]
    pub fn is_free(&self, page: u32) -> bool {
        let word = self.words.get(page as usize);
        word.is_some_and(|word| word.slot().is_none() && word.0 != KIND_ASKED)
    }

    /// A page's merge is under way: it is not offered until [`Self::merged`] or
    /// [`Self::refused`].
    pub fn asked(&mut self, page: u32) {
        if let Some(word) = self.words.get_mut(page as usize).filter(|word| word.slot().is_none()) {
            *word = Word(KIND_ASKED);
        }
    }

    /// A page's merge failed: the page has changed, or I/O holds it.
    pub fn refused(&mut self, page: u32) {
        if let Some(word) = self.words.get_mut(page as usize).filter(|word| word.0 == KIND_ASKED) {
            *word = Word(KIND_SEEN | 1 << TAG_BITS);
        }
    }

    /// A page shares this slot now.
    pub fn merged(&mut self, page: u32, slot: u32) {
        if let Some(word) = self.words.get_mut(page as usize) {
            self.merged += u32::from(word.slot().is_none());
            *word = Word(KIND_MERGED | slot & CONTENT);
        }
    }

    /// A merged page was written and has a copy of its own. Returns the slot that it shared.
    pub fn broke(&mut self, page: u32) -> Option<u32> {
        self.parts(page, Word(KIND_SEEN | AFTER_BREAK << TAG_BITS))
    }

    /// A page was given back or discarded: its record is void. Returns the slot that it shared.
    pub fn gone(&mut self, page: u32) -> Option<u32> {
        self.parts(page, UNKNOWN)
    }

    fn parts(&mut self, page: u32, then: Word) -> Option<u32> {
        let word = self.words.get_mut(page as usize)?;
        let slot = word.slot();
        *word = then;
        self.merged -= u32::from(slot.is_some());
        slot
    }

    /// The slot that a page shares.
    #[must_use]
    pub fn slot(&self, page: u32) -> Option<u32> {
        self.words.get(page as usize)?.slot()
    }

    /// The pages that share a slot, each with its slot.
    pub fn slots(&self) -> impl Iterator<Item = (u32, u32)> {
        let numbered = (0..).zip(&self.words);
        numbered.filter_map(|(page, word)| Some((page, word.slot()?)))
    }

    /// How many pages share a slot.
    #[must_use]
    pub fn merged_pages(&self) -> u32 {
        self.merged
    }

    /// The VM's pages.
    #[must_use]
    pub fn pages(&self) -> u32 {
        u32::try_from(self.words.len()).unwrap_or(u32::MAX)
    }
}

/// The result of the last look at a page.
#[derive(Clone, Copy)]
struct LastScan {
    tag: u32,
    restless: u32,
    calm: u32,
}

impl LastScan {
    fn word(self) -> Word {
        Word(KIND_SEEN | self.calm << CALM_AT | self.restless << TAG_BITS | self.tag)
    }
}

impl Word {
    fn seen(self) -> Option<LastScan> {
        let content = self.0 & CONTENT;
        (self.0 & !CONTENT == KIND_SEEN).then_some(LastScan {
            tag: content & ((1 << TAG_BITS) - 1),
            restless: content >> TAG_BITS & MOST,
            calm: content >> CALM_AT,
        })
    }

    fn slot(self) -> Option<u32> {
        (self.0 & !CONTENT == KIND_MERGED).then_some(self.0 & CONTENT)
    }
}

/// Whether a page with this calm is due in this pass.
fn is_turn(page: u32, pass: u32, calm: u32) -> bool {
    // Neighbours are read together, so they are due together; the next ones are due in another
    // pass.
    pass.wrapping_add(page / Book::TOGETHER) & ((1 << calm) - 1) == 0
}

#[expect(clippy::cast_possible_truncation, reason = "the low bits are meant")]
fn tag(hash: u64) -> u32 {
    hash as u32 & ((1 << TAG_BITS) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_never_seen_is_offered_and_what_changes_is_not() {
        let mut book = Book::new(2);
        assert_eq!(book.look(0, 1), Verdict::Offer);
        assert_eq!(book.look(0, 1), Verdict::Offer, "unchanged");
        assert_eq!(book.look(0, 2), Verdict::Restless);
        assert_eq!(book.look(0, 3), Verdict::Restless);
        assert_eq!(book.look(0, 3), Verdict::Restless, "it changed twice");
        assert_eq!(book.look(0, 3), Verdict::Offer);
        assert_eq!(book.look(1, 9), Verdict::Offer, "another page");
    }

    #[test]
    fn a_merge_that_broke_is_tried_again_when_the_page_has_settled() {
        let mut book = Book::new(1);
        book.look(0, 1);
        book.merged(0, 77);
        assert_eq!((book.look(0, 1), book.slot(0)), (Verdict::Merged, Some(77)));
        assert_eq!(book.broke(0), Some(77));
        assert_eq!(book.broke(0), None, "only once");
        let looks: Vec<Verdict> = (0..6).map(|_| book.look(0, 5)).collect();
        let offered = looks.iter().position(|verdict| *verdict == Verdict::Offer);
        assert_eq!(offered, Some(4), "{looks:?}");
    }

    #[test]
    fn what_does_not_change_is_looked_at_less_and_less() {
        let mut book = Book::new(1);
        let looks = |book: &mut Book, passes: std::ops::Range<u32>, hash: u64| {
            let due = |pass: &u32| book.is_due(0, *pass) && book.look(0, hash) != Verdict::Merged;
            passes.filter(due).count()
        };
        let first = looks(&mut book, 0..64, 7);
        assert!((6..=12).contains(&first), "{first}");
        assert_eq!(looks(&mut book, 64..128, 7), 2, "every thirty-second");
        assert!((128..192).all(|pass| book.rests(0, pass) != book.is_due(0, pass)));
        assert_eq!(looks(&mut book, 128..129, 8), 1);
        let afterwards = (129..133).filter(|&pass| book.is_due(0, pass)).count();
        assert_eq!(afterwards, 4, "it has changed");
        assert!(Book::new(0).is_due(9, 3));
        assert!((0..64).all(|pass| !Book::new(1).rests(0, pass)), "it was never seen");
        book.absent(0);
        assert!((0..64).all(|pass| !book.rests(0, pass)), "it may come back");
    }

    #[test]
    fn where_there_was_nothing_a_recall_is_worth_it_seldom_and_a_look_is_as_ever() {
        let mut book = Book::new(2);
        let recalls = |book: &Book| (0..64).filter(|&pass| book.is_due_for_recall(0, pass)).count();
        assert_eq!(recalls(&book), 64);
        book.absent(0);
        assert_eq!(recalls(&book), 2);
        assert!((0..64).all(|pass| book.is_due(0, pass)));
        assert_eq!(book.look(0, 1), Verdict::Offer);
        assert_eq!(recalls(&book), 64, "it was seen");
        book.absent(0);
        assert_eq!(recalls(&book), 2, "it was given up");
        book.asked(0);
        book.absent(0);
        assert!(!book.is_free(0), "what is under way stays so");
        book.absent(9);
    }

    #[test]
    fn a_page_whose_merge_is_under_way_is_not_offered() {
        let mut book = Book::new(2);
        assert_eq!(book.look(0, 1), Verdict::Offer);
        assert!(!book.is_unread(0) && book.is_unread(1) && !book.is_unread(2));
        assert!(book.is_free(0) && !book.is_free(2));
        book.asked(0);
        assert_eq!((book.look(0, 1), book.slot(0)), (Verdict::Merged, None));
        assert!(!book.is_free(0));
        book.refused(0);
        assert!(book.is_free(0));
        assert!(book.is_restless(0) && !book.is_restless(1) && !book.is_restless(2));
        assert_eq!(book.look(0, 1), Verdict::Restless);
        assert_eq!([book.look(0, 1), book.look(0, 1)], [Verdict::Restless, Verdict::Offer]);
        book.asked(0);
        book.merged(0, 9);
        book.refused(0);
        book.asked(0);
        assert_eq!((book.slot(0), book.merged_pages()), (Some(9), 1));
        assert!(!book.is_free(0));
    }

    #[test]
    fn a_page_that_always_changes_is_never_offered_again_and_settles_in_bounded_time() {
        let mut book = Book::new(1);
        let offers = (0..1000).filter(|&hash| book.look(0, hash) == Verdict::Offer).count();
        assert_eq!(offers, 1);
        let until = (0..100).position(|_| book.look(0, 5000) == Verdict::Offer);
        assert!(until.is_some_and(|looks| looks <= MOST as usize + 1), "{until:?}");
    }

    #[test]
    fn merged_pages_are_counted_and_listed() {
        let mut book = Book::new(10);
        book.merged(3, 30);
        book.merged(3, 31);
        book.merged(5, Book::MOST_SLOTS);
        assert_eq!(book.slots().collect::<Vec<_>>(), [(3, 31), (5, Book::MOST_SLOTS)]);
        assert_eq!(
            (book.merged_pages(), book.gone(5), book.merged_pages()),
            (2, Some(Book::MOST_SLOTS), 1)
        );
        assert_eq!(book.look(5, 1), Verdict::Offer, "nothing is known of it");
    }

    #[test]
    fn pages_that_the_vm_has_not_are_harmless() {
        let mut book = Book::new(0);
        assert_eq!((book.look(0, 1), book.slot(0), book.broke(0)), (Verdict::Restless, None, None));
        book.merged(u32::MAX, 1);
        assert_eq!(book.merged_pages(), 0);
    }

    #[test]
    fn four_bytes_a_page() {
        assert!((BYTES_PER_PAGE - 4.0).abs() < f64::EPSILON);
    }
}
