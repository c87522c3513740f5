//! Configuration: from TOML text to a [`Spec`] that cannot be wrong, or to a list of all faults.
//!
//! **Problem.** An operator who can mend only one fault per attempt loses time, and one whose
//! misspelt key is ignored learns it in an outage.
//!
//! **Idea.** Three steps. [`table`](self) readers walk the parsed tree and note each fault with
//! its file and line instead of stopping; [`draft`](self) merges the files and keeps the place of
//! each value; [`check`](self) compares the values with each other and makes the `Spec`. Later
//! files override earlier ones key by key, so a drop-in holds only the differences. A list is one
//! value and is replaced whole.
//!
//! **Invariants.** Nothing unknown is accepted. No text causes a panic. A `Spec` comes out only
//! when there is no fault. A fault that merely follows from another one (no group has the VM,
//! because the group's list is broken) is not reported.
//!
//! **Leaves out.** Reading files: the caller passes their texts.

mod check;
mod draft;
mod faults;
mod table;

#[cfg(test)]
mod tests;

pub use faults::{Fault, Faults};

use std::path::PathBuf;

use crate::Spec;

/// The default directory of the daemon's state.
pub const DEFAULT_STATE: &str = "/var/lib/overbook";

/// Settings that can be recovered from files with faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Salvaged {
    /// `state` in `[host]`, where it is readable.
    pub state: Option<PathBuf>,
    /// `socket` in `[api]`, where it is readable.
    pub socket: Option<PathBuf>,
    /// `qmp` in `[host]`, where it is readable, or its default.
    pub qmp: Vec<String>,
}

/// Finds the daemon's state and socket in files that may have faults. Changes must be undone, and
/// the daemon must be reachable, in spite of a faulty file.
#[must_use]
pub fn salvage(files: &[(String, String)]) -> Salvaged {
    let mut draft = draft::Draft::default();
    for (name, text) in files {
        let source = table::Source::new(name, text);
        let root = source.parse_readable();
        draft.apply(&table::TableReader::root(&source, root.get_ref()));
    }
    let path = |text: Option<table::Located<String>>| {
        text.map(|at| PathBuf::from(at.value)).filter(|path| path.is_absolute())
    };
    let globs = draft.qmp.into_iter().flat_map(|list| list.value).map(|glob| glob.value);
    let mut qmp: Vec<String> = globs.filter(|glob| glob.starts_with('/')).collect();
    if qmp.is_empty() {
        qmp.extend(check::DEFAULT_QMP.map(str::to_owned));
    }
    Salvaged { state: path(draft.state), socket: path(draft.socket), qmp }
}

/// Makes a [`Spec`] of the main file and its drop-ins, given in order as `(name, text)`.
///
/// # Errors
/// Every fault of every file, each with its line.
pub fn parse(files: &[(String, String)]) -> Result<Spec, Faults> {
    let mut faults = Vec::new();
    let mut draft = draft::Draft::default();
    let mut all_parsed = true;
    for (name, text) in files {
        let source = table::Source::new(name, text);
        match source.parse() {
            Some(root) => draft.apply(&table::TableReader::root(&source, root.get_ref())),
            None => all_parsed = false,
        }
        faults.append(&mut source.into_faults());
    }
    // A file with a syntax error has unknown content, so nothing is concluded from its absence.
    let spec = if all_parsed { Some(check::finish(draft, &mut faults)) } else { None };
    match spec {
        Some(spec) if faults.is_empty() => Ok(spec),
        _ => Err(faults.into()),
    }
}
