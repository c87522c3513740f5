//! TLS files that are read again when they change, and connections that end when the peer's
//! certificate is revoked.
//!
//! **Problem.** A process with leases, or with guests' disks, must not restart because a
//! certificate is renewed. And a stolen key remains usable for as long as a connection that it
//! has opened lasts. **Idea.** A thread checks the files every second; changes apply from the
//! next handshake on. Each connection is known by the fingerprint of the peer's certificate. When
//! that fingerprint appears on the list, the stream is woken, and its next read or write fails.
//!
//! A file that cannot be read changes nothing: the earlier files stay in use, and one line says
//! why.

use std::collections::HashSet;
use std::io::{self, IoSlice};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{HandshakeError, REVOKED, TlsError};

/// Interval at which the files are checked.
const LOOK: Duration = Duration::from_secs(1);

/// Fingerprints of revoked certificates.
pub(super) type Revoked = HashSet<String>;

/// The list in a directory; if the file is missing, nothing is revoked.
pub(super) fn revoked(directory: &Path) -> Result<Revoked, TlsError> {
    let path = directory.join(REVOKED);
    let unread = |why: String| TlsError::File { path: path.clone(), why };
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Revoked::new()),
        read => read.map_err(|error| unread(error.to_string()))?,
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let word = line.split_whitespace().next().unwrap_or_default().to_ascii_lowercase();
            let is_one = word.len() == 64 && word.bytes().all(|byte| byte.is_ascii_hexdigit());
            let shown: String = word.escape_debug().take(80).collect();
            is_one.then_some(word).ok_or_else(|| {
                unread(format!("{shown:?} is no SHA-256 fingerprint of 64 hexadecimal digits"))
            })
        })
        .collect()
}

/// The files of one side, as they are now.
pub(super) struct Live<C> {
    directory: PathBuf,
    side: &'static str,
    read: fn(&Path) -> Result<C, TlsError>,
    state: Mutex<LiveState<C>>,
}

struct LiveState<C> {
    config: Arc<C>,
    revoked: Revoked,
    stamp: Stamp,
    /// Why the present files are not used.
    trouble: Option<String>,
    connections: Vec<(String, Weak<Cut>)>,
}

/// Modification time and inode of each file; `None`: the file is missing.
type Stamp = [Option<(i64, i64, u64)>; 4];

impl<C: Send + Sync + 'static> Live<C> {
    /// Reads the files of one side, and checks them for as long as this is in use.
    pub(super) fn new(
        directory: &Path,
        side: &'static str,
        read: fn(&Path) -> Result<C, TlsError>,
    ) -> Result<Arc<Self>, TlsError> {
        let stamp = stamp(directory, side);
        let state = LiveState {
            config: Arc::new(read(directory)?),
            revoked: revoked(directory)?,
            stamp,
            trouble: None,
            connections: Vec::new(),
        };
        let live = Self { directory: directory.to_owned(), side, read, state: Mutex::new(state) };
        let live = Arc::new(live);
        let watched = Arc::downgrade(&live);
        let watch = move || {
            while let Some(live) = watched.upgrade() {
                live.look();
                drop(live);
                std::thread::sleep(LOOK);
            }
        };
        let unwatched = |error: io::Error| TlsError::Unfit {
            directory: directory.to_owned(),
            why: format!("cannot be watched: {error}"),
        };
        std::thread::Builder::new()
            .name("certificates".to_owned())
            .spawn(watch)
            .map_err(unwatched)?;
        Ok(live)
    }

    /// Configuration for the next handshake.
    pub(super) fn config(&self) -> Arc<C> {
        self.look();
        self.state().config.clone()
    }

    /// Registers a connection whose peer has shown this certificate.
    pub(super) fn admit(&self, fingerprint: String) -> io::Result<Arc<Cut>> {
        let mut state = self.state();
        if state.revoked.contains(&fingerprint) {
            return Err(HandshakeError::Revoked.into_io());
        }
        let cut = Arc::new(Cut::default());
        state.connections.retain(|(_, cut)| cut.strong_count() > 0);
        state.connections.push((fingerprint, Arc::downgrade(&cut)));
        Ok(cut)
    }

    fn look(&self) {
        let stamp = stamp(&self.directory, self.side);
        if self.state().stamp == stamp {
            return;
        }
        let read = (self.read)(&self.directory).and_then(|c| Ok((c, revoked(&self.directory)?)));
        let mut state = self.state();
        match read {
            Ok((config, revoked)) => {
                state.connections.retain(|(fingerprint, cut)| {
                    let Some(cut) = cut.upgrade() else { return false };
                    let stays = !revoked.contains(fingerprint);
                    if !stays {
                        cut.cut();
                    }
                    stays
                });
                (state.config, state.revoked) = (Arc::new(config), revoked);
                (state.stamp, state.trouble) = (stamp, None);
            }
            // Files are replaced one by one: the next check may find all of them consistent.
            Err(error) => {
                let why = error.to_string();
                if state.trouble.as_ref() != Some(&why) {
                    sys::log::warn(&format!("{why}; the earlier certificates stay in use"));
                    state.trouble = Some(why);
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, LiveState<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn stamp(directory: &Path, side: &str) -> Stamp {
    let names = ["ca-cert.pem", &format!("{side}-cert.pem"), &format!("{side}-key.pem"), REVOKED];
    names.map(|name| {
        let file = std::fs::metadata(directory.join(name)).ok()?;
        Some((file.mtime(), file.mtime_nsec(), file.ino()))
    })
}

/// Ends a connection from another thread.
#[derive(Default)]
pub(super) struct Cut {
    is_cut: AtomicBool,
    waker: AtomicWaker,
}

impl Cut {
    fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        self.waker.wake();
    }

    fn check(&self, context: &Context<'_>) -> io::Result<()> {
        self.waker.register(context.waker());
        if self.is_cut.load(Ordering::SeqCst) {
            return Err(HandshakeError::Revoked.into_io());
        }
        Ok(())
    }
}

/// A TLS stream that works for as long as the peer's certificate is trusted.
pub struct Trusted<T> {
    stream: T,
    cut: Arc<Cut>,
    peer: String,
}

impl<T> Trusted<T> {
    pub(super) fn new(stream: T, cut: Arc<Cut>, peer: String) -> Self {
        Self { stream, cut, peer }
    }

    /// The name in the peer's certificate: it stays the same when the key changes.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Trusted<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.cut.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Trusted<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.cut.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.cut.check(context)?;
        Pin::new(&mut self.stream).poll_write_vectored(context, data)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
