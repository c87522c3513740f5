//! The ring under loom: every interleaving of producer and consumer that the memory model allows.
//! `make loom` runs it.

#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use protocol::Trap;
use protocol::ring::{Consumer, Drained, Producer, Ring};

struct LoomRing {
    head: AtomicU64,
    slots: Vec<AtomicU64>,
}

impl LoomRing {
    fn new(capacity: usize) -> Arc<Self> {
        let slots = (0..capacity).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { head: AtomicU64::new(0), slots })
    }

    fn ring(&self) -> Ring<'_> {
        Ring::new(&self.head, &self.slots)
    }
}

/// Pushes traps 1, 2, … while another thread drains; then drains the rest.
fn run(capacity: usize, traps: u32) {
    let memory = LoomRing::new(capacity);
    let producer = {
        let memory = Arc::clone(&memory);
        thread::spawn(move || {
            let mut producer = Producer::new();
            for number in 1..=traps {
                producer.push(memory.ring(), Trap { granule: number, at_us: number });
            }
        })
    };
    let mut consumer = Consumer::default();
    let mut seen = Vec::new();
    let mut lost = 0;
    let mut drain = |consumer: &mut Consumer| {
        let drained: Drained = consumer.drain(memory.ring(), u32::MAX, |trap| {
            assert_eq!(trap.granule, trap.at_us, "torn");
            seen.push(trap.granule);
        });
        assert_eq!(drained.invalid, 0);
        lost += drained.lost;
    };
    drain(&mut consumer);
    drain(&mut consumer);
    producer.join().unwrap();
    drain(&mut consumer);
    assert!(seen.is_sorted_by(|a, b| a < b), "out of order or twice: {seen:?}");
    assert!(seen.iter().all(|&number| (1..=traps).contains(&number)), "never written: {seen:?}");
    assert_eq!(seen.len() as u64 + lost, u64::from(traps), "neither read nor counted as lost");
}

#[test]
fn every_trap_is_read_once_and_in_order_or_counted_as_lost() {
    loom::model(|| run(4, 3));
}

#[test]
fn a_ring_that_overflows_while_it_is_read_passes_on_no_trap_of_the_next_round_as_its_own() {
    loom::model(|| run(2, 4));
}
