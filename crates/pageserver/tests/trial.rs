//! The errors of repositories are told apart, each with a real server. A repository that is
//! tested does not change.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::certificates::{Authority, CLIENT, CertificateSpec, SERVER};
use common::{SingleExport, listen};
use pageserver::layers::memory::{Memory, SLAB};
use pageserver::layers::remote::Address;
use pageserver::repository::{Lent, Repository};
use pageserver::server::{Catalogue, Limits, Server, Who};
use pageserver::tls::{Acceptor, Connector, HandshakeError};
use pageserver::trial::{Trouble, try_repository};
use tempfile::TempDir;
use tokio::net::TcpListener;

/// A busy machine must not fail the test.
const WITHIN: Duration = Duration::from_secs(60);

/// Serves on a TCP port of this host, until the runtime ends.
async fn serve(catalogue: Arc<dyn Catalogue>, tls: Option<Acceptor>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(Server::new(catalogue, tls, Limits::default()).listen_tcp(listener));
    format!("localhost:{port}")
}

fn repository(slabs: usize) -> Arc<Repository> {
    Arc::new(Repository::new(slabs, 4).unwrap())
}

fn disk() -> Arc<SingleExport> {
    Arc::new(SingleExport("disk", Arc::new(Memory::new(SLAB as u64))))
}

fn at(address: &str, tls: Option<&Connector>) -> Address {
    match address.strip_prefix('/') {
        Some(_) => Address::Unix(address.into()),
        None => Address::Tcp(address.to_owned(), tls.cloned()),
    }
}

async fn tried(address: &str, tls: Option<&Connector>) -> Result<u64, Trouble> {
    try_repository(&at(address, tls), WITHIN).await
}

#[tokio::test]
async fn a_repository_says_what_it_would_lend_and_lends_nothing() {
    let repository = repository(2);
    let server = listen(repository.clone());
    let address = Address::Unix(server.socket.clone());
    for _ in 0..10 {
        assert_eq!(try_repository(&address, WITHIN).await, Ok(2 * SLAB as u64));
    }
    let Lent { free, lent, leases, .. } = repository.lent();
    assert_eq!((free, lent, leases), (2, 0, 0));
    let client = server.client("lease/2").await.unwrap();
    assert_eq!(try_repository(&address, WITHIN).await, Err(Trouble::Empty));
    drop(client);
    assert!(server.client("lease/0").await.is_err(), "nobody can have what only tells");
}

#[tokio::test]
async fn who_is_not_there_is_told_from_who_is_no_repository() {
    let unresolved = tried("no-such-host.invalid:10810", None).await;
    assert!(matches!(unresolved, Err(Trouble::Unresolved(_))), "{unresolved:?}");

    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = free.local_addr().unwrap().to_string();
    let silent = try_repository(&at(&address, None), Duration::from_millis(50)).await;
    assert_eq!(silent, Err(Trouble::Silent(Duration::from_millis(50))));
    drop(free);
    assert_eq!(tried(&address, None).await, Err(Trouble::Refused));
    let nowhere = tried("/nonexistent/socket", None).await;
    assert!(matches!(nowhere, Err(Trouble::Unreachable(_))), "{nowhere:?}");

    let other = serve(disk(), None).await;
    let other = tried(&other, None).await;
    assert!(matches!(other, Err(Trouble::NoRepository(_))), "{other:?}");
    // A server that has an export of any name.
    let any = listen(Arc::new(Any(Memory::new(SLAB as u64))));
    let any = try_repository(&Address::Unix(any.socket.clone()), WITHIN).await;
    assert!(matches!(any, Err(Trouble::NoRepository(_))), "{any:?}");
    let closes = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = closes.local_addr().unwrap().to_string();
    tokio::spawn(async move { while closes.accept().await.is_ok() {} });
    let closes = tried(&address, None).await;
    assert!(matches!(closes, Err(Trouble::NoRepository(_))), "{closes:?}");
}

/// Has an export of every name.
struct Any(Memory);

impl Catalogue for Any {
    fn list(&self) -> Vec<String> {
        Vec::new()
    }

    fn find(&self, _: &str, _: &Who) -> Option<pageserver::nbd::request::Export> {
        Some(pageserver::server::of_layer(&self.0))
    }

    fn open(&self, _: &str, _: &Who) -> Option<pageserver::server::Opened> {
        None
    }
}

#[tokio::test]
async fn what_is_wrong_with_certificates_is_named() {
    let dir = TempDir::new().unwrap();
    let (ours, others) = (Authority::new(), Authority::new());
    let acceptor = |signer: &Authority, wish| {
        Acceptor::new(&ours.files(dir.path(), signer, "server", wish)).unwrap()
    };
    let connector = |signer: &Authority, wish| {
        Connector::new(&ours.files(dir.path(), signer, "client", wish)).unwrap()
    };
    let served = async |acceptor| serve(repository(1), Some(acceptor)).await;
    let good = connector(&ours, CLIENT);
    let whole = served(acceptor(&ours, SERVER)).await;
    assert_eq!(tried(&whole, Some(&good)).await, Ok(SLAB as u64));
    assert_eq!(tried(&whole, None).await, Err(Trouble::DemandsTls));
    let bare = serve(repository(1), None).await;
    assert_eq!(tried(&bare, Some(&good)).await, Err(Trouble::NoTls));

    let of_server = async |acceptor| match tried(&served(acceptor).await, Some(&good)).await {
        Err(Trouble::Tls(error)) => error,
        other => panic!("{other:?}"),
    };
    assert_eq!(of_server(acceptor(&others, SERVER)).await, HandshakeError::Untrusted);
    let old = CertificateSpec { days: (-9, -2), ..SERVER };
    assert_eq!(of_server(acceptor(&ours, old)).await, HandshakeError::Expired);
    let early = CertificateSpec { days: (2, 9), ..SERVER };
    assert_eq!(of_server(acceptor(&ours, early)).await, HandshakeError::NotYetValid);
    let elsewhere = of_server(acceptor(&ours, CertificateSpec { name: "host-b", ..SERVER })).await;
    assert!(elsewhere.to_string().contains("host-b"), "{elsewhere}");

    let of_client = async |signer: &Authority, wish| match tried(
        &whole,
        Some(&connector(signer, wish)),
    )
    .await
    {
        Err(Trouble::Tls(error)) => error,
        other => panic!("{other:?}"),
    };
    let stranger = of_client(&others, CLIENT).await;
    assert!(matches!(stranger, HandshakeError::Refused(_)), "{stranger}");
    let old = of_client(&ours, CertificateSpec { days: (-9, -2), ..CLIENT }).await;
    assert_eq!(old, HandshakeError::Refused("it has expired"));
}
