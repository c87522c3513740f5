//! The program as the operator runs it, with a served tick or without a daemon.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/program.rs"]
mod program;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixListener,
    path::Path,
    process::{Command, Stdio},
};

use program::{error, json, overbook, says};
use serde_json::Value;
use server::TestServer;

#[test]
fn one_vm_or_group_is_shown_in_full() {
    let server = TestServer::start();
    let vm = says(&server, &["vm", "web-1"]);
    assert!(vm.contains("host view: occupied     180 MiB\n"), "{vm}");
    assert!(vm.contains("guest view: available   12 MiB\n"), "{vm}");
    assert!(says(&server, &["group", "web"]).contains("580 MiB"));
    assert_eq!(json(&server, &["vm", "web-2"])["uncooperative"], true);
}

#[test]
fn working_sets_and_what_they_cost_are_shown() {
    let server = TestServer::start();
    let status = says(&server, &["status"]);
    assert!(status.lines().any(|line| line.starts_with("web-1") && line.contains("150 MiB")));
    let vm = says(&server, &["vm", "web-1"]);
    assert!(vm.contains("host view: working set  150 MiB, 20 MiB of it in its swap\n"), "{vm}");
    assert!(
        vm.contains("tracking                0.95 % of one vCPU and 210 traps/s in the last"),
        "{vm}"
    );
    let group = says(&server, &["group", "web"]);
    assert!(group.contains("worker of web: process 4711, 6 MiB, 1.5 s of CPU time"), "{group}");
}

#[test]
fn a_curve_is_drawn_and_written_as_a_plot() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("curve.svg");
    let text = says(&server, &["vm", "web-1", "--mrc", "--plot", plot.to_str().unwrap()]);
    assert!(text.contains("miss ratio of web-1 by memory, 12000 references/s"), "{text}");
    assert!(text.contains("▲ working set, 20 MiB of it in its swap: 150 MiB"), "{text}");
    assert!(std::fs::read_to_string(plot).unwrap().contains("<svg"));
    let socket = server.socket.to_str().unwrap();
    let output = overbook(&["vm", "web-2", "--mrc", "--socket", socket]);
    assert!(!output.status.success());
    assert!(error(&output).contains("`web-2` has no miss-ratio curve"), "{}", error(&output));
}

#[test]
fn explain_prints_the_daemons_words() {
    let text = says(&TestServer::start(), &["explain", "web-2"]);
    assert!(text.contains("Unchanged    uncooperative: its balloon stands at 384 MiB"), "{text}");
}

#[test]
fn history_shows_readings_and_changes() {
    let text = says(&TestServer::start(), &["history", "web-1", "--rows", "--since", "2h"]);
    assert!(text.starts_with("TIME "), "{text}");
    assert!(text.contains("2026-05-28T20:23:40Z"), "{text}");
    assert!(text.contains("target raised to 192 MiB"), "{text}");
    assert!(!text.contains("--limit"), "{text}");
    let limited = ["history", "web-1", "--rows", "--since", "2h", "--limit", "2"];
    let text = says(&TestServer::start(), &limited);
    assert!(
        text.ends_with("\nthe newest 2 rows of the last 120 min; --limit shows more\n"),
        "{text}"
    );
    assert!(text.contains("\nearlier rows: --until 20"), "{text}");
    let output = overbook(&["history", "web-1", "--since", "0s"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(error(&output).contains("nothing lies in no time; valid: `1s` and more"));
}

#[test]
fn history_begins_with_lines_means_and_changes() {
    let server = TestServer::start();
    let text = says(&server, &["history", "web-1"]);
    assert!(text.starts_with("web-1 in the last 60 min\n\nMAY USE     ▁"), "{text}");
    assert!(text.contains("\nmeans of "), "{text}");
    assert!(text.contains("\nchanges\n2026-05-28T20:23:40Z  target raised to 192 MiB"), "{text}");
    let until = "2026-05-28T20:26:40Z";
    let text = says(&server, &["history", "web-1", "--since", "15min", "--until", until]);
    assert!(text.starts_with("web-1 in the 15 min before 2026-05-28T20:26:40Z\n"), "{text}");
    assert!(text.contains("\n2026-05-28T20:11:00Z  192 MiB"), "{text}");
    assert!(overbook(&["history", "web-1", "--until", "noon"]).status.code() == Some(2));
}

#[test]
fn the_history_of_what_never_was_is_an_error() {
    let server = TestServer::start();
    let fails = |arguments: &[&str]| {
        let socket = ["--socket", server.socket.to_str().unwrap()];
        let output = overbook(&[arguments, &socket].concat());
        assert_eq!(output.status.code(), Some(1));
        error(&output)
    };
    let why = fails(&["history", "web-9"]);
    assert_eq!(why, "overbook: no VM is named `web-9`; known: db-1, web-1, web-2\n");
    let why = fails(&["history", "web-9", "--loans"]);
    assert_eq!(why, "overbook: no group is named `web-9`; known: web\n");
    let text = says(&server, &["history", "web-2"]);
    assert_eq!(text, "nothing is known of web-2 in the last 60 min\n");
}

#[test]
fn an_unknown_vm_is_an_error_with_the_known_names() {
    let server = TestServer::start();
    let output = overbook(&["vm", "nope", "--socket", server.socket.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let why = error(&output);
    assert_eq!(why, "overbook: no VM is named `nope`; known: db-1, web-1, web-2\n");
}

#[test]
fn pause_resume_and_release_ask_the_daemon() {
    let server = TestServer::start();
    for verb in ["pause", "resume", "release"] {
        assert_eq!(says(&server, &[verb]), format!("{verb} done\n"));
    }
    assert_eq!(json(&server, &["pause"])["message"], "pause done");
}

#[test]
fn without_a_daemon_the_exit_code_is_3_and_the_words_help() {
    for command in ["status", "vm", "plan", "pause", "top"] {
        let output = overbook(&[command, "--socket", "/nonexistent/s"]);
        assert_eq!(output.status.code(), Some(3), "{command}");
        let why = error(&output);
        let start = "overbook: no daemon answers at /nonexistent/s (is `overbook daemon` running?";
        assert!(why.starts_with(start), "{why}");
    }
}

#[test]
fn a_configuration_that_was_named_must_be_readable() {
    let output = overbook(&["status", "--config", "/nonexistent/x.toml"]);
    assert_eq!(output.status.code(), Some(1));
    let why = error(&output);
    assert!(why.contains("/nonexistent/x.toml") && why.contains("--socket"), "{why}");
}

#[test]
fn the_socket_is_taken_from_the_configuration() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("overbook.toml");
    fs::write(&config, format!("[api]\nsocket = {:?}\n", server.socket)).unwrap();
    let output = overbook(&["status", "--config", config.to_str().unwrap()]);
    assert!(output.status.success(), "{}", error(&output));
}

#[test]
fn an_exported_case_is_decided_again_without_a_daemon() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("case.json");
    fs::write(&file, says(&server, &["plan", "--export"])).unwrap();
    drop(server);
    let output = overbook(&["plan", "--json", "--from", file.to_str().unwrap()]);
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<&str> =
        plan["vms"].as_array().unwrap().iter().map(|vm| vm["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["db-1", "web-1", "web-2"]);
    let text = overbook(&["plan", "--from", file.to_str().unwrap()]);
    assert!(text.stdout.starts_with(b"mode enforce: it is carried out\n"));
}

#[test]
fn a_broken_case_names_the_field() {
    let server = TestServer::start();
    let mut case: Value = serde_json::from_str(&says(&server, &["plan", "--export"])).unwrap();
    case["view"]["vms"]["web-1"]["ram"] = "lots".into();
    let why = decide_error(&case.to_string());
    assert!(
        why.contains("view.vms.web-1.ram: invalid type: string \"lots\", expected u64"),
        "{why}"
    );
    assert!(decide_error("{").contains("EOF while parsing"));
    assert!(
        decide_error("\n").contains("it is empty; valid: what `overbook plan --export` writes")
    );
    assert!(!decide_error("\u{feff}{\"now\": 1}").contains("expected value"));
    let output = overbook(&["plan", "--from", "/nonexistent/case.json"]);
    assert!(error(&output).contains("/nonexistent/case.json: No such file"));
}

fn decide_error(text: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("case.json");
    fs::write(&file, text).unwrap();
    let output = overbook(&["plan", "--from", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    error(&output)
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let program = env!("CARGO_BIN_EXE_overbook");
    let mut command = Command::new(program);
    command.args(["completions", "bash"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let mut words = String::new();
    child.stderr.take().unwrap().read_to_string(&mut words).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(words, "");
}

#[test]
fn a_name_cannot_steer_the_operators_terminal() {
    let server = TestServer::start();
    let mut tick = http_fixture::published();
    let vm = tick.view.vms[&model::VmName::from("web-1")].clone();
    tick.view.vms.insert("\u{1b}]0;gotcha\u{7}".into(), vm);
    server.publish(tick);
    let text = says(&server, &["status"]);
    assert!(text.contains("gotcha") && !text.contains('\u{1b}'), "{text}");
}

/// Words that the program offers a shell for the last of these.
fn offered(words: &[&str]) -> Vec<String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
    command.env("OVERBOOK_COMPLETE", "bash").env("_CLAP_IFS", "\n");
    command.env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
    let output = command.arg("--").args(words).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn completions_and_man_pages_know_every_command() {
    let output = overbook(&["completions", "bash"]);
    let script = String::from_utf8(output.stdout).unwrap();
    assert!(script.contains("OVERBOOK_COMPLETE=\"bash\""), "{script}");
    let shown = offered(&["overbook", ""]);
    let dir = tempfile::tempdir().unwrap();
    assert!(overbook(&["man", dir.path().to_str().unwrap()]).status.success());
    for page in ["overbook.8", "overbook.toml.5"] {
        assert!(dir.path().join(page).exists(), "{page}");
    }
    let help = String::from_utf8(overbook(&["--help"]).stdout).unwrap();
    for command in ["daemon", "check", "status", "top", "plan", "release", "history", "lab"] {
        assert!(help.contains(command), "{command}");
        assert!(shown.iter().any(|word| word == command), "{command}: {shown:?}");
        let page = fs::read_to_string(dir.path().join(format!("overbook-{command}.8"))).unwrap();
        for part in ["SYNOPSIS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"] {
            assert!(
                page.contains(&format!(".SH \"{part}\"")) || page.contains(&format!(".SH {part}"))
            );
        }
    }
    let history = fs::read_to_string(dir.path().join("overbook-history.8")).unwrap();
    assert!(history.contains("\\-\\-since\\fR \\fITIME\\fR"), "{history}");
    // Overbook starts these by itself.
    for hidden in ["worker", "api", "store"] {
        assert_eq!(offered(&["overbook", hidden]), [""; 0]);
    }
}

#[test]
fn check_answers_with_its_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("overbook.toml");
    fs::write(&config, "[host]\nreserve = 5\n").unwrap();
    let output = overbook(&["check", "--config", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("overbook.toml:2"));

    let output = overbook(&["check", "--json", "--config", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["faults"][0]["line"], 2);
}

#[test]
fn check_tries_each_repository_and_says_what_is_wrong_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let mut lends = Command::new(env!("CARGO_BIN_EXE_overbook"))
        .args(["repository", "--memory", "16MiB", "--unix", &path("lends")])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = [0; 1];
    lends.stderr.as_mut().unwrap().read_exact(&mut said).unwrap();
    let other = UnixListener::bind(dir.path().join("other")).unwrap();
    let babbles = std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        // The client may have closed the connection: the first bytes were enough.
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let disk = |name: &str, repositories: &[&str]| {
        let repositories: Vec<String> = repositories.iter().map(|r| path(r)).collect();
        let file = path(name);
        format!(
            "[disk.{name}]\nvm = \"a\"\nfile = \"{file}\"\nsize = \"16MiB\"\n\
             repositories = {repositories:?}\n"
        )
    };
    let text = "group.g.vms = [\"a\"]\n".to_owned()
        + &disk("one", &["lends", "nobody"])
        + &disk("two", &["lends", "other"]);
    let config = dir.path().join("overbook.toml");
    fs::write(&config, text).unwrap();
    let output = overbook(&["check", "--config", config.to_str().unwrap()]);
    lends.kill().unwrap();
    lends.wait().unwrap();
    babbles.join().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{text}");
    let line = |name: &str| {
        let begin = format!("repository {} of ", path(name));
        text.lines().find_map(|line| line.strip_prefix(&begin)).unwrap_or_else(|| panic!("{text}"))
    };
    assert_eq!(line("lends"), "one, two: fine, it would lend 16 MiB");
    assert!(line("nobody").starts_with("one: cannot be reached: No such file"), "{text}");
    let other = "two: is no repository: the server begins with 0x485454502f312e31";
    assert!(line("other").starts_with(other), "{text}");
    assert!(!dir.path().join("one").exists(), "no disk is made");
    let text = "group.g.vms = [\"a\"]\n".to_owned() + &disk("one", &["lends"]);
    let text = text.replace(&path("lends"), "localhost:1") + "tls = \"/nonexistent\"\n";
    fs::write(&config, text).unwrap();
    let output = overbook(&["check", "--config", config.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "the disk cannot be served");
    assert!(String::from_utf8_lossy(&output.stdout).contains("/nonexistent/ca-cert.pem"));
}

#[test]
fn check_tries_the_host_and_its_exit_code_says_what_its_answer_says() {
    let output = overbook(&["check", "--host", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(i32::from(report["managed"] == false)));
    let features = report["features"].as_array().unwrap();
    assert!(features.len() > 5, "{report}");
    for feature in features {
        assert_eq!(feature["works"] == true, feature["cost"].is_null(), "{feature}");
    }
    let text = String::from_utf8(overbook(&["check", "--host"]).stdout).unwrap();
    assert!(text.contains("UFFDIO_MOVE"), "{text}");
}

/// A repository as an operator starts it, ended with the test.
struct RepositoryProcess(std::process::Child);

impl RepositoryProcess {
    fn at(socket: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
        command.args(["repository", "--memory", "16MiB", "--unix"]).arg(socket);
        let child = Self(command.stderr(Stdio::null()).spawn().unwrap());
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !socket.exists() {
            assert!(std::time::Instant::now() < end, "the repository did not start");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        child
    }
}

impl Drop for RepositoryProcess {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Ends the keeper and the processes that it has started.
struct DisksProcess(std::process::Child);

impl Drop for DisksProcess {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        // The process may have ended by itself.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.0.wait();
    }
}

#[test]
fn what_a_vm_swaps_that_lacks_nothing_stays_away_from_repositories() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let (config, repository) = (dir.path().join("overbook.toml"), dir.path().join("repository"));
    let at = dir.path().display();
    let text = format!(
        "[api]\nsocket = \"{at}/s\"\n[group.web]\nvms = [\"w\"]\n[disk.d]\nvm = \"w\"\n\
         file = \"{at}/file\"\nsize = \"16MiB\"\nrepositories = [{repository:?}]\n"
    );
    fs::write(&config, text).unwrap();
    let _lends = RepositoryProcess::at(&repository);
    let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
    command.args(["disks", "web", "--config"]).arg(&config).stderr(Stdio::null());
    let _disks = DisksProcess(command.spawn().unwrap());
    let spec = overbook::config_files::load(&config).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let status = disks::status_socket(&spec, &"web".into());
        let until = async |at_max: Option<&str>, is_so: fn(&model::RepositoriesReading) -> bool| {
            let at_max = at_max.map(|vm| [vm.into()].into());
            let order = disks::Order { at_max, ..Default::default() };
            for _ in 0..6_000 {
                let found = disks::ask(&status, &order).await;
                let found = found.and_then(|found| found.disks["d"].repositories);
                if found.as_ref().is_some_and(is_so) {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
            panic!("not in time");
        };
        until(None, |far| far.connected == 1 && far.admits).await;
        let wanted = |name: &str| pageserver::nbd::dialogue::Wanted {
            name: name.to_owned(),
            tls: false,
            status: false,
        };
        let stream = tokio::net::UnixStream::connect(spec.disk_socket("d")).await.unwrap();
        let (client, connection) = pageserver::client::connect(stream, wanted("d")).await.unwrap();
        tokio::spawn(connection.run());
        client.write(0, vec![1; 64 << 10].into()).await.unwrap();
        until(None, |far| far.held == model::Bytes::kib(64)).await;
        until(Some("w"), |far| !far.admits).await;
        client.write(0, vec![2; 32 << 10].into()).await.unwrap();
        until(Some("w"), |far| far.held == model::Bytes::kib(32) && !far.admits).await;
        assert_eq!(client.read(0, 64 << 10).await.unwrap()[32 << 10..], [1; 32 << 10]);
        assert_eq!(client.read(0, 32 << 10).await.unwrap(), [2; 32 << 10]);
        // No more orders come.
        until(None, |far| far.admits).await;
        client.write(0, vec![3; 32 << 10].into()).await.unwrap();
        until(None, |far| far.held == model::Bytes::kib(64)).await;
    });
}

/// A configuration in its own directory, and the output of `check` on it.
fn checked(text: &str) -> (Option<i32>, String, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("overbook.toml");
    let at = dir.path().display();
    let host = format!("host.state = \"{at}/state\"\napi.socket = \"{at}/s\"\n");
    fs::write(&config, host + &text.replace("DIR", &at.to_string())).unwrap();
    let output = overbook(&["check", "--config", config.to_str().unwrap()]);
    (output.status.code(), String::from_utf8(output.stdout).unwrap(), dir)
}

#[test]
fn what_the_daemon_would_not_start_with_is_no_ok() {
    let tcp = "api.tcp = \"127.0.0.1:7780\"\napi.token_file = \"DIR/token\"\n";
    let faulty = [
        (tcp, "fault: api.token_file "),
        ("api.tcp = \"192.0.2.1:7780\"\napi.token_file = \"DIR/token\"\n", "fault: api.tcp"),
        ("host.reserve = \"900TiB\"\n", "fault: `reserve` in [host] is 900 TiB, and the host has"),
        (
            "[group.web]\nvms = [\"w\"]\nbase = \"999TiB\"\n",
            "fault: `base` of [group.web] is 999 TiB",
        ),
    ];
    for (text, fault) in faulty {
        let (code, said, _dir) = checked(text);
        assert!(said.contains(fault), "{text}: {said}");
        assert_eq!((code, said.contains("ok:")), (Some(1), false), "{said}");
    }
    // The fault of the token comes from the start itself.
    let dir = tempfile::tempdir().unwrap();
    let (config, at) = (dir.path().join("overbook.toml"), dir.path().display());
    let host = format!("host.state = \"{at}/state\"\napi.socket = \"{at}/s\"\n");
    fs::write(&config, host + &tcp.replace("DIR", &at.to_string())).unwrap();
    fs::write(dir.path().join("token"), "0123456789abcdef").unwrap();
    let run = |command: &str| overbook(&[command, "--config", config.to_str().unwrap()]);
    let check = String::from_utf8(run("check").stdout).unwrap();
    let fault = check.lines().find_map(|line| line.strip_prefix("fault: ")).unwrap();
    assert!(fault.contains("has mode 0644: others may read it"), "{fault}");
    assert!(error(&run("daemon")).contains(fault), "{}", error(&run("daemon")));

    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(dir.path().join("state"), open).unwrap();
    let check = String::from_utf8(run("check").stdout).unwrap();
    assert!(check.contains("fault: state directory "), "{check}");
}

#[test]
fn what_has_no_effect_is_noted_beside_the_ok() {
    let text = "host.qmp = [\"DIR/nowhere/*.sock\"]\n[group.web]\nvms = [\"web-[0-9]*\"]\n\
                cold = \"when-needed\"\ntracking = \"off\"\n";
    let (code, said, _dir) = checked(text);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.starts_with("ok: 1 group"), "{said}");
    for note in [
        "note: `qmp` \"",
        "/nowhere: no QEMU can make its socket there\n",
        "note: [group.web]: only `*` and `?` are wildcards; \"web-[0-9]*\" is otherwise taken literally",
        "note: [group.web]: `cold` does nothing while tracking = \"off\"",
    ] {
        assert!(said.contains(note), "{note} is missing in\n{said}");
    }
}

#[test]
fn a_diff_without_a_daemon_fails_and_hides_no_other_finding() {
    let (_, plain, dir) = checked("[group.web]\nvms = [\"web-[0-9]*\"]\n");
    let config = dir.path().join("overbook.toml");
    let run = |more: &[&str]| {
        let arguments = [&["check", "--diff", "--config", config.to_str().unwrap()], more].concat();
        let output = overbook(&arguments);
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (code, said) = run(&[]);
    assert_eq!(code, Some(1), "{said}");
    let diff = said.strip_prefix(&plain).unwrap();
    assert!(diff.starts_with("diff: no daemon answers at "), "{said}");
    let (code, said) = run(&["--json"]);
    let report: Value = serde_json::from_str(&said).unwrap();
    let why = report["why_no_changes"].as_str().unwrap();
    assert!(why.starts_with("no daemon answers at ") && code == Some(1), "{said}");
    assert!(report["findings"].to_string().contains("taken literally"), "{said}");
}

#[test]
fn a_unit_that_is_restarted_releases_nothing_and_one_that_is_stopped_does() {
    let dir = tempfile::tempdir().unwrap();
    let (config, systemctl) = (dir.path().join("overbook.toml"), dir.path().join("systemctl"));
    let at = dir.path().display();
    fs::write(&config, format!("host.state = \"{at}/state\"\napi.socket = \"{at}/s\"\n")).unwrap();
    let unit = "overbook.service";
    let said = |job: &str| {
        fs::write(&systemctl, format!("#!/bin/sh\necho \"$@\" > {at}/asked\necho '{job}'\n"))
            .unwrap();
        let run = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&systemctl, run).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
        command.args(["release", "--unless-restarting", unit, "--config"]).arg(&config);
        let path = format!("{at}:{}", std::env::var("PATH").unwrap_or_default());
        let output = command.env("PATH", path).stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", error(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let kept = "overbook.service is being restarted: every guest keeps the memory that it has\n";
    assert_eq!(said("4711 overbook.service restart running"), kept);
    let asked = fs::read_to_string(dir.path().join("asked")).unwrap();
    assert_eq!(asked, "list-jobs --no-legend --plain overbook.service\n");
    for job in ["4711 overbook.service stop running", "4711 other.service restart running", ""] {
        assert_eq!(said(job), "nothing to release\n", "{job}");
    }
}
