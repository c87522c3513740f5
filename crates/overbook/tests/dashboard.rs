//! The dashboard over real sockets: its page, its ticks, its types, and what a browser may do.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use serde_json::Value;
use server::TestServer;

/// The status and the whole answer to a request with these headers.
fn ask(stream: &mut (impl Read + Write), request: &str, headers: &[&str]) -> (u16, String) {
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    stream.write_all(format!("{request} HTTP/1.1\r\n{headers}\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
}

fn on_unix(server: &TestServer, request: &str, headers: &[&str]) -> (u16, String) {
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    ask(&mut stream, request, &[headers, &["Connection: close"]].concat())
}

fn on_tcp(server: &TestServer, request: &str, headers: &[&str]) -> (u16, String) {
    let mut stream = TcpStream::connect(server.tcp.unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    ask(&mut stream, request, headers)
}

#[test]
fn the_page_needs_no_token_and_allows_nothing_from_elsewhere_and_keeps_no_connection() {
    // The answer is read to its end, so the server has closed the connection.
    let (status, page) = on_tcp(&TestServer::with_tcp(), "GET /", &["Host: localhost"]);
    assert_eq!(status, 200, "{page}");
    let head = page.split("\r\n\r\n").next().unwrap().to_lowercase();
    let policy = "content-security-policy: default-src 'none'; script-src 'self'; \
                  style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';";
    assert!(head.contains(policy), "{head}");
    assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    assert!(page.contains("<title>Overbook</title>"), "{page}");
}

#[test]
fn its_data_needs_the_token() {
    let server = TestServer::with_tcp();
    for path in ["/v1/ticks", "/v1/status", "/assets/../v1/status", "/assets/none.js"] {
        assert_eq!(on_tcp(&server, &format!("GET {path}"), &["Host: localhost"]).0, 401, "{path}");
    }
}

#[test]
fn a_browser_on_the_unix_socket_may_read_under_a_local_name_and_give_no_order() {
    let server = TestServer::start();
    let of_a_browser = "Accept-Language: en";
    let local = ["Host: localhost:8080", of_a_browser];
    assert_eq!(on_unix(&server, "GET /v1/host", &local).0, 200);
    let (status, text) = on_unix(&server, "POST /v1/release", &local);
    assert_eq!(status, 403, "{text}");
    assert!(text.contains("a browser may only read here"), "{text}");
    let foreign = ["Host: evil.example:8080", of_a_browser];
    assert_eq!(on_unix(&server, "GET /v1/host", &foreign).0, 403);
    assert_eq!(on_unix(&server, "GET /", &foreign).0, 403);
    let program = ["Host: monitor.example"];
    assert_eq!(on_unix(&server, "GET /v1/host", &program).0, 200);
    assert_eq!(on_unix(&server, "POST /v1/pause", &program).0, 200);
}

#[test]
fn a_reader_gets_the_latest_tick_at_once_and_then_each() {
    let server = TestServer::start();
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"GET /v1/ticks HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(|line| line.unwrap());
    let mut next = || -> Value {
        let data = lines.find_map(|line| Some(line.strip_prefix("data: ")?.to_owned()));
        serde_json::from_str(&data.unwrap()).unwrap()
    };
    let first = next();
    assert_eq!(first["vms"].as_array().unwrap().len(), 3);
    assert_eq!(first["reserve_bytes"], 2048_u64 << 20);
    let mut tick = http_fixture::published();
    tick.paused = true;
    server.publish(tick);
    assert_eq!(next()["host"]["paused"], true);
}

#[test]
fn a_reader_that_reads_nothing_delays_no_other() {
    let server = TestServer::start();
    let open = || {
        let mut stream = UnixStream::connect(&server.socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(b"GET /v1/ticks HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        BufReader::new(stream)
    };
    let (_silent, mut reading) = (open(), open());
    // A socket buffer holds some 20 of these ticks.
    for number in 1..=200 {
        let mut tick = http_fixture::published();
        tick.wall_ms = number;
        server.publish(tick);
        let wanted = format!("\"wall_ms\":{number},");
        let mut line = String::new();
        while !line.contains(&wanted) {
            line.clear();
            assert_ne!(reading.read_line(&mut line).unwrap(), 0, "tick {number} is missing");
        }
    }
}

/// Removes the texts of a description: they are for people, and change often.
fn without_texts(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, value| name != "description" || !value.is_string());
            fields.values_mut().for_each(without_texts);
        }
        Value::Array(values) => values.iter_mut().for_each(without_texts),
        _ => {}
    }
}

/// The dashboard's TypeScript types are made of this file, so that Node needs no compiled daemon.
#[test]
fn the_description_that_the_dashboard_is_built_from_is_that_of_the_api() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web/openapi.json");
    let mut now: Value = serde_json::from_str(&overbook::http::openapi()).unwrap();
    without_texts(&mut now);
    let text = serde_json::to_string_pretty(&now).unwrap() + "\n";
    if std::env::var_os("OVERBOOK_WRITE_OPENAPI").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let is_same = fs::read_to_string(&path).is_ok_and(|kept| kept == text);
    assert!(
        is_same,
        "web/openapi.json is old; OVERBOOK_WRITE_OPENAPI=1 cargo test -p overbook --test dashboard \
         writes it"
    );
}
