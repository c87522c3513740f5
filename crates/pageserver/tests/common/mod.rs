//! A server on a unix socket in this process, and its clients: honest ones, and raw streams for
//! hostile ones.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part; what fails has failed")]

pub(crate) mod certificates;
pub(crate) mod raw;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pageserver::client::{self, Client, ClientError};
use pageserver::layer::Layer;
use pageserver::nbd::dialogue::Wanted;
use pageserver::nbd::request::Export;
use pageserver::server::{Catalogue, Limits, Opened, Server, Who, of_layer};
use pageserver::tls::{Acceptor, Connector};
use tokio::net::{UnixListener, UnixStream};

/// Longest time that anything may take; a busy machine must not fail the test.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A catalogue with one export, of this name.
pub(crate) struct SingleExport(pub(crate) &'static str, pub(crate) Arc<dyn Layer>);

impl Catalogue for SingleExport {
    fn list(&self) -> Vec<String> {
        vec![self.0.to_owned()]
    }

    fn find(&self, name: &str, _: &Who) -> Option<Export> {
        (name == self.0).then(|| of_layer(&*self.1))
    }

    fn open(&self, name: &str, _: &Who) -> Option<Opened> {
        let layer = self.1.clone();
        (name == self.0).then(|| Opened { name: name.to_owned(), layer })
    }
}

/// A listening server; its directory is removed with it.
pub(crate) struct Listening {
    pub(crate) socket: PathBuf,
    task: tokio::task::JoinHandle<()>,
    _dir: Option<tempfile::TempDir>,
}

/// Serves `catalogue` until this is dropped.
pub(crate) fn listen(catalogue: Arc<dyn Catalogue>) -> Listening {
    listen_with(catalogue, None, Limits::default())
}

/// Like [`listen`], with TLS and limits.
pub(crate) fn listen_with(
    catalogue: Arc<dyn Catalogue>,
    tls: Option<Acceptor>,
    limits: Limits,
) -> Listening {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::new(catalogue, tls, limits);
    let mut listening = serve_at(dir.path().join("socket"), server);
    listening._dir = Some(dir);
    listening
}

/// Like [`listen`], at the given socket.
pub(crate) fn listen_at(socket: PathBuf, catalogue: Arc<dyn Catalogue>) -> Listening {
    serve_at(socket, Server::new(catalogue, None, Limits::default()))
}

/// Like [`listen_at`], with the given server.
pub(crate) fn serve_at(socket: PathBuf, server: Arc<Server>) -> Listening {
    let listener = UnixListener::bind(&socket).unwrap();
    let task = tokio::spawn(server.listen_unix(listener));
    Listening { socket, task, _dir: None }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Listening {
    /// A client of an export; a task runs its connection.
    pub(crate) async fn client(&self, name: &str) -> Result<Client, ClientError> {
        let (client, connection) = self.connect(name).await?;
        tokio::spawn(connection.run());
        Ok(client)
    }

    /// Like [`Listening::client`], but the caller has to run the connection.
    pub(crate) async fn connect(
        &self,
        name: &str,
    ) -> Result<(Client, client::Connection<UnixStream>), ClientError> {
        let stream = UnixStream::connect(&self.socket).await?;
        let wanted = Wanted { name: name.to_owned(), tls: false, status: true };
        client::connect(stream, wanted).await
    }

    /// Like [`Listening::client`] with TLS, to a server that should have the name `host`.
    pub(crate) async fn tls_client(
        &self,
        name: &str,
        with: (&Connector, &str),
    ) -> Result<Client, ClientError> {
        let stream = UnixStream::connect(&self.socket).await?;
        let (client, connection) = client::connect_tls(stream, name.to_owned(), true, with).await?;
        tokio::spawn(connection.run());
        Ok(client)
    }

    /// A stream for raw bytes.
    pub(crate) async fn raw(&self) -> UnixStream {
        UnixStream::connect(&self.socket).await.unwrap()
    }
}

/// Waits until `is_so` holds.
pub(crate) async fn waits_for(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..6_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not in time: {what}");
}
