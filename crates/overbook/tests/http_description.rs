//! The OpenAPI description against the handlers: parameters, statuses, tokens, media types.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;
use server::TestServer;

const CHANGE: &str = "Authorization: Bearer 0123456789abcdef\r\n";
const READ: &str = "Authorization: Bearer fedcba9876543210\r\n";

/// Status, head and body of the answer to a request over TCP.
fn ask(server: &TestServer, line: &str, headers: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(server.tcp.unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let request = format!("{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_ascii_lowercase(), body.to_owned())
}

fn description() -> Value {
    serde_json::from_str(&overbook::http::openapi()).unwrap()
}

/// Every operation: method, path, and its description.
fn operations(description: &Value) -> Vec<(String, String, &Value)> {
    let paths = description["paths"].as_object().unwrap();
    let of = |(path, item): (&String, &'_ Value)| {
        let item = item.as_object().unwrap().clone();
        let found = item.keys().map(|method| (method.to_uppercase(), path.clone()));
        found.collect::<Vec<_>>()
    };
    let found = paths.iter().flat_map(of).map(|(method, path)| {
        let described = &description["paths"][&path][method.to_lowercase()];
        (method, path, described)
    });
    found.collect()
}

/// The operation's parameters in `place`.
fn declared(operation: &Value, place: &str) -> BTreeSet<String> {
    let parameters = operation["parameters"].as_array().map(Vec::as_slice).unwrap_or_default();
    let here = parameters.iter().filter(|parameter| parameter["in"] == place);
    here.map(|parameter| parameter["name"].as_str().unwrap().to_owned()).collect()
}

/// The path with a name that the fixture has.
fn filled(path: &str) -> String {
    let name = if path.contains("group") { "web" } else { "web-1" };
    let parts = path.split('/').map(|part| if part.starts_with('{') { name } else { part });
    parts.collect::<Vec<_>>().join("/")
}

#[test]
fn every_parameter_is_where_its_handler_reads_it() {
    let (server, description) = (TestServer::with_tcp(), description());
    let mut queries = 0;
    for (method, path, operation) in operations(&description) {
        let parameters = operation["parameters"].as_array().map_or(0, Vec::len);
        let (in_path, in_query) = (declared(operation, "path"), declared(operation, "query"));
        assert_eq!(in_path.len() + in_query.len(), parameters, "{path}");
        let template = path.split('/').filter_map(|part| part.strip_prefix('{'));
        let template: BTreeSet<String> =
            template.map(|part| part.trim_end_matches('}').to_owned()).collect();
        assert_eq!(in_path, template, "{path}");
        queries += in_query.len();
        if ["/v1/events", "/v1/ticks"].contains(&path.as_str()) {
            // The answers do not end, and the handlers have no parameter.
            assert!(in_query.is_empty());
            continue;
        }
        let path = filled(&path);
        // The handler's own words: "unknown field `nosuch`, expected `limit`".
        let (status, _, body) = ask(&server, &format!("{method} {path}?nosuch=1"), CHANGE);
        let read: BTreeSet<String> = match status {
            400 => {
                let (_, expected) = body.split_once("expected ").expect(&body);
                expected.split('`').skip(1).step_by(2).map(str::to_owned).collect()
            }
            _ => BTreeSet::new(),
        };
        assert_eq!(read, in_query, "{method} {path}: {body}");
        for name in in_query {
            let (status, _, body) = ask(&server, &format!("{method} {path}?{name}=x"), CHANGE);
            // A name of a VM or group is valid, and unknown.
            let wrong = if ["vm", "group"].contains(&name.as_str()) { 404 } else { 400 };
            assert_eq!(status, wrong, "{path}?{name}=x: {body}");
            assert!(body.to_lowercase().contains(&name), "{body}");
        }
    }
    assert!(queries >= 6, "{queries}");
}

#[test]
fn every_operation_describes_its_token_and_its_common_errors() {
    let description = description();
    let schemes = &description["components"]["securitySchemes"];
    assert_eq!(
        (&schemes["token"]["type"], &schemes["token"]["scheme"]),
        (&"http".into(), &"bearer".into())
    );
    // No token on the unix socket.
    assert_eq!(description["security"], serde_json::json!([{}, {"token": []}]));
    for (method, path, operation) in operations(&description) {
        let answers = operation["responses"].as_object().unwrap();
        let mut statuses = vec!["401", "405", "503"];
        statuses.extend((method == "POST").then_some("403"));
        statuses.extend(operation.get("parameters").map(|_| "400"));
        for status in statuses {
            let content = &answers[status]["content"]["application/json"];
            assert_eq!(
                content["schema"]["$ref"], "#/components/schemas/Failure",
                "{path} {status}"
            );
        }
        assert_eq!(answers.contains_key("403"), method == "POST", "{path}");
    }
}

#[test]
fn statuses_come_with_the_headers_that_belong_to_them() {
    let server = TestServer::with_tcp();
    for token in ["", "Authorization: Bearer 0123456789abcdeX\r\n", "Authorization: Basic eDp5\r\n"]
    {
        let (status, head, _) = ask(&server, "GET /v1/host", token);
        assert_eq!(status, 401);
        assert!(head.contains("\r\nwww-authenticate: bearer"), "{head}");
    }
    for (line, allow) in [("POST /v1/host", "get,head"), ("GET /v1/pause", "post")] {
        let (status, head, _) = ask(&server, line, CHANGE);
        assert_eq!(status, 405);
        assert!(head.contains(&format!("\r\nallow: {allow}")), "{head}");
    }
}

#[test]
fn a_token_that_only_reads_changes_nothing() {
    let server = TestServer::with_tcp();
    for path in ["/metrics", "/v1/status", "/healthz", "/v1/openapi.json"] {
        for method in ["GET", "HEAD"] {
            assert_eq!(ask(&server, &format!("{method} {path}"), READ).0, 200, "{method} {path}");
        }
    }
    for path in ["/v1/pause", "/v1/resume", "/v1/release", "/v1/nosuch"] {
        for method in ["POST", "PUT", "PATCH", "DELETE", "NOSUCH"] {
            let (status, _, body) = ask(&server, &format!("{method} {path}"), READ);
            assert_eq!(status, 403, "{method} {path}");
            assert!(body.contains("`api.read_token_file` changes nothing"), "{body}");
        }
    }
    assert_eq!(ask(&server, "POST /v1/release", CHANGE).0, 200);
}

#[test]
fn metrics_come_in_the_format_that_the_client_asks_for() {
    let server = TestServer::with_tcp();
    let open = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n";
    let (_, head, body) = ask(&server, "GET /metrics", &format!("{READ}{open}"));
    let kind = "\r\ncontent-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
    assert!(head.contains(kind) && head.contains("\r\nvary: accept"), "{head}");
    assert!(body.ends_with("\n# EOF\n"), "{body}");
    assert!(body.contains("# TYPE overbook_ticks counter\noverbook_ticks_total "), "{body}");
    for accept in ["", "Accept: */*\r\n", "Accept: text/plain\r\n"] {
        let (_, head, body) = ask(&server, "GET /metrics", &format!("{READ}{accept}"));
        let kind = "\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n";
        assert!(head.contains(kind) && head.contains("\r\nvary: accept"), "{head}");
        assert!(body.contains("# TYPE overbook_ticks_total counter\n"), "{body}");
        assert!(!body.contains("# EOF") && !body.contains("# UNIT"), "{body}");
    }
}
