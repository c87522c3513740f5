//! `overbook check` tries the pool that the configuration names: certificates, the command that
//! starts QEMUs, and real etcd.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use cluster::records;
use cluster::store::{Store, WriterLease};
use lab::etcd::Members;
use model::HostName;
use overbook::pki::{self, CertificateRequest};
use overbook::{config_files, pool};
use overbook_tests::{Requirement, program, requires, take_turn, text};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 3600);
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// A host `a` that uses these members of etcd.
struct CheckedHost {
    config: PathBuf,
    incoming: PathBuf,
}

impl CheckedHost {
    fn new(dir: &Path, endpoints: &[String], tls: Option<&Path>) -> Self {
        let (config, incoming) = (dir.join("overbook.toml"), dir.join("incoming"));
        let tls = match tls {
            Some(tls) => format!("tls = \"{}\"\n", tls.display()),
            None => "insecure = true\n".to_owned(),
        };
        let shown = incoming.display();
        let text = format!(
            "[host]\nqmp = [\"/run/overbook-none/*.sock\"]\n[pool]\nhost = \"a\"\n\
             etcd = {endpoints:?}\naddress = \"127.0.0.1\"\nincoming = \"{shown}\"\n{tls}"
        );
        fs::write(&config, text).unwrap();
        fs::write(&incoming, "#!/bin/sh\n").unwrap();
        let host = Self { config, incoming };
        host.set_mode(0o755);
        host
    }

    fn set_mode(&self, mode: u32) {
        fs::set_permissions(&self.incoming, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        let mut check = program();
        check.arg("--config").arg(&self.config).arg("check").args(arguments);
        check.output().unwrap()
    }

    /// Runs `check`, and expects this exit code and these words.
    fn check(&self, code: i32, words: &[&str]) {
        let begun = Instant::now();
        let output = self.ask(&[]);
        let said = text(&output);
        assert_eq!(output.status.code(), Some(code), "{said}");
        for word in words {
            assert!(said.contains(word), "{word:?} is not in\n{said}");
        }
        assert!(begun.elapsed() < LIMIT / 4, "it took {:?}", begun.elapsed());
    }
}

/// Host `b` takes its lease in the store of this configuration.
async fn seat_of_b(config: &Path) -> (std::sync::Arc<dyn Store>, WriterLease) {
    let spec = config_files::load(config).unwrap().pool.unwrap();
    let store = pool::store(&spec).await.unwrap();
    let end = Instant::now() + LIMIT;
    loop {
        match store.sit(&records::host_seat(&HostName::from("b")), "b").await {
            Ok(Some(seat)) => return (store, seat),
            other => assert!(Instant::now() < end, "{other:?}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}

#[test]
fn a_check_says_who_is_there_and_who_does_not_answer() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::tempdir().unwrap();
    let Some(mut members) = requires(Requirement::Packages, Members::start(1, dir.path())) else {
        return;
    };
    let endpoints = members.endpoints();
    let host = CheckedHost::new(dir.path(), &endpoints, None);
    Runtime::new().unwrap().block_on(async {
        let (store, seat) = seat_of_b(&host.config).await;
        let etcd = format!("pool: etcd {}: ", endpoints[0]);
        let fine = format!("{etcd}fine\n");
        host.check(0, &["ok: ", &fine, "incoming: fine\n", "other hosts that are there: b\n"]);
        store.rise(seat).await.unwrap();
        host.check(0, &["pool: no other host is there\n"]);

        let page: Value = serde_json::from_slice(&host.ask(&["--json"]).stdout).unwrap();
        assert_eq!(page["pool"]["others"], serde_json::json!([]), "{page}");
        host.set_mode(0o644);
        host.check(1, &["incoming: is not executable\n", &fine]);
        fs::remove_file(&host.incoming).unwrap();
        host.check(1, &["incoming: No such file"]);

        fs::write(&host.incoming, "").unwrap();
        host.set_mode(0o755);
        members.kill(0).unwrap();
        host.check(0, &["ok: ", &format!("{etcd}does not answer: ")]);
    });
}

#[test]
fn a_check_reads_the_certificates() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (own, foreign) = (dir.path().join("pki"), dir.path().join("foreign"));
    for authority in [&own, &foreign] {
        pki::init(authority).unwrap();
    }
    let here = ["127.0.0.1".to_owned()];
    let order = |name, valid| CertificateRequest { name, addresses: &here, valid, renews: false };
    let issue = |by: &Path, name, valid| pki::host(by, order(name, valid)).unwrap();
    let server = issue(&own, "etcd", YEAR).join("etcd");
    let Some(members) =
        requires(Requirement::Packages, Members::start_secured(1, dir.path(), &server))
    else {
        return;
    };
    let endpoints = members.endpoints();
    let with = |tls: &Path| CheckedHost::new(dir.path(), &endpoints, Some(tls));
    let a = issue(&own, "a", YEAR);
    Runtime::new().unwrap().block_on(async {
        let (_store, _seat) = seat_of_b(&with(&a).config).await;
        let etcd = format!("pool: etcd {}: ", endpoints[0]);
        let fine = format!("{etcd}fine\n");
        let words =
            ["client-cert.pem: fine until 2", "ca-cert.pem: fine until 2", &fine, "there: b\n"];
        with(&a).check(0, &words);

        // A certificate of another host.
        let other = issue(&own, "c", YEAR);
        with(&other).check(1, &["client-cert.pem: it is of c, and is to be of a, for `host` is a"]);
        // A certificate that expires soon still works.
        fs::remove_dir_all(&a).unwrap();
        let a = issue(&own, "a", 3 * DAY);
        with(&a).check(0, &["client-cert.pem: it ends in ", &fine]);

        // Missing files, and files that do not belong together.
        fs::copy(other.join("client-key.pem"), a.join("client-key.pem")).unwrap();
        with(&a).check(1, &["client-key.pem is not the key of client-cert.pem\n"]);
        fs::remove_file(a.join("client-key.pem")).unwrap();
        with(&a).check(1, &["client-key.pem: "]);
        fs::remove_dir_all(&a).unwrap();
        let a = issue(&own, "a", Duration::ZERO);
        // The expiry time is rounded to a second.
        let (expired, end) = (with(&a), Instant::now() + LIMIT);
        while !text(&expired.ask(&[])).contains("client-cert.pem has expired") {
            assert!(Instant::now() < end, "{}", text(&expired.ask(&[])));
            sleep(Duration::from_millis(50)).await;
        }
        with(&a).check(1, &["client-cert.pem has expired\n"]);

        // A certificate of an authority that is unknown here or to etcd.
        let stranger = issue(&foreign, "a", YEAR);
        let refused = format!("{etcd}does not answer: invalid peer certificate");
        with(&stranger).check(0, &["client-cert.pem: fine until 2", &refused]);
        fs::copy(own.join("ca-cert.pem"), stranger.join("ca-cert.pem")).unwrap();
        with(&stranger)
            .check(1, &["client-cert.pem is not signed by the authority in ca-cert.pem"]);
    });
}

#[test]
fn a_pool_without_tls_is_refused_by_all_that_would_use_it() {
    let Some(_turn) = take_turn() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (config, state) = (dir.path().join("overbook.toml"), dir.path().display());
    let plain = format!(
        "[host]\nstate = \"{state}\"\n[api]\nsocket = \"{state}/sock\"\n\
         [pool]\nhost = \"a\"\netcd = [\"http://127.0.0.1:2379\"]\n"
    );
    fs::write(&config, plain).unwrap();
    for command in ["check", "daemon", "controller"] {
        let output = program().arg("--config").arg(&config).arg(command).output().unwrap();
        let said = text(&output);
        assert_eq!(output.status.code(), Some(1), "{command}: {said}");
        let words = "[pool] has no `tls`: any host that reaches etcd could move VMs";
        assert_eq!(said.matches(words).count(), 1, "{command}: {said}");
    }
}
