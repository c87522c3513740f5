//! The store of a pool on real etcd, and of one host alone: a client without the lease cannot
//! write.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::store::{
    Change, Snapshot, Store, StoreError, WriterLease, embedded::Embedded, etcd::Etcd,
};
use lab::etcd::Members;
use overbook_tests::{Requirement, requires};
use tokio::runtime::Runtime;
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(60);

fn put(key: &str, value: &str) -> Vec<Change> {
    vec![Change::Put { key: key.to_owned(), value: value.into() }]
}

/// Retries until the store answers.
async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Result<T, StoreError>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(Instant::now() < end, "{what}: {error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

/// Reads, and retries while the store has no leader.
async fn read(store: &dyn Store, prefix: &str) -> Snapshot {
    until("a read", async || store.read(prefix).await).await
}

async fn sits(store: &dyn Store, who: &str) -> WriterLease {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(seat) = until("a seat", async || store.sit("controller", who).await).await {
            return seat;
        }
        assert!(Instant::now() < end, "the seat is not given up");
        sleep(Duration::from_millis(50)).await;
    }
}

/// The behaviour of every store. `lose` silences the holder of a lease until it expires.
async fn is_a_store(store: &dyn Store) {
    let first = sits(store, "first").await;
    assert_eq!(until("a seat", async || store.sit("controller", "second").await).await, None);
    until("a write", async || store.write(&first, vec![], put("vms/a", "1")).await).await;
    store.stay(&first).await.unwrap();
    let seen = read(store, "vms/").await;
    assert_eq!(seen.values["vms/a"], b"1");
    assert_eq!(read(store, "vm/").await.values.len(), 0);

    // A waiting reader is told of a change, and so is one that missed it.
    let change = async {
        until("a write", async || store.write(&first, vec![], put("vms/b", "2")).await).await;
    };
    let (heard, ()) = tokio::join!(store.changed("vms/", seen.revision), change);
    heard.unwrap();
    store.changed("vms/", seen.revision).await.unwrap();
    let now = read(store, "vms/").await;
    assert!(now.revision > seen.revision && now.values.len() == 2);

    // A write takes effect as a whole or not at all.
    let both = vec![
        Change::Put { key: "vms/c".to_owned(), value: b"3".to_vec() },
        Change::Delete { key: "vms/a".to_owned() },
    ];
    store.rise(first.clone()).await.unwrap();
    let second = sits(store, "second").await;
    assert_ne!(first.number, second.number);
    let late = store.write(&first, vec![], both.clone()).await;
    assert_eq!(late, Err(StoreError::Unseated("controller".to_owned())));
    assert_eq!(read(store, "vms/").await.values, now.values, "a part was written");
    assert_eq!(store.stay(&first).await, Err(StoreError::Unseated("controller".to_owned())));
    store.write(&second, vec![], both).await.unwrap();

    // A write fails if a value that it depends on has changed.
    let now = read(store, "vms/").await;
    let still = |key: &str| vec![now.still(key.to_owned())];
    store.write(&second, still("vms/b"), put("vms/b", "4")).await.unwrap();
    let late = store.write(&second, still("vms/b"), put("vms/b", "5")).await;
    assert_eq!(late, Err(StoreError::Changed));
    let late = store.write(&second, still("vms/none"), put("vms/none", "6")).await;
    assert_eq!(late, Ok(()));
    let late = store.write(&second, still("vms/none"), put("vms/none", "7")).await;
    assert_eq!(late, Err(StoreError::Changed));
    let left = read(store, "vms/").await.values;
    assert_eq!(left.into_keys().collect::<Vec<_>>(), ["vms/b", "vms/c", "vms/none"]);
}

#[test]
fn a_host_alone_has_a_store_that_outlives_the_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let file = dir.path().join("pool.db");
        is_a_store(&Embedded::open(&file).unwrap()).await;
        let again = Embedded::open(&file).unwrap();
        assert_eq!(read(&again, "vms/").await.values.len(), 3);
        // Leases end with the process that held them.
        sits(&again, "third").await;
    });
}

#[test]
fn a_pool_has_a_store_in_etcd_that_survives_its_leader() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut members) = requires(Requirement::Packages, Members::start(3, dir.path())) else {
        return;
    };
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let store = Etcd::connect(&members.endpoints(), None, "test").await.unwrap();
        until("three members", async || store.read("").await).await;
        is_a_store(&store).await;
        let other = Etcd::connect(&members.endpoints(), None, "other").await.unwrap();
        assert!(read(&other, "").await.values.is_empty());

        // Each member is killed in turn, also the leader: writes go on, and none is lost.
        let seat = sits(&store, "writer").await;
        for i in 0..members.count() {
            members.kill(i).unwrap();
            let value = i.to_string();
            until("two of three", async || {
                store.stay(&seat).await?;
                store.write(&seat, vec![], put("vms/b", &value)).await
            })
            .await;
            let left = read(&store, "vms/b").await;
            assert_eq!(left.values["vms/b"], value.as_bytes());
            members.revive(i).unwrap();
            until("three of three", async || store.read("").await).await;
        }
    });
}

#[test]
fn who_was_cut_off_finds_its_seat_taken_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let Some(members) = requires(Requirement::Packages, Members::start(1, dir.path())) else {
        return;
    };
    let runtime = Runtime::new().unwrap();
    runtime.block_on(async {
        let store = Arc::new(Etcd::connect(&members.endpoints(), None, "test").await.unwrap());
        let lost = sits(&*store, "first").await;
        // The holder is silent until its lease expires, and another client takes its place.
        let next = sits(&*store, "second").await;
        let late = store.write(&lost, vec![], put("vms/a", "late")).await;
        assert_eq!(late, Err(StoreError::Unseated("controller".to_owned())));
        until("a write", async || store.write(&next, vec![], put("vms/a", "right")).await).await;
        // A store that does not answer gives an error in time, and never a wrong answer.
        members.hold(0, true).unwrap();
        let begun = Instant::now();
        let silent = store.write(&next, vec![], put("vms/a", "silent")).await;
        members.hold(0, false).unwrap();
        assert!(matches!(silent, Err(StoreError::Unreachable(_))), "{silent:?}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    });
}

/// A host that writes as much as etcd allows, below its own prefix.
async fn write_fat(endpoints: &[String]) {
    let mut raw = etcd_client::Client::connect(endpoints, None).await.unwrap();
    let fat = vec![b'x'; 1_400_000];
    for number in 0..12 {
        let key = format!("/overbook/test/hosts/fat/source/{number:04}");
        raw.put(key, fat.clone(), None).await.unwrap();
    }
    for start in (0..6_000).step_by(100) {
        let put = |number| {
            let key = format!("/overbook/test/hosts/many/source/{number:05}");
            etcd_client::TxnOp::put(key, "{}", None)
        };
        let all: Vec<_> = (start..start + 100).map(put).collect();
        raw.txn(etcd_client::Txn::new().and_then(all)).await.unwrap();
    }
}

#[test]
fn what_one_host_writes_keeps_nobody_from_reading_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let Some(members) = requires(Requirement::Packages, Members::start(1, dir.path())) else {
        return;
    };
    Runtime::new().unwrap().block_on(async {
        let store = Etcd::connect(&members.endpoints(), None, "test").await.unwrap();
        let seat =
            until("a seat", async || store.sit("hosts/zoe/seat", "zoe").await).await.unwrap();
        for key in ["hosts/ann/report", "hosts/zoe/report", "controller/intents/web"] {
            store.write(&seat, vec![], put(key, "{}")).await.unwrap();
        }
        let before = store.read("").await.unwrap();
        let endpoints = members.endpoints();
        let (heard, ()) = tokio::join!(store.changed("", before.revision), write_fat(&endpoints));
        heard.unwrap();
        store.changed("", before.revision).await.unwrap();

        let seen = store.read("").await.unwrap();
        let of = |host: &str| seen.values.keys().filter(|key| key.starts_with(host)).count();
        let kept: usize = seen.values.iter().map(|(key, value)| key.len() + value.len()).sum();
        println!(
            "of 12 values of 1.4 MB {} were read, of 6,000 keys {}; {kept} bytes in all",
            of("hosts/fat/"),
            of("hosts/many/")
        );
        assert_eq!((of("hosts/fat/"), of("hosts/many/")), (0, 4096));
        assert!(kept < 8 << 20, "{kept} bytes are kept");
        for (key, value) in &before.values {
            assert_eq!(seen.values.get(key), Some(value), "{key}");
        }
        assert_eq!(store.read("hosts/zoe/").await.unwrap().values.len(), 2);
        assert_eq!(store.read("hosts/fat/").await.unwrap().values.len(), 0);
    });
}
