//! The API over real sockets: its answers, and its limits for hostile clients.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixStream},
    time::{Duration, Instant},
};

use model::{Link, Time};
use serde_json::Value;
use server::TestServer;

/// Sends raw bytes and reads until the server closes or goes silent.
fn raw(stream: &mut (impl Read + Write), request: &[u8]) -> String {
    // A server that refuses early may close while the client still writes.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(n @ 1..) = stream.read(&mut buffer) {
        answer.extend_from_slice(&buffer[..n]);
    }
    String::from_utf8_lossy(&answer).into_owned()
}

fn connect(server: &TestServer) -> UnixStream {
    let stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// One request on a connection of its own: status and body.
fn ask(server: &TestServer, method: &str, path: &str) -> (u16, String) {
    let request = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    let answer = raw(&mut connect(server), request.as_bytes());
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    assert!(!chunked, "every object has a length: {head}");
    (status, body.to_owned())
}

fn json(server: &TestServer, path: &str) -> Value {
    let (status, body) = ask(server, "GET", path);
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

fn error(server: &TestServer, method: &str, path: &str) -> (u16, String) {
    let (status, body) = ask(server, method, path);
    let value: Value = serde_json::from_str(&body).unwrap();
    (status, value["error"].as_str().unwrap().to_owned())
}

#[test]
fn the_host_shows_its_memory_and_the_mode() {
    let server = TestServer::start();
    let host = json(&server, "/v1/host");
    assert_eq!(host["available_bytes"], 6_144_u64 << 20);
    assert_eq!(host["mode"], "enforce");
    assert_eq!(host["unreachable_vms"], 1);
    assert_eq!(host["uncooperative_vms"], 1);
}

#[test]
fn a_group_shows_its_ledger_and_its_vms() {
    let server = TestServer::start();
    assert_eq!(json(&server, "/v1/groups").as_array().unwrap().len(), 1);
    let group = json(&server, "/v1/groups/web");
    assert_eq!(group["surplus_bytes"], 100_u64 << 20);
    assert_eq!(group["borrowed_bytes"], 60_u64 << 20);
    assert_eq!(group["loans"][0]["lender"], "shop");
    assert_eq!(group["vms"], serde_json::json!(["web-1", "web-2"]));
}

#[test]
fn a_vm_shows_both_views_and_its_decision() {
    let server = TestServer::start();
    assert_eq!(json(&server, "/v1/vms").as_array().unwrap().len(), 3);
    let page = json(&server, "/v1/status");
    for part in ["groups", "vms"] {
        assert_eq!(page[part], json(&server, &format!("/v1/{part}")), "{part}");
    }
    assert_eq!(page["host"]["vms"], 3);
    let vm = json(&server, "/v1/vms/web-1");
    assert_eq!(vm["used_bytes"], 180_u64 << 20);
    assert_eq!(vm["guest_available_bytes"], 12_u64 << 20);
    assert_eq!(vm["change"]["reason"]["code"], "demand");
    assert_eq!(vm["stats_age_ms"], 800);
}

#[test]
fn the_plan_names_the_order_of_its_actions() {
    let plan = json(&TestServer::start(), "/v1/plan");
    assert_eq!(plan["order"], serde_json::json!(["web-1"]));
}

#[test]
fn the_case_is_what_the_policy_was_given() {
    let case = json(&TestServer::start(), "/v1/case");
    let case: policy::Case = serde_json::from_value(case).unwrap();
    assert_eq!(case.view, http_fixture::published().view);
}

#[test]
fn an_explanation_takes_the_last_change_from_history() {
    let text = json(&TestServer::start(), "/v1/explain/web-1")["text"].to_string();
    assert!(text.contains("Last change  3 min before this tick: target raised"), "{text}");
}

#[test]
fn a_groups_past_loans_say_who_and_why() {
    let rows = json(&TestServer::start(), "/v1/loans/web?since_wall_ms=7");
    assert_eq!((&rows[0]["lender"], &rows[0]["wall_ms"]), (&"web".into(), &7.into()));
    assert_eq!(rows[0]["reason"]["code"], "loan_unneeded");
}

#[test]
fn history_passes_its_bounds_on_and_bounds_them() {
    let server = TestServer::start();
    let rows = json(&server, "/v1/history/web-1?since_wall_ms=5&limit=2");
    assert_eq!(rows[0]["wall_ms"], 5);
    let (status, why) = error(&server, "GET", "/v1/history/web-1?limit=10001");
    assert_eq!(
        (status, why.as_str()),
        (400, "limit is 10001; at most 10000 rows are answered at once")
    );
    assert_eq!(error(&server, "GET", "/v1/history/web-1?limit=x").0, 400);
    let (status, why) = error(&server, "GET", "/v1/history/broken");
    assert_eq!((status, why.as_str()), (500, "the disk is on fire"));
}

#[test]
fn an_unknown_vm_or_group_is_404_with_the_known_names() {
    let server = TestServer::start();
    let (status, why) = error(&server, "GET", "/v1/vms/web-9");
    assert_eq!((status, why.as_str()), (404, "no VM is named `web-9`; known: db-1, web-1, web-2"));
    let (status, why) = error(&server, "GET", "/v1/groups/x");
    assert_eq!((status, why.as_str()), (404, "no group is named `x`; known: web"));
    let (status, why) = error(&server, "GET", "/v1/history/web-9");
    assert_eq!((status, why.as_str()), (404, "no VM is named `web-9`; known: db-1, web-1, web-2"));
    let (status, why) = error(&server, "GET", "/v1/loans/x");
    assert_eq!((status, why.as_str()), (404, "no group is named `x`; known: web"));
    // An existing VM without history, and a VM that no longer exists.
    assert_eq!(json(&server, "/v1/history/web-2"), Value::Array(Vec::new()));
    assert!(json(&server, "/v1/history/web-gone")[0].is_object());
    assert_eq!(error(&server, "GET", "/v1/explain/web-9").0, 404);
}

#[test]
fn names_with_odd_characters_are_found() {
    let server = TestServer::start();
    let mut tick = http_fixture::published();
    let name = "a b/../ü%?#\"\n";
    let vm = tick.view.vms[&model::VmName::from("web-1")].clone();
    tick.view.vms.insert(name.into(), vm);
    server.publish(tick);
    let path = api::client::path_of("vms", name);
    assert_eq!(json(&server, &path)["name"], name);
    assert_eq!(error(&server, "GET", "/v1/vms/%ff%fe").0, 400);
}

#[test]
fn pause_resume_and_release_reach_the_loop() {
    let server = TestServer::start();
    for verb in ["pause", "resume", "release"] {
        let (status, body) = ask(&server, "POST", &format!("/v1/{verb}"));
        assert_eq!((status, body), (200, format!("{{\"message\":\"{verb} done\"}}")));
    }
}

#[test]
fn a_request_that_the_loop_refuses_says_why() {
    let server = TestServer::refusing("the journal cannot be written");
    let (status, why) = error(&server, "POST", "/v1/release");
    assert_eq!((status, why.as_str()), (500, "the journal cannot be written"));
}

#[test]
fn a_tracked_vm_has_a_curve_and_another_says_why_not() {
    let server = TestServer::start();
    let curve = json(&server, "/v1/vms/web-1/curve");
    assert_eq!(curve["working_set_bytes"], 150 << 20);
    assert_eq!(
        curve["points"][1],
        serde_json::json!({"memory_bytes": 100 << 20, "miss_ratio": 0.25})
    );
    let (status, why) = error(&server, "GET", "/v1/vms/web-2/curve");
    assert_eq!(status, 404);
    assert!(why.ends_with("QEMU was started without Overbook's shim"), "{why}");
    assert!(error(&server, "GET", "/v1/vms/db-1/curve").1.contains("not been measured"));
    let vm = json(&server, "/v1/vms/web-1");
    assert_eq!(
        (&vm["tracking"]["traps_total"], &vm["tracking"]["cost_ratio"]),
        (&42_000.into(), &0.0095.into())
    );
    assert_eq!(json(&server, "/v1/groups/web")["worker"]["pid"], 4711);
}

#[test]
fn the_capacity_is_told_from_what_was_learned() {
    let server = TestServer::start();
    let crowded = json(&server, "/v1/capacity");
    assert_eq!(crowded["others_bytes"], (16_384 - 6_144 - 480_u64) << 20);
    // Nothing but the two VMs, which occupy 480 MiB, is on this host.
    let mut tick = http_fixture::published();
    tick.view.host.as_mut().unwrap().value.available = model::Bytes::mib(16_384 - 480);
    server.publish(tick);
    let found = json(&server, "/v1/capacity");
    assert_eq!(found["others_bytes"], 0);
    assert!(crowded["fit_vms"].as_u64().unwrap() < found["fit_vms"].as_u64().unwrap() / 2);
    assert_eq!((&found["certainty"], &found["vms"]), (&0.97.into(), &2.into()));
    assert_eq!((&found["measured_vms"], &found["measured_seconds"]), (&1.into(), &3600.into()));
    // Two VMs of 384 MiB; one was in sustained overload in forty intervals.
    assert_eq!(found["sustained"]["vms"], 1);
    assert_eq!(found["targets_bytes"], 384 << 20);
    // 14 GiB for VMs of 165 MiB on average, with room for overloaded ones.
    let fit = found["fit_vms"].as_u64().unwrap();
    assert!((60..86).contains(&fit), "{found}");
    let certain = json(&server, "/v1/capacity?certainty=0.9999");
    assert!(certain["fit_vms"].as_u64().unwrap() < fit, "{certain}");
    let alike = json(&server, "/v1/capacity?given=0.5");
    assert!(alike["given_ratio"].as_f64().unwrap() > 0.45, "{alike}");
    for (query, words) in [
        ("certainty=1", "certainty is 1; write 0.5 to 0.9999"),
        ("given=0", "given is 0; write 0.1 to 1"),
        ("given=0.9", "no VM here has about 90 % of what it was promised"),
    ] {
        let (status, text) = error(&server, "GET", &format!("/v1/capacity?{query}"));
        assert!(status == 400 || status == 404, "{status}");
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn unknown_paths_and_wrong_methods_are_told_apart() {
    let server = TestServer::start();
    assert_eq!(error(&server, "GET", "/nope").0, 404);
    assert_eq!(error(&server, "GET", "/v1/pause").0, 405);
    let few = error(&server, "POST", "/v1/lender?holds_bytes=1");
    assert!(few.0 == 400 && few.1.contains("most_bytes"), "{few:?}");
    assert_eq!(error(&server, "DELETE", "/v1/host").0, 405);
}

#[test]
fn the_description_holds_every_path() {
    let api = json(&TestServer::start(), "/v1/openapi.json");
    for path in ["/v1/host", "/v1/vms/{name}", "/v1/explain/{vm}", "/v1/events", "/metrics"] {
        assert!(api["paths"][path].is_object(), "{path}");
    }
    for (path, names) in [
        ("/v1/history/{vm}", &["vm", "since_wall_ms", "until_wall_ms", "limit"][..]),
        ("/v1/loans/{group}", &["group", "since_wall_ms", "until_wall_ms", "limit"]),
        ("/v1/capacity", &["certainty", "given"]),
    ] {
        let parameters = api["paths"][path]["get"]["parameters"].as_array().unwrap();
        let named = |name: &&&str| parameters.iter().find(|found| found["name"] == ***name);
        assert_eq!(names.iter().filter_map(|name| named(&name)).count(), parameters.len());
        for name in names {
            let place = if path.contains(&format!("{{{name}}}")) { "path" } else { "query" };
            assert_eq!(named(&name).unwrap()["in"], place, "{path}: {name}");
        }
    }
    let target = &api["components"]["schemas"]["VmStatus"]["properties"]["target_bytes"];
    assert!(target.is_object());
}

#[test]
fn metrics_are_served_as_open_metrics() {
    let server = TestServer::start();
    let accept = "Accept: application/openmetrics-text;version=1.0.0\r\nConnection: close";
    let request = format!("GET /metrics HTTP/1.1\r\nHost: x\r\n{accept}\r\n\r\n");
    let body = raw(&mut connect(&server), request.as_bytes());
    assert!(body.starts_with("HTTP/1.1 200 "), "{body}");
    assert!(
        body.contains("overbook_vm_used_bytes{vm=\"web-1\",group=\"web\"} 188743680"),
        "{body}"
    );
    assert!(body.ends_with("# EOF\n"));
}

#[test]
fn health_fails_when_the_loop_stands_still() {
    let server = TestServer::start();
    assert_eq!(ask(&server, "GET", "/healthz").0, 200);
    let end = Instant::now() + Duration::from_secs(60);
    while ask(&server, "GET", "/healthz").0 == 200 {
        assert!(Instant::now() < end, "it never fails");
        std::thread::sleep(Duration::from_millis(50));
    }
    let (status, why) = error(&server, "GET", "/healthz");
    assert_eq!(status, 503);
    assert!(why.starts_with("the last tick was ") && why.ends_with("more than 5 s"), "{why}");
    server.publish(http_fixture::published());
    assert_eq!(ask(&server, "GET", "/healthz").0, 200);
}

#[test]
fn a_huge_header_is_refused() {
    let server = TestServer::start();
    let request = format!("GET /v1/host HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "y".repeat(1 << 20));
    let answer = raw(&mut connect(&server), request.as_bytes());
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");
    assert_eq!(ask(&server, "GET", "/v1/host").0, 200);
}

#[test]
fn a_huge_body_is_not_kept() {
    let server = TestServer::start();
    let before = resident_kib();
    let mut request =
        b"POST /v1/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 900000000\r\n\r\n".to_vec();
    request.resize(64 << 20, b'x');
    let sent = resident_kib();
    raw(&mut connect(&server), &request);
    assert!(
        // Tests that run at the same time also take some MB.
        resident_kib() < sent + (48 << 10),
        "before {before}, sent {sent}, {} now",
        resident_kib()
    );
    assert_eq!(ask(&server, "GET", "/v1/host").0, 200);
}

#[test]
fn garbage_is_refused() {
    let server = TestServer::start();
    for garbage in
        [&b"\x16\x03\x01\x00\xff\xff\xff"[..], b"\r\n\r\n\r\n", b"GET\r\n\r\n", &[0; 9000]]
    {
        let mut stream = connect(&server);
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let answer = raw(&mut stream, garbage);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    assert_eq!(ask(&server, "GET", "/v1/host").0, 200);
}

#[test]
fn silent_clients_do_not_keep_others_out_for_long() {
    let server = TestServer::start();
    let silent: Vec<UnixStream> = (0..64).map(|_| connect(&server)).collect();
    let since = Instant::now();
    let mut late = connect(&server);
    late.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let answer = raw(&mut late, b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 "), "{answer}");
    assert!(since.elapsed() < Duration::from_secs(60), "{:?}", since.elapsed());
    drop(silent);
}

/// Reads a stream of events until `done` returns true; returns the text.
fn events_until(stream: &mut UnixStream, done: impl Fn(&str) -> bool) -> String {
    let mut text = String::new();
    let mut buffer = [0; 65_536];
    while !done(&text) {
        let n = stream.read(&mut buffer).unwrap();
        assert_ne!(n, 0, "the stream ended: {text}");
        text.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    text
}

fn subscribe(server: &TestServer) -> UnixStream {
    let mut stream = connect(server);
    stream.write_all(b"GET /v1/events HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    events_until(&mut stream, |text| text.contains("\r\n\r\n"));
    stream
}

/// The fixture with a thousand more VMs; `down` makes all of them unreachable.
fn crowd(down: bool) -> api::published::Published {
    let mut tick = http_fixture::published();
    let mut vm = tick.view.vms[&model::VmName::from("web-1")].clone();
    if down {
        vm.link = Link::Down { since: Time(0), why: "gone ".repeat(50) };
    }
    tick.view.vms.extend((0..1000).map(|n| (format!("vm-{n}").into(), vm.clone())));
    tick
}

#[test]
fn events_tell_what_happens_and_why() {
    let server = TestServer::start();
    let mut stream = subscribe(&server);
    let mut tick = http_fixture::published();
    let vm = tick.view.vms.get_mut(&"web-1".into()).unwrap();
    vm.link = Link::Down { since: Time(0), why: "connection reset".to_owned() };
    server.publish(tick);
    let text = events_until(&mut stream, |text| text.contains("connection reset"));
    assert!(text.contains("event: link_down"), "{text}");
    assert!(text.contains("\"vm\":\"web-1\",\"group\":\"web\""), "{text}");
}

#[test]
fn a_slow_reader_loses_events_is_told_and_holds_up_nobody() {
    let server = TestServer::start();
    let mut slow = subscribe(&server);
    for round in 0..40 {
        server.publish(crowd(round % 2 == 0));
        assert_eq!(ask(&server, "GET", "/healthz").0, 200);
    }
    let text = events_until(&mut slow, |text| text.contains("event: lagged"));
    let told = text.lines().any(|line| line.contains("events were missed"));
    assert!(told || events_until(&mut slow, |t| t.contains("missed")).contains("missed"));
}

#[test]
fn the_socket_is_for_owner_and_group_and_goes_with_the_daemon() {
    let server = TestServer::start();
    let mode = std::fs::metadata(&server.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let socket = server.socket.clone();
    server.stop();
    assert!(!socket.exists());
}

#[test]
fn tcp_answers_only_to_the_token() {
    let server = TestServer::with_tcp();
    let ask = |address: SocketAddr, path: &str, header: &str| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}\r\n");
        raw(&mut stream, head.as_bytes())
    };
    let address = server.tcp.unwrap();
    for path in ["/v1/host", "/metrics", "/nope", "/v1/events"] {
        assert!(ask(address, path, "").starts_with("HTTP/1.1 401"), "{path}");
        let wrong = "Authorization: Bearer 0123456789abcdeX\r\n";
        assert!(ask(address, path, wrong).starts_with("HTTP/1.1 401"), "{path}");
    }
    let right = "Authorization: Bearer 0123456789abcdef\r\n";
    assert!(ask(address, "/v1/host", right).starts_with("HTTP/1.1 200"));
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
