//! Tests the files and the repositories that the configuration of the disks names.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use model::{Bytes, Spec};
use pageserver::trial::try_repository;
use serde::Serialize;

use super::address;
use super::files::{self, FileError};

/// Timeout of the test of one repository.
const TRY_LIMIT: Duration = Duration::from_secs(3);
/// Number of repositories that are tested at a time.
const TRIES: usize = 32;

/// Result of the test of a disk's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TriedFile {
    /// The disk.
    pub disk: String,
    /// The fault of its file; `None`: it can be served.
    pub problem: Option<String>,
    /// Space of its file system that the file still needs.
    pub takes_bytes: u64,
    /// Whether the disk cannot be served.
    pub is_fatal: bool,
}

/// Tests the files of all disks; nothing changes.
#[must_use]
pub fn try_files(spec: &Spec) -> Vec<TriedFile> {
    let mut taken: BTreeMap<u64, Bytes> = BTreeMap::new();
    let tried = spec.disks.iter().map(|(name, disk)| {
        let mut tried =
            TriedFile { disk: name.clone(), problem: None, takes_bytes: 0, is_fatal: false };
        let mut fails = |error: FileError, is_fatal| {
            (tried.problem, tried.is_fatal) = (Some(error.to_string()), is_fatal);
        };
        match files::look(disk) {
            Err(error) => fails(error, true),
            Ok(takes) => {
                let others = taken.entry(takes.device).or_default();
                if let Err(error) = takes.leaves_enough(disk, *others) {
                    // A disk on which a guest may have its swap is served nevertheless.
                    fails(error, !takes.was_there);
                }
                *others = others.plus(takes.lacks);
                tried.takes_bytes = takes.lacks.0;
            }
        }
        tried
    });
    tried.collect()
}

/// Result of the test of a repository.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tried {
    /// Its address.
    pub repository: String,
    /// The disks that name it.
    pub disks: Vec<String>,
    /// The fault; `None`: the repository lends.
    pub problem: Option<String>,
    /// Bytes that it would lend to one disk now.
    pub lends_bytes: u64,
    /// Whether the disks cannot be served, because our certificates are unusable or this host
    /// could test no repository.
    pub is_fatal: bool,
}

/// Tests all repositories of all disks, in parallel. This takes some seconds at most, and nothing
/// changes at the repositories.
pub fn try_repositories(spec: &Spec) -> Vec<Tried> {
    let mut found: BTreeMap<(&str, Option<&Path>), Vec<&String>> = BTreeMap::new();
    for (name, disk) in &spec.disks {
        for repository in &disk.repositories {
            // A socket of this host is used without TLS.
            let tls = disk.tls.as_deref().filter(|_| !repository.starts_with('/'));
            found.entry((repository, tls)).or_default().push(name);
        }
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let untried = |((repository, _), disks): ((&str, _), Vec<&String>)| Tried {
                repository: repository.to_owned(),
                disks: disks.into_iter().cloned().collect(),
                problem: Some(format!("cannot be tried: {error}")),
                lends_bytes: 0,
                is_fatal: true,
            };
            return found.into_iter().map(untried).collect();
        }
    };
    let tries = found.into_iter().map(|((repository, tls), disks)| async move {
        let disks = disks.into_iter().cloned().collect();
        let repository = repository.to_owned();
        let tried = |problem, lends_bytes, is_fatal| Tried {
            repository: repository.clone(),
            disks,
            problem,
            lends_bytes,
            is_fatal,
        };
        match address(&repository, tls) {
            Ok(address) => match try_repository(&address, TRY_LIMIT).await {
                Ok(lends) => tried(None, lends, false),
                Err(trouble) => tried(Some(trouble.to_string()), 0, false),
            },
            Err(error) => tried(Some(error.to_string()), 0, true),
        }
    });
    let tried = stream::iter(tries).buffered(TRIES).collect();
    let tried = runtime.block_on(tried);
    // A name lookup that hangs must not delay the result.
    runtime.shutdown_background();
    tried
}
