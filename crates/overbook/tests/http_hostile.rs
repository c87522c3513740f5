//! Clients that try to occupy the API, and an operator who still gets an answer.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use server::TestServer;

const RIGHT: &str = "Authorization: Bearer 0123456789abcdef\r\n";
const LIMIT: Duration = Duration::from_secs(60);

fn tcp(server: &TestServer) -> TcpStream {
    let stream = TcpStream::connect(server.tcp.unwrap()).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Connects from another address of this machine.
fn tcp_from(server: &TestServer, ip: [u8; 4]) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&stream, &SocketAddr::from((ip, 0))).unwrap();
    connect(&stream, &server.tcp.unwrap()).unwrap();
    let stream = TcpStream::from(stream);
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn unix(server: &TestServer) -> UnixStream {
    let stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Sends one request; returns the first line of the answer.
fn ask(mut stream: impl Read + Write, header: &str) -> String {
    let request = format!("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

/// Sends half of a request.
fn half(mut stream: impl Write) {
    // The server may have closed the connection.
    let _ = stream.write_all(b"GET /v1/host HTTP/1.1\r\nHost: x\r\n");
}

/// Waits until the server closes the connection.
fn until_ended(mut stream: impl Read) {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return,
            Err(error) => panic!("it does not end: {error}"),
        }
    }
}

#[test]
fn halves_of_requests_shut_neither_tcp_nor_the_unix_socket() {
    let server = TestServer::with_tcp();
    let mut held = Vec::new();
    let mut held_too = Vec::new();
    for _ in 0..200 {
        held.push(tcp(&server));
        half(held.last().unwrap());
        held_too.push(unix(&server));
        half(held_too.last().unwrap());
    }
    assert_eq!(ask(tcp(&server), RIGHT), "HTTP/1.1 200 OK", "to the attacker's own address");
    assert_eq!(ask(tcp_from(&server, [127, 0, 0, 9]), RIGHT), "HTTP/1.1 200 OK");
    assert_eq!(ask(unix(&server), ""), "HTTP/1.1 200 OK");
    until_ended(&held[0]);
    println!("the attacker saw: the oldest of 200 halves of requests was cut off");
    // Even the youngest connections are closed after ten seconds.
    until_ended(held.last().unwrap());
    until_ended(held_too.last().unwrap());
}

#[test]
fn a_request_that_trickles_has_one_deadline_in_all() {
    let server = TestServer::with_tcp();
    let mut slow = tcp(&server);
    let started = Instant::now();
    slow.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    half(&slow);
    while slow.write_all(b"X: y\r\n").is_ok() {
        match slow.read(&mut [0; 64]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            _ => break,
        }
        assert!(started.elapsed() < LIMIT, "a byte now and then keeps the connection");
    }
}

#[test]
fn a_wrong_token_is_refused_once_a_connection() {
    let server = TestServer::with_tcp();
    let mut stream = tcp(&server);
    let request = "GET /healthz HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer guess\r\n\r\n";
    let _ = stream.write_all(request.repeat(50).as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert_eq!(answer.matches("HTTP/1.1 401").count(), 1, "{answer}");
}

#[test]
fn streams_of_one_address_leave_places_to_others() {
    let server = TestServer::with_tcp();
    let request = format!("GET /v1/events HTTP/1.1\r\nHost: x\r\n{RIGHT}\r\n");
    let mut held = Vec::new();
    let mut outcomes = Vec::new();
    for _ in 0..40 {
        let mut stream = tcp(&server);
        stream.write_all(request.as_bytes()).unwrap();
        let mut head = [0; 12];
        stream.read_exact(&mut head).unwrap();
        outcomes.push(String::from_utf8_lossy(&head[9..]).into_owned());
        held.push(stream);
    }
    let open = outcomes.iter().filter(|status| *status == "200").count();
    assert_eq!(open, 32, "{outcomes:?}");
    assert_eq!(outcomes.last().unwrap(), "503");
    assert_eq!(ask(tcp_from(&server, [127, 0, 0, 9]), RIGHT), "HTTP/1.1 200 OK");
    drop(held);
    let end = Instant::now() + LIMIT;
    while ask(tcp(&server), RIGHT) != "HTTP/1.1 200 OK" {
        assert!(Instant::now() < end, "the places do not come back");
    }
}

#[test]
fn many_at_once_are_all_answered() {
    let server = TestServer::with_tcp();
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(ask(unix(&server), ""), "HTTP/1.1 200 OK");
                    assert_eq!(ask(tcp(&server), RIGHT), "HTTP/1.1 200 OK");
                }
            });
        }
    });
}
