use super::*;

const CAPACITY: usize = 8;

struct RingMemory {
    head: AtomicU64,
    slots: [AtomicU64; CAPACITY],
}

impl RingMemory {
    fn new() -> Self {
        Self { head: AtomicU64::new(0), slots: Default::default() }
    }

    fn ring(&self) -> Ring<'_> {
        Ring::new(&self.head, &self.slots)
    }

    fn push(&self, producer: &mut Producer, granules: std::ops::Range<u32>) {
        for granule in granules {
            producer.push(self.ring(), Trap { granule, at_us: !granule });
        }
    }

    fn drain(&self, consumer: &mut Consumer) -> (Vec<u32>, Drained) {
        let mut seen = Vec::new();
        let drained = consumer.drain(self.ring(), 1000, |trap| {
            assert_eq!(trap.at_us, !trap.granule);
            seen.push(trap.granule);
        });
        assert_eq!(seen.len() as u64, drained.read);
        (seen, drained)
    }
}

#[test]
fn traps_come_out_in_order_and_once() {
    let (memory, mut producer, mut consumer) =
        (RingMemory::new(), Producer::new(), Consumer::default());
    for round in 0..5 {
        let first = round * 7;
        memory.push(&mut producer, first..first + 7);
        let (seen, drained) = memory.drain(&mut consumer);
        assert_eq!(seen, (first..first + 7).collect::<Vec<_>>());
        assert_eq!(drained, Drained { read: 7, ..Drained::default() });
    }
    assert_eq!(memory.drain(&mut consumer).1, Drained::default());
}

#[test]
fn a_flood_keeps_the_newest_and_counts_the_rest_as_lost() {
    let (memory, mut producer, mut consumer) =
        (RingMemory::new(), Producer::new(), Consumer::default());
    memory.push(&mut producer, 0..100);
    let (seen, drained) = memory.drain(&mut consumer);
    assert_eq!(seen, (93..100).collect::<Vec<_>>());
    assert_eq!(drained, Drained { read: 7, lost: 93, invalid: 0 });
}

#[test]
fn a_consumer_that_comes_late_begins_at_the_traps_to_come() {
    let (memory, mut producer) = (RingMemory::new(), Producer::new());
    memory.push(&mut producer, 0..5);
    let mut consumer = Consumer::new(memory.ring());
    memory.push(&mut producer, 5..7);
    assert_eq!(consumer.skip(memory.ring()), 2);
    memory.push(&mut producer, 7..8);
    assert_eq!(memory.drain(&mut consumer).0, [7]);
}

#[test]
fn a_granule_that_does_not_exist_is_counted_and_not_passed_on() {
    let (memory, mut producer, mut consumer) =
        (RingMemory::new(), Producer::new(), Consumer::default());
    memory.push(&mut producer, 998..1003);
    let (seen, drained) = memory.drain(&mut consumer);
    assert_eq!(seen, [998, 999]);
    assert_eq!(drained, Drained { read: 2, lost: 0, invalid: 3 });
}

#[test]
fn a_head_that_moves_backward_is_a_loss_and_the_ring_goes_on_from_there() {
    let (memory, mut producer, mut consumer) =
        (RingMemory::new(), Producer::new(), Consumer::default());
    memory.push(&mut producer, 0..5);
    memory.drain(&mut consumer);
    memory.head.store(2, Ordering::Relaxed);
    assert_eq!(memory.drain(&mut consumer).1, Drained { lost: 8, ..Drained::default() });
    assert_eq!(memory.drain(&mut consumer).1, Drained::default());
}

#[test]
fn the_position_wraps_around() {
    let memory = RingMemory::new();
    memory.head.store(u64::MAX - 2, Ordering::Relaxed);
    let mut consumer = Consumer::new(memory.ring());
    let mut producer = Producer { head: u64::MAX - 2 };
    memory.push(&mut producer, 0..6);
    assert_eq!(memory.drain(&mut consumer).0, [0, 1, 2, 3, 4, 5]);
}

/// Loom proves this for a few traps; this test checks it for many and at full speed.
#[test]
fn under_load_every_trap_is_read_once_and_in_order_or_counted_as_lost() {
    const TRAPS: u32 = 2_000_000;
    let memory = RingMemory::new();
    let (mut read, mut lost, mut last) = (0_u64, 0, None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut producer = Producer::new();
            memory.push(&mut producer, 0..TRAPS);
        });
        let mut consumer = Consumer::default();
        while read + lost < u64::from(TRAPS) {
            let drained = consumer.drain(memory.ring(), TRAPS, |trap| {
                assert_eq!(trap.at_us, !trap.granule);
                assert!(last < Some(trap.granule), "{last:?} before {}", trap.granule);
                last = Some(trap.granule);
            });
            assert_eq!(drained.invalid, 0);
            read += drained.read;
            lost += drained.lost;
        }
    });
    assert_eq!(read + lost, u64::from(TRAPS));
    assert_eq!(last, Some(TRAPS - 1));
}
