//! The daemon's HTTP API, on a unix socket, and on TCP for clients that hold the token.
//!
//! **Idea.** Ticks come on a watch channel. One task follows them ([`follow`]), and every request
//! reads the latest tick from it. Everything else is a question to the daemon ([`asks`]). So the
//! API runs in a process of its own without rights ([`crate::api_process`]). The paths are in
//! [`routes`], the objects in [`wire`](api::wire). OpenAPI is derived from both, so the
//! description always matches. A page for browsers is in [`dashboard`].
//!
//! **Invariants.** No listener on TCP without a token. Every resource that a client can hold is
//! bounded: connections per listener and peer, header bytes, the time to send a header and to
//! read an answer, events per reader. A misbehaving client harms only itself. Connections that
//! have not shown the token are counted separately from those that have ([`places`]), and the
//! unix socket's separately from TCP's, so strangers cannot keep the operator out.
//!
//! **Leaves out.** TLS (put a proxy in front) and HTTP/2.

mod asks;
mod connection;
mod dashboard;
mod description;
mod events;
mod exposition;
mod follow;
mod listen;
mod metrics;
mod orders;
mod places;
mod problem;
mod prompt;
mod routes;
mod ticks;
mod token;

use std::{future::Future, io, sync::Arc};

use tokio::sync::{broadcast, watch};

pub use asks::{Ask, Asks, LoopAnswer, MAX_ROWS, Outcome, Question, Span};
pub use events::{BUFFER, Event, EventKind};
pub use listen::{Doors, ListenError, Listeners};
pub use routes::openapi;
pub use token::{TokenError, TokenFault, Tokens};

use api::published::Latest;
use api::shown::TickView;

/// The API's inputs from the daemon.
pub struct Inside {
    /// The latest tick.
    pub latest: Latest,
    /// The channel for questions to the daemon.
    pub asks: Asks,
}

/// State that every request handler can use.
#[derive(Clone)]
struct Api {
    shown: watch::Receiver<Arc<TickView>>,
    events: events::Events,
    ticks: ticks::EncodedTicks,
    asks: Asks,
}

/// Serves until `shutdown` is over.
///
/// # Errors
/// A listener cannot be polled.
pub async fn serve(
    listeners: Listeners,
    inside: Inside,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let mut latest = inside.latest;
    let first = Arc::clone(&latest.borrow_and_update());
    let (show, shown) = watch::channel(Arc::new(TickView::first(first)));
    let (events, _) = broadcast::channel(BUFFER);
    let ticks = ticks::EncodedTicks::new(shown.clone());
    let api = Api { shown, events: events.clone(), ticks, asks: inside.asks };
    let everything = async {
        let follow = follow::follow(latest, show, events);
        tokio::join!(follow, listeners.serve(routes::router(api))).1
    };
    tokio::select! {
        served = everything => served,
        () = shutdown => Ok(()),
    }
}
