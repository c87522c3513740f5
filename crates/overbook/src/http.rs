//! The daemon's face: an HTTP API on a unix socket, and on TCP for whoever holds the token.
//!
//! **Idea.** The loop publishes ticks on a watch channel; one task follows them ([`follow`]) and
//! every request reads the latest moment from it. Nothing here holds a lock that the loop could
//! wait for, and requests that change something are messages to the loop. The paths are in
//! [`routes`], the objects in [`wire`], and OpenAPI is derived from both, so the description cannot
//! drift.
//!
//! **Invariants.** No listener on TCP without a token. Everything that a client can make us keep is
//! bounded: connections per listener and peer, header bytes, time to send a header and to read an
//! answer, events per reader. A client that misbehaves costs itself: connections that have not
//! shown the token are counted apart from those that have ([`places`]), and the unix socket's
//! apart from TCP's, so strangers cannot keep the operator out.
//!
//! **Leaves out.** TLS (put a proxy in front) and HTTP/2.

mod connection;
mod events;
mod follow;
mod listen;
mod metrics;
mod places;
mod problem;
mod prompt;
mod routes;
mod token;
pub mod wire;

use std::{future::Future, path::PathBuf, sync::Arc};

use model::{GroupName, VmName};
use tokio::sync::{broadcast, watch};

pub use events::{BUFFER, Event, EventKind};
pub use follow::Shown;
pub use listen::{ListenError, Listeners};
pub use metrics::TickTimes;
pub use routes::openapi;
pub use token::{Token, TokenError};

use crate::{
    history,
    published::{Latest, Requests},
};
use wire::{HistoryRow, LoanRow};

/// Reads what is on the disk. Called on a thread that may wait for it.
pub trait ReadHistory: Send + Sync {
    /// The newest `limit` rows of `vm` since `since_wall_ms`, oldest first.
    ///
    /// # Errors
    /// Why it cannot be read, for the operator.
    fn rows(
        &self,
        vm: &VmName,
        since_wall_ms: u64,
        limit: usize,
    ) -> Result<Vec<HistoryRow>, String>;

    /// The last change of `vm`.
    ///
    /// # Errors
    /// Why it cannot be read, for the operator.
    fn last_change(&self, vm: &VmName) -> Result<Option<HistoryRow>, String>;

    /// The newest `limit` decisions about what `group` lent or borrowed since `since_wall_ms`,
    /// oldest first.
    ///
    /// # Errors
    /// Why it cannot be read, for the operator.
    fn loans(
        &self,
        group: &GroupName,
        since_wall_ms: u64,
        limit: usize,
    ) -> Result<Vec<LoanRow>, String>;
}

/// A history that every request can read.
pub type HistoryReader = Arc<dyn ReadHistory>;

/// The history in a file.
#[must_use]
pub fn history_in(file: PathBuf) -> HistoryReader {
    Arc::new(HistoryFile(file))
}

struct HistoryFile(PathBuf);

impl ReadHistory for HistoryFile {
    fn rows(&self, vm: &VmName, since: u64, limit: usize) -> Result<Vec<HistoryRow>, String> {
        let rows = history::read(&self.0, vm, since, limit).map_err(|error| error.to_string())?;
        Ok(rows.into_iter().map(HistoryRow::from).collect())
    }

    fn last_change(&self, vm: &VmName) -> Result<Option<HistoryRow>, String> {
        let row = history::last_change(&self.0, vm).map_err(|error| error.to_string())?;
        Ok(row.map(HistoryRow::from))
    }

    fn loans(&self, group: &GroupName, since: u64, limit: usize) -> Result<Vec<LoanRow>, String> {
        let rows =
            history::loans(&self.0, group, since, limit).map_err(|error| error.to_string())?;
        Ok(rows.into_iter().map(LoanRow::from).collect())
    }
}

/// What the API needs of the daemon.
pub struct Inside {
    /// The latest tick.
    pub latest: Latest,
    /// The way to the loop.
    pub requests: Requests,
    /// What is on the disk.
    pub history: HistoryReader,
    /// How long the ticks took.
    pub ticks: Arc<TickTimes>,
}

/// What every request handler can reach.
#[derive(Clone)]
struct Api {
    shown: watch::Receiver<Arc<Shown>>,
    events: events::Events,
    requests: Requests,
    history: HistoryReader,
    ticks: Arc<TickTimes>,
}

/// Serves until `shutdown` is over. Takes the socket file away again.
pub async fn serve(listeners: Listeners, inside: Inside, shutdown: impl Future<Output = ()>) {
    let mut latest = inside.latest;
    let first = Arc::clone(&latest.borrow_and_update());
    let (show, shown) = watch::channel(Arc::new(Shown::first(first)));
    let (events, _) = broadcast::channel(BUFFER);
    let api = Api {
        shown,
        events: events.clone(),
        requests: inside.requests,
        history: inside.history,
        ticks: inside.ticks,
    };
    let everything = async {
        tokio::join!(follow::follow(latest, show, events), listeners.serve(routes::router(api)));
    };
    tokio::select! {
        () = everything => {}
        () = shutdown => {}
    }
}
