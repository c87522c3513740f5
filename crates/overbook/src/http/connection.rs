//! Accepts connections, with a bound on everything that a client can hold.
//!
//! | a client can hold | bound |
//! |-|-|
//! | a connection without a request | [`HEADER_TIMEOUT`], and [`MAX_WAITING`](super::places) of them |
//! | a request's line and headers | [`MAX_HEADER_BYTES`] |
//! | a connection between two requests | [`HEADER_TIMEOUT`] |
//! | an answer that it does not read | [`prompt::LIMIT`](super::prompt) |
//! | a wrong token | one request: the answer ends the connection |

use std::{io, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    extract::{Request, State},
    http::{HeaderValue, header::CONNECTION},
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
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    task::{JoinSet, yield_now},
};

use super::{
    dashboard,
    places::{ConnectionPeer, ConnectionSlot, ConnectionSlots},
    problem::Problem,
    prompt::Prompt,
    token::{TokenRight, Tokens},
};

/// Maximum size of a request's line and headers.
const MAX_HEADER_BYTES: usize = 16 << 10;
/// Timeout for a client to send all headers, also the next ones on an idle connection.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed `accept`, for example when no file descriptor is left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves the unix socket: a client that may open the file may do everything; a browser only reads.
pub(super) async fn serve_unix(listener: UnixListener, router: Router) {
    let router = router.layer(middleware::from_fn(dashboard::serve));
    let router = router.layer(middleware::from_fn(dashboard::admit));
    accept(listener, router.layer(middleware::from_fn(admit))).await;
}

/// Serves TCP: the dashboard's files, and everything else only with a token.
pub(super) async fn serve_tcp(listener: TcpListener, router: Router, tokens: Tokens) {
    let router = router.layer(middleware::from_fn(admit));
    accept(listener, router.layer(middleware::from_fn_with_state(tokens, authorize))).await;
}

/// Ends the connection after a wrong token, so each try needs a new connection. It ends after a
/// file of the dashboard too, so clients without the token keep none.
async fn authorize(State(tokens): State<Tokens>, request: Request, next: Next) -> Response {
    if let Some(file) = dashboard::file(&request) {
        return last(file);
    }
    match tokens.right(request.headers()) {
        Some(TokenRight::Change) => next.run(request).await,
        // Safe methods change nothing (RFC 9110 §9.2.1).
        Some(TokenRight::Read) if request.method().is_safe() => next.run(request).await,
        Some(TokenRight::Read) => Problem::ReadOnly.into_response(),
        None => last(Problem::Unauthorized),
    }
}

async fn admit(
    Extension(place): Extension<Arc<ConnectionSlot>>,
    request: Request,
    next: Next,
) -> Response {
    match place.admit() {
        Ok(()) => next.run(request).await,
        Err(crowded) => last(Problem::Crowded(crowded)),
    }
}

/// An answer that ends the connection.
fn last(answer: impl IntoResponse) -> Response {
    let mut response = answer.into_response();
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// A listener of either kind.
trait Incoming {
    /// Type of a connection.
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for the next connection.
    fn next(&mut self) -> impl Future<Output = io::Result<(Self::Stream, ConnectionPeer)>> + Send;
}

impl Incoming for UnixListener {
    type Stream = UnixStream;

    async fn next(&mut self) -> io::Result<(UnixStream, ConnectionPeer)> {
        let (stream, _) = self.accept().await?;
        let peer = stream.peer_cred().ok();
        let (uid, pid) = (peer.as_ref().map(|peer| peer.uid()), peer.and_then(|peer| peer.pid()));
        Ok((stream, ConnectionPeer::Local { uid, pid }))
    }
}

impl Incoming for TcpListener {
    type Stream = TcpStream;

    async fn next(&mut self) -> io::Result<(TcpStream, ConnectionPeer)> {
        self.accept().await.map(|(stream, address)| (stream, ConnectionPeer::Remote(address)))
    }
}

async fn accept(mut listener: impl Incoming, router: Router) {
    let places = ConnectionSlots::default();
    // Dropping the set ends its connections, when the daemon shuts down.
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let Ok((stream, peer)) = listener.next().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let (place, lost) = places.enter(peer);
        let place = Arc::new(place);
        let service = router.clone().layer(Extension(place));
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEADER_TIMEOUT)
            .max_buf_size(MAX_HEADER_BYTES)
            .serve_connection(TokioIo::new(Prompt::new(stream)), TowerToHyperService::new(service));
        connections.spawn(async move {
            tokio::select! {
                // The result of a connection concerns only its client.
                _ = connection => {}
                _ = lost => {}
            }
        });
        // Lets this connection read its bytes before the next one may need its place.
        yield_now().await;
    }
}
