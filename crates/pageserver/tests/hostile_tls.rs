//! TLS: clients without permission do not get in, and an attacker on the network can neither
//! strip TLS nor inject data before it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use common::certificates::{Authority, CLIENT, CertificateSpec, SERVER, Usage};
use common::raw::{self, flags, go, greet, hear, option, option_reply as reply, to_the_end};
use common::{LIMIT, Listening, SingleExport, listen, listen_with};
use pageserver::client::{self, Client, ClientError};
use pageserver::layers::memory::{Memory, SLAB};
use pageserver::nbd::ProtocolError;
use pageserver::nbd::dialogue::Wanted;
use pageserver::nbd::wire::{self, option, option_reply};
use pageserver::repository::Repository;
use pageserver::server::Limits;
use pageserver::tls::{Acceptor, Connector, HandshakeError, REVOKED, TlsError, fingerprint};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

struct TlsFixture {
    dir: tempfile::TempDir,
    ours: Authority,
    others: Authority,
}

impl TlsFixture {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), ours: Authority::new(), others: Authority::new() }
    }

    /// A server that shows a certificate signed by `signer`.
    fn acceptor(&self, signer: &Authority, wish: CertificateSpec<'_>) -> Acceptor {
        Acceptor::new(&self.ours.files(self.dir.path(), signer, "server", wish)).unwrap()
    }

    /// A client that shows a certificate signed by `signer`.
    fn connector(&self, signer: &Authority, wish: CertificateSpec<'_>) -> Connector {
        Connector::new(&self.ours.files(self.dir.path(), signer, "client", wish)).unwrap()
    }

    /// A server with a valid certificate.
    fn server(&self) -> Listening {
        self.server_with(self.acceptor(&self.ours, SERVER))
    }

    fn server_with(&self, acceptor: Acceptor) -> Listening {
        listen_with(disk(), Some(acceptor), Limits::default())
    }
}

fn disk() -> Arc<SingleExport> {
    Arc::new(SingleExport("disk", Arc::new(Memory::new(1 << 20))))
}

async fn gets_in(server: &Listening, connector: &Connector, host: &str) -> bool {
    let client = timeout(LIMIT, server.tls_client("disk", (connector, host))).await.unwrap();
    match client {
        Ok(client) => {
            client.write(0, Bytes::from_static(b"by TLS")).await.unwrap();
            client.read(0, 6).await.unwrap() == b"by TLS"
        }
        Err(ClientError::Gone(_) | ClientError::Tls(_)) => false,
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
async fn both_sides_with_certificates_of_the_authority_meet() {
    let world = TlsFixture::new();
    let connector = world.connector(&world.ours, CLIENT);
    assert!(gets_in(&world.server(), &connector, "localhost").await);
    let by_address = world.acceptor(&world.ours, CertificateSpec { name: "127.0.0.1", ..SERVER });
    assert!(gets_in(&world.server_with(by_address), &connector, "127.0.0.1").await);
}

#[tokio::test]
async fn a_client_with_the_wrong_certificate_does_not_get_in() {
    let world = TlsFixture::new();
    let server = world.server();
    let wrong = [
        (&world.others, CLIENT),
        (&world.ours, CertificateSpec { days: (-10, -1), ..CLIENT }),
        (&world.ours, CertificateSpec { days: (1, 10), ..CLIENT }),
        (&world.ours, CertificateSpec { usage: Usage::Server, ..CLIENT }),
        // The authority has signed these for another purpose.
        (&world.ours, CertificateSpec { purpose: "host", ..CLIENT }),
        (&world.ours, CertificateSpec { purpose: "repository", ..CLIENT }),
        (&world.ours, CertificateSpec { purpose: "", ..CLIENT }),
    ];
    for (i, (signer, wish)) in wrong.into_iter().enumerate() {
        let connector = world.connector(signer, wish);
        assert!(!gets_in(&server, &connector, "localhost").await, "number {i} gets in");
    }
    assert!(gets_in(&server, &world.connector(&world.ours, CLIENT), "localhost").await);
}

#[tokio::test]
async fn a_server_with_the_wrong_certificate_is_not_talked_to() {
    let world = TlsFixture::new();
    let connector = world.connector(&world.ours, CLIENT);
    let wrong = [
        (&world.others, SERVER),
        (&world.ours, CertificateSpec { name: "localhost.example", ..SERVER }),
        (&world.ours, CertificateSpec { days: (-10, -1), ..SERVER }),
        (&world.ours, CertificateSpec { days: (1, 10), ..SERVER }),
        (&world.ours, CertificateSpec { usage: Usage::Client, ..SERVER }),
        (&world.ours, CertificateSpec { purpose: "disks", ..SERVER }),
        (&world.ours, CertificateSpec { purpose: "", ..SERVER }),
    ];
    for (i, (signer, wish)) in wrong.into_iter().enumerate() {
        let server = world.server_with(world.acceptor(signer, wish));
        assert!(!gets_in(&server, &connector, "localhost").await, "number {i} is talked to");
    }
    let server = world.server();
    for host in ["127.0.0.1", "host", "", "no name", "localhost.", "*"] {
        let met = gets_in(&server, &connector, host).await;
        assert!(!met || host == "localhost.", "{host:?} is taken for localhost");
    }
}

/// A client's side of TLS that shows no certificate.
fn without_certificate(world: &TlsFixture) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(world.ours.pem().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    TlsConnector::from(Arc::new(config))
}

async fn asks_for_tls(stream: &mut UnixStream) {
    greet(stream).await;
    stream.write_all(&option(option::STARTTLS, &[])).await.unwrap();
    assert_eq!(hear(stream).await, (option::STARTTLS, option_reply::ACK, Vec::new()));
}

#[tokio::test]
async fn a_client_without_a_certificate_hears_nothing() {
    let world = TlsFixture::new();
    let server = world.server();
    let mut stream = server.raw().await;
    asks_for_tls(&mut stream).await;
    let localhost = ServerName::try_from("localhost").unwrap();
    // The client's side may finish before the server has noticed that there is no certificate.
    if let Ok(mut stream) = without_certificate(&world).connect(localhost, stream).await {
        let _ = stream.write_all(&go("disk")).await;
        let mut said = Vec::new();
        let _error = timeout(LIMIT, stream.read_to_end(&mut said)).await.unwrap();
        assert!(said.is_empty());
    }
    for garbage in [&b""[..], &[0x16, 3, 1, 0xff, 0xff], &[0xff; 4096], &go("disk")] {
        let mut stream = server.raw().await;
        asks_for_tls(&mut stream).await;
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        let mut said = Vec::new();
        let _or_reset = timeout(LIMIT, stream.read_to_end(&mut said)).await.unwrap();
        assert!(!said.starts_with(&wire::OPTION_REPLY.to_be_bytes()), "it answers without TLS");
    }
    assert!(gets_in(&server, &world.connector(&world.ours, CLIENT), "localhost").await);
}

#[tokio::test]
async fn where_tls_is_required_nothing_is_told_without_it() {
    let world = TlsFixture::new();
    let server = world.server();
    let mut stream = server.raw().await;
    greet(&mut stream).await;
    let every = (2..20).filter(|n| ![option::ABORT, option::STARTTLS].contains(n));
    for number in every {
        stream.write_all(&option(number, b"\0\0\0\x04disk\0\0")).await.unwrap();
        assert_eq!(hear(&mut stream).await, (number, option_reply::TLS_REQUIRED, Vec::new()));
    }
    stream.write_all(&option(option::STARTTLS, b"data")).await.unwrap();
    assert_eq!(hear(&mut stream).await.1, option_reply::INVALID);
    stream.write_all(&option(option::EXPORT_NAME, b"disk")).await.unwrap();
    assert!(to_the_end(&mut stream).await.is_empty());
    let refused = server.client("disk").await.map(|_| ()).unwrap_err();
    let is_refusal = matches!(refused, ClientError::Protocol(ProtocolError::Refused { .. }));
    assert!(is_refusal, "{refused}");
}

#[tokio::test]
async fn what_was_said_before_tls_is_forgotten() {
    let world = TlsFixture::new();
    let server = world.server();
    let mut stream = server.raw().await;
    stream.read_exact(&mut [0; 18]).await.unwrap();
    // An attacker on the network appends another option to the client's STARTTLS.
    let injected = [&flags()[..], &option(option::STARTTLS, &[]), &go("disk")].concat();
    stream.write_all(&injected).await.unwrap();
    assert_eq!(hear(&mut stream).await.1, option_reply::ACK);
    let dir = world.ours.files(world.dir.path(), &world.ours, "client", CLIENT);
    let connector = Connector::new(&dir).unwrap();
    let mut stream = connector.connect("localhost", stream).await.unwrap();
    stream.write_all(&option(option::LIST, &[])).await.unwrap();
    stream.flush().await.unwrap();
    assert_eq!(hear(&mut stream).await.0, option::LIST, "what came before TLS is answered");
    stream.write_all(&option(option::STARTTLS, &[])).await.unwrap();
    while hear(&mut stream).await.1 == option_reply::SERVER {}
    assert_eq!(hear(&mut stream).await.1, option_reply::INVALID, "TLS in TLS");
}

#[tokio::test]
async fn what_a_server_says_before_tls_is_forgotten() {
    let world = TlsFixture::new();
    let acceptor = world.acceptor(&world.ours, SERVER);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let serving = async {
        theirs.write_all(&raw::server_says()[..18]).await.unwrap();
        theirs.read_exact(&mut [0; 20]).await.unwrap();
        // An attacker on the network acknowledges the option that the client will send next.
        let yes = reply(option::STRUCTURED_REPLY, option_reply::ACK, &[]);
        let ack = reply(option::STARTTLS, option_reply::ACK, &[]);
        theirs.write_all(&[ack, yes].concat()).await.unwrap();
        let mut stream = acceptor.accept(theirs).await?;
        let no = reply(option::STRUCTURED_REPLY, option_reply::UNSUPPORTED, &[]);
        let size = [&[0, 0][..], &4096_u64.to_be_bytes(), &[0, 1]].concat();
        let info = reply(option::GO, option_reply::INFO, &size);
        let done = reply(option::GO, option_reply::ACK, &[]);
        stream.read_exact(&mut [0; 16]).await?;
        stream.write_all(&no).await?;
        stream.read_exact(&mut vec![0; go("disk").len() + 2]).await?;
        stream.write_all(&[info, done].concat()).await?;
        stream.flush().await?;
        Ok::<_, std::io::Error>(stream)
    };
    let connector = world.connector(&world.ours, CLIENT);
    let connecting = client::connect_tls(ours, "disk".to_owned(), true, (&connector, "localhost"));
    let both = async { tokio::join!(connecting, serving) };
    let (connected, _stream) = timeout(LIMIT, both).await.unwrap();
    let (client, _connection) = connected.unwrap();
    assert!(!client.session().structured, "what came before TLS is believed");
    assert_eq!(client.session().export.size, 4096);
}

/// All bytes that a client sends when its STARTTLS gets this answer.
async fn says_without_tls(answer: &[u8]) -> Vec<u8> {
    let world = TlsFixture::new();
    let connector = world.connector(&world.ours, CLIENT);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let connecting = async {
        let with = (&connector, "localhost");
        client::connect_tls(ours, "disk".to_owned(), true, with).await.map(|_| ()).unwrap_err();
    };
    let serving = async {
        theirs.write_all(&raw::server_says()[..18]).await.unwrap();
        let mut said = vec![0; 20];
        theirs.read_exact(&mut said).await.unwrap();
        let _ = theirs.write_all(answer).await;
        let _ = theirs.shutdown().await;
        let mut after = Vec::new();
        let _or_reset = theirs.read_to_end(&mut after).await;
        said.extend(after);
        said
    };
    let both = async { tokio::join!(connecting, serving) };
    timeout(LIMIT, both).await.unwrap().1
}

#[tokio::test]
async fn a_client_that_wants_tls_never_does_without() {
    let wish = [&flags()[..], &option(option::STARTTLS, &[])].concat();
    for kind in [
        option_reply::UNSUPPORTED,
        option_reply::POLICY,
        option_reply::INVALID,
        option_reply::INFO,
        0,
    ] {
        assert_eq!(says_without_tls(&reply(option::STARTTLS, kind, &[])).await, wish, "{kind}");
    }
    let other = reply(option::STRUCTURED_REPLY, option_reply::ACK, &[]);
    assert_eq!(says_without_tls(&other).await, wish);
    // The server agrees, and continues in plain text.
    let plain = [reply(option::STARTTLS, option_reply::ACK, &[]), other].concat();
    let plain = [&plain[..], &raw::server_says()[18..]].concat();
    let said = says_without_tls(&plain).await;
    let magic = wire::IHAVEOPT.to_be_bytes();
    let options = said.windows(8).filter(|bytes| *bytes == magic).count();
    assert_eq!(options, 1, "options are sent in plain");
    let server = listen(disk());
    let world = TlsFixture::new();
    let connector = world.connector(&world.ours, CLIENT);
    assert!(server.tls_client("disk", (&connector, "localhost")).await.is_err());
    let wanted = Wanted { name: "disk".to_owned(), tls: true, status: true };
    assert!(client::connect(server.raw().await, wanted.clone()).await.is_err());
    assert!(client::connect(world.server().raw().await, wanted).await.is_err());
}

#[tokio::test]
async fn files_that_do_not_fit_are_told() {
    let world = TlsFixture::new();
    let made = || world.ours.files(world.dir.path(), &world.ours, "server", SERVER);
    let spoilt = |spoil: &dyn Fn(&Path)| {
        let dir = made();
        spoil(&dir);
        Acceptor::new(&dir).map(|_| ()).unwrap_err()
    };
    for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        let missing = spoilt(&|dir| std::fs::remove_file(dir.join(name)).unwrap());
        assert!(missing.to_string().contains(name), "{missing}");
        let empty = spoilt(&|dir| std::fs::write(dir.join(name), "").unwrap());
        assert!(matches!(empty, TlsError::File { .. }), "{empty}");
    }
    let other = made();
    let unfit = spoilt(&|dir| {
        std::fs::copy(other.join("server-key.pem"), dir.join("server-key.pem")).unwrap();
    });
    assert!(matches!(unfit, TlsError::Unfit { .. }), "{unfit}");
    assert!(Connector::new(&made()).is_err(), "a server's files are a client's");
}

/// A line for the list of revoked certificates, for the certificate in this directory.
fn revoking(directory: &Path, side: &str) -> String {
    let path = directory.join(format!("{side}-cert.pem"));
    let certificate = CertificateDer::from_pem_file(path).unwrap();
    format!("# stolen\n{} and whatever follows\n", fingerprint(&certificate))
}

async fn works(client: &Client) -> bool {
    timeout(LIMIT, client.read(0, 6)).await.unwrap().is_ok()
}

/// Waits until this client's requests fail; returns their error.
async fn is_cut(client: &Client) -> ClientError {
    let asked = async {
        loop {
            match client.read(0, 6).await {
                Ok(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
                Err(error) => return error,
            }
        }
    };
    timeout(LIMIT, asked).await.expect("it is served on and on")
}

#[tokio::test]
async fn a_revoked_client_is_thrown_out_and_does_not_come_back() {
    let world = TlsFixture::new();
    let own = world.ours.files(world.dir.path(), &world.ours, "server", SERVER);
    let server = world.server_with(Acceptor::new(&own).unwrap());
    let files = || world.ours.files(world.dir.path(), &world.ours, "client", CLIENT);
    let (stolen, honest) = (files(), files());
    let [thief, other] = [&stolen, &honest].map(|files| Connector::new(files).unwrap());
    let inside = server.tls_client("disk", (&thief, "localhost")).await.unwrap();
    let beside = server.tls_client("disk", (&other, "localhost")).await.unwrap();
    assert!(works(&inside).await && works(&beside).await);
    // An invalid list changes nothing.
    std::fs::write(own.join(REVOKED), "all of them\n").unwrap();
    assert!(gets_in(&server, &thief, "localhost").await);
    std::fs::write(own.join(REVOKED), revoking(&stolen, "client")).unwrap();
    let saw = is_cut(&inside).await;
    eprintln!("saw: inside: {saw}");
    let again = server.tls_client("disk", (&thief, "localhost")).await.map(|_| ()).unwrap_err();
    eprintln!("saw: at the door: {again}");
    let refused = HandshakeError::Refused("it is revoked");
    assert!(matches!(&again, ClientError::Tls(why) if *why == refused), "{again}");
    assert!(works(&beside).await, "another client is thrown out, too");
    assert!(gets_in(&server, &other, "localhost").await);
}

#[tokio::test]
async fn a_revoked_server_is_not_talked_to_any_more() {
    let world = TlsFixture::new();
    let own = world.ours.files(world.dir.path(), &world.ours, "server", SERVER);
    let server = world.server_with(Acceptor::new(&own).unwrap());
    let files = world.ours.files(world.dir.path(), &world.ours, "client", CLIENT);
    let connector = Connector::new(&files).unwrap();
    let client = server.tls_client("disk", (&connector, "localhost")).await.unwrap();
    assert!(works(&client).await);
    std::fs::write(files.join(REVOKED), revoking(&own, "server")).unwrap();
    is_cut(&client).await;
    let again = server.tls_client("disk", (&connector, "localhost")).await.map(|_| ());
    let is_told = matches!(&again, Err(ClientError::Tls(HandshakeError::Revoked)));
    assert!(is_told, "{again:?}");
}

#[tokio::test]
async fn new_keys_on_both_sides_cost_no_lease_and_give_no_second_quota() {
    let world = TlsFixture::new();
    let renew = |directory: &Path, side: &str, wish| {
        let new = world.ours.files(world.dir.path(), &world.ours, side, wish);
        for file in std::fs::read_dir(new).unwrap().map(|file| file.unwrap()) {
            std::fs::rename(file.path(), directory.join(file.file_name())).unwrap();
        }
    };
    let own = world.ours.files(world.dir.path(), &world.ours, "server", SERVER);
    let files = world.ours.files(world.dir.path(), &world.ours, "client", CLIENT);
    let repository = Arc::new(Repository::new(2, 1).unwrap());
    let acceptor = Acceptor::new(&own).unwrap();
    let server = listen_with(repository, Some(acceptor), Limits::default());
    let connector = Connector::new(&files).unwrap();
    let with = (&connector, "localhost");
    let lease = server.tls_client("lease/1", with).await.unwrap();
    lease.write(0, Bytes::from_static(b"a page")).await.unwrap();
    renew(&own, "server", SERVER);
    renew(&files, "client", CLIENT);
    assert_eq!(lease.read(0, 6).await.unwrap(), b"a page", "the lease is lost with the key");
    let second = server.tls_client("lease/1", with).await;
    assert!(second.is_err(), "a new key has a quota of its own");
    let name = &lease.session().name;
    let same = server.tls_client(name, with).await.unwrap();
    assert_eq!(same.read(0, 6).await.unwrap(), b"a page");
    assert_eq!(same.session().export.size, SLAB as u64);
    // A client with another name has its own quota.
    let other = world.connector(&world.ours, CertificateSpec { name: "other", ..CLIENT });
    assert!(server.tls_client("lease/1", (&other, "localhost")).await.is_ok());
}
