//! `overbook top` and `status` on a real terminal: they fit it, and `top` ends when it goes or on a
//! signal, and restores it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
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
    keys: ChildStdin,
    screen: ChildStdout,
    seen: String,
    top: Identity,
}

impl Terminal {
    /// Waits until the view is shown.
    fn open(server: &TestServer) -> Self {
        Self::open_after(server, "")
    }

    /// The same after these commands of the shell.
    fn open_after(server: &TestServer, settings: &str) -> Self {
        let program = env!("CARGO_BIN_EXE_overbook");
        let socket = server.socket.display();
        let top = format!(
            "{settings} stty -g; {program} --socket {socket} top; \
             echo $? > \"${{RESULT:-/dev/null}}\"; stty -g"
        );
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
        Self { script, keys, screen, seen, top }
    }

    /// Presses keys, and waits until the screen has these words.
    fn press_until(&mut self, keys: &str, words: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.keys.flush().unwrap();
        let begin = Instant::now();
        while !self.screen_has(words) {
            assert!(begin.elapsed() < LIMIT, "{words} is not on\n{}", painted(&self.seen));
            let mut bytes = [0; 4096];
            let length = self.screen.read(&mut bytes).unwrap();
            assert!(length > 0, "{words} is not on\n{}", painted(&self.seen));
            self.seen.push_str(&String::from_utf8_lossy(&bytes[..length]));
        }
    }

    fn screen_has(&self, words: &str) -> bool {
        painted(&self.seen).contains(words)
    }

    /// Ends the view and returns all that was written.
    fn quit(mut self) -> String {
        self.keys.write_all(b"q").unwrap();
        self.last_words()
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

/// The screen after this output since the view took it.
fn painted(output: &str) -> String {
    let output = output.rsplit(TAKES).next().unwrap_or_default();
    let mut cells: BTreeMap<usize, BTreeMap<usize, char>> = BTreeMap::new();
    let (mut row, mut column) = (1, 1);
    let mut letters = output.chars();
    while let Some(letter) = letters.next() {
        if letter != '\x1b' {
            cells.entry(row).or_default().insert(column, letter);
            column += 1;
            continue;
        }
        let (mut numbers, mut end) = (String::new(), None);
        for letter in letters.by_ref().filter(|letter| *letter != '[') {
            if letter.is_ascii_alphabetic() {
                end = Some(letter);
                break;
            }
            numbers.push(letter);
        }
        match (end, numbers.split_once(';')) {
            (Some('H'), Some((to_row, to_column))) => {
                (row, column) = (to_row.parse().unwrap(), to_column.parse().unwrap());
            }
            (Some('J'), _) => cells.clear(),
            _ => {}
        }
    }
    let line = |cells: &BTreeMap<usize, char>| -> String {
        let last = cells.keys().next_back().copied().unwrap_or(0);
        (1..=last).map(|column| cells.get(&column).copied().unwrap_or(' ')).collect()
    };
    cells.values().map(|cells| line(cells) + "\n").collect()
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
fn when_its_terminal_goes_without_a_hangup_signal_it_exits_by_itself() {
    let server = TestServer::start();
    let dir = tempfile::tempdir().unwrap();
    let result = dir.path().join("result");
    // As under nohup(1). The shell lives on, too, and writes the exit code.
    let settings = format!("trap '' HUP; RESULT='{}';", result.display());
    let mut terminal = Terminal::open_after(&server, &settings);
    terminal.script.kill().unwrap();
    assert!(terminal.top.wait_for(LIMIT).unwrap(), "it still runs");
    let begin = Instant::now();
    let mut code = String::new();
    while !code.ends_with('\n') {
        assert!(begin.elapsed() < LIMIT, "no exit code");
        std::thread::sleep(Duration::from_millis(10));
        code = fs::read_to_string(&result).unwrap_or_default();
    }
    // A process that a signal has ended has a code above 128.
    assert!(["0\n", "1\n"].contains(&code.as_str()), "{code}");
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

#[test]
fn keys_sort_filter_explain_and_help() {
    let server = TestServer::start();
    let mut terminal = Terminal::open_after(&server, "stty cols 80 rows 24;");
    terminal.press_until("", "sorted by GUEST:SWAP");
    terminal.press_until("s", "sorted by STATE");
    terminal.press_until("/nothing-like-it\r", "/nothing-like-it: 0 of 3 VMs");
    assert!(!terminal.screen_has("web-1"), "{}", painted(&terminal.seen));
    terminal.press_until("\x1b", "uncooperative: its");
    terminal.press_until("\x1b[F", "┌ web-1, ");
    terminal.press_until("\r", " web-1, lines 1-");
    terminal.press_until("\x1b[F", "Last change  3 min before this tick");
    terminal.press_until("?", "PageUp PageDown select");
    terminal.press_until("?", "uncooperative: its");
    assert!(terminal.quit().contains(GIVES_BACK));
}

#[test]
fn a_terminal_of_40x8_is_large_enough() {
    let server = TestServer::start();
    let mut terminal = Terminal::open_after(&server, "stty cols 40 rows 8;");
    terminal.press_until("", "? help");
    assert!(terminal.screen_has("web-2"), "{}", painted(&terminal.seen));
    terminal.press_until("?", " keys, lines 1-4 of ");
    assert!(terminal.quit().contains(GIVES_BACK));
}

#[test]
fn no_color_is_obeyed() {
    let server = TestServer::start();
    let has_colours = |settings: &str| {
        let mut terminal = Terminal::open_after(&server, settings);
        terminal.press_until("", "? help");
        terminal.quit().contains("\x1b[38;5;")
    };
    assert!(has_colours("unset NO_COLOR; stty cols 80 rows 24;"));
    assert!(!has_colours("export NO_COLOR=1; stty cols 80 rows 24;"));
}

#[test]
fn status_fits_its_terminal() {
    let server = TestServer::start();
    let program = env!("CARGO_BIN_EXE_overbook");
    let status = format!("stty cols 64; {program} --socket {} status", server.socket.display());
    let output = Command::new("script")
        .args(["--quiet", "--command", &status, "/dev/null"])
        .stdin(Stdio::null())
        .output()
        .expect("script(1) of util-linux is needed");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("WARNING: db-1"), "{text}");
    let long = text.lines().find(|line| line.trim_end().chars().count() > 64);
    assert_eq!(long, None);
}
