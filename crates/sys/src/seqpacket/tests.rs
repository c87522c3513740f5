use std::os::fd::AsRawFd;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn name(test: &str) -> String {
    format!("overbook-test.{}.{test}", std::process::id())
}

fn pair(test: &str) -> (Connection, Connection) {
    let listener = Listener::bind(&name(test)).unwrap();
    let client = Connection::connect(&name(test), SECOND).unwrap();
    (listener.accept().unwrap().unwrap(), client)
}

fn pipe() -> OwnedFd {
    rustix::pipe::pipe().unwrap().0
}

#[test]
fn packets_stay_apart_and_in_order() {
    let (server, client) = pair("order");
    client.send(b"one", None).unwrap();
    client.send(b"two, longer", None).unwrap();
    let mut buffer = [0; 64];
    let first = server.receive(&mut buffer).unwrap().unwrap();
    assert_eq!(&buffer[..first.length], b"one");
    let second = server.receive(&mut buffer).unwrap().unwrap();
    assert_eq!(&buffer[..second.length], b"two, longer");
    assert!(second.fd.is_none());
    assert!(server.receive(&mut buffer).unwrap().is_none());
}

#[test]
fn a_descriptor_travels_with_its_packet_and_is_closed_on_exec() {
    let (server, client) = pair("fd");
    let sent = pipe();
    client.send(b"here", Some(sent.as_fd())).unwrap();
    let packet = server.receive(&mut [0; 64]).unwrap().unwrap();
    let received = packet.fd.unwrap();
    assert_ne!(received.as_raw_fd(), sent.as_raw_fd());
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    assert_eq!(inode(&received), inode(&sent));
    let flags = rustix::io::fcntl_getfd(&received).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn both_sides_know_who_the_other_is() {
    let (server, client) = pair("peer");
    let uid = rustix::process::geteuid().as_raw();
    let us = Peer { pid: std::process::id(), uid };
    assert_eq!(server.peer().unwrap(), us);
    assert_eq!(client.peer().unwrap(), us);
}

#[test]
fn a_packet_that_does_not_fit_is_an_error_and_the_next_is_read() {
    let (server, client) = pair("long");
    client.send(&[7; 65], None).unwrap();
    client.send(b"next", None).unwrap();
    let error = server.receive(&mut [0; 64]).unwrap_err();
    assert!(matches!(error, SeqpacketError::Truncated { limit: 64 }), "{error}");
    assert_eq!(server.receive(&mut [0; 64]).unwrap().unwrap().length, 4);
}

/// The number of our descriptors of that pipe, because other tests open and close theirs
/// meanwhile.
fn copies_of(fd: &OwnedFd) -> usize {
    let inode = rustix::fs::fstat(fd).unwrap().st_ino;
    let link = format!("pipe:[{inode}]");
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .filter(|target| target.to_string_lossy() == link)
        .count()
}

#[test]
fn surplus_descriptors_are_refused_and_closed() {
    for count in [2, 4, 9, 200] {
        let (server, client) = pair(&format!("surplus{count}"));
        let (sent, _other_end) = rustix::pipe::pipe().unwrap();
        let before = copies_of(&sent);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = vec![sent.as_fd(); count];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let data = [IoSlice::new(b"many")];
        rustix::net::sendmsg(&client.fd, &data, &mut control, SendFlags::empty()).unwrap();
        let error = server.receive(&mut [0; 64]).unwrap_err();
        assert!(matches!(error, SeqpacketError::Truncated { .. }), "{error}");
        assert_eq!(copies_of(&sent), before);
    }
}

#[test]
fn a_peer_that_closes_or_sends_nothing_is_gone() {
    let (server, client) = pair("gone");
    drop(client);
    assert!(server.wait(SECOND).unwrap());
    assert!(matches!(server.receive(&mut [0; 64]).unwrap_err(), SeqpacketError::Closed));
    assert!(matches!(server.send(b"x", None).unwrap_err(), SeqpacketError::Closed));
    let (server, client) = pair("empty");
    client.send(b"", None).unwrap();
    assert!(matches!(server.receive(&mut [0; 64]).unwrap_err(), SeqpacketError::Closed));
}

#[test]
fn a_peer_that_does_not_read_never_makes_us_wait() {
    let (_server, client) = pair("full");
    // If it waited, the test would hang.
    let full = (0..10_000).find_map(|_| client.send(&[0; 1024], None).err()).unwrap();
    assert!(matches!(full, SeqpacketError::Full), "{full}");
}

#[test]
fn connecting_where_nobody_accepts_ends_at_the_deadline() {
    let name = name("backlog");
    let _listener = Listener::bind(&name).unwrap();
    let timeout = Duration::from_millis(50);
    let mut waiting = Vec::new();
    let error = loop {
        match Connection::connect(&name, timeout) {
            Ok(connection) => waiting.push(connection),
            Err(error) => break error,
        }
        assert!(waiting.len() < 100);
    };
    assert!(matches!(error, SeqpacketError::Call { call: "connect", .. }), "{error}");
}

#[test]
fn an_address_without_listener_or_taken_or_too_long_is_an_error() {
    let error = Connection::connect(&name("nobody"), SECOND).unwrap_err();
    assert!(matches!(error, SeqpacketError::Call { call: "connect", errno: Errno::CONNREFUSED }));
    let _first = Listener::bind(&name("taken")).unwrap();
    let error = Listener::bind(&name("taken")).unwrap_err();
    assert!(matches!(error, SeqpacketError::Call { call: "bind", errno: Errno::ADDRINUSE }));
    assert!(Listener::bind(&"x".repeat(200)).is_err());
}
