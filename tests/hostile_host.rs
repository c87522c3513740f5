//! What a host of a pool can do that has become an enemy: say what it likes of itself, and of
//! nobody else. Real etcd with certificates from `overbook pki`, and roles as the guide has them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::records::{self, Records, Written};
use cluster::store::{Change, Seat, Store, StoreError};
use etcd_client::{
    Certificate, Client, ConnectOptions, Identity, Permission, PermissionType, TlsOptions,
};
use lab::etcd::Members;
use model::cluster::{HostReport, Intent};
use model::spec::PoolSpec;
use model::{Bytes, HostName};
use overbook::{pki, pool};
use overbook_tests::skip;
use policy::handover::SourceStep;
use tokio::runtime::Runtime;
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(60);
const VALID: Duration = Duration::from_secs(3600);

/// A client with the certificates of `name`.
async fn raw(endpoints: &[String], directory: &Path) -> Client {
    let read = |name: &str| std::fs::read(directory.join(name)).unwrap();
    let own = Identity::from_pem(read("client-cert.pem"), read("client-key.pem"));
    let ca = Certificate::from_pem(read("ca-cert.pem"));
    let tls = TlsOptions::new().ca_certificate(ca).identity(own);
    let options = ConnectOptions::new().with_tls(tls).with_timeout(Duration::from_secs(3));
    Client::connect(endpoints, Some(options)).await.unwrap()
}

async fn store(endpoints: &[String], name: &str, directory: &Path) -> Arc<dyn Store> {
    let spec = PoolSpec {
        name: "test".to_owned(),
        host: name.into(),
        etcd: endpoints.to_owned(),
        tls: Some(directory.to_owned()),
        receive: None,
        movable: Vec::new(),
        bandwidth: PoolSpec::BANDWIDTH,
        downtime: PoolSpec::DOWNTIME,
        precopy: PoolSpec::PRECOPY,
        rest: PoolSpec::REST,
    };
    pool::store(&spec).await.unwrap()
}

/// Roles as the guide has them.
async fn grant(root: &mut Client) {
    root.user_add("root", "-", None).await.unwrap();
    root.user_grant_role("root", "root").await.unwrap();
    for (user, own) in [("a", "hosts/a/"), ("b", "hosts/b/"), ("controller", "controller/")] {
        root.role_add(user).await.unwrap();
        let prefix = |kind, key: &str| Permission::new(kind, key).with_prefix();
        let own = prefix(PermissionType::Readwrite, &format!("/overbook/test/{own}"));
        root.role_grant_permission(user, own).await.unwrap();
        let all = prefix(PermissionType::Read, "/overbook/test/");
        root.role_grant_permission(user, all).await.unwrap();
        root.user_add(user, "-", None).await.unwrap();
        root.user_grant_role(user, user).await.unwrap();
    }
    root.auth_enable().await.unwrap();
}

async fn sits(store: &dyn Store, key: &str, who: &str) -> Seat {
    let end = Instant::now() + LIMIT;
    loop {
        match store.sit(key, who).await {
            Ok(Some(seat)) => return seat,
            other => assert!(Instant::now() < end, "{key}: {other:?}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn a_hostile_host_harms_nobody_but_itself() {
    let dir = tempfile::tempdir().unwrap();
    let (own, foreign) = (dir.path().join("pki"), dir.path().join("foreign"));
    let here = ["127.0.0.1".to_owned()];
    for authority in [&own, &foreign] {
        pki::init(authority).unwrap();
    }
    let issue = |name: &str| pki::issue(&own, name, &here, VALID).unwrap();
    let server = issue("etcd");
    let members = match Members::start_secured(1, dir.path(), &server) {
        Ok(members) => members,
        Err(why) => return skip(&why.to_string()),
    };
    let endpoints = members.endpoints();
    Runtime::new().unwrap().block_on(async {
        let mut root = raw(&endpoints, &issue("root")).await;
        let end = Instant::now() + LIMIT;
        while let Err(why) = root.status().await {
            assert!(Instant::now() < end, "{why}");
            sleep(Duration::from_millis(50)).await;
        }
        root.role_add("root").await.unwrap();
        grant(&mut root).await;
        let (a, b): (HostName, HostName) = ("a".into(), "b".into());
        let hostile = store(&endpoints, "a", &issue("a")).await;
        let victim = store(&endpoints, "b", &issue("b")).await;
        let decides = store(&endpoints, "controller", &issue("controller")).await;

        // What is its own it may write.
        let mine = sits(&*hostile, &records::host_seat(&a), "a").await;
        let theirs = sits(&*victim, &records::host_seat(&b), "b").await;
        let report = HostReport { memory: Bytes::mib(1 << 20), ..HostReport::default() };
        let put = |key: String| vec![Change::put(key, &report)];
        hostile.write(&mine, vec![], put(records::report(&a))).await.unwrap();
        victim.write(&theirs, vec![], put(records::report(&b))).await.unwrap();

        // Nothing else: no intents, no other host's words, no other seat.
        let vm = "web-1".into();
        let intent = Intent { generation: 9, from: b.clone(), to: a.clone(), is_withdrawn: false };
        let step =
            Written { generation: 9, step: SourceStep::Switched, incarnation: 0, is_over: false };
        let forged = [
            Change::put(records::intent(&vm), &intent),
            Change::put(records::report(&b), &report),
            Change::put(records::source(&b, &vm), &step),
            Change::Delete { key: records::host_seat(&b) },
        ];
        for change in forged {
            let done = hostile.write(&mine, vec![], vec![change.clone()]).await;
            assert!(matches!(done, Err(StoreError::Refused(_))), "{change:?}: {done:?}");
        }
        for key in [records::CONTROLLER_SEAT.to_owned(), records::host_seat(&b)] {
            let done = hostile.sit(&key, "a").await;
            assert!(matches!(done, Err(StoreError::Refused(_))), "{key}: {done:?}");
        }
        // The seat of another one ends with its lease: that is not to be ended by others.
        let mut attacker = raw(&endpoints, &own.join("a")).await;
        let key = format!("/overbook/test/{}", records::host_seat(&b));
        let lease = attacker.get(key, None).await.unwrap().kvs()[0].lease();
        let revoked = attacker.lease_revoke(lease).await;
        assert!(revoked.is_err(), "a lease of another host was revoked");
        victim.stay(&theirs).await.unwrap();

        // Who is not of the pool reads nothing.
        let stranger = pki::issue(&foreign, "a", &here, VALID).unwrap();
        std::fs::copy(own.join("ca-cert.pem"), stranger.join("ca-cert.pem")).unwrap();
        let stranger = store(&endpoints, "a", &stranger).await;
        let read = stranger.read("").await;
        assert!(read.is_err(), "a foreign certificate reads: {read:?}");

        // A host that was away says what an older intent had: nobody takes it for this one's.
        let seat = sits(&*decides, records::CONTROLLER_SEAT, "controller").await;
        let intent = Intent { from: a.clone(), to: b.clone(), ..intent };
        let put = vec![Change::put(records::intent(&vm), &intent)];
        decides.write(&seat, vec![], put).await.unwrap();
        hostile.stay(&mine).await.unwrap();
        let old = Written { generation: 8, ..step };
        let put = vec![Change::put(records::source(&a, &vm), &old)];
        hostile.write(&mine, vec![], put).await.unwrap();
        let seen = Records::of(&victim.read("").await.unwrap());
        assert_eq!(seen.intents[&vm], intent);
        assert_eq!(seen.source_of(&vm, &intent), None);
    });
}
