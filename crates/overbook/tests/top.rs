//! `overbook top` on a real terminal: it ends when that goes or on a signal, and restores it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    fs,
    io::Read,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use server::TestServer;
use sys::process::{Identity, Signal, children_of};

const LIMIT: Duration = Duration::from_secs(60);
/// Output of a program that enters the alternate screen.
const TAKES: &str = "\x1b[?1049h";
/// Output of a program that leaves it.
const GIVES_BACK: &str = "\x1b[?1049l";

/// `overbook top` on a terminal of script(1), started by a shell.
struct Terminal {
    script: Child,
    /// While this pipe is open, script(1) sends no end of input.
    _keys: ChildStdin,
    screen: ChildStdout,
    seen: String,
    top: Identity,
}

impl Terminal {
    /// Waits until the view is shown.
    fn open(server: &TestServer) -> Self {
        let program = env!("CARGO_BIN_EXE_overbook");
        let top = format!("stty -g; {program} --socket {} top; stty -g", server.socket.display());
        let mut script = Command::new("script")
            .args(["--quiet", "--flush", "--command", &top, "/dev/null"])
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("script(1) of util-linux is needed");
        let (keys, mut screen) = (script.stdin.take().unwrap(), script.stdout.take().unwrap());
        let mut seen = String::new();
        while !seen.contains(TAKES) {
            let mut bytes = [0; 4096];
            let length = screen.read(&mut bytes).unwrap();
            assert!(length > 0, "{seen}");
            seen.push_str(&String::from_utf8_lossy(&bytes[..length]));
        }
        let top = find(script.id(), Path::new(program)).unwrap();
        Self { script, _keys: keys, screen, seen, top }
    }

    /// All text on the screen, after everything on it has ended.
    fn last_words(mut self) -> String {
        let mut rest = Vec::new();
        self.screen.read_to_end(&mut rest).unwrap();
        self.script.wait().unwrap();
        std::mem::take(&mut self.seen) + &String::from_utf8_lossy(&rest)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.script.kill();
        let _ = self.script.wait();
        let _ = self.top.signal(Signal::KILL);
    }
}

/// The descendant that runs `program`.
fn find(ancestor: u32, program: &Path) -> Option<Identity> {
    children_of(ancestor).unwrap().into_iter().find_map(|child| {
        let runs = fs::read_link(format!("/proc/{}/exe", child.pid)).unwrap_or_default();
        if runs == program { Some(child) } else { find(child.pid, program) }
    })
}

#[test]
fn when_its_terminal_goes_it_ends() {
    let server = TestServer::start();
    let mut terminal = Terminal::open(&server);
    // Killing script(1) closes the last descriptor of the terminal, as when a connection breaks.
    terminal.script.kill().unwrap();
    let started = Instant::now();
    assert!(terminal.top.wait_for(LIMIT).unwrap(), "it still runs");
    println!("ended after {:?}", started.elapsed());
}

#[test]
fn a_signal_ends_it_and_the_terminal_is_as_it_was() {
    let server = TestServer::start();
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let terminal = Terminal::open(&server);
        assert!(terminal.top.signal(signal).unwrap());
        let screen = terminal.last_words();
        assert!(screen.contains(GIVES_BACK), "{signal:?}: {screen:?}");
        let settings = screen.lines().filter(|line| line.matches(':').count() > 20);
        let settings: Vec<&str> = settings.map(|line| line.trim_end()).collect();
        let [before, after] = settings[..] else { panic!("{screen:?}") };
        assert!(after.ends_with(before), "{signal:?}: {before:?} {after:?}");
    }
}
