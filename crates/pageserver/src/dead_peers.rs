//! Connections whose other end has gone without a word: a host that lost its power, a cable that
//! was cut.
//!
//! Without this the kernel keeps such a connection for hours. A repository would keep the slabs of
//! a client that is no more, and a client would wait for a repository that is no more.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

/// Nothing was heard for so long: ask.
const IDLE: Duration = Duration::from_secs(5);
/// And again, so often, so many times.
const AGAIN: Duration = Duration::from_secs(2);
const TIMES: u32 = 3;
/// So long may what was sent be without an acknowledgement.
pub(crate) const LATEST: Duration = Duration::from_secs(10);

/// Has the kernel end a TCP connection soon after its other end has died. Where a kernel does not
/// know one of the ways, the others are left.
pub(crate) fn notice(stream: &impl AsFd) {
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, IDLE);
    let _ = sockopt::set_tcp_keepintvl(stream, AGAIN);
    let _ = sockopt::set_tcp_keepcnt(stream, TIMES);
    let _ = sockopt::set_tcp_user_timeout(stream, LATEST.as_millis().try_into().unwrap_or(0));
}
