//! Accepting connections, with a bound on everything that a client can hold.

use std::{io, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixStream},
    sync::Semaphore,
    task::JoinSet,
};

use super::{listen::UnixDoor, problem::Problem, token::Token};

/// Connections at once, per listener. The next ones wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 64;
/// A request's line and headers.
const MAX_HEADER_BYTES: usize = 16 << 10;
/// How long a client may take to send them, also the next ones on an idle connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed `accept`, as when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the unix socket: whoever may open the file may do everything.
pub(super) async fn serve_unix(door: UnixDoor, router: Router) {
    accept(door, router).await;
}

/// Serves TCP: nothing at all without the token.
pub(super) async fn serve_tcp(listener: TcpListener, router: Router, token: Token) {
    let router = router.layer(middleware::from_fn_with_state(token, authorize));
    accept(listener, router).await;
}

async fn authorize(State(token): State<Token>, request: Request, next: Next) -> Response {
    if token.is_in(request.headers()) {
        next.run(request).await
    } else {
        Problem::Unauthorized.into_response()
    }
}

/// What both kinds of listener have in common.
trait Incoming {
    /// A connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for the next one.
    fn next(&mut self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Incoming for UnixDoor {
    type Stream = UnixStream;

    async fn next(&mut self) -> io::Result<UnixStream> {
        self.accept().await
    }
}

impl Incoming for TcpListener {
    type Stream = TcpStream;

    async fn next(&mut self) -> io::Result<TcpStream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

async fn accept(mut listener: impl Incoming, router: Router) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    // Ends its connections when it is dropped, that is, when the daemon shuts down.
    let mut connections = JoinSet::new();
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        let Ok(stream) = listener.next().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .max_buf_size(MAX_HEADER_BYTES)
            .serve_connection(TokioIo::new(stream), service);
        connections.spawn(async move {
            // How a connection ends concerns its client only.
            let _: hyper::Result<()> = connection.await;
            drop(slot);
        });
    }
}
