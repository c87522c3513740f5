//! Every path of the API against its description, with a real daemon: schemathesis invents the
//! requests. No answer is an error of the server, and none differs from its description.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod daemon_fixture;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    os::unix::{fs::PermissionsExt, net::UnixListener},
    path::Path,
    process::Command,
    thread,
};

use daemon_fixture::TestDaemon;
use serde_json::{Value, json};

/// A VM that answers as a QEMU does: `web-1`, the example in the description.
fn start_vm(socket: &Path) {
    let listener = UnixListener::bind(socket).unwrap();
    let answer = |message: &Value| match message["execute"].as_str() {
        Some("query-name") => json!({"name": "web-1"}),
        Some("query-memdev") => json!([{"size": 256 << 20}]),
        Some("query-memory-size-summary") => {
            json!({"base-memory": 256 << 20, "plugged-memory": 0})
        }
        Some("query-balloon") => json!({"actual": 256 << 20}),
        Some("query-status") => json!({"status": "running"}),
        _ => json!({}),
    };
    // It ends with the test's process.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut answers) = stream else { continue };
            let asked = BufReader::new(answers.try_clone().unwrap());
            let _ = answers.write_all(b"{\"QMP\": {}}\n");
            for line in asked.lines().map_while(Result::ok) {
                let message: Value = serde_json::from_str(&line).unwrap();
                let text = json!({"return": answer(&message), "id": message["id"]});
                if writeln!(answers, "{text}").is_err() {
                    break;
                }
            }
        }
    });
}

/// A daemon with one VM and one group that answers over TCP, and its address.
fn start() -> (TestDaemon, String) {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    fs::write(&token, "0123456789abcdef").unwrap();
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
    // QEMUs of this host are none of its business.
    fs::create_dir(dir.path().join("overbook.d")).unwrap();
    fs::write(dir.path().join("overbook.d/attach.toml"), "[host]\nattach = \"off\"\n").unwrap();
    start_vm(&dir.path().join("web-1.qmp"));
    // A free port.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let more = format!(
        "tcp = \"{address}\"\ntoken_file = \"{}\"\n[group.web]\nvms = [\"shop-*\"]\n\
         budget = \"1GiB\"\n",
        token.display()
    );
    let mut daemon = TestDaemon::start(dir, &more);
    daemon.until("TCP answers", |_| TcpStream::connect(address).is_ok());
    for path in ["/v1/vms/web-1", "/v1/history/web-1"] {
        daemon.until("the VM is known", |daemon| daemon.try_get::<Value>(path).is_some());
    }
    (daemon, address.to_string())
}

#[test]
#[ignore = "`make api-test` installs schemathesis and runs it"]
fn every_answer_is_as_described() {
    let schemathesis = std::env::var_os("SCHEMATHESIS").expect("`make api-test` sets SCHEMATHESIS");
    let (mut daemon, address) = start();
    let output = Command::new(schemathesis)
        .arg("run")
        .arg(format!("http://{address}/v1/openapi.json"))
        .args(["--header", "Authorization: Bearer 0123456789abcdef"])
        // These streams do not end; `http_api.rs` and `dashboard.rs` read them.
        .args(["--exclude-path", "/v1/events", "--exclude-path", "/v1/ticks"])
        .args(["--checks", "all", "--max-examples", "30", "--seed", "1"])
        .args(["--request-timeout", "10", "--no-color"])
        .current_dir(daemon.dir())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert!(output.status.success(), "{said}{errors}\nthe daemon: {}", daemon.log());
    daemon.end();
}
