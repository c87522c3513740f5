//! Memory that cannot be tracked is left alone, and the reason is reported.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{StandIn, TestWorker, by_name};
use protocol::{Refusal, Request, State};
use requires::{Requirement, ensure, requires};

fn why_not(stand_in: &StandIn) -> String {
    let worker = TestWorker::meet(stand_in);
    let State::Unsupported { why } = worker.state.clone() else {
        panic!("{:?}", worker.state);
    };
    let refusal = worker.refused(&Request::Track(by_name()));
    assert_eq!(refusal, Refusal::NotTracking { why: why.clone() });
    why
}

/// The number of huge pages in the kernel's pool.
const POOL: &str = "/proc/sys/vm/nr_hugepages";

/// More huge pages in the kernel's pool, until it is dropped.
struct HugePagePool {
    before: u64,
}

impl HugePagePool {
    fn with(more: u64) -> Result<Self, String> {
        let pages = || std::fs::read_to_string(POOL).map_err(|error| format!("{POOL}: {error}"));
        let before: u64 = pages()?.trim().parse().unwrap();
        let written = std::fs::write(POOL, (before + more).to_string());
        written.map_err(|error| format!("{POOL}: {error}"))?;
        let pool = Self { before };
        let now = pages()?;
        ensure(now.trim() == (before + more).to_string(), format!("{now} of {before} + {more}"))?;
        Ok(pool)
    }
}

impl Drop for HugePagePool {
    fn drop(&mut self) {
        std::fs::write(POOL, self.before.to_string()).unwrap();
    }
}

#[test]
fn shared_and_file_backed_memory_is_refused_by_name() {
    for (kind, word) in [("shared", "share=on"), ("file", "mapped from a file")] {
        let mut stand_in = StandIn::new();
        stand_in.expect(&format!("plug 64 {kind}"));
        let why = why_not(&stand_in);
        assert!(why.contains(word), "{why}");
        stand_in.expect("fill 0 1");
        stand_in.expect("check 0 1");
    }
}

#[test]
fn huge_pages_of_the_kernels_pool_are_refused() {
    let Some(_pool) = requires(Requirement::HugePagePool, HugePagePool::with(16)) else { return };
    let mut stand_in = StandIn::new();
    stand_in.expect("plug 32 hugetlb");
    assert!(why_not(&stand_in).contains("transparent huge pages"));
}

#[test]
fn a_user_who_may_not_have_userfaultfd_is_told_what_to_do() {
    let free = std::fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    let is_denied = free.is_ok_and(|value| value.trim() == "0");
    let is_denied = ensure(is_denied, "all users may have it");
    let Some(()) = requires(Requirement::DeniedUserfaultfd, is_denied) else { return };
    let mut stand_in = StandIn::run_by(Some(65534));
    stand_in.expect("plug 64");
    stand_in.expect("fill 0 1");
    let why = why_not(&stand_in);
    assert!(why.contains("/dev/userfaultfd"), "{why}");
    stand_in.expect("check 0 1");
}

#[test]
fn without_guest_ram_there_is_no_thread_of_ours_and_nobody_listens() {
    let mut stand_in = StandIn::new();
    let listens = |stand_in: &StandIn| common::address_of(stand_in).is_some();
    stand_in.expect("close-all");
    assert!(!listens(&stand_in));
    assert_eq!(stand_in.threads().len(), 1);
    stand_in.expect("plug 16");
    assert!(!listens(&stand_in), "16 MiB are no guest RAM");
    stand_in.expect("plug 64");
    TestWorker::meet(&stand_in);
    assert_eq!(stand_in.threads().len(), 2, "one listens; nothing is tracked");
}
