//! Detects connections whose peer has vanished without closing them: a host that lost power, a
//! cable that was cut.
//!
//! Without this the kernel keeps such a connection for hours. A repository would keep the slabs
//! of a dead client, and a client would wait for a dead repository.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt;

/// Idle time after which the kernel sends the first keepalive probe.
const IDLE: Duration = Duration::from_secs(5);
/// Interval between further probes, and their number.
const AGAIN: Duration = Duration::from_secs(2);
const TIMES: u32 = 3;
/// Longest time that sent data may stay unacknowledged.
pub(crate) const LATEST: Duration = Duration::from_secs(10);

/// Makes the kernel end a TCP connection soon after its peer has died. If a kernel does not
/// support one of these options, the others still apply.
pub(crate) fn notice(stream: &impl AsFd) {
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, IDLE);
    let _ = sockopt::set_tcp_keepintvl(stream, AGAIN);
    let _ = sockopt::set_tcp_keepcnt(stream, TIMES);
    let _ = sockopt::set_tcp_user_timeout(stream, LATEST.as_millis().try_into().unwrap_or(0));
}
