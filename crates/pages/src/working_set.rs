//! A VM's working set in bytes: the part measured inside its memory, and the part in swap.
//!
//! Problem: a curve ends at the VM's memory size. A guest that swaps appears to need exactly the
//! memory that it has.
//!
//! Idea (MEB §3.6, Wang et al. 2016): references to the guest's swap were filtered by its memory
//! and have little locality left, so the swap *in use* stands for the missing memory. It falls as
//! soon as the program that needed it ends, whereas a history of swap reads would linger. It
//! counts only while the memory inside is busy. Pages that went to swap long ago and are not read
//! back need no memory, and a guest whose working set leaves a good part of its memory unused
//! could fetch them at any time.
//!
//! The granule follows from the size: 32 pages (0.9 % of error in the paper), and 512 above
//! 2 GiB, where moves by whole huge pages are cheaper and the table of granules stays small. Left
//! out: guests that report no swap; their working set ends at the allocation.

use model::Bytes;

/// Pages of 4 KiB in a granule of a VM with a small working set.
pub const SMALL_GRANULE: u32 = 32;
/// Pages in a granule of a VM with a large working set: a huge page.
pub const LARGE_GRANULE: u32 = 512;
/// Working sets above this are tracked by large granules.
const LARGE_ABOVE: Bytes = Bytes::mib(2048);
/// Working sets below this are tracked by small granules again.
const SMALL_BELOW: Bytes = Bytes::mib(1536);
/// Below this share of the memory, in percent, a working set leaves room, and swap does not
/// count.
const ROOM_PERCENT: u64 = 50;
/// From this share on it fills the memory, and all swap counts; in between, part of the swap
/// counts.
const FULL_PERCENT: u64 = 75;

/// The memory that a VM could use: its working set inside, and its swap in use if its memory is
/// full.
#[must_use]
pub fn demand(inside: Bytes, swap_in_use: Option<Bytes>, memory: Bytes) -> Bytes {
    let (room, full) = (memory.percent(ROOM_PERCENT), memory.percent(FULL_PERCENT));
    let filled = inside.minus(room).min(full.minus(room));
    let swap = swap_in_use.unwrap_or(Bytes::ZERO);
    inside.plus(swap.share(filled.0, full.minus(room).0))
}

/// Pages per granule for a working set, given the present number (any other number counts as
/// small).
#[must_use]
pub fn granule_pages(present: u32, working_set: Bytes) -> u32 {
    let limit = if present == LARGE_GRANULE { SMALL_BELOW } else { LARGE_ABOVE };
    if working_set > limit { LARGE_GRANULE } else { SMALL_GRANULE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_in_use_is_added_where_the_memory_is_full() {
        let memory = Bytes::mib(400);
        let swap = Some(Bytes::mib(300));
        assert_eq!(demand(Bytes::mib(380), swap, memory), Bytes::mib(680));
        assert_eq!(demand(Bytes::mib(380), None, memory), Bytes::mib(380));
    }

    #[test]
    fn what_sank_to_swap_and_is_not_wanted_back_does_not_count() {
        assert_eq!(demand(Bytes::mib(40), Some(Bytes::mib(300)), Bytes::mib(400)), Bytes::mib(40));
    }

    #[test]
    fn in_between_a_part_of_the_swap_counts_so_that_nothing_jumps() {
        let swap = Some(Bytes::mib(300));
        assert_eq!(demand(Bytes::mib(250), swap, Bytes::mib(400)), Bytes::mib(400));
    }

    #[test]
    fn an_absurd_swap_reading_does_not_wrap() {
        let all = Bytes(u64::MAX);
        assert_eq!(demand(Bytes::mib(400), Some(all), Bytes::mib(400)), all);
    }

    #[test]
    fn the_granule_follows_the_working_set_and_does_not_flap() {
        assert_eq!(granule_pages(32, Bytes::mib(2000)), 32);
        assert_eq!(granule_pages(32, Bytes::mib(2100)), 512);
        assert_eq!(granule_pages(512, Bytes::mib(2000)), 512);
        assert_eq!(granule_pages(512, Bytes::mib(1500)), 32);
        assert_eq!(granule_pages(0, Bytes::mib(10)), 32);
    }
}
