//! Tests what is written to KSM's files, when, and that everything is restored. The files are in
//! a temporary directory, except in [`kernel`].

mod kernel;

use std::path::Path;

use super::*;
use crate::journal::{FILE_NAME, Journal};

const RATE: PagesPerMs = PagesPerMs(50);
const DRIVE: KsmOrder = KsmOrder::Drive(RATE);

/// A host's KSM, and a daemon's state directory.
struct KsmFixture {
    ksm: tempfile::TempDir,
    state: tempfile::TempDir,
    hand: Hand,
}

impl KsmFixture {
    /// KSM with the given `run` setting, and the given number of merged pages.
    fn new(run: &str, merged: u32) -> Self {
        let (ksm, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let hand = hand(ksm.path(), state.path());
        let world = Self { ksm, state, hand };
        for (name, value) in [
            ("advisor_mode", "none [scan-time]"),
            ("pages_to_scan", "100"),
            ("sleep_millisecs", "200"),
            ("merge_across_nodes", "1"),
            ("use_zero_pages", "0"),
            ("run", run),
        ] {
            world.write(name, value);
        }
        world.merge(merged);
        world
    }

    fn write(&self, name: &str, value: &str) {
        std::fs::write(self.ksm.path().join(name), format!("{value}\n")).unwrap();
    }

    fn merge(&self, pages: u32) {
        self.write("pages_shared", &pages.to_string());
        self.write("pages_sharing", &(pages * 9).to_string());
    }

    fn all(&self) -> [String; 6] {
        let names = [
            "advisor_mode",
            "pages_to_scan",
            "sleep_millisecs",
            "run",
            "merge_across_nodes",
            "use_zero_pages",
        ];
        names.map(|name| {
            let text = std::fs::read_to_string(self.ksm.path().join(name)).unwrap();
            text.replace("none [scan-time]", "scan-time").trim().to_owned()
        })
    }

    /// Simulates that the daemon is killed and another one starts.
    fn restart(&mut self) {
        self.hand = hand(self.ksm.path(), self.state.path());
    }

    fn on_record(&self) -> Option<KsmRecord> {
        Journal::open(self.state.path()).unwrap().ksm().cloned()
    }

    fn obey(&mut self, order: KsmOrder) -> Outcome {
        self.hand.obey(order)
    }
}

fn hand(ksm: &Path, state: &Path) -> Hand {
    let records = Records::new(Journal::open(state).unwrap());
    Hand { room: || Bytes::mib(1), ..Hand::new(Ksm::at(ksm), records) }
}

fn as_before(run: &str) -> [String; 6] {
    ["scan-time", "100", "200", run, "1", "0"].map(str::to_owned)
}

fn driven() -> [String; 6] {
    ["none", "1000", "20", "1", "1", "0"].map(str::to_owned)
}

#[test]
fn the_rate_is_pages_in_a_batch_and_what_was_there_goes_back() {
    let mut world = KsmFixture::new("0", 0);
    world.obey(DRIVE).unwrap();
    assert_eq!(world.all(), driven());
    world.obey(KsmOrder::Drive(PagesPerMs(5))).unwrap();
    assert_eq!(world.all()[1], "100");
    let said = world.obey(KsmOrder::PutBack).unwrap().unwrap();
    assert_eq!(said, "its settings are what they were");
    assert_eq!(world.all(), as_before("0"));
    assert_eq!((world.on_record(), world.obey(KsmOrder::PutBack).unwrap()), (None, None));
}

#[test]
fn the_journal_is_written_before_the_first_setting() {
    let mut world = KsmFixture::new("0", 0);
    // Without the state directory nothing can be recorded.
    let state = world.state.path().to_owned();
    std::fs::remove_dir_all(&state).unwrap();
    let error = world.obey(DRIVE).unwrap_err();
    assert!(matches!(error, KsmTrouble::Journal(_)), "{error}");
    assert_eq!(world.all(), as_before("0"));
    std::fs::create_dir(&state).unwrap();
    let now = world.hand.ksm.settings().unwrap();
    world.obey(DRIVE).unwrap();
    let record = world.on_record().unwrap();
    assert!(now.iter().all(|(knob, value)| record.before(*knob) == Some(value)), "{record:?}");
}

#[test]
fn undecided_and_without_a_record_nothing_is_done() {
    let mut world = KsmFixture::new("1", 7);
    for order in [KsmOrder::Undecided, KsmOrder::Rest, KsmOrder::PutBack] {
        assert_eq!(world.obey(order).unwrap(), None);
    }
    assert_eq!(world.all(), as_before("1"));
    assert!(!world.state.path().join(FILE_NAME).exists());
}

#[test]
fn a_restarted_daemon_keeps_the_operators_values() {
    let mut world = KsmFixture::new("0", 0);
    world.obey(DRIVE).unwrap();
    world.restart();
    world.obey(DRIVE).unwrap();
    world.restart();
    world.obey(KsmOrder::Rest).unwrap();
    world.restart();
    world.obey(DRIVE).unwrap();
    assert_eq!(world.all(), driven());
    world.restart();
    world.obey(KsmOrder::PutBack).unwrap();
    assert_eq!(world.all(), as_before("0"));
}

#[test]
fn what_the_advisor_chooses_is_left_to_it() {
    let mut world = KsmFixture::new("0", 0);
    world.obey(DRIVE).unwrap();
    // State after a kill: the advisor was restored, but not yet removed from the record.
    world.write("advisor_mode", "none [scan-time]");
    world.write("pages_to_scan", "500");
    world.restart();
    world.obey(KsmOrder::PutBack).unwrap();
    assert_eq!(world.all(), ["scan-time", "500", "200", "0", "1", "0"]);
    assert_eq!(world.on_record(), None);
}

#[test]
fn resting_stops_it_and_keeps_what_is_merged() {
    let mut world = KsmFixture::new("0", 0);
    world.obey(DRIVE).unwrap();
    world.merge(3);
    world.obey(KsmOrder::Rest).unwrap();
    assert_eq!(world.all(), as_before("0"));
    let record = world.on_record().unwrap();
    assert_eq!(record.before.len(), 1, "unmerging is left: {record:?}");
    // A setting that an administrator changes meanwhile is the new original.
    world.write("pages_to_scan", "7");
    world.obey(DRIVE).unwrap();
    world.obey(KsmOrder::PutBack).unwrap();
    assert_eq!(world.all()[1], "7");
}

#[test]
fn what_ksm_had_merged_by_itself_stays_and_only_the_rates_go_back() {
    let mut world = KsmFixture::new("1", 5000);
    world.obey(DRIVE).unwrap();
    assert_eq!(world.all(), driven());
    let said = world.obey(KsmOrder::PutBack).unwrap().unwrap();
    assert!(!said.contains("unmerged"), "{said}");
    assert_eq!((world.all(), world.on_record()), (as_before("1"), None));

    let mut stopped = KsmFixture::new("0", 5000);
    stopped.obey(DRIVE).unwrap();
    let said = stopped.obey(KsmOrder::PutBack).unwrap().unwrap();
    assert!(said.contains("stays merged"), "{said}");
    assert_eq!((stopped.all(), stopped.on_record()), (as_before("0"), None));
}

#[test]
fn what_was_merged_is_unmerged_if_the_host_has_room_and_else_stays_on_record() {
    let mut world = KsmFixture::new("0", 0);
    world.obey(DRIVE).unwrap();
    world.merge(1000);
    let error = world.obey(KsmOrder::PutBack).unwrap_err();
    assert!(matches!(error, KsmTrouble::NoRoom { .. }), "{error}");
    assert!(error.to_string().contains("stay merged until the guests write"), "{error}");
    assert_eq!(world.all(), as_before("0"), "stopped all the same");
    assert!(world.on_record().is_some(), "tried again");
    world.restart();
    world.hand.room = || Bytes::mib(1024);
    let said = world.obey(KsmOrder::PutBack).unwrap().unwrap();
    assert!(said.ends_with(" unmerged"), "{said}");
    assert_eq!((world.all(), world.on_record()), (as_before("0"), None));
}

#[test]
fn ksm_that_was_unmerged_before_is_unmerged_again() {
    let mut world = KsmFixture::new("2", 0);
    world.obey(DRIVE).unwrap();
    world.merge(1);
    world.obey(KsmOrder::PutBack).unwrap();
    assert_eq!((world.all(), world.on_record()), (as_before("2"), None));
}

#[test]
fn what_others_change_is_theirs_and_the_rest_goes_back() {
    let mut world = KsmFixture::new("0", 0);
    world.obey(DRIVE).unwrap();
    world.write("pages_to_scan", "4000");
    for order in [DRIVE, DRIVE, KsmOrder::Rest] {
        let error = world.obey(order).unwrap_err();
        assert!(error.to_string().contains("pages_to_scan from 1000 to 4000"), "{error}");
        assert_eq!(world.all(), ["scan-time", "4000", "200", "0", "1", "0"]);
    }
    world.restart();
    assert!(matches!(world.obey(DRIVE), Err(KsmTrouble::TakenOver(_))), "known for ever");
    let said = world.obey(KsmOrder::PutBack).unwrap().unwrap();
    assert!(said.contains("left to the program that changed pages_to_scan"), "{said}");
    assert_eq!(world.all()[1], "4000");
    world.obey(DRIVE).unwrap();
    assert_eq!(world.all(), driven(), "everything was put back, so it begins anew");
}

#[test]
fn who_stops_or_starts_it_is_not_fought() {
    let mut world = KsmFixture::new("0", 0);
    world.obey(DRIVE).unwrap();
    world.write("run", "0");
    world.obey(DRIVE).unwrap_err();
    world.write("run", "1");
    world.obey(DRIVE).unwrap_err();
    world.merge(10);
    world.obey(KsmOrder::PutBack).unwrap();
    assert_eq!(world.all(), as_before("1"), "an admin's own run, not unmerged either");
}

#[test]
fn a_kernel_without_ksm_or_that_refuses_is_a_reason_and_nothing_else() {
    let mut world = KsmFixture::new("0", 0);
    let run = world.ksm.path().join("run");
    std::fs::remove_file(&run).unwrap();
    assert!(matches!(world.obey(DRIVE), Err(KsmTrouble::Absent)));
    // The file can be read, but not opened for writing, not even by root.
    let pages = world.ksm.path().join("pages_to_scan");
    std::fs::remove_file(&pages).unwrap();
    std::os::unix::fs::symlink("/proc/sys/kernel/ngroups_max", pages).unwrap();
    world.write("run", "0");
    let before = world.all();
    let error = world.obey(DRIVE).unwrap_err().to_string();
    assert!(error.starts_with("kernel KSM cannot be driven: "), "{error}");
    assert_eq!((world.all(), world.on_record()), (before, None));
}

#[tokio::test]
async fn what_is_ordered_shows_and_what_is_asked_for_is_answered() {
    let KsmFixture { ksm: _ksm, state: _state, hand } = KsmFixture::new("0", 2);
    let driver = KsmDriver::start(hand);
    driver.order(DRIVE);
    let limit = std::time::Duration::from_secs(60);
    let rested = async {
        while !driver.known().is_driven {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(limit, rested).await.unwrap();
    assert!(!driver.known().counters.unwrap().value.saved.is_zero());
    driver.order(KsmOrder::Rest);
    let said = driver.ask(KsmOrder::PutBack, limit).await.unwrap().unwrap().unwrap();
    assert!(said.contains("what they were"), "{said}");
}
