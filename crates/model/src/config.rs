//! Configuration: TOML text in, a [`Spec`] that cannot be wrong out, or every fault at once.
//!
//! **Problem.** An operator who mends one fault per attempt learns to hate the tool, and one whose
//! misspelt key is ignored learns it at three in the morning.
//!
//! **Idea.** Three steps. [`table`](self) readers walk the parsed tree and note each fault with its
//! file and line instead of stopping; [`draft`](self) merges the files, each value still knowing
//! where it was written; [`check`](self) compares the values with each other and makes the `Spec`.
//! Later files override earlier ones key by key, so a drop-in says only what differs; a list is one
//! value and is replaced whole.
//!
//! **Invariants.** Nothing unknown is accepted. No text makes it panic. A `Spec` comes out only
//! when there is no fault. A fault that merely follows from another one (no group has the VM,
//! because the group's list is broken) is not reported.
//!
//! **Leaves out.** Reading files: the caller brings their texts.

mod check;
mod draft;
mod faults;
mod table;

#[cfg(test)]
mod tests;

pub use faults::{Fault, Faults};

use std::path::PathBuf;

use crate::Spec;

/// Where state is kept unless the configuration says otherwise.
pub const DEFAULT_STATE: &str = "/var/lib/overbook";

/// What can still be learnt from files with faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Salvaged {
    /// `state` in `[host]`, where it is written readably.
    pub state: Option<PathBuf>,
    /// `socket` in `[api]`, where it is written readably.
    pub socket: Option<PathBuf>,
    /// `qmp` in `[host]`, where it is written readably, or its default.
    pub qmp: Vec<String>,
}

/// Where the daemon keeps its state and answers, by files that may have faults: what was done must
/// be undone, and the daemon asked, all the same.
#[must_use]
pub fn salvage(files: &[(String, String)]) -> Salvaged {
    let mut draft = draft::Draft::default();
    for (name, text) in files {
        let source = table::Source::new(name, text);
        let root = source.parse_readable();
        draft.apply(&table::Table::root(&source, root.get_ref()));
    }
    let path = |text: Option<table::At<String>>| {
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
            Some(root) => draft.apply(&table::Table::root(&source, root.get_ref())),
            None => all_parsed = false,
        }
        faults.append(&mut source.into_faults());
    }
    // What a file with a syntax error meant to say is unknown, so nothing is concluded from its
    // absence.
    let spec = if all_parsed { Some(check::finish(draft, &mut faults)) } else { None };
    match spec {
        Some(spec) if faults.is_empty() => Ok(spec),
        _ => Err(faults.into()),
    }
}
