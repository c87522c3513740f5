//! Configuration files: the main one and its drop-ins, their checks, and safe reloading.
//!
//! `overbook.toml` comes first, then `overbook.d/*.toml` in the same directory, in the order of
//! their names. An error of a file (unreadable, not text, too large, missing) is a fault like any
//! other, so one run of `overbook check` shows all faults. A reload with faults changes nothing:
//! the daemon continues with the last good configuration and reports the faults.

mod changes;

use std::{
    fs::{self, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use model::{
    Spec,
    config::{self, Fault, Faults, Salvaged},
};
use rustix::fs::OFlags;

use drivers::discovery;

/// Path of the configuration unless the command line names another one.
pub const DEFAULT_PATH: &str = "/etc/overbook/overbook.toml";
/// Path of the commented example that the packages install.
const EXAMPLE: &str = "/usr/share/doc/overbook/overbook.toml";
/// The time within which a second reload confirms a configuration.
pub const CONFIRM: Duration = Duration::from_secs(600);
/// A configuration is small; a larger file is something else.
const MOST_BYTES: u64 = 1 << 20;

/// Reads and checks `path` and its drop-ins.
///
/// # Errors
/// Every fault of every file.
pub fn load(path: &Path) -> Result<Spec, Faults> {
    load_counting(path).map(|(spec, _)| spec)
}

/// The daemon's state directory and socket, even for a configuration with faults: earlier changes
/// must be undone nevertheless.
#[must_use]
pub fn salvage(path: &Path) -> Salvaged {
    let mut paths = vec![path.to_owned()];
    paths.extend(drop_ins(path).unwrap_or_default());
    let texts: Vec<_> = paths
        .iter()
        .filter_map(|path| Some((path.display().to_string(), text_of(path).ok()?)))
        .collect();
    config::salvage(&texts)
}

fn load_counting(path: &Path) -> Result<(Spec, usize), Faults> {
    let mut faults = Vec::new();
    let mut texts = Vec::new();
    let mut paths = vec![path.to_owned()];
    match drop_ins(path) {
        Ok(found) => paths.extend(found),
        Err(fault) => faults.push(fault),
    }
    for path in &paths {
        match text_of(path) {
            Ok(text) => texts.push((path.display().to_string(), text)),
            Err(message) => faults.push(file_fault(path, message)),
        }
    }
    let spec = config::parse(&texts);
    match &spec {
        Ok(spec) => {
            for glob in &spec.host.qmp {
                if let Err(error) = discovery::check(std::slice::from_ref(glob)) {
                    faults.push(fault_at(&texts, glob, format!("`qmp`: {error}")));
                }
            }
        }
        Err(more) => faults.extend_from_slice(more.as_slice()),
    }
    match spec {
        Ok(spec) if faults.is_empty() => Ok((spec, paths.len() - 1)),
        _ => Err(faults.into()),
    }
}

/// A fault in the line that contains `value` as a string.
fn fault_at(texts: &[(String, String)], value: &str, message: String) -> Fault {
    let written = [format!("\"{value}\""), format!("'{value}'")];
    let found = texts.iter().find_map(|(file, text)| {
        let line = text.lines().position(|line| written.iter().any(|w| line.contains(w)))?;
        Some((file.clone(), line + 1))
    });
    let first = || texts.first().map(|(file, _)| file.clone()).unwrap_or_default();
    let (file, line) = found.map_or_else(|| (first(), None), |(file, line)| (file, Some(line)));
    Fault { file, line, message }
}

fn file_fault(path: &Path, message: String) -> Fault {
    Fault { file: path.display().to_string(), line: None, message }
}

fn drop_ins(path: &Path) -> Result<Vec<PathBuf>, Fault> {
    let directory = path.with_extension("d");
    let fail = |error: io::Error| file_fault(&directory, error.to_string());
    let entries = match fs::read_dir(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(fail)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(fail)?;
        let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if !is_hidden && entry.path().extension().is_some_and(|e| e == "toml") {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn text_of(path: &Path) -> Result<String, String> {
    // The file is opened non-blocking, so that a named pipe is refused instead of blocking.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
        .open(path)
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                format!("there is no such file; start with a copy of the example, {EXAMPLE}")
            }
            io::ErrorKind::PermissionDenied => format!("{error}; run as root"),
            _ => error.to_string(),
        })?;
    let kind = file.metadata().map_err(|error| error.to_string())?;
    if !kind.is_file() {
        return Err("this is not a regular file".to_owned());
    }
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(
            "the file is larger than 1 MiB, the most that a configuration may have".to_owned()
        );
    }
    String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = good.iter().filter(|byte| **byte == b'\n').count() + 1;
        format!("line {line} is not UTF-8 text")
    })
}

/// [`load`], with a short summary of what was read.
///
/// # Errors
/// Every fault of every file.
pub fn load_with_summary(path: &Path) -> Result<(Spec, String), Faults> {
    let (spec, drop_ins) = load_counting(path)?;
    let mode = spec.modes.balloon;
    let count = |n: usize, word: &str| format!("{n} {word}{}", if n == 1 { "" } else { "s" });
    let summary = format!(
        "{}, {} with settings of their own, balloon mode {mode}, {}",
        count(spec.groups.len(), "group"),
        count(spec.vms.len(), "VM"),
        count(drop_ins, "drop-in"),
    );
    Ok((spec, summary))
}

/// Keeps the configuration in force, without regard to changes of the files.
#[derive(Debug)]
pub struct Reloader {
    path: PathBuf,
    spec: Arc<Spec>,
    error: Option<String>,
    waiting: Option<String>,
    /// A configuration that waits until it is confirmed, and since when.
    held: Option<(Spec, Instant)>,
}

/// Why a configuration is not in force after a reload.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// It has faults.
    #[error("the last good configuration stays in force:\n{0}")]
    Faults(#[from] Faults),
    /// It must be confirmed.
    #[error("{0}")]
    Held(String),
}

impl Reloader {
    /// Loads the first configuration; without a valid one the daemon does not start.
    ///
    /// # Errors
    /// Every fault of every file.
    pub fn start(path: &Path) -> Result<Self, Faults> {
        let (path, spec) = (path.to_owned(), Arc::new(load(path)?));
        Ok(Self { path, spec, error: None, waiting: None, held: None })
    }

    /// The configuration in force.
    #[must_use]
    pub fn spec(&self) -> Arc<Spec> {
        self.spec.clone()
    }

    /// Why the present files are not in force: for `Published::config_error`.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.error.clone()
    }

    /// Changes in the files that take effect at a restart: for `Published::waits_for_restart`.
    #[must_use]
    pub fn waiting(&self) -> Option<String> {
        self.waiting.clone()
    }

    /// Reads the files again, and returns the changes. With faults nothing changes, nor with an
    /// objection until the same configuration is read again within [`CONFIRM`]. The configuration
    /// in force meets none. The listeners,
    /// the state directory and the pool cannot change while the daemon runs; all other changes
    /// take effect, and [`Reloader::waiting`] asks for a restart.
    ///
    /// # Errors
    /// Every fault of every file, or the objection.
    pub fn reload(
        &mut self,
        objection: impl FnOnce(&Spec) -> Option<String>,
    ) -> Result<String, ReloadError> {
        let mut new = match load(&self.path) {
            Ok(new) => new,
            Err(faults) => {
                self.error = Some(faults.to_string());
                return Err(faults.into());
            }
        };
        let old = &self.spec;
        let news = changes::between(old, &new);
        let mut waiting = Vec::new();
        if new.api != old.api {
            waiting.push("[api]");
            new.api = old.api.clone();
        }
        if new.host.state != old.host.state {
            waiting.push("`state` in [host]");
            new.host.state = old.host.state.clone();
        }
        if new.pool != old.pool {
            waiting.push("[pool]");
            new.pool = old.pool.clone();
        }
        let held = self.held.take().filter(|(_, since)| since.elapsed() < CONFIRM);
        if new != **old
            && held.is_none_or(|(held, _)| held != new)
            && let Some(why) = objection(&new)
        {
            self.held = Some((new, Instant::now()));
            self.error = Some(why.clone());
            return Err(ReloadError::Held(why));
        }
        self.waiting = (!waiting.is_empty()).then(|| {
            let what = waiting.join(" and ");
            format!("the change of {what} takes effect at a restart; all else is in force")
        });
        self.error = None;
        self.spec = Arc::new(new);
        Ok(news)
    }
}

#[cfg(test)]
mod tests;
