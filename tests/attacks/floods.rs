//! Processes of another user that try to occupy the daemon: a QEMU that floods it, and a client
//! that fills its API.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::{Duration, Instant};

use api::client::ApiClient;
use lab::attack::{Attacker, NOBODY};
use lab::command::own_program;
use serde_json::Value;
use sys::process::{Child, Signal, Spawn};

const LIMIT: Duration = Duration::from_secs(120);
/// Maximum memory of the daemon under both attacks, in MiB.
const MOST_MIB: u64 = 64;
const TOKEN: &str = "0123456789abcdef";

/// The real daemon, with an API on TCP; it ends when dropped.
struct FloodedDaemon {
    child: Child,
    dir: tempfile::TempDir,
    tcp: String,
}

impl FloodedDaemon {
    /// Starts a daemon that looks for QEMUs in a directory of [`NOBODY`]'s.
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().display();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(dir.path().join("qmp")).unwrap();
        chown(dir.path().join("qmp"), Some(NOBODY), None).unwrap();
        let token = dir.path().join("token");
        fs::write(&token, TOKEN).unwrap();
        fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).unwrap();
        // An address of this process alone, so that the port is free.
        let [_, high, middle, low] = std::process::id().to_be_bytes();
        let tcp = format!("127.{}.{middle}.{low}:7780", 64 + high);
        let config = dir.path().join("overbook.toml");
        let text = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nqmp = [\"{at}/qmp/*.sock\"]\nstate = \"{at}/state\"\n\
             [api]\nsocket = \"{at}/s\"\ntcp = \"{tcp}\"\ntoken_file = \"{at}/token\"\n"
        );
        fs::write(&config, text).unwrap();
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let program = own_program("overbook").unwrap();
        let spawn = Spawn::new(program).args(["daemon", "--config"]).arg(&config);
        let child = spawn.output_to(log).unwrap().die_with_parent().spawn().unwrap();
        let daemon = Self { child, dir, tcp };
        daemon.until("it answers", |daemon| daemon.try_get("/v1/host").is_some());
        daemon
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn try_get(&self, path: &str) -> Option<Value> {
        ApiClient::new(Path::new(&self.path("s"))).unwrap().get(path).ok()
    }

    fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !holds(self) {
            let log = || fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < end, "not in time: {what}: {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn most_memory_mib(&self) -> u64 {
        let pid = self.child.identity().pid;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
    }

    /// The answer to the operator over TCP.
    fn ask_with_token(&self) -> String {
        let mut stream = TcpStream::connect(&self.tcp).unwrap();
        let request = format!(
            "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\
             Authorization: Bearer {TOKEN}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer.lines().next().unwrap_or_default().to_owned()
    }
}

impl Drop for FloodedDaemon {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.child.signal(Signal::KILL);
        let _ = self.child.wait_for(Duration::from_secs(10));
    }
}

#[test]
fn floods_of_strangers_neither_grow_the_daemon_nor_shut_its_api() {
    let daemon = FloodedDaemon::start();
    let socket = daemon.path("qmp/flood.sock");
    let flood = Attacker::start("qmp_flood", &[&socket], Some(NOBODY)).unwrap();
    let fills = Attacker::start("slow_http", &[&daemon.tcp], Some(NOBODY)).unwrap();
    // Each size of events occurs twice; the API is tried during each.
    for _ in 0..8 {
        let saw = flood.saw(LIMIT).unwrap();
        assert!(saw.contains("cut off after"), "{saw}");
        println!("the flooding QEMU {saw}");
        assert_eq!(daemon.ask_with_token(), "HTTP/1.1 200 OK");
        assert!(daemon.try_get("/v1/host").is_some());
    }
    let saw = fills.all_seen();
    let cut = |line: &String| !line.ends_with(" 0 were cut off");
    assert!(saw.iter().any(cut), "{saw:?}");
    println!("the client without the token {}", saw.last().unwrap());
    daemon.until("the VM shows why it is not managed", |daemon| {
        let vms = daemon.try_get("/v1/vms").unwrap_or_default();
        let why = vms[0]["link_error"].as_str().unwrap_or_default().to_owned();
        why.contains("KiB of events a second") || why.contains("a line of more than")
    });
    let most = daemon.most_memory_mib();
    println!("the daemon had {most} MiB at most");
    assert!(most <= MOST_MIB, "{most} MiB");
}
