//! Message sockets (`SOCK_SEQPACKET`) on abstract Unix addresses: whole packets, in order, and at
//! most one file descriptor with each.
//!
//! Abstract addresses leave no file behind when a process dies, and need no directory writable by
//! QEMU's user. They have no permissions, so each side asks the kernel for the other's identity
//! ([`Connection::process`], [`Peer`]). They belong to a network namespace, so a QEMU in another
//! one cannot connect.
//!
//! Only calls with a deadline wait. Sockets are non-blocking, because one peer must never delay
//! the others. The caller's buffer limits a packet; a longer packet is an error, not a truncated
//! packet. Unexpected descriptors are closed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::peer;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// The most connections that wait to be accepted.
const BACKLOG: i32 = 8;

/// The reason why a socket operation failed.
#[derive(Debug, thiserror::Error)]
pub enum SeqpacketError {
    /// A system call failed.
    #[error("message socket: {call}: {errno}")]
    Call {
        /// The name of the call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// The peer does not read its packets.
    #[error("message socket: the peer does not read; nothing more fits")]
    Full,
    /// The peer is gone.
    #[error("message socket: the peer closed the connection")]
    Closed,
    /// A packet does not fit the buffer, or has more descriptors than any packet of ours.
    #[error("message socket: a packet of more than {limit} bytes, or with surplus descriptors")]
    Truncated {
        /// The size of the buffer.
        limit: usize,
    },
}

/// The process on the other side, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The pid of the process that connected or listened; 0 if it is not visible from here.
    pub pid: u32,
    /// Its effective user at that time.
    pub uid: u32,
}

/// An address that accepts connections.
#[derive(Debug)]
pub struct Listener {
    fd: OwnedFd,
}

impl Listener {
    /// Listens on an abstract address (`name` without its leading zero byte).
    ///
    /// # Errors
    /// When the address is taken or too long, or the kernel refuses.
    pub fn bind(name: &str) -> Result<Self, SeqpacketError> {
        let address = address(name)?;
        let fd = socket(FLAGS)?;
        rustix::net::bind(&fd, &address).map_err(failed("bind"))?;
        rustix::net::listen(&fd, BACKLOG).map_err(failed("listen"))?;
        Ok(Self { fd })
    }

    /// The next connection; `None` if no peer waits.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn accept(&self) -> Result<Option<Connection>, SeqpacketError> {
        match rustix::net::accept_with(&self.fd, FLAGS) {
            Ok(fd) => Ok(Some(Connection { fd })),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(errno) => Err(failed("accept")(errno)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// The number of bytes of the buffer that it fills; at least 1.
    pub length: usize,
    /// The descriptor that came with it, close-on-exec.
    pub fd: Option<OwnedFd>,
}

/// One end of a connection.
#[derive(Debug)]
pub struct Connection {
    fd: OwnedFd,
}

impl Connection {
    /// Connects to an abstract address.
    ///
    /// # Errors
    /// When no process listens there, or its backlog stays full for `timeout`.
    pub fn connect(name: &str, timeout: Duration) -> Result<Self, SeqpacketError> {
        let address = address(name)?;
        let fd = socket(SocketFlags::CLOEXEC)?;
        sockopt::set_socket_timeout(
            &fd,
            Timeout::Send,
            Some(timeout.max(Duration::from_millis(1))),
        )
        .map_err(failed("SO_SNDTIMEO"))?;
        rustix::net::connect(&fd, &address).map_err(failed("connect"))?;
        rustix::io::ioctl_fionbio(&fd, true).map_err(failed("FIONBIO"))?;
        Ok(Self { fd })
    }

    /// The process on the other side when it connected or listened. It may have ended since, and
    /// its pid may have been reused.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn peer(&self) -> Result<Peer, SeqpacketError> {
        let peer = peer::credentials(&self.fd).map_err(|error| {
            failed("SO_PEERCRED")(Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
        })?;
        Ok(Peer { pid: peer.pid.cast_unsigned(), uid: peer.uid })
    }

    /// The live process on the other side.
    ///
    /// # Errors
    /// When it has ended, or is not visible.
    pub fn process(&self) -> Result<peer::Peer, peer::PeerError> {
        peer::Peer::of(&self.fd)
    }

    /// Sends a packet, and a descriptor with it.
    ///
    /// # Errors
    /// When the peer is gone or has not read earlier packets.
    pub fn send(&self, packet: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<(), SeqpacketError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fd.into_iter().collect();
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&fds));
        }
        let data = [IoSlice::new(packet)];
        match rustix::net::sendmsg(&self.fd, &data, &mut control, SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(Errno::AGAIN | Errno::NOBUFS) => Err(SeqpacketError::Full),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(SeqpacketError::Closed),
            Err(errno) => Err(failed("sendmsg")(errno)),
        }
    }

    /// Receives a packet into `buffer`; `None` if there is none yet.
    ///
    /// # Errors
    /// When the peer is gone (an empty packet counts as such), or the packet does not fit.
    pub fn receive(&self, buffer: &mut [u8]) -> Result<Option<Packet>, SeqpacketError> {
        // Room for more than one descriptor, so that surplus ones are seen and closed here.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let limit = buffer.len();
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received =
            rustix::net::recvmsg(&self.fd, &mut [IoSliceMut::new(buffer)], &mut control, flags);
        let message = match received {
            Ok(message) => message,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(Errno::CONNRESET) => return Err(SeqpacketError::Closed),
            Err(errno) => return Err(failed("recvmsg")(errno)),
        };
        let mut fds: Vec<OwnedFd> = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                fds.extend(rights);
            }
        }
        if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || fds.len() > 1 {
            return Err(SeqpacketError::Truncated { limit });
        }
        if message.bytes == 0 {
            return Err(SeqpacketError::Closed);
        }
        Ok(Some(Packet { length: message.bytes, fd: fds.pop() }))
    }

    /// Waits until there is a packet (or the peer is gone); `false` if `timeout` passed.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn wait(&self, timeout: Duration) -> Result<bool, SeqpacketError> {
        let timeout = Timespec::try_from(timeout).map_err(|_| failed("poll")(Errno::INVAL))?;
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(errno) => Err(failed("poll")(errno)),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn socket(flags: SocketFlags) -> Result<OwnedFd, SeqpacketError> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(failed("socket"))
}

fn address(name: &str) -> Result<SocketAddrUnix, SeqpacketError> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(failed("address"))
}

fn failed(call: &'static str) -> impl Fn(Errno) -> SeqpacketError {
    move |errno| SeqpacketError::Call { call, errno }
}

#[cfg(test)]
mod tests;
