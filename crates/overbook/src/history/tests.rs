//! Tests with real files, a full disk and a killed writer.

mod versions;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    thread::sleep,
    time::{Duration, Instant},
};

use api::moves::{Moves, Progress};
use api::published::MemberState;
use api::published::{Published, TickTimes};
use model::{
    Action, Bytes, Decision, GuestStats, HostView, Link, Loan, Means, Migration, Mode, Plan,
    Reading, Reason, Time, VmName, VmView, config,
    plan::{Change, Outcome},
};
use rusqlite::Connection;

use super::{
    store::{HistoryStore, VERSION, set_aside},
    *,
};
use crate::test_process::{on_small_disk, start};

/// The beginning of a minute.
const START_MS: u64 = 1_700_000_040_000;

/// A tick at second `s` in which the VM has swapped `swapped` MiB so far.
fn tick(s: u64, swapped_mib: u64) -> Published {
    let at = Time(s * 1000);
    let stats = GuestStats {
        swap_in: Some(Bytes::mib(swapped_mib)),
        swap_out: Some(Bytes::ZERO),
        ..GuestStats::default()
    };
    let vm = VmView {
        incarnation: 7,
        ram: Bytes::mib(512),
        balloon: Some(Reading::new(Bytes::mib(256), at)),
        stats: Some(Reading::new(stats, at)),
        used: Some(Reading::new(Bytes::mib(200), at)),
        migration: Migration::None,
        immovable: None,
        ..VmView::unknown(Link::Up)
    };
    Published {
        at,
        wall_ms: START_MS + s * 1000,
        spec: Arc::new(config::parse(&[]).unwrap()),
        view: HostView {
            host: None,
            vms: BTreeMap::from([("web-1".into(), vm)]),
            ..HostView::default()
        },
        memory: policy::Memory::default(),
        plan: Plan { at, mode: Mode::Enforce, ..Plan::default() },
        paused: false,
        config_error: None,
        waits_for_restart: None,
        history_error: None,
        pool: None,
        lender: None,
        ticks: TickTimes::default(),
    }
}

fn with_change(mut tick: Published, target_mib: u64, is_repeat: bool) -> Published {
    let target = Bytes::mib(target_mib);
    let action = Action::Resize { vm: vm(), incarnation: 7, target, by: Means::Balloon };
    let change =
        Change { action, is_take: true, is_repeat, reason: Reason::AboveMax { max: target } };
    let decision = Decision { target: Some(target), change: Some(change), ..Decision::default() };
    tick.plan.vms.insert(vm(), decision);
    tick
}

fn vm() -> VmName {
    "web-1".into()
}

fn file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join(FILE_NAME)
}

fn record(history: &History, ticks: impl IntoIterator<Item = Published>) {
    for tick in ticks {
        history.record_surely(tick);
    }
}

fn steps(rows: &[HistoryRow]) -> Vec<(u64, u32)> {
    let readings = rows.iter().filter_map(|row| match row.entry {
        Entry::Reading { step_s, .. } => Some(((row.wall_ms - START_MS) / 1000, step_s)),
        Entry::Change { .. } | Entry::Move { .. } => None,
    });
    readings.collect()
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(15), "never came true: {what}");
        sleep(Duration::from_millis(20));
    }
}

/// A tick at second `s` in which group `rich` lends `poor` `mib` MiB.
fn with_loan(s: u64, mib: u64, reason: Reason) -> Published {
    let mut tick = tick(s, 0);
    let loan = Loan { borrower: "poor".into(), amount: Bytes::mib(mib), reason };
    tick.plan.loans.insert("rich".into(), loan);
    tick
}

#[test]
fn what_became_of_a_move_is_kept_once_also_of_a_vm_that_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let history = History::start(&file(&dir)).unwrap();
    let mut moves = Moves::default();
    let mut at = |s, progress: Option<Progress>| {
        progress.into_iter().for_each(|progress| moves.add(vm(), progress));
        let pool = MemberState { moves: moves.clone(), ..MemberState::default() };
        let mut tick = Published { pool: Some(pool), ..tick(s, 0) };
        tick.view.vms.clear();
        tick
    };
    let to = || "b".into();
    let ticks = [
        at(0, None),
        at(1, Some(Progress::Leaving { to: to() })),
        at(2, None),
        at(3, Some(Progress::Left { to: to() })),
    ];
    record(&history, ticks);
    drop(history);
    let rows = read(&file(&dir), &vm(), 0..u64::MAX, 100).unwrap().into_iter().map(|row| match row
        .entry
    {
        Entry::Move { words } => ((row.wall_ms - START_MS) / 1000, words),
        entry => panic!("{entry:?}"),
    });
    assert_eq!(
        rows.collect::<Vec<_>>(),
        [(1, "it begins to move to host b".to_owned()), (3, "it has moved to host b".to_owned())]
    );
}

#[test]
fn readings_and_changes_come_back_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let history = History::start(&file(&dir)).unwrap();
    record(&history, [tick(0, 0), with_change(tick(1, 3), 300, false), tick(2, 3)]);
    drop(history);
    let rows = read(&file(&dir), &vm(), 0..u64::MAX, 100).unwrap();
    assert_eq!(steps(&rows), [(0, 1), (1, 1), (2, 1)]);
    let Entry::Reading { used, balloon, swap_per_s, target, .. } = rows[1].entry else {
        panic!("{rows:?}")
    };
    assert_eq!((used, balloon), (Some(Bytes::mib(200)), Some(Bytes::mib(256))));
    assert_eq!((swap_per_s, target), (Some(Bytes::mib(3)), Some(Bytes::mib(300))));
    let last = last_change(&file(&dir), &vm()).unwrap().unwrap();
    assert_eq!(rows[2], last, "the change follows the reading that led to it");
    let Entry::Change { reason, words, mode, .. } = last.entry else { panic!() };
    assert_eq!(reason, Some(Reason::AboveMax { max: Bytes::mib(300) }));
    assert_eq!(
        (words.as_str(), mode),
        ("it holds more than its maximum of 300 MiB", Mode::Enforce)
    );
}

#[test]
fn the_newest_rows_are_kept_under_a_limit_and_a_start() {
    let dir = tempfile::tempdir().unwrap();
    let history = History::start(&file(&dir)).unwrap();
    record(&history, (0..9).map(|s| tick(s, 0)));
    drop(history);
    assert_eq!(steps(&read(&file(&dir), &vm(), 0..u64::MAX, 2).unwrap()), [(7, 1), (8, 1)]);
    let since = START_MS + 8000;
    assert_eq!(steps(&read(&file(&dir), &vm(), since..u64::MAX, 9).unwrap()), [(8, 1)]);
    let earlier = read(&file(&dir), &vm(), 0..since, 2).unwrap();
    assert_eq!(steps(&earlier), [(6, 1), (7, 1)], "the end is not included");
    assert!(read(&file(&dir), &"other".into(), 0..u64::MAX, 9).unwrap().is_empty());
}

#[test]
fn a_decision_that_is_said_again_is_written_once() {
    let mut sampler = sample::Sampler::default();
    let mut changes = |tick| sampler.rows(&tick).changes.len();
    assert_eq!(changes(with_change(tick(0, 0), 300, false)), 1);
    assert_eq!(changes(with_change(tick(1, 0), 300, false)), 0, "an echo in mode recommend");
    assert_eq!(changes(with_change(tick(2, 0), 310, true)), 0, "a repeat");
    assert_eq!(changes(with_change(tick(3, 0), 310, false)), 1);
    assert_eq!(changes(with_change(tick(70, 0), 310, false)), 1, "a minute later it is news again");
}

#[test]
fn what_a_move_has_saved_is_written_once() {
    let mut sampler = sample::Sampler::default();
    let mut changes = |s, judged: Option<u64>| {
        let mut tick = with_change(tick(s, 0), 300, true);
        let outcome = judged.map(|at| Outcome {
            at: Time(at),
            from: Bytes::mib(400),
            to: Bytes::mib(300),
            expected: -20,
            saved: -35,
        });
        tick.plan.vms.entry(vm()).or_default().outcome = outcome;
        sampler.rows(&tick).changes
    };
    assert!(changes(0, None).is_empty());
    let rows = changes(1, Some(7));
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].reason, Reason::Saved { expected: -20, saved: -35 });
    assert!(rows[0].is_take && rows[0].target == Bytes::mib(300));
    assert!(changes(2, Some(7)).is_empty(), "it is known");
    assert_eq!(changes(3, Some(9)).len(), 1, "another move");
}

#[test]
fn coarse_rows_hold_the_mean_swap_rate_of_their_step() {
    let mut sampler = sample::Sampler::default();
    let rows: Vec<_> = (0..=10).flat_map(|s| sampler.rows(&tick(s, s * 2)).readings).collect();
    let coarse: Vec<_> = rows.iter().filter(|row| row.step_s == 10).collect();
    assert_eq!(coarse.len(), 1);
    assert_eq!(coarse[0].wall_ms, START_MS);
    assert_eq!(coarse[0].sample.swap_per_s, Some(Bytes::mib(2)));
}

#[test]
fn a_vanished_vm_leaves_its_open_steps_behind() {
    let mut sampler = sample::Sampler::default();
    sampler.rows(&tick(0, 0));
    let mut gone = tick(1, 0);
    gone.view.vms.clear();
    let steps: Vec<u32> = sampler.rows(&gone).readings.iter().map(|row| row.step_s).collect();
    assert_eq!(steps, [10, 60]);
}

#[test]
fn counters_that_run_backwards_give_no_rate() {
    let mut sampler = sample::Sampler::default();
    let mut rate = |s, swapped| sampler.rows(&tick(s, swapped)).readings[0].sample.swap_per_s;
    assert_eq!(rate(0, 5), None);
    assert_eq!(rate(1, 9), Some(Bytes::mib(4)));
    assert_eq!(rate(2, 1), None);
    assert_eq!(rate(3, 2), Some(Bytes::mib(1)));
}

#[test]
fn old_rows_get_coarser_and_then_go() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = HistoryStore::open(&file(&dir), Bytes::mib(64)).unwrap();
    let mut sampler = sample::Sampler::default();
    for s in 0..130 {
        store.append(&sampler.rows(&tick(s, 0))).unwrap();
    }
    let now = |hours: u64| START_MS + 100_000 + hours * 3_600_000;
    let oldest = || steps(&read(&file(&dir), &vm(), 0..u64::MAX, 1000).unwrap())[0];
    assert_eq!(oldest(), (0, 1));
    store.thin(now(1)).unwrap();
    let rows = steps(&read(&file(&dir), &vm(), 0..u64::MAX, 1000).unwrap());
    assert_eq!(rows[..2], [(0, 10), (10, 10)]);
    assert_eq!(rows[10..12], [(100, 1), (101, 1)]);
    store.thin(now(24)).unwrap();
    assert_eq!(oldest(), (0, 60));
    store.thin(now(24 * 31)).unwrap();
    assert!(read(&file(&dir), &vm(), 0..u64::MAX, 1000).unwrap().is_empty());
}

#[test]
fn the_file_stays_within_its_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let most = Bytes::kib(512);
    let mut store = HistoryStore::open(&file(&dir), most).unwrap();
    let mut sampler = sample::Sampler::default();
    for round in 0..40 {
        for s in 0..500 {
            store.append(&sampler.rows(&tick(round * 500 + s, 0))).unwrap();
        }
        store.thin(START_MS).unwrap();
    }
    let size = fs::metadata(file(&dir)).unwrap().len();
    assert!(size <= most.0 * 5 / 4, "{size} bytes");
    let rows = read(&file(&dir), &vm(), 0..u64::MAX, 10_000).unwrap();
    assert_eq!(rows.last().unwrap().wall_ms, START_MS + 19_999_000, "the newest are kept");
}

#[test]
fn a_damaged_file_is_set_aside_and_a_new_one_begun() {
    let dir = tempfile::tempdir().unwrap();
    let garbage = vec![0x5a; 20_000];
    fs::write(file(&dir), &garbage).unwrap();
    let history = History::start(&file(&dir)).unwrap();
    record(&history, [tick(0, 0)]);
    eventually("the row is there", || {
        read(&file(&dir), &vm(), 0..u64::MAX, 9).is_ok_and(|r| r.len() == 1)
    });
    let said = history.error().unwrap();
    assert!(said.contains("not a database") && said.contains("history.db.unusable-"), "{said}");
    let aside = aside_of(dir.path());
    assert_eq!(fs::read(aside).unwrap(), garbage, "never deleted");
}

fn aside_of(dir: &Path) -> PathBuf {
    let is_aside = |p: &PathBuf| p.to_str().unwrap().contains(".unusable-");
    let mut entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.find(is_aside).expect("a file was set aside")
}

#[test]
fn a_file_damaged_in_its_middle_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = HistoryStore::open(&file(&dir), Bytes::mib(64)).unwrap();
    let mut sampler = sample::Sampler::default();
    for s in 0..2000 {
        store.append(&sampler.rows(&tick(s, 0))).unwrap();
    }
    drop(store);
    let mut bytes = fs::read(file(&dir)).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 8192].fill(0xa5);
    fs::write(file(&dir), bytes).unwrap();
    let history = History::start(&file(&dir)).unwrap();
    record(&history, [tick(0, 0)]);
    eventually("it was set aside", || history.error().is_some_and(|e| e.contains(".unusable-")));
}

#[test]
fn a_loan_is_on_record_for_both_groups_from_its_beginning_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let history = History::start(&file(&dir)).unwrap();
    let ended = Reason::LoanNotConsented;
    let ticks = [
        with_loan(0, 10, Reason::LoanUsed),
        with_loan(1, 10, Reason::LoanUsed),
        with_loan(2, 0, ended.clone()),
    ];
    record(&history, ticks);
    drop(history);
    let of = |group: &str| loans(&file(&dir), &group.into(), 0..u64::MAX, 10).unwrap();
    let rows = of("rich");
    assert_eq!(rows, of("poor"));
    assert_eq!(of("other"), []);
    let seen: Vec<_> =
        rows.iter().map(|row| (row.wall_ms - START_MS, row.amount.0 >> 20)).collect();
    assert_eq!(seen, [(0, 10), (2_000, 0)]);
    assert_eq!((rows[1].words.clone(), rows[1].reason.clone()), (ended.to_string(), Some(ended)));
}

#[test]
fn a_newer_versions_file_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    drop(HistoryStore::open(&file(&dir), Bytes::mib(1)).unwrap());
    let connection = Connection::open(file(&dir)).unwrap();
    connection.pragma_update(None, "user_version", VERSION + 1).unwrap();
    drop(connection);
    let history = History::start(&file(&dir)).unwrap();
    record(&history, [tick(0, 0)]);
    eventually("it was set aside", || {
        history.error().is_some_and(|e| e.contains("written by a newer Overbook"))
    });
}

#[test]
fn setting_aside_takes_the_log_along() {
    let dir = tempfile::tempdir().unwrap();
    for part in ["", "-wal", "-shm"] {
        fs::write(dir.path().join(format!("{FILE_NAME}{part}")), part).unwrap();
    }
    let aside = set_aside(&file(&dir), 5).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    assert_eq!(fs::read(format!("{}-wal", aside.display())).unwrap(), b"-wal");
}

#[test]
fn a_missing_history_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let error = read(&file(&dir), &vm(), 0..u64::MAX, 1).unwrap_err().to_string();
    assert!(error.starts_with("there is no history at "), "{error}");
}

#[test]
fn a_directory_that_is_not_there_is_said_and_harms_nothing() {
    let history = History::start(Path::new("/proc/no/history.db")).unwrap();
    record(&history, (0..5).map(|s| tick(s, 0)));
    eventually("it is said", || {
        history.error().is_some_and(|e| e.contains("not being kept") && e.contains("/proc/no"))
    });
}

#[test]
fn a_full_disk_is_said_and_recording_resumes_by_itself() {
    let name = "history::tests::a_full_disk_is_said_and_recording_resumes_by_itself";
    let Some(dir) = on_small_disk(name, "2m") else { return };
    let path = dir.join(FILE_NAME);
    let history = History::start(&path).unwrap();
    record(&history, (0..50).map(|s| tick(s, 0)));
    eventually("rows are there", || {
        read(&path, &vm(), 0..u64::MAX, 99).is_ok_and(|rows| rows.len() == 50)
    });
    assert_eq!(history.error(), None);
    fs::write(dir.join("filler"), vec![1; 4 << 20]).unwrap_err();
    let mut s = 50;
    let mut record_one = || {
        history.record(&Arc::new(tick(s, 0)));
        s += 1;
    };
    eventually("the full disk is said", || {
        record_one();
        history.error().is_some_and(|e| e.contains("is full") || e.contains("I/O error"))
    });
    println!("{}", history.error().unwrap());
    fs::remove_file(dir.join("filler")).unwrap();
    eventually("recording resumes", || {
        record_one();
        history.error().is_none()
    });
    drop(history);
    let rows = steps(&read(&path, &vm(), 0..u64::MAX, 100_000).unwrap());
    assert_eq!(rows[..2], [(0, 1), (1, 1)], "what was kept before is still there");
    assert!(rows.last().unwrap().0 > 50);
}

#[test]
fn a_disk_that_is_full_from_the_start_is_said() {
    let name = "history::tests::a_disk_that_is_full_from_the_start_is_said";
    let Some(dir) = on_small_disk(name, "256k") else { return };
    fs::write(dir.join("filler"), vec![1; 1 << 20]).unwrap_err();
    let history = History::start(&dir.join(FILE_NAME)).unwrap();
    record(&history, [tick(0, 0)]);
    eventually("it is said", || history.error().is_some());
    println!("{}", history.error().unwrap());
    fs::remove_file(dir.join("filler")).unwrap();
    eventually("recording begins", || {
        history.record(&Arc::new(tick(1, 0)));
        history.error().is_none()
    });
}

const WRITER: &str = "OVERBOOK_TEST_HISTORY_WRITER";

#[test]
fn a_queue_that_is_full_loses_ticks_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    drop(HistoryStore::open(&file(&dir), Bytes::mib(1)).unwrap());
    // Another transaction blocks the writer.
    let other = Connection::open(file(&dir)).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let history = History::start(&file(&dir)).unwrap();
    // If recording waited for that transaction, this would never end.
    for s in 0..100 {
        history.record(&Arc::new(tick(s, 0)));
    }
    assert!(history.error().unwrap().contains("slower than the readings come"));
    other.execute_batch("ROLLBACK").unwrap();
    let mut s = 100;
    eventually("recording resumes", || {
        history.record(&Arc::new(tick(s, 0)));
        s += 1;
        history.error().is_none()
    });
}

#[test]
fn a_killed_writer_loses_nothing_that_was_written_long_ago() {
    if let Some(path) = std::env::var_os(WRITER) {
        let history = History::start(Path::new(&path)).unwrap();
        let first = read(Path::new(&path), &vm(), 0..u64::MAX, 1)
            .map_or(0, |rows| rows.last().map_or(0, |row| (row.wall_ms - START_MS) / 1000 + 1));
        // The pace keeps all rounds together within the hour for which every row is kept.
        let slowly = |s| {
            sleep(Duration::from_millis(1));
            tick(s, 0)
        };
        record(&history, (first..).map(slowly));
    }
    let name = "history::tests::a_killed_writer_loses_nothing_that_was_written_long_ago";
    let dir = tempfile::tempdir().unwrap();
    let mut before = 0;
    for round in 0..8_u64 {
        let mut writer = start(name, WRITER, &file(&dir));
        let count = || read(&file(&dir), &vm(), 0..u64::MAX, 100_000).map_or(0, |rows| rows.len());
        eventually("it writes", || count() > before + 20);
        // A time at which the writer is busy.
        sleep(Duration::from_millis(round * 37));
        let seen = read(&file(&dir), &vm(), 0..u64::MAX, 100_000).map_or(0, |rows| rows.len());
        writer.kill().unwrap();
        writer.wait().unwrap();
        let rows = steps(&read(&file(&dir), &vm(), 0..u64::MAX, 100_000).unwrap());
        assert!(
            rows.len() >= seen && seen >= before,
            "{} < {seen} or {seen} < {before}",
            rows.len()
        );
        assert!(rows.iter().enumerate().all(|(i, row)| *row == (i as u64, 1)), "no row is missing");
        before = rows.len();
    }
    let verdict: String = Connection::open(file(&dir))
        .unwrap()
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(verdict, "ok");
    assert!(before > 100, "only {before} rows");
    assert!(aside_count(dir.path()) == 0, "nothing had to be set aside");
}

fn aside_count(dir: &Path) -> usize {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_str().unwrap().contains(".unusable-")).count()
}
