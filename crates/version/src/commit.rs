//! The commit of a source tree: told by git, or by the archive that `git archive` made.
//!
//! The build script runs this, and the crate's tests.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// `git archive` writes the commit into this file.
const ARCHIVED: &str = "crates/version/commit";
/// Everything that a program is made from.
const SOURCES: [&str; 7] =
    ["Cargo.lock", "Cargo.toml", "crates", "guest", "web/index.html", "web/public", "web/src"];
/// Digits of a commit that are told.
const DIGITS: usize = 12;

/// The commit of the sources at `root`; `None`: not known.
///
/// A commit from git has `, modified` behind it where the sources differ from it.
pub(crate) fn of(root: &Path) -> Option<String> {
    archived(root).or_else(|| in_git(root))
}

/// The files and directories whose change may change the answer.
#[cfg_attr(test, allow(dead_code, reason = "the build script's"))]
pub(crate) fn watched(root: &Path) -> Vec<PathBuf> {
    let mut watched: Vec<PathBuf> = SOURCES.iter().map(|name| root.join(name)).collect();
    // A commit and a checkout each add a line to the log of HEAD.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(root, &["rev-parse", "--git-path", name]);
        watched.extend(path.map(|path| root.join(path)));
    }
    watched.retain(|path| path.exists());
    watched
}

fn archived(root: &Path) -> Option<String> {
    let text = fs::read_to_string(root.join(ARCHIVED)).ok()?;
    let text = text.trim();
    let is_commit = text.len() >= DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_commit.then(|| text[..DIGITS].to_owned())
}

fn in_git(root: &Path) -> Option<String> {
    // An archive that was unpacked inside another project's repository is none of its commits.
    let top = fs::canonicalize(git(root, &["rev-parse", "--show-toplevel"])?).ok()?;
    if top != fs::canonicalize(root).ok()? {
        return None;
    }
    let mut commit = git(root, &["rev-parse", "HEAD"])?;
    commit.truncate(DIGITS);
    let status = ["status", "--porcelain", "--untracked-files=no", "--"];
    if !git(root, &[&status[..], &SOURCES].concat())?.is_empty() {
        commit.push_str(", modified");
    }
    Some(commit)
}

/// The output of a command of git; `None`: it failed, or there is no git.
fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
    let text = output.status.success().then(|| String::from_utf8(output.stdout).ok())??;
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree with the file that `git archive` would fill in.
    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("crates/version")).unwrap();
        fs::write(dir.path().join(ARCHIVED), "$Format:%H$\n").unwrap();
        fs::write(dir.path().join(".gitattributes"), format!("{ARCHIVED} export-subst\n")).unwrap();
        dir
    }

    fn must(root: &Path, arguments: &[&str]) -> String {
        let author = ["-c", "user.name=a", "-c", "user.email=a@example.org"];
        git(root, &[&author[..], arguments].concat()).unwrap()
    }

    #[test]
    fn a_clone_an_archive_and_a_bare_tree_tell_what_they_know() {
        let dir = tree();
        let root = dir.path();
        assert_eq!(of(root), None);
        must(root, &["init", "-q"]);
        assert_eq!(of(root), None, "there is no commit yet");
        must(root, &["add", "."]);
        must(root, &["commit", "-q", "-m", "first"]);
        let commit = must(root, &["rev-parse", "HEAD"])[..DIGITS].to_owned();
        assert_eq!(of(root), Some(commit.clone()));
        let log = root.join(".git/logs/HEAD");
        assert!(watched(root).contains(&log), "{:?}", watched(root));

        // Below a repository, and yet none of it.
        let below = root.join("unpacked");
        fs::create_dir_all(below.join("crates/version")).unwrap();
        assert_eq!(of(&below), None);
        must(root, &["archive", "--output", "a.tar", "HEAD"]);
        let mut tar = Command::new("tar");
        tar.arg("-xf").arg(root.join("a.tar")).arg("-C").arg(&below);
        assert!(tar.status().unwrap().success());
        assert_eq!(of(&below), Some(commit.clone()));

        fs::write(root.join("notes"), "no source").unwrap();
        assert_eq!(of(root), Some(commit.clone()));
        fs::write(root.join(ARCHIVED), "$Format:%H$ \n").unwrap();
        assert_eq!(of(root), Some(format!("{commit}, modified")));
    }
}
