//! Files of older versions keep their rows and get the new columns.

use super::*;

/// The columns that each version lacked, from version 1 on.
const ADDED: [&[&str]; 6] = [
    &["working_set"],
    &["shared", "saved", "merged", "scan_rate"],
    &["freed", "freed_taken"],
    &["in_repositories", "disk_read_us"],
    &[],
    &["resident", "paged_out", "refaults_per_s"],
];

/// A file of this version with one row, opened by the current code.
fn opened_from(version: usize) -> (tempfile::TempDir, HistoryStore) {
    let dir = tempfile::tempdir().unwrap();
    let mut store = HistoryStore::open(&file(&dir), Bytes::mib(1)).unwrap();
    store.append(&sample::Sampler::default().rows(&tick(0, 0))).unwrap();
    drop(store);
    let connection = Connection::open(file(&dir)).unwrap();
    for column in ADDED[version - 1..].iter().copied().flatten() {
        let drop = format!("ALTER TABLE reading DROP COLUMN {column}");
        connection.execute_batch(&drop).unwrap();
    }
    if version < 3 {
        connection.execute_batch("DROP TABLE loan").unwrap();
    }
    if version < 6 {
        connection.execute_batch("DROP TABLE moved").unwrap();
    }
    connection.pragma_update(None, "user_version", u32::try_from(version).unwrap()).unwrap();
    drop(connection);
    let store = HistoryStore::open(&file(&dir), Bytes::mib(1)).unwrap();
    (dir, store)
}

#[test]
fn a_file_of_version_1_keeps_its_rows_and_learns_working_sets() {
    let (dir, mut store) = opened_from(1);
    let mut later = tick(1, 0);
    let tracking =
        model::Tracking { working_set: Some(Bytes::mib(150)), ..model::Tracking::default() };
    let seen = later.view.vms.get_mut(&vm()).unwrap();
    seen.tracking = Some(Reading::new(tracking, Time(1_000)));
    store.append(&sample::Sampler::default().rows(&later)).unwrap();
    let sets: Vec<_> = read(&file(&dir), &vm(), 0..u64::MAX, 10)
        .unwrap()
        .into_iter()
        .map(|row| match row.entry {
            Entry::Reading { working_set, .. } => working_set,
            entry => panic!("{entry:?}"),
        })
        .collect();
    assert_eq!(sets, [None, Some(Bytes::mib(150))]);
}

#[test]
fn a_file_of_version_2_keeps_its_rows_and_learns_what_was_shared_and_lent() {
    let (dir, mut store) = opened_from(2);
    store.append(&sample::Sampler::default().rows(&with_loan(0, 10, Reason::LoanUsed))).unwrap();
    assert_eq!(loans(&file(&dir), &"rich".into(), 0..u64::MAX, 10).unwrap().len(), 1);
    let mut later = with_change(tick(1, 0), 200, true);
    let mib = Bytes::mib;
    let dedup =
        model::Dedup { shared: mib(40), saved: mib(30), merged: mib(90), ..Default::default() };
    later.view.vms.get_mut(&vm()).unwrap().dedup = Some(Reading::new(dedup, Time(1_000)));
    later.plan.vms.get_mut(&vm()).unwrap().group = Some("web".into());
    let (rate, reason, payer) = (Some(model::PagesPerMs(50)), Reason::ScanFixed, None);
    let scan = model::Scan { rate, reason, payer };
    later.plan.scans.insert("web".into(), scan);
    store.append(&sample::Sampler::default().rows(&later)).unwrap();
    let rows: Vec<_> = read(&file(&dir), &vm(), 0..u64::MAX, 10)
        .unwrap()
        .into_iter()
        .map(|row| match row.entry {
            Entry::Reading { shared, saved, merged, scan_rate, .. } => {
                (shared, saved, merged, scan_rate.map(|model::PagesPerMs(rate)| rate))
            }
            entry => panic!("{entry:?}"),
        })
        .collect();
    let known = (Some(mib(40)), Some(mib(30)), Some(mib(90)), Some(50));
    assert_eq!(rows, [(None, None, None, None), known]);
}

#[test]
fn a_file_of_version_3_keeps_its_rows_and_learns_what_was_freed_and_taken() {
    let (dir, mut store) = opened_from(3);
    let mut later = tick(1, 0);
    let free =
        model::FreePages { freed: Bytes::mib(40), taken: Bytes::mib(9), ..Default::default() };
    later.view.vms.get_mut(&vm()).unwrap().free_pages = Some(Reading::new(free, Time(1_000)));
    store.append(&sample::Sampler::default().rows(&later)).unwrap();
    let rows: Vec<_> = read(&file(&dir), &vm(), 0..u64::MAX, 10)
        .unwrap()
        .into_iter()
        .map(|row| match row.entry {
            Entry::Reading { freed, freed_taken, .. } => (freed, freed_taken),
            entry => panic!("{entry:?}"),
        })
        .collect();
    assert_eq!(rows, [(None, None), (Some(Bytes::mib(40)), Some(Bytes::mib(9)))]);
}

#[test]
fn a_file_of_version_4_keeps_its_rows_and_learns_of_disks() {
    let (dir, mut store) = opened_from(4);
    let mut later = tick(1, 0);
    let disk = |read_us_median, held| {
        let repositories = Some(model::RepositoriesReading { held, ..Default::default() });
        let disk = model::DiskReading { read_us_median, repositories, ..Default::default() };
        Reading::new(disk, Time(1_000))
    };
    let disks = [("a", disk(64, Bytes::mib(3))), ("b", disk(32, Bytes::mib(4)))];
    later.view.vms.get_mut(&vm()).unwrap().disks =
        disks.map(|(name, disk)| (name.to_owned(), disk)).into();
    store.append(&sample::Sampler::default().rows(&later)).unwrap();
    let rows: Vec<_> = read(&file(&dir), &vm(), 0..u64::MAX, 10)
        .unwrap()
        .into_iter()
        .map(|row| match row.entry {
            Entry::Reading { in_repositories, disk_read_us, .. } => (in_repositories, disk_read_us),
            entry => panic!("{entry:?}"),
        })
        .collect();
    assert_eq!(rows, [(None, None), (Some(Bytes::mib(7)), Some(64))]);
}

#[test]
fn a_file_of_version_5_keeps_its_rows_and_learns_of_moves() {
    let (dir, mut store) = opened_from(5);
    let mut moves = Moves::default();
    moves.add(vm(), Progress::Arrived { from: "a".into() });
    let pool = Some(MemberState { moves, ..MemberState::default() });
    let later = Published { pool, ..tick(1, 0) };
    store.append(&sample::Sampler::default().rows(&later)).unwrap();
    let rows = read(&file(&dir), &vm(), 0..u64::MAX, 10).unwrap();
    assert_eq!(steps(&rows), [(0, 1), (1, 1)]);
    let words = "it has come from host a".to_owned();
    assert_eq!(rows.last().unwrap().entry, Entry::Move { words });
}

#[test]
fn a_file_of_version_6_keeps_its_rows_and_learns_what_is_paged_out() {
    let (dir, mut store) = opened_from(6);
    let mut later = tick(1, 0);
    let (resident, out) = (Bytes::mib(412), Bytes::mib(300));
    let cold = model::Cold { resident, out, refaults_per_s: 1.25, ..Default::default() };
    later.view.vms.get_mut(&vm()).unwrap().cold = Some(Reading::new(cold, Time(1_000)));
    store.append(&sample::Sampler::default().rows(&later)).unwrap();
    let rows: Vec<_> = read(&file(&dir), &vm(), 0..u64::MAX, 10)
        .unwrap()
        .into_iter()
        .map(|row| match row.entry {
            Entry::Reading { resident, paged_out, refaults_per_s, .. } => {
                (resident, paged_out, refaults_per_s)
            }
            entry => panic!("{entry:?}"),
        })
        .collect();
    assert_eq!(rows, [(None, None, None), (Some(resident), Some(out), Some(1.25))]);
}
