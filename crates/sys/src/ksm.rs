//! The kernel's own merging of identical pages (KSM), controlled and shown by
//! `/sys/kernel/mm/ksm`.
//!
//! KSM merges all memory that a process has marked mergeable, and QEMU marks its guest's RAM. It
//! knows no groups and has one set of settings for the whole host. Four of them matter here
//! ([`Knob`]); each is a file with one word. This module only reads and writes them; the policy
//! is elsewhere.
//!
//! Source: Documentation/admin-guide/mm/ksm.rst, `mm/ksm.c`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use model::Bytes;

use crate::procfs::{ProcError, read};

const ROOT: &str = "/sys/kernel/mm/ksm";

/// A setting. The order is that of setting them: while the kernel's advisor chooses the number of
/// pages, the kernel refuses any other number, and the setting that starts KSM comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Knob {
    /// The mode of the advisor, which chooses the number of pages: `none` or `scan-time`. Since
    /// Linux 6.8.
    AdvisorMode,
    /// Pages that are scanned in one batch.
    PagesToScan,
    /// The pause after a batch.
    SleepMillisecs,
    /// `0`: stopped, merged pages stay merged; `1`: running; `2`: stopped, and everything is
    /// unmerged.
    Run,
}

impl Knob {
    /// All settings.
    pub const ALL: [Self; 4] =
        [Self::AdvisorMode, Self::PagesToScan, Self::SleepMillisecs, Self::Run];

    /// The file's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AdvisorMode => "advisor_mode",
            Self::PagesToScan => "pages_to_scan",
            Self::SleepMillisecs => "sleep_millisecs",
            Self::Run => "run",
        }
    }

    /// The knob of this file.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|knob| knob.name() == name)
    }

    /// Whether the kernel could report this value.
    #[must_use]
    pub fn admits(self, value: &str) -> bool {
        match self {
            Self::AdvisorMode => {
                !value.is_empty() && value.bytes().all(|b| b.is_ascii_lowercase() || b == b'-')
            }
            Self::PagesToScan | Self::SleepMillisecs => value.parse::<u32>().is_ok(),
            Self::Run => ["0", "1", "2"].contains(&value),
        }
    }
}

/// The values of the settings. The advisor is missing if the kernel has none.
pub type Settings = BTreeMap<Knob, String>;

/// The results of KSM on the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// The size of the merged pages (`pages_shared`).
    pub shared: Bytes,
    /// The memory saved by them (`pages_sharing`).
    pub saved: Bytes,
}

/// KSM, with the directory of its files.
#[derive(Clone, Debug)]
pub struct Ksm {
    root: PathBuf,
}

impl Ksm {
    /// KSM of this host.
    #[must_use]
    pub fn of_host() -> Self {
        Self::at(ROOT)
    }

    /// KSM with its files in `root`.
    #[must_use]
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The present values of all settings.
    ///
    /// # Errors
    /// When the kernel has no KSM, or a file is malformed.
    pub fn settings(&self) -> Result<Settings, ProcError> {
        let mut settings = Settings::new();
        for knob in Knob::ALL {
            let path = self.path(knob);
            match read(&path) {
                Err(ProcError::Gone { .. }) if knob == Knob::AdvisorMode => {}
                Err(error) => return Err(error),
                Ok(text) => {
                    let value = chosen(&text);
                    if !knob.admits(value) {
                        let expected = "a setting of KSM";
                        return Err(ProcError::malformed(&path, knob.name(), value, expected));
                    }
                    settings.insert(knob, value.to_owned());
                }
            }
        }
        Ok(settings)
    }

    /// Checks whether these settings could be written now. Changes nothing.
    ///
    /// # Errors
    /// The reason why not.
    pub fn check_writable(&self, settings: &Settings) -> Result<(), ProcError> {
        settings.keys().try_for_each(|knob| self.open(*knob, false).map(drop))
    }

    /// Writes a setting. Stopping and unmerging wait for the present batch. Unmerging takes as
    /// long as copying all of the pages, and the process that requests it is the OOM killer's
    /// first choice.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set(&self, knob: Knob, value: &str) -> Result<(), ProcError> {
        let path = self.path(knob);
        let mut file = self.open(knob, true)?;
        file.write_all(value.as_bytes()).map_err(|error| ProcError::from_io(&path, error))
    }

    /// The present counters.
    ///
    /// # Errors
    /// When the kernel has no KSM, or a file is malformed.
    pub fn counters(&self) -> Result<Counters, ProcError> {
        Ok(Counters { shared: self.pages("pages_shared")?, saved: self.pages("pages_sharing")? })
    }

    fn pages(&self, name: &'static str) -> Result<Bytes, ProcError> {
        let path = self.root.join(name);
        let text = read(&path)?;
        let page = rustix::param::page_size() as u64;
        let count: Option<u64> = text.trim().parse().ok();
        let size = count.and_then(|pages| pages.checked_mul(page)).map(Bytes);
        size.ok_or_else(|| ProcError::malformed(&path, name, text.trim(), "a number of pages"))
    }

    fn open(&self, knob: Knob, truncate: bool) -> Result<File, ProcError> {
        let path = self.path(knob);
        let file = OpenOptions::new().write(true).truncate(truncate).open(&path);
        file.map_err(|error| ProcError::from_io(&path, error))
    }

    fn path(&self, knob: Knob) -> PathBuf {
        Path::new(&self.root).join(knob.name())
    }
}

/// The word in brackets of a list; without brackets the whole text.
fn chosen(text: &str) -> &str {
    let inside = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(text.trim(), |(word, _)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(files: &[(&str, &str)]) -> (tempfile::TempDir, Ksm) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let ksm = Ksm::at(dir.path());
        (dir, ksm)
    }

    const FILES: [(&str, &str); 3] =
        [("pages_to_scan", "1250\n"), ("sleep_millisecs", "20\n"), ("run", "0\n")];

    #[test]
    fn settings_are_read_and_set_with_and_without_an_advisor() {
        let (dir, ksm) = fake(&FILES);
        let settings = ksm.settings().unwrap();
        assert_eq!(settings.len(), 3);
        assert_eq!(settings[&Knob::PagesToScan], "1250");
        ksm.set(Knob::PagesToScan, "9").unwrap();
        assert_eq!(ksm.settings().unwrap()[&Knob::PagesToScan], "9");
        std::fs::write(dir.path().join("advisor_mode"), "none [scan-time]\n").unwrap();
        assert_eq!(ksm.settings().unwrap()[&Knob::AdvisorMode], "scan-time");
        assert!(ksm.check_writable(&ksm.settings().unwrap()).is_ok());
    }

    #[test]
    fn a_kernel_without_ksm_is_told_from_one_that_says_nonsense() {
        let (_dir, none) = fake(&[]);
        assert!(matches!(none.settings(), Err(ProcError::Gone { .. })));
        assert!(matches!(none.set(Knob::Run, "1"), Err(ProcError::Gone { .. })), "never made");
        let (dir, ksm) = fake(&FILES);
        std::fs::write(dir.path().join("run"), "7\n").unwrap();
        assert!(matches!(ksm.settings(), Err(ProcError::Malformed { .. })));
    }

    #[test]
    fn pages_are_counted_in_bytes() {
        let (_dir, ksm) = fake(&[("pages_shared", "2\n"), ("pages_sharing", "10\n")]);
        let counters = ksm.counters().unwrap();
        assert_eq!(counters.saved.0, 5 * counters.shared.0);
        assert!(counters.shared >= Bytes::kib(8));
    }

    #[test]
    fn names_lead_to_their_knobs_and_nothing_else_does() {
        assert!(Knob::ALL.into_iter().all(|knob| Knob::named(knob.name()) == Some(knob)));
        assert_eq!(Knob::named("../../../etc/passwd"), None);
        assert!(!Knob::PagesToScan.admits("-1") && !Knob::AdvisorMode.admits("a b"));
    }
}
