//! Merges that are adjacent both in the guest and in the pool: one mapping each.
//!
//! A mapping costs the kernel some 420 bytes, and their number in a process is limited
//! (`vm.max_map_count`, 65,530 by default). A guest of which every second page is merged would
//! need one for each. So the fewer mappings are left, the longer must a run be to be worth one
//! ([`least_run`]).

/// Consecutive pages that share consecutive slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first page.
    pub page: u32,
    /// The slot that the first page shares.
    pub slot: u32,
    /// The number of pages.
    pub len: u32,
}

/// The longest runs of merges, which are pairs of a page and a slot, by ascending page.
pub fn runs(merges: &[(u32, u32)]) -> impl Iterator<Item = Run> {
    merges.chunk_by(|merge, next| follows(*merge, *next)).filter_map(|run| {
        let (page, slot) = *run.first()?;
        Some(Run { page, slot, len: u32::try_from(run.len()).ok()? })
    })
}

fn follows(merge: (u32, u32), next: (u32, u32)) -> bool {
    merge.0.checked_add(1) == Some(next.0) && merge.1.checked_add(1) == Some(next.1)
}

/// The least length of a run that is worth a mapping, when `used` of `most` are in use; `None`:
/// there is no room for any. A run inside a mapping needs two more.
#[must_use]
pub fn least_run(used: u32, most: u32) -> Option<u32> {
    let left = most.checked_sub(used).filter(|&left| left > 2)?;
    // Any run while more than a third is left; then about twice the length for each halving of
    // the rest.
    Some((most / left).next_power_of_two() / 2).map(|length| length.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_in_guest_and_pool_are_one_run() {
        let merges = [(1, 10), (2, 11), (3, 12), (5, 13), (6, 15), (7, 16)];
        let run = |page, slot, len| Run { page, slot, len };
        let found: Vec<Run> = runs(&merges).collect();
        assert_eq!(found, [run(1, 10, 3), run(5, 13, 1), run(6, 15, 2)]);
        assert_eq!(runs(&[]).count(), 0);
    }

    #[test]
    fn the_last_page_is_not_followed_by_the_first() {
        assert_eq!(runs(&[(u32::MAX, 3), (0, 4)]).count(), 2);
    }

    #[test]
    fn runs_must_be_longer_the_fewer_mappings_are_left() {
        let least = [0, 10_000, 32_000, 50_000, 60_000, 65_000, 65_528, 65_530, u32::MAX]
            .map(|used| least_run(used, 65_530));
        assert_eq!(least[0], Some(1));
        assert!(
            least.windows(2).all(|pair| pair[1].is_none_or(|next| Some(next) >= pair[0])),
            "{least:?}"
        );
        assert_eq!(least[6..], [None; 3]);
        assert!(least[5].is_some_and(|length| length >= 64), "{least:?}");
    }
}
