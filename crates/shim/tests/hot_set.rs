//! The paper's hot set, which only experiments use.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{GRANULE, StandIn, TestWorker, by_name};
use protocol::layout::Counter;
use protocol::{Answer, Request, Tracking};

const MIB: u32 = 64;
const GRANULES: u32 = MIB * 256 / GRANULE;

#[test]
fn a_recalled_granule_counts_in_the_hot_set() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    worker.ask(&Request::Track(Tracking { hot_set: Some(64), ..by_name() }));
    assert_eq!(worker.recall([7]), 1);
    stand_in.expect("check 0 1");
    worker.status();
    let staged = worker.count(Counter::StagedPages);
    assert_eq!(staged, u64::from((GRANULES - 64) * GRANULE));
}

#[test]
fn a_hot_set_of_64_lets_64_granules_be_reached() {
    let mut stand_in = StandIn::with_ram(MIB);
    let worker = TestWorker::meet(&stand_in);
    let tracking = Tracking { hot_set: Some(64), ..by_name() };
    assert_eq!(worker.ask(&Request::Track(tracking)), Answer::Done { count: GRANULES });
    stand_in.expect("check 0 1");
    // The guest continues before the trap has evicted another granule; an answer comes after
    // that.
    worker.status();
    let staged = worker.count(Counter::StagedPages);
    assert_eq!(staged, u64::from((GRANULES - 64) * GRANULE));
    assert_eq!(worker.count(Counter::Traps), u64::from(GRANULES));
    let wider = Tracking { hot_set: Some(100), ..tracking };
    assert_eq!(worker.ask(&Request::Track(wider)), Answer::Done { count: 0 });
    stand_in.expect("check 0 1");
    worker.status();
    assert_eq!(worker.count(Counter::StagedPages), u64::from((GRANULES - 100) * GRANULE));
    assert_eq!(worker.ask(&Request::Track(tracking)), Answer::Done { count: 36 });
}
