//! Finds the commit that a release build is made from ([`commit`]).

#[path = "src/commit.rs"]
mod commit;

use std::{env, path::Path};

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // A debug build is not built again at each commit.
    let is_release = env::var_os("PROFILE").is_some_and(|profile| profile == "release");
    println!("cargo::rerun-if-changed=build.rs");
    let commit = if is_release {
        commit::watched(&root)
            .iter()
            .for_each(|path| println!("cargo::rerun-if-changed={}", path.display()));
        commit::of(&root)
    } else {
        None
    };
    let commit = commit.map(|commit| format!(" ({commit})")).unwrap_or_default();
    println!("cargo::rustc-env=OVERBOOK_VERSION={}{commit}", env!("CARGO_PKG_VERSION"));
}
