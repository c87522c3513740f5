//! Records survive a restart, and invalid journals are set aside.

use super::*;
use crate::test_process::on_small_disk;

fn record(socket: &str, incarnation: u64, mib: u64) -> UndoRecord {
    UndoRecord {
        socket: socket.into(),
        vm: "web-1".into(),
        incarnation,
        balloon: Some(Bytes::mib(mib)),
        ram: Some(Bytes::mib(1024)),
        stats_interval_s: None,
    }
}

#[test]
fn what_was_recorded_is_there_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.records().count(), 0);
    journal.record(&[record("/q/1", 7, 512), record("/q/2", 8, 256)]).unwrap();
    let again = Journal::open(dir.path()).unwrap();
    assert_eq!(again.get(Path::new("/q/1"), 7), Some(&record("/q/1", 7, 512)));
    assert_eq!(again.records().count(), 2);
    assert!(!dir.path().join("undo.json.tmp").exists());
}

#[test]
fn an_original_is_never_replaced_within_a_life() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    let polling = UndoRecord { balloon: None, stats_interval_s: Some(0), ..record("/q/1", 7, 1) };
    journal.record(&[polling]).unwrap();
    journal.record(&[record("/q/1", 7, 512)]).unwrap();
    journal.record(&[record("/q/1", 7, 128)]).unwrap();
    let kept = journal.get(Path::new("/q/1"), 7).unwrap();
    assert_eq!((kept.balloon, kept.stats_interval_s), (Some(Bytes::mib(512)), Some(0)));
}

#[test]
fn a_new_life_replaces_the_old_ones_record() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    journal.record(&[record("/q/1", 7, 512)]).unwrap();
    journal.record(&[record("/q/1", 9, 128)]).unwrap();
    assert_eq!(journal.get(Path::new("/q/1"), 7), None);
    journal.forget(Path::new("/q/1"), 7).unwrap();
    assert!(journal.get(Path::new("/q/1"), 9).is_some(), "forgetting the dead spares the living");
    journal.forget(Path::new("/q/1"), 9).unwrap();
    assert_eq!(Journal::open(dir.path()).unwrap().records().count(), 0);
}

#[test]
fn a_journal_that_makes_no_sense_is_set_aside_and_said() {
    let cases: [(&[u8], &str); 5] = [
        (b"", "EOF"),
        (b"\xff\x00garbage", "expected value"),
        (b"{\"version\":2,\"vms\":[]}", "version 2"),
        (
            br#"{"version":1,"vms":[{"socket":"q","vm":"a","incarnation":1,"balloon":1,"stats_interval_s":null}]}"#,
            "no absolute path",
        ),
        (
            br#"{"version":1,"vms":[{"socket":"/q","vm":"a","incarnation":1,"balloon":0,"stats_interval_s":null}]}"#,
            "is zero",
        ),
    ];
    for (bytes, why) in cases {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE_NAME), bytes).unwrap();
        let mut journal = Journal::open(dir.path()).unwrap();
        let said = journal.set_aside().unwrap().to_owned();
        assert!(said.contains(why), "{said}");
        let kept = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap();
        assert!(kept.file_name().to_str().unwrap().starts_with("undo.json.unusable-"));
        assert_eq!(fs::read(kept.path()).unwrap(), bytes, "never deleted");
        journal.record(&[record("/q/1", 1, 1)]).unwrap();
    }
}

#[test]
fn after_a_downgrade_what_a_newer_release_has_added_is_left_out_and_all_else_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    journal.record(&[record("/q/1", 7, 512)]).unwrap();
    let path = dir.path().join(FILE_NAME);
    let text = fs::read_to_string(&path).unwrap();
    let newer = text.replace("\"version\"", "\"more\": 1, \"version\"");
    let newer = newer.replace("\"socket\"", "\"more\": [2], \"socket\"");
    assert_eq!(newer.matches("more").count(), 2);
    fs::write(&path, newer).unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.set_aside(), None);
    assert_eq!(journal.get(Path::new("/q/1"), 7), Some(&record("/q/1", 7, 512)));
}

#[test]
fn without_the_directory_nothing_may_be_touched() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("gone")).unwrap();
    let error = journal.record(&[record("/q/1", 7, 512)]).unwrap_err();
    assert!(error.to_string().contains("nothing is touched"), "{error}");
    assert_eq!(journal.records().count(), 0);
}

#[test]
fn a_socket_that_cannot_be_written_down_is_refused() {
    use std::os::unix::ffi::OsStringExt;
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    let socket = std::ffi::OsString::from_vec(b"/q/\xff".to_vec()).into();
    let error = journal.record(&[UndoRecord { socket, ..record("/q", 1, 1) }]).unwrap_err();
    assert!(matches!(error, JournalError::Unwritable { .. }));
}

#[test]
fn a_record_that_could_not_be_read_again_is_refused_and_spares_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    journal.record(&[record("/q/1", 7, 512)]).unwrap();
    for bad in [record("/q/2", 8, 0), record("q/2", 8, 1)] {
        let error = journal.record(&[bad]).unwrap_err();
        assert!(matches!(error, JournalError::Unwritable { .. }), "{error}");
    }
    let again = Journal::open(dir.path()).unwrap();
    assert_eq!((again.records().count(), again.set_aside()), (1, None));
}

#[test]
fn a_full_disk_refuses_the_record_and_keeps_the_old_ones() {
    let name = "journal::tests::a_full_disk_refuses_the_record_and_keeps_the_old_ones";
    let Some(dir) = on_small_disk(name, "256k") else { return };
    let mut journal = Journal::open(&dir).unwrap();
    journal.record(&[record("/q/1", 7, 512)]).unwrap();
    let filler = dir.join("filler");
    fs::write(&filler, vec![1; 1 << 20]).unwrap_err();
    let many: Vec<_> = (0..300).map(|i| record(&format!("/q/many-{i}"), 1, 1)).collect();
    let error = journal.record(&many).unwrap_err();
    assert!(error.to_string().contains("No space left"), "{error}");
    assert_eq!(journal.records().count(), 1);
    assert_eq!(Journal::open(&dir).unwrap().records().count(), 1);
    fs::remove_file(filler).unwrap();
    journal.record(&many).unwrap();
    assert_eq!(Journal::open(&dir).unwrap().records().count(), 301);
}

fn ksm() -> KsmRecord {
    let before = [("run", "0"), ("pages_to_scan", "100"), ("sleep_millisecs", "20")];
    let before = before.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    KsmRecord { before, had_merged: false, taken_over: None }
}

#[test]
fn ksms_record_stands_beside_the_vms_and_goes_without_them() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    journal.record(&[record("/q/1", 7, 512)]).unwrap();
    journal.set_ksm(Some(ksm())).unwrap();
    journal.forget(Path::new("/q/1"), 7).unwrap();
    let mut again = Journal::open(dir.path()).unwrap();
    assert_eq!((again.ksm(), again.records().count()), (Some(&ksm()), 0));
    again.set_ksm(None).unwrap();
    assert_eq!(Journal::open(dir.path()).unwrap().ksm(), None);
}

#[test]
fn a_journal_from_before_there_was_ksm_reads_and_one_without_it_is_written_as_then() {
    let dir = tempfile::tempdir().unwrap();
    let old = br#"{"version":1,"vms":[{"socket":"/q/1","vm":"web-1","incarnation":7,"balloon":1048576,"stats_interval_s":null}]}"#;
    fs::write(dir.path().join(FILE_NAME), old).unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    assert_eq!((journal.set_aside(), journal.ksm()), (None, None));
    journal.forget(Path::new("/q/1"), 7).unwrap();
    assert!(!fs::read_to_string(dir.path().join(FILE_NAME)).unwrap().contains("ksm"));
}

#[test]
fn a_record_of_ksm_that_names_other_files_is_set_aside() {
    let dir = tempfile::tempdir().unwrap();
    for (name, value) in [("../../../proc/sys/kernel/panic", "1"), ("run", "9")] {
        let ksm =
            format!(r#"{{"before":{{"{name}":"{value}"}},"had_merged":false,"taken_over":null}}"#);
        let text = format!(r#"{{"version":1,"vms":[],"ksm":{ksm}}}"#);
        fs::write(dir.path().join(FILE_NAME), text).unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        assert!(journal.set_aside().unwrap().contains("no setting of KSM"));
    }
}
