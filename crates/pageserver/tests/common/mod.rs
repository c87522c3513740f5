//! A server on a unix socket in this process, and clients of it.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses a part; what fails has failed")]

use std::path::PathBuf;
use std::sync::Arc;

use pageserver::client::{self, Client, ClientError};
use pageserver::layer::Layer;
use pageserver::nbd::dialogue::Wanted;
use pageserver::nbd::request::Export;
use pageserver::server::{Catalogue, Limits, Opened, Server, of_layer};
use tokio::net::{UnixListener, UnixStream};

/// One export of one name.
pub(crate) struct One(pub(crate) &'static str, pub(crate) Arc<dyn Layer>);

impl Catalogue for One {
    fn list(&self) -> Vec<String> {
        vec![self.0.to_owned()]
    }

    fn find(&self, name: &str) -> Option<Export> {
        (name == self.0).then(|| of_layer(&*self.1))
    }

    fn open(&self, name: &str) -> Option<Opened> {
        let layer = self.1.clone();
        (name == self.0).then(|| Opened { name: name.to_owned(), layer })
    }
}

/// Where a server listens; the directory goes with it.
pub(crate) struct Listening {
    pub(crate) socket: PathBuf,
    task: tokio::task::JoinHandle<()>,
    _dir: Option<tempfile::TempDir>,
}

/// Serves `catalogue` until this is dropped.
pub(crate) fn listen(catalogue: Arc<dyn Catalogue>) -> Listening {
    let dir = tempfile::tempdir().unwrap();
    let mut listening = listen_at(dir.path().join("socket"), catalogue);
    listening._dir = Some(dir);
    listening
}

/// The same, there.
pub(crate) fn listen_at(socket: PathBuf, catalogue: Arc<dyn Catalogue>) -> Listening {
    let listener = UnixListener::bind(&socket).unwrap();
    let server = Server::new(catalogue, None, Limits::default());
    let task = tokio::spawn(server.listen_unix(listener));
    Listening { socket, task, _dir: None }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Listening {
    /// A client of an export; its connection runs by itself.
    pub(crate) async fn client(&self, name: &str) -> Result<Client, ClientError> {
        let stream = UnixStream::connect(&self.socket).await?;
        let wanted = Wanted { name: name.to_owned(), tls: false, status: true };
        let (client, connection) = client::connect(stream, wanted).await?;
        tokio::spawn(connection.run());
        Ok(client)
    }
}
