//! Orders for single VMs and groups: pause, resume, release, and the dry run of a release. The real
//! daemon works on a simulated QEMU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod daemon_fixture;
#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/program.rs"]
mod program;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixListener,
    path::Path,
    sync::{Arc, Mutex},
};

use daemon_fixture::TestDaemon;
use program::{error, json, overbook, says};
use serde_json::{Value, json};
use server::TestServer;

#[test]
fn names_of_vms_and_groups_say_what_an_order_is_for() {
    let server = TestServer::start();
    for verb in ["pause", "resume", "release"] {
        assert_eq!(says(&server, &[verb, "web-1"]), format!("{verb} of web-1 done\n"));
        let both = says(&server, &[verb, "web", "db-1"]);
        assert_eq!(both, format!("{verb} of group web done\n{verb} of db-1 done\n"));
    }
    let socket = server.socket.to_str().unwrap();
    for arguments in [&["pause", "wbe"][..], &["release", "wbe"], &["release", "wbe", "--dry-run"]]
    {
        let output = overbook(&[arguments, &["--socket", socket]].concat());
        assert_eq!(output.status.code(), Some(1));
        let why = error(&output);
        let expected =
            "overbook: no VM or group is named `wbe`; VMs: db-1, web-1, web-2; groups: web\n";
        assert_eq!(why, expected, "{arguments:?}");
    }
}

#[test]
fn a_dry_run_tells_what_each_vm_would_get_back_and_where_the_room_ends() {
    let server = TestServer::start();
    let text = says(&server, &["release", "--dry-run"]);
    let expected = "\
        web-2: would get 4 MiB back, balloon back to 256 MiB\n\
        web-1: would get 76 MiB back, balloon back to 256 MiB, 12 MiB that are paged out\n\
        KSM: would get its settings back\n\
        in this order; the host has 70 MiB beyond its reserve, and all is 80 MiB: from web-1 on it \
        would swap as guests use what their balloons give back, and what is shared or paged out \
        would stay so until there is room\n";
    assert_eq!(text, expected);
    let one = says(&server, &["release", "--dry-run", "web-2"]);
    let expected = "web-2: would get 4 MiB back, balloon back to 256 MiB\n\
        in this order; the host has 70 MiB beyond its reserve, enough for 4 MiB\n";
    assert_eq!(one, expected);
    let rows = json(&server, &["release", "--dry-run", "web"]);
    assert_eq!(rows["vms"].as_array().unwrap().len(), 2, "{rows}");
    assert_eq!((&rows["vms"][1]["fits"], &rows["ksm"]), (&json!(false), &json!(false)));
}

const RAM: u64 = 256 << 20;

/// A simulated QEMU of the VM web-1, whose guest has swap and uses little.
#[derive(Clone)]
struct Script {
    /// Its balloon's size, and the interval of its statistics.
    state: Arc<Mutex<(u64, u64)>>,
}

impl Script {
    fn listening(directory: &Path) -> Self {
        let listener = UnixListener::bind(directory.join("web-1.qmp")).unwrap();
        let script = Self { state: Arc::new(Mutex::new((RAM, 0))) };
        let own = script.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // The client may go at any time.
                let _ = own.serve(&stream.unwrap());
            }
        });
        script
    }

    fn serve(&self, mut stream: &std::os::unix::net::UnixStream) -> std::io::Result<()> {
        stream.write_all(b"{\"QMP\": {}}\n")?;
        for line in BufReader::new(stream).lines() {
            let message: Value = serde_json::from_str(&line?).unwrap();
            let answer = json!({"return": self.answer(&message), "id": message["id"]});
            stream.write_all(format!("{answer}\n").as_bytes())?;
        }
        Ok(())
    }

    fn answer(&self, message: &Value) -> Value {
        let mut state = self.state.lock().unwrap();
        let value = &message["arguments"]["value"];
        let property = message["arguments"]["property"].as_str().unwrap_or_default();
        match (message["execute"].as_str().unwrap(), property) {
            ("query-name", _) => json!({"name": "web-1"}),
            ("query-memdev", _) => json!([{"size": RAM}]),
            ("query-memory-size-summary", _) => json!({"base-memory": RAM, "plugged-memory": 0}),
            ("query-memory-devices", _) => json!([]),
            ("query-balloon", _) => json!({"actual": state.0}),
            ("query-status", _) => json!({"status": "running"}),
            ("qom-list", _) => json!([{"name": "b0", "type": "child<virtio-balloon-pci>"}]),
            ("balloon", _) => {
                state.0 = value.as_u64().unwrap().min(RAM);
                json!({})
            }
            ("qom-set", "guest-stats-polling-interval") => {
                state.1 = value.as_u64().unwrap();
                json!({})
            }
            (_, "guest-stats-polling-interval") => json!(state.1),
            (_, "guest-stats") => {
                let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
                let free = state.0.saturating_sub(40 << 20);
                let stats = json!({
                    "stat-total-memory": state.0, "stat-free-memory": free,
                    "stat-available-memory": free, "stat-swap-in": 0, "stat-swap-out": 1 << 20,
                    "stat-minor-faults": 1000, "stat-major-faults": 0,
                });
                json!({"stats": stats, "last-update": now})
            }
            (_, "free-page-reporting") => json!(true),
            _ => json!({}),
        }
    }

    fn balloon(&self) -> u64 {
        self.state.lock().unwrap().0
    }

    fn polling_s(&self) -> u64 {
        self.state.lock().unwrap().1
    }
}

/// Group web, whose VM web-1 may have half of its RAM.
fn half() -> String {
    let user = rustix::process::getuid().as_raw();
    format!(
        "[mode]\nballoon = \"enforce\"\n[group.web]\nvms = [\"web-*\"]\nuid = [{user}]\n\
         min = \"64MiB\"\nbase = \"128MiB\"\nmax = \"128MiB\"\n"
    )
}

/// A daemon, its configuration without a time of grace, and its VM.
struct ScriptedHost {
    daemon: TestDaemon,
    script: Script,
}

impl ScriptedHost {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let drop_ins = dir.path().join("overbook.d");
        std::fs::create_dir(&drop_ins).unwrap();
        // QEMUs of others on this machine are left alone.
        let host = "[host]\ngrace_s = 0\nattach = \"off\"\n";
        std::fs::write(drop_ins.join("host.toml"), host).unwrap();
        let script = Script::listening(dir.path());
        let mut daemon = TestDaemon::start(dir, "");
        daemon.until("the VM is found", |daemon| {
            daemon.try_get::<Value>("/v1/vms/web-1").is_some_and(|vm| vm["link_up"] == true)
        });
        Self { daemon, script }
    }

    fn says(&self, arguments: &[&str]) -> String {
        let config = self.daemon.dir().join("overbook.toml");
        let output = overbook(&[arguments, &["--config", config.to_str().unwrap()]].concat());
        assert!(output.status.success(), "{arguments:?}: {}", error(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn vm(daemon: &TestDaemon) -> Value {
        daemon.try_get::<Value>("/v1/vms/web-1").unwrap_or_default()
    }

    fn refusal(vm: &Value) -> &str {
        vm["refusals"][0]["text"].as_str().unwrap_or_default()
    }

    /// Waits for this many further ticks.
    fn ticks(&mut self, count: u64) {
        let wall =
            |daemon: &TestDaemon| daemon.get::<Value>("/v1/host")["wall_ms"].as_u64().unwrap();
        let until = wall(&self.daemon) + count * 1000;
        self.daemon.until("the ticks pass", |daemon| wall(daemon) >= until);
    }

    fn restart(self) -> Self {
        let Self { daemon, script } = self;
        Self { daemon: daemon.restarted(), script }
    }
}

#[test]
fn a_paused_vm_keeps_what_it_has_over_a_restart_until_it_is_resumed_and_a_release_undoes_all() {
    let mut world = ScriptedHost::start();
    let said = world.says(&["pause", "web-1"]);
    assert_eq!(said, "web-1 paused: nothing is changed until `overbook resume web-1`\n");
    world.daemon.reconfigure(&half());
    world.daemon.until("its group has it", |daemon| ScriptedHost::vm(daemon)["group"] == "web");
    world.ticks(5);
    let vm = ScriptedHost::vm(&world.daemon);
    assert_eq!((world.script.balloon(), &vm["paused"]), (RAM, &json!(true)));
    let why = "paused by the operator: nothing is changed on it until `overbook resume web-1`";
    assert_eq!(ScriptedHost::refusal(&vm), why);
    let status = world.says(&["status"]);
    assert!(status.starts_with("WARNING: ") && status.contains(" paused "), "{status}");
    assert_eq!(world.daemon.get::<Value>("/v1/host")["paused_vms"], json!(["web-1"]));
    assert!(world.says(&["explain", "web-1"]).contains(why));

    world = world.restart();
    world.daemon.until("it is found again", |daemon| {
        ScriptedHost::refusal(&ScriptedHost::vm(daemon)) == why
    });
    world.ticks(5);
    assert_eq!(world.script.balloon(), RAM);

    assert_eq!(world.says(&["resume", "web-1"]), "web-1 resumed\n");
    let script = world.script.clone();
    world.daemon.until("it shrinks", |_| script.balloon() == RAM / 2);
    let would = world.says(&["release", "--dry-run"]);
    assert!(would.starts_with("web-1: would get 128 MiB back, "), "{would}");
    assert!(would.contains("balloon back to 256 MiB"), "{would}");
    assert_eq!((script.balloon(), script.polling_s()), (RAM / 2, 1), "nothing was changed");

    // Memory that was taken stays taken in a pause, also in one of its group.
    let said = world.says(&["pause", "web"]);
    assert_eq!(said, "group web paused: nothing is changed until `overbook resume web`\n");
    world.daemon.reconfigure(&half().replace("128MiB", "200MiB"));
    let base = |daemon: &TestDaemon| ScriptedHost::vm(daemon)["base_bytes"] == 200 << 20;
    world.daemon.until("its base is larger", base);
    world.ticks(5);
    assert_eq!(script.balloon(), RAM / 2);

    let said = world.says(&["release", "web"]);
    assert!(said.starts_with("web-1: ") && said.contains("balloon back to 256 MiB"), "{said}");
    assert_eq!((script.balloon(), script.polling_s()), (RAM, 0));
    world = world.restart();
    world.daemon.until("it is found again", |daemon| ScriptedHost::vm(daemon)["paused"] == true);
    world.ticks(5);
    assert_eq!((script.balloon(), script.polling_s()), (RAM, 0), "it is left alone");
    let said = world.says(&["resume"]);
    assert_eq!(said, "resumed, except group web, paused by name\n");
    assert_eq!(world.says(&["resume", "web"]), "group web resumed\n");
    world.daemon.until("it shrinks again", |_| script.balloon() == 200 << 20);
    assert_eq!(script.polling_s(), 1);

    // Without a daemon.
    let config = world.daemon.dir().join("overbook.toml");
    let ScriptedHost { daemon, .. } = world;
    let dir = daemon.killed();
    let run = |arguments: &[&str]| {
        let output = overbook(&[arguments, &["--config", config.to_str().unwrap()]].concat());
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &error(&output);
        (output.status.code(), said)
    };
    let (code, would) = run(&["release", "--dry-run", "web-1"]);
    assert_eq!(code, Some(0), "{would}");
    assert!(would.starts_with("web-1: would get 56 MiB back, "), "{would}");
    assert_eq!((script.balloon(), script.polling_s()), (200 << 20, 1));
    let (code, said) = run(&["release", "web-9"]);
    assert_eq!(code, Some(1));
    assert!(said.contains("no VM or group is named `web-9`; VMs: web-1; groups: web"), "{said}");
    let (code, said) = run(&["release", "web"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("web-1: ") && said.contains("balloon back to 256 MiB"), "{said}");
    assert_eq!((script.balloon(), script.polling_s()), (RAM, 0));
    drop(dir);
}

#[test]
fn nothing_is_taken_for_the_time_of_grace_after_a_pause_of_the_host() {
    let mut world = ScriptedHost::start();
    assert_eq!(world.says(&["pause"]), "paused: nothing is changed until `overbook resume`\n");
    world.daemon.reconfigure(&half());
    world.daemon.until("its group has it", |daemon| ScriptedHost::vm(daemon)["group"] == "web");
    // A pause outlives the daemon. The time of grace after a reload does not.
    let host = "[host]\ngrace_s = 600\nattach = \"off\"\n";
    std::fs::write(world.daemon.dir().join("overbook.d/host.toml"), host).unwrap();
    world = world.restart();
    let why = "paused by the operator: nothing is changed until `overbook resume`";
    world.daemon.until("it is found again", |daemon| {
        let vm = ScriptedHost::vm(daemon);
        vm["link_up"] == true && vm.to_string().contains(why)
    });
    assert_eq!(world.says(&["resume"]), "resumed\n");
    world.daemon.until("the time of grace is told", |daemon| {
        ScriptedHost::vm(daemon).to_string().contains("or Overbook was resumed, a moment ago")
    });
    world.ticks(5);
    assert_eq!(world.script.balloon(), RAM);
}

#[test]
fn an_order_for_what_does_not_exist_or_is_not_paused_is_an_error() {
    let world = ScriptedHost::start();
    let post = |path: &str| world.daemon.client().post(path).unwrap_err().to_string();
    assert_eq!(post("/v1/pause?vm=web-9"), "no VM is named `web-9`; known: web-1");
    assert!(post("/v1/release?group=web").starts_with("no group is named `web`"));
    assert_eq!(post("/v1/resume?vm=web-1"), "web-1 is not paused");
    let of_no_group = "no VM of this group is named `a`; none is known";
    assert_eq!(post("/v1/pause?vm=a&group=b"), of_no_group);
}
