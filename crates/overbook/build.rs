//! Lists the dashboard's built files, to be part of the program.
//!
//! `make web` writes them to `web/dist/site`. A checkout without them compiles too: the list is
//! empty then, and the dashboard's page says how to build it.

use std::{
    env,
    fmt::Write,
    fs, io,
    path::{Path, PathBuf},
};

fn main() -> io::Result<()> {
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web/dist");
    if dist.is_dir() {
        println!("cargo::rerun-if-changed={}", dist.display());
    } else {
        println!("cargo::rerun-if-changed=build.rs");
    }
    let site = dist.join("site");
    let mut files = Vec::new();
    if site.is_dir() {
        list(&site, &mut files)?;
    }
    files.sort();
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or(io::ErrorKind::NotFound)?);
    let mut list = "&[\n".to_owned();
    for (number, file) in files.iter().enumerate() {
        let path = file.strip_prefix(&site).map_err(io::Error::other)?.display().to_string();
        let name = if path == "index.html" { String::new() } else { path };
        // A copy, because the next `make web` may replace the file before it is compiled.
        let copy = format!("dashboard_file_{number}");
        fs::copy(file, out.join(&copy))?;
        // Writing to a string cannot fail.
        let _ = writeln!(list, "({:?}, include_bytes!({copy:?})),", format!("/{name}"));
    }
    list.push(']');
    fs::write(out.join("dashboard_files.rs"), list)
}

/// Adds all files at and below `dir`.
fn list(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
