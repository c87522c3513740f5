use proptest::prelude::*;

use super::{
    table::{HashTable, mix},
    *,
};

/// The stack as it is defined: a list of ids, newest last.
#[derive(Default)]
struct Naive(Vec<u64>);

impl Naive {
    fn touch(&mut self, id: u64) -> Option<u64> {
        let at = self.0.iter().rposition(|known| *known == id);
        let distance = at.map(|at| (self.0.len() - at) as u64);
        at.map(|at| self.0.remove(at));
        self.0.push(id);
        distance
    }
}

fn distances(stack: &mut dyn StackDistance, ids: &[u64]) -> Vec<Option<u64>> {
    ids.iter().map(|id| stack.touch(*id)).collect()
}

fn naive(ids: &[u64]) -> Vec<Option<u64>> {
    let mut naive = Naive::default();
    ids.iter().map(|id| naive.touch(*id)).collect()
}

/// References with repeats near and far.
fn trace(ids: u64, length: usize) -> impl Strategy<Value = Vec<u64>> {
    let near = (0..ids.min(8)).boxed();
    let far = (0..ids).boxed();
    proptest::collection::vec(prop_oneof![near, far], 1..length)
}

/// A long trace from a seed; no proptest case could hold it.
fn long_trace(seed: u64, ids: u64, length: usize) -> Vec<u64> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| random.u64(0..=random.clone().u64(0..ids))).collect()
}

proptest! {
    #[test]
    fn every_structure_tells_the_distances_of_the_definition(ids in trace(200, 1500)) {
        let expected = naive(&ids);
        prop_assert_eq!(&distances(&mut ListStack::new(), &ids), &expected);
        prop_assert_eq!(&distances(&mut AvlStack::new(), &ids), &expected);
        prop_assert_eq!(&distances(&mut HashedStack::<Fenwick>::new(), &ids), &expected);
        prop_assert_eq!(&distances(&mut HashedStack::<Bitmap>::new(), &ids), &expected);
        prop_assert_eq!(&distances(&mut DenseStack::<Bitmap>::new(200), &ids), &expected);
    }

    #[test]
    fn ids_may_be_any_numbers(ids in proptest::collection::vec(
        prop_oneof![any::<u64>(), Just(u64::MAX), Just(0), (u64::MAX - 4)..=u64::MAX], 1..300)
    ) {
        prop_assert_eq!(distances(&mut HashedStack::<Bitmap>::new(), &ids), naive(&ids));
    }

    #[test]
    fn batches_of_any_length_tell_the_same(ids in trace(300, 2000), cut in 1_usize..700) {
        let (mut stack, mut told) = (HashedStack::<Bitmap>::new(), Vec::new());
        ids.chunks(cut).for_each(|batch| stack.touch_all(batch, |distance| told.push(distance)));
        prop_assert_eq!(told, naive(&ids));
    }

    #[test]
    fn a_bitmap_ranks_as_a_list_of_times_does(
        capacity in 1_u32..200_000, seeds in proptest::collection::vec(any::<u32>(), 1..200)
    ) {
        let (mut bitmap, mut fenwick) = (Bitmap::full(capacity), Fenwick::full(capacity));
        let mut taken = std::collections::BTreeSet::new();
        for time in seeds.iter().map(|seed| seed % capacity) {
            let expected = time - u32::try_from(taken.range(..time).count()).unwrap();
            prop_assert_eq!(bitmap.rank(time), expected);
            if taken.insert(time) {
                prop_assert_eq!(bitmap.take(time), expected);
                prop_assert_eq!(fenwick.take(time), expected);
            }
        }
    }

    #[test]
    fn forgotten_ids_count_no_more(
        steps in proptest::collection::vec((0_u64..60, any::<bool>()), 1..600)
    ) {
        let mut expected = Naive::default();
        let (mut hashed, mut dense) = (HashedStack::<Bitmap>::new(), DenseStack::<Bitmap>::new(60));
        for (id, touch) in steps {
            if touch {
                let distance = expected.touch(id);
                prop_assert_eq!(hashed.touch(id), distance);
                prop_assert_eq!(dense.touch(id), distance);
            } else {
                let known = expected.0.contains(&id);
                expected.0.retain(|other| *other != id);
                prop_assert_eq!(hashed.forget(id), known);
                prop_assert_eq!(dense.forget(id), known);
            }
            prop_assert_eq!(hashed.len(), expected.0.len());
            prop_assert_eq!(dense.len(), expected.0.len());
        }
    }

    #[test]
    fn a_table_is_a_map(
        steps in proptest::collection::vec((0_u64..500, 0_u32..1000, 0..4), 1..3000)
    ) {
        let (mut table, mut map) = (HashTable::new(), std::collections::HashMap::new());
        for (id, value, what) in steps {
            if what == 0 {
                prop_assert_eq!(table.remove(mix(id)), map.remove(&id));
            } else {
                table.reserve(1);
                let before = map.insert(id, value).unwrap_or(NONE);
                prop_assert_eq!(table.replace(mix(id), value), before);
            }
            prop_assert_eq!(table.len(), map.len());
        }
    }
}

#[test]
fn long_traces_stay_exact_over_growth_and_renumbering() {
    for (seed, ids) in [(1, 3), (2, 1_000), (3, 40_000)] {
        let trace = long_trace(seed, ids, 150_000);
        let mut expected = HashedStack::<Fenwick>::new();
        let expected = distances(&mut expected, &trace);
        assert_eq!(expected[..4_000], naive(&trace[..4_000]));
        assert_eq!(distances(&mut AvlStack::new(), &trace), expected, "{ids} ids");
        let mut dense = DenseStack::<Bitmap>::new(40_000);
        assert_eq!(distances(&mut dense, &trace), expected, "{ids} ids");
        let (mut stack, mut told) = (HashedStack::<Bitmap>::new(), Vec::new());
        stack.touch_all(&trace, |distance| told.push(distance));
        assert_eq!(told, expected, "{ids} ids");
    }
}

/// 3.2 million times, so that counts of regions beyond the first are used.
#[test]
fn a_bitmap_counts_over_several_regions() {
    let mut bitmap = Bitmap::full(5_000_000);
    for time in (0..5_000_000).step_by(3) {
        bitmap.take(time);
    }
    for time in (1..5_000_000).step_by(99_991) {
        assert_eq!(bitmap.rank(time), time - time.div_ceil(3), "{time}");
    }
}

#[test]
fn no_more_than_25_bytes_are_used_per_id_at_any_moment() {
    let mut stack = HashedStack::<Bitmap>::new();
    for id in 0..300_000_u64 {
        stack.touch(id);
        let ids = stack.len();
        if ids > 20_000 {
            assert!(stack.bytes() <= 25 * ids, "{} bytes for {ids} ids", stack.bytes());
        }
    }
}

#[test]
#[should_panic(expected = "id 5 in a stack of 5 ids")]
fn a_dense_stack_knows_its_ids() {
    DenseStack::<Bitmap>::new(5).touch(5);
}
