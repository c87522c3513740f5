use std::os::unix::fs::PermissionsExt;

use super::*;

const YEAR: Duration = Duration::from_secs(365 * DAY_S);

fn order(name: &str) -> CertificateRequest<'_> {
    CertificateRequest { name, addresses: &[], valid: YEAR, renews: false }
}

#[test]
fn an_authority_ends_and_nothing_that_it_signs_outlives_it() {
    let dir = tempfile::tempdir().unwrap();
    init(dir.path()).unwrap();
    let own = read(&dir.path().join(AUTHORITY_CERTIFICATE)).unwrap();
    let years = own.left_s / (365 * 86_400);
    assert!((9..=10).contains(&years), "it is valid for {years} years more");
    let long = CertificateRequest { valid: AUTHORITY_VALID + 2 * BEFORE, ..order("a") };
    let why = host(dir.path(), long).unwrap_err().to_string();
    assert!(why.starts_with("3652 days are too many: the authority ends on 2"), "{why}");
}

#[test]
fn each_certificate_has_one_purpose_and_says_it() {
    let dir = tempfile::tempdir().unwrap();
    init(dir.path()).unwrap();
    let own =
        host(dir.path(), CertificateRequest { addresses: &["10.0.0.1".to_owned()], ..order("a") })
            .unwrap();
    let all = [
        ("client-cert.pem", Purpose::Host, "a"),
        ("etcd/server-cert.pem", Purpose::Etcd, "etcd.pool"),
        ("migration/server-cert.pem", Purpose::Migration, "migration.a"),
        ("migration/client-cert.pem", Purpose::Migration, "migration.a"),
        ("repository/server-cert.pem", Purpose::Repository, "repository.a"),
        ("disks/client-cert.pem", Purpose::Disks, "disks.a"),
    ];
    for (file, purpose, name) in all {
        let found = read(&own.join(file)).unwrap();
        assert_eq!((found.purpose, found.name.as_deref()), (Some(purpose), Some(name)), "{file}");
    }
    assert!(!own.join("server-cert.pem").exists() && !own.join("disks/server-cert.pem").exists());
    let key = std::fs::metadata(own.join("migration/client-key.pem")).unwrap();
    assert_eq!(key.permissions().mode() & 0o777, 0o600);
}

#[test]
fn certificates_are_replaced_only_when_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    init(dir.path()).unwrap();
    let first = || std::fs::read(dir.path().join("a/client-cert.pem")).unwrap();
    host(dir.path(), order("a")).unwrap();
    let before = first();
    assert!(matches!(host(dir.path(), order("a")), Err(PkiError::File { .. })));
    assert_eq!(first(), before);
    host(dir.path(), CertificateRequest { renews: true, ..order("a") }).unwrap();
    assert_ne!(first(), before);
}

#[test]
fn a_revoked_certificate_is_on_both_lists_beside_all_others() {
    let dir = tempfile::tempdir().unwrap();
    init(dir.path()).unwrap();
    host(dir.path(), order("a")).unwrap();
    revoke(dir.path(), &[dir.path().join("a/disks/client-cert.pem")]).unwrap();
    // Certificates that are created later come with the lists.
    host(dir.path(), order("b")).unwrap();
    for place in ["a", "a/migration", "a/disks", "b", "b/disks"] {
        let list = std::fs::read_to_string(dir.path().join(place).join("revoked")).unwrap();
        assert_eq!(list.lines().count(), 1, "{place}: {list}");
        assert!(list.ends_with(" CN=disks.a\n"), "{list}");
        let signed = std::fs::read_to_string(dir.path().join(place).join("ca-crl.pem")).unwrap();
        assert!(signed.starts_with("-----BEGIN X509 CRL-----"), "{place}");
    }
    revoke(dir.path(), &[dir.path().join("a/disks/client-cert.pem")]).unwrap();
    let list = std::fs::read_to_string(dir.path().join("revoked")).unwrap();
    assert_eq!(list.lines().count(), 1, "it is on the list once");
}

#[test]
fn the_signed_list_is_copied_where_the_other_one_is_lost_and_no_shorter_one_replaces_it() {
    let dir = tempfile::tempdir().unwrap();
    let signed = |place: &str| std::fs::read(dir.path().join(place).join("ca-crl.pem")).unwrap();
    init(dir.path()).unwrap();
    host(dir.path(), order("a")).unwrap();
    revoke(dir.path(), &[dir.path().join("a/disks/client-cert.pem")]).unwrap();
    std::fs::remove_file(dir.path().join("revoked")).unwrap();
    host(dir.path(), order("b")).unwrap();
    let before = signed("");
    for place in ["b", "b/migration", "b/disks"] {
        assert_eq!(signed(place), before, "{place}");
        assert!(!dir.path().join(place).join("revoked").exists(), "{place}");
    }
    let other = dir.path().join("b/disks/client-cert.pem");
    let why = revoke(dir.path(), std::slice::from_ref(&other)).unwrap_err().to_string();
    assert!(why.contains("/revoked: No such file"), "{why}");
    assert_eq!(signed(""), before);
    std::fs::copy(dir.path().join("a/revoked"), dir.path().join("revoked")).unwrap();
    revoke(dir.path(), &[other]).unwrap();
    assert_eq!(std::fs::read_to_string(dir.path().join("b/revoked")).unwrap().lines().count(), 2);
}
