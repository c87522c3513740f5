//! Tests state here what they need of the machine, so that no test is skipped in silence.
//!
//! **Problem.** A test that returns early passes, and the test harness hides what it prints.
//!
//! **Idea.** A test calls [`requires`] with a [`Requirement`] and what it found of it. Where the
//! machine lacks it, the test gets `None` and returns. The skip goes to standard error, past the
//! harness, and to the file that [`SKIPPED`] names; `make test` prints that file at its end.
//!
//! **Invariant.** Under `CI` a skip fails the test, unless [`EXPECTED`] names the need and the
//! machine is of the kind that cannot have it.
//!
//! It needs no other crate, because all others' tests may need it.

mod expected;
mod requirement;

use std::env;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::panic::Location;
use std::process::{Command, Stdio};

pub use expected::{EXPECTED, Expected};
pub use requirement::Requirement;

/// The environment variable with the path of the file that lists the skips.
pub const SKIPPED: &str = "OVERBOOK_SKIPPED";

/// The consequence of a need that is not met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Consequence {
    /// A developer's machine may lack anything.
    Skip,
    /// CI's machine is known to lack this; the reason.
    SkipExpected(&'static str),
    Fail,
}

/// Passes on what was found of `need`. `None`: the machine lacks it, and the test returns.
///
/// # Panics
///
/// Under `CI`, if it lacks it and [`EXPECTED`] does not name it for this kind of machine.
#[must_use = "without it the test cannot go on"]
#[track_caller]
pub fn requires<T, E: Display>(need: Requirement, found: Result<T, E>) -> Option<T> {
    let found = match found {
        Ok(found) => return Some(found),
        Err(found) => found,
    };
    let place = Location::caller();
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a thread of it");
    let consequence = consequence(is_ci(env::var("CI").ok().as_deref()), need, EXPECTED);
    let reason = match consequence {
        Consequence::Fail => {
            panic!("CI must run this test. It needs {need}; this machine has not: {found}")
        }
        Consequence::Skip => String::new(),
        Consequence::SkipExpected(why) => format!(" (expected: {why})"),
    };
    let found = found.to_string().replace('\n', " ");
    let (file, line) = (place.file(), place.line());
    tell(&format!("SKIPPED {file}:{line} {test}: it needs {need}; found: {found}{reason}\n"));
    None
}

/// `Ok` if `holds`, otherwise what was found.
///
/// # Errors
///
/// `found`, if `holds` is false.
pub fn ensure(holds: bool, found: impl Display) -> Result<(), String> {
    if holds { Ok(()) } else { Err(found.to_string()) }
}

/// `Ok` for root, otherwise the user.
///
/// # Errors
///
/// The user, if it is not root.
pub fn root() -> Result<(), String> {
    let own = std::fs::metadata("/proc/self").map_err(|error| format!("/proc/self: {error}"))?;
    ensure(own.uid() == 0, format!("user {}", own.uid()))
}

/// `Ok` if the program can be started.
///
/// # Errors
///
/// Why it cannot be started.
pub fn program(name: &str) -> Result<(), String> {
    let mut command = Command::new(name);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().map(drop).map_err(|error| format!("{name}: {error}"))
}

/// Whether the value of the variable `CI` says that this is CI.
fn is_ci(value: Option<&str>) -> bool {
    value.is_some_and(|value| !["", "0", "false"].contains(&value))
}

fn consequence(is_ci: bool, need: Requirement, expected: &[Expected]) -> Consequence {
    if !is_ci {
        return Consequence::Skip;
    }
    let of_this = |expected: &&Expected| expected.need == need && (expected.is_such_a_machine)();
    expected.iter().find(of_this).map_or(Consequence::Fail, |it| Consequence::SkipExpected(it.why))
}

/// Writes a line to standard error and to the list. The harness captures `eprintln` alone.
fn tell(line: &str) {
    std::io::stderr().write_all(line.as_bytes()).expect("standard error takes a line");
    if let Some(path) = env::var_os(SKIPPED).filter(|path| !path.is_empty()) {
        let list = OpenOptions::new().create(true).append(true).open(&path);
        let written = list.and_then(|mut list| list.write_all(line.as_bytes()));
        written.unwrap_or_else(|error| panic!("{SKIPPED}={}: {error}", path.display()));
    }
}

#[cfg(test)]
mod tests;
