//! Tries the tables that groups name, for `overbook check`. Each is read as a worker reads it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use model::{GroupName, Spec};
use pages::offline::Sampling;
use serde::Serialize;

/// The result of trying a table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tried {
    /// The table's file.
    pub table: PathBuf,
    /// The group that names it.
    pub group: GroupName,
    /// The fault; `None`: the table can be used. A group with a faulty table uses none.
    pub problem: Option<String>,
    /// Number of its distinct pages.
    pub distinct_pages: u64,
}

/// Tries all tables of all groups. Each file is read once.
#[must_use]
pub fn try_tables(spec: &Spec) -> Vec<Tried> {
    let mut read = BTreeMap::new();
    let mut tried = Vec::new();
    for (group, settings) in &spec.groups {
        let mut first = None;
        for path in &settings.tables {
            let found = read.entry(path).or_insert_with(|| try_table(path));
            let (distinct_pages, problem) = match found {
                Ok((pages, sampling)) => {
                    (*pages, unlike(*first.get_or_insert(*sampling), *sampling))
                }
                Err(why) => (0, Some(why.clone())),
            };
            let (table, group) = (path.clone(), group.clone());
            tried.push(Tried { table, group, problem, distinct_pages });
        }
    }
    tried
}

/// The table's number of pages, and their sampling.
fn try_table(path: &Path) -> Result<(u64, Sampling), String> {
    let bytes = super::read(path).map_err(|error| error.what())?;
    let table = super::parse(&bytes)?;
    Ok((table.len() as u64, table.sampling()))
}

fn unlike(first: Sampling, sampling: Sampling) -> Option<String> {
    let [first, here] = [first, sampling].map(Sampling::offsets);
    (first != here).then(|| {
        format!("it is sampled at {here:?}, and the group's tables before it at {first:?}")
    })
}
