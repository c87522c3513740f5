//! Tests a repository, and describes errors for the operator who configured its address.
//!
//! Nothing changes at the repository: it is asked how much a lease would get, and no lease is
//! opened. One deadline covers all steps.

use std::io;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::{Instant, timeout_at};

use crate::client::{self, ClientError};
use crate::layers::memory::SLAB;
use crate::layers::remote::{Address, host_of};
use crate::nbd::wire::option_reply;
use crate::nbd::{HandshakeRequest, ProtocolError};
use crate::repository::{LEASE, ROOM};
use crate::tls::HandshakeError;

/// An error of a repository.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// The name does not exist, or no name server answers.
    #[error("its name does not resolve: {0}")]
    Unresolved(String),
    /// No process listens there.
    #[error("no server listens there: the connection is refused")]
    Refused,
    /// There is no route to it.
    #[error("cannot be reached: {0}")]
    Unreachable(String),
    /// It does not answer in time.
    #[error("does not answer within {0:?}")]
    Silent(Duration),
    /// It does not support TLS.
    #[error("speaks no TLS, and the disk has `tls`: nothing is sent to it")]
    NoTls,
    /// It requires TLS.
    #[error("demands TLS: name the directory of the certificates by the disk's `tls`")]
    DemandsTls,
    /// A certificate is not accepted.
    #[error(transparent)]
    Tls(HandshakeError),
    /// Another server listens there.
    #[error("is no repository: {0}")]
    NoRepository(String),
    /// All of its memory is lent.
    #[error("has nothing left to lend")]
    Empty,
}

/// Tests a repository. Returns how many bytes it would lend to one disk now.
///
/// # Errors
///
/// The error of the repository.
pub async fn try_repository(address: &Address, within: Duration) -> Result<u64, Trouble> {
    let trial = RepositoryTrial { address, within, end: Instant::now() + within };
    let size = match trial.ask(ROOM).await? {
        Ok(size) => size,
        Err(error) => return Err(refusal(error)),
    };
    // A server that accepts any name has this export, too; a repository does not.
    match trial.ask(LEASE).await? {
        Err(ClientError::Protocol(ProtocolError::Refused {
            what: HandshakeRequest::Export,
            kind: option_reply::UNKNOWN,
            ..
        })) if size.is_multiple_of(SLAB as u64) => {}
        Ok(_) | Err(ClientError::Protocol(_)) => {
            return Err(Trouble::NoRepository("it exports something else".to_owned()));
        }
        Err(error) => return Err(refusal(error)),
    }
    if size == 0 { Err(Trouble::Empty) } else { Ok(size) }
}

/// A test of a repository.
struct RepositoryTrial<'a> {
    address: &'a Address,
    within: Duration,
    end: Instant,
}

impl RepositoryTrial<'_> {
    /// Size of the export of this name.
    async fn ask(&self, name: &str) -> Result<Result<u64, ClientError>, Trouble> {
        let asked = match self.address {
            Address::Unix(path) => {
                let stream = self.in_time(UnixStream::connect(path)).await?.map_err(unreached)?;
                self.in_time(client::inquire(stream, name, None)).await?
            }
            Address::Tcp(address, connector) => {
                let found = self.in_time(lookup_host(address)).await;
                let found = found.map_err(|why| Trouble::Unresolved(why.to_string()))?;
                let found: Vec<_> =
                    found.map_err(|error| Trouble::Unresolved(error.to_string()))?.collect();
                let stream = TcpStream::connect(&found[..]);
                let stream = self.in_time(stream).await?.map_err(unreached)?;
                let tls = connector.as_ref().map(|connector| (connector, host_of(address)));
                self.in_time(client::inquire(stream, name, tls)).await?
            }
        };
        Ok(asked.map(|export| export.size))
    }

    async fn in_time<T>(&self, future: impl Future<Output = T>) -> Result<T, Trouble> {
        timeout_at(self.end, future).await.map_err(|_| Trouble::Silent(self.within))
    }
}

fn unreached(error: io::Error) -> Trouble {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => Trouble::Refused,
        io::ErrorKind::TimedOut => Trouble::Unreachable("there is no answer".to_owned()),
        _ => Trouble::Unreachable(error.to_string()),
    }
}

/// The error of a repository that does not tell how much it would lend.
fn refusal(error: ClientError) -> Trouble {
    match error {
        ClientError::Tls(error) => Trouble::Tls(error),
        ClientError::Protocol(ProtocolError::Refused { what: HandshakeRequest::Tls, .. }) => {
            Trouble::NoTls
        }
        ClientError::Protocol(ProtocolError::Refused {
            kind: option_reply::TLS_REQUIRED, ..
        }) => Trouble::DemandsTls,
        ClientError::Gone(_) => {
            Trouble::NoRepository("it closes the connection and says nothing".to_owned())
        }
        ClientError::Protocol(ProtocolError::Refused { kind: option_reply::UNKNOWN, .. }) => {
            Trouble::NoRepository("it speaks NBD, and exports something else".to_owned())
        }
        ClientError::Protocol(error) => Trouble::NoRepository(error.to_string()),
        error @ (ClientError::Refused(_) | ClientError::Owes(_)) => {
            Trouble::NoRepository(error.to_string())
        }
    }
}
