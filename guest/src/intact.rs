//! Checks a distribution's programs and libraries against the MD5 sums of their packages, as
//! `debsums` does.
//!
//! The check reads the guest's page cache, from which the programs run. It finds a corrupted page
//! as long as the kernel caches it. Each round counts each wrong file as one bad byte. A check
//! that fails counts as one, too, because it runs the same programs.

use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::Args;

use crate::args::seconds;
use crate::error::WorkError;
use crate::program;
use crate::run::RunState;

/// The directory with the packages' sums.
const SUMS: &str = "/var/lib/dpkg/info";
/// The files below these are programs and libraries.
const CODE: [&str; 6] = ["bin/", "lib/", "sbin/", "usr/bin/", "usr/lib/", "usr/sbin/"];
/// Every workload needs these.
const COMMON: [&str; 5] = ["coreutils", "dash", "libc6", "libssl", "zlib1g"];
const LIST: &str = "/tmp/overbook-sums";

#[derive(Debug, Args)]
pub(crate) struct Checks {
    /// Check the programs' files at this interval [0 = never]
    #[arg(long, value_name = "SECS", default_value = "20", value_parser = seconds)]
    check_s: f64,
}

/// Checks the packages with these name prefixes, until the stop. `checks` counts the rounds.
pub(crate) fn watch(
    checks: &Checks,
    packages: &[&str],
    shared: &Arc<RunState>,
) -> Result<(), WorkError> {
    shared.bad_bytes.set(0);
    if checks.check_s == 0.0 {
        return Ok(());
    }
    let every = Duration::from_secs_f64(checks.check_s);
    let sums = sums_of(Path::new(SUMS), &[&COMMON, packages].concat());
    let sums = sums.map_err(WorkError::file("read", Path::new(SUMS)))?;
    fs::write(LIST, sums).map_err(WorkError::file("write", Path::new(LIST)))?;
    shared.checks.set(0);
    let shared = Arc::clone(shared);
    let check = move || {
        while shared.sleep_until(shared.now() + every) {
            let bad = wrong_files(Path::new("/"), Path::new(LIST)).unwrap_or_else(|error| {
                eprintln!("overbook-guest: cannot check the programs: {error}");
                1
            });
            shared.bad_bytes.add(bad);
            shared.checks.add(1);
        }
    };
    let builder = thread::Builder::new().name("check".into());
    builder.spawn(check).map(drop).map_err(|source| WorkError::Start { what: "check", source })
}

/// The lines `<sum>  <file>` of programs and libraries.
fn sums_of(info: &Path, packages: &[&str]) -> io::Result<String> {
    let mut lines = String::new();
    for entry in fs::read_dir(info)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".md5sums") || !packages.iter().any(|p| name.starts_with(p)) {
            continue;
        }
        for line in fs::read_to_string(&path)?.lines() {
            let file = line.split_once("  ").map_or("", |(_, file)| file);
            if CODE.iter().any(|dir| file.starts_with(dir)) {
                lines += line;
                lines.push('\n');
            }
        }
    }
    if lines.is_empty() {
        return Err(io::Error::other("no package left sums of its files"));
    }
    Ok(lines)
}

/// Counts the wrong files, and reports each on standard error.
fn wrong_files(root: &Path, list: &Path) -> io::Result<usize> {
    let mut md5sum: Command = program::command("md5sum");
    md5sum.args(["--check", "--quiet"]).arg(list).current_dir(root).stderr(Stdio::inherit());
    let output = md5sum.output()?;
    let wrong = String::from_utf8_lossy(&output.stdout).into_owned();
    eprint!("{wrong}");
    match wrong.lines().count() {
        0 if !output.status.success() => Err(io::Error::other(output.status.to_string())),
        count => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sum of an empty file.
    const EMPTY: &str = "d41d8cd98f00b204e9800998ecf8427e";

    #[test]
    fn a_file_that_is_not_as_packaged_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (root, info) = (dir.path(), dir.path().join("info"));
        fs::create_dir_all(root.join("usr/bin")).unwrap();
        fs::create_dir(&info).unwrap();
        let files = ["usr/bin/a", "usr/bin/b", "usr/share/gone"];
        let lines = files.map(|file| format!("{EMPTY}  {file}\n")).concat();
        fs::write(info.join("libc6:amd64.md5sums"), lines).unwrap();
        fs::write(info.join("other.md5sums"), format!("{EMPTY}  usr/bin/other\n")).unwrap();
        fs::write(info.join("libc6:amd64.list"), "/usr/bin/a\n").unwrap();
        let sums = sums_of(&info, &COMMON).unwrap();
        assert_eq!(sums, format!("{EMPTY}  usr/bin/a\n{EMPTY}  usr/bin/b\n"));

        let list = root.join("list");
        fs::write(&list, sums).unwrap();
        for file in ["usr/bin/a", "usr/bin/b"] {
            fs::write(root.join(file), "").unwrap();
        }
        assert_eq!(wrong_files(root, &list).unwrap(), 0);
        fs::write(root.join("usr/bin/b"), "x").unwrap();
        assert_eq!(wrong_files(root, &list).unwrap(), 1);
        fs::remove_file(&list).unwrap();
        assert!(wrong_files(root, &list).is_err());
    }

    #[test]
    fn a_system_without_such_packages_proves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert!(sums_of(dir.path(), &COMMON).is_err());
        let checks = Checks { check_s: 0.0 };
        let shared = Arc::new(RunState::new());
        watch(&checks, &[], &shared).unwrap();
        assert_eq!((shared.bad_bytes.get(), shared.checks.get()), (Some(0), None));
    }
}
