//! Counts the contents of a source. A source without pages is an error that says what it contains.

use std::{
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{OfflineError, lock};

/// Counts of one source, by all threads.
#[derive(Debug, Default)]
pub(super) struct Tally {
    source: PathBuf,
    /// Files that are not empty.
    pub(super) files: AtomicU64,
    /// Those of them that begin like an executable.
    pub(super) elf: AtomicU64,
    /// Pages that were taken, including pages of zeros.
    pub(super) pages: AtomicU64,
    /// Files and directories that could not be read.
    pub(super) left_out: AtomicU64,
    /// A kernel's boot image in the source, which is not decompressed.
    pub(super) kernel: Mutex<Option<PathBuf>>,
}

impl Tally {
    pub(super) fn new(source: PathBuf) -> Self {
        Self { source, ..Self::default() }
    }

    /// Returns an error if no page was taken.
    pub(super) fn check(&self, told: &[String]) -> Result<(), OfflineError> {
        if self.pages.load(Relaxed) > 0 {
            return Ok(());
        }
        let [files, elf, left_out] =
            [&self.files, &self.elf, &self.left_out].map(|count| count.load(Relaxed));
        let mut what = "no page came of it: ".to_owned();
        what += &match (files, elf) {
            (0, _) => "it has no file with content".to_owned(),
            (_, 0) => format!("of {files} files none is an executable; --all-pages takes any file"),
            _ if left_out > 0 => format!("of {files} files {elf} are ELF, and none gave one"),
            _ => format!(
                "of {files} files {elf} are ELF, and none has code that is mapped to run, as object \
                 files and kernel modules have none"
            ),
        };
        if let Some(kernel) = &*lock(&self.kernel) {
            let kernel = super::printable(&kernel.display().to_string());
            what += &format!("; {kernel} is taken where it is named itself");
        }
        if left_out > 0 {
            let example = told.first().map_or("", String::as_str);
            what += &format!("; {left_out} could not be read, for example {example}");
        }
        Err(OfflineError::Source { path: self.source.clone(), what })
    }
}
