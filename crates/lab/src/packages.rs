//! Packages of the distribution, downloaded and unpacked privately, so that the user's system is
//! not changed.
//!
//! **Problem.** The lab needs a guest kernel, a busybox and perhaps a newer QEMU. Installing them
//! would change the machine, and need root.
//!
//! **Idea.** `apt-get` works unprivileged on directories of its own. Ours has its own package lists
//! (the machine's mirror plus its backports, see [`crate::sources`]) but reads the *system's* list
//! of installed packages, so that only the libraries missing here are downloaded. `dpkg -x` unpacks
//! them into the cache; the signature check is apt's, as always. Programs of another release come
//! with everything that they need, because nothing of it counts as installed.

use std::path::{Path, PathBuf};

use sys::process::Spawn;

use crate::cache::{Cache, CacheError};
use crate::command::{self, CommandError};
use crate::sources::{self, Source};

/// The system's list of installed packages.
const INSTALLED: &str = "/var/lib/dpkg/status";
/// A list in which nothing is installed.
const NOTHING_INSTALLED: &str = "/dev/null";
/// Where Debian's packages put libraries.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// Why packages could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum PackageError {
    /// The machine is no Debian.
    #[error(
        "this machine has no apt-get to get the lab's QEMU and guest kernel with: run the lab on a \
         Debian 12 or newer, or copy the cache of one that ran it here and name it in {}",
        crate::cache::CACHE_VARIABLE
    )]
    NoApt,
    /// The machine's release or its mirror is unknown.
    #[error(
        "no package source for the release {codename:?} in /etc/apt: the lab needs Debian's own"
    )]
    NoSource {
        /// `VERSION_CODENAME` of `/etc/os-release`, or nothing.
        codename: String,
    },
    /// apt did not name the requested package.
    #[error("apt knows no package {name:?}: the lab needs the packages of Debian 12 or newer")]
    Unknown {
        /// The package.
        name: String,
    },
    /// apt or dpkg failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A private apt: its own lists and archives in a directory that is removed on drop.
#[derive(Debug)]
pub struct Apt {
    root: tempfile::TempDir,
    codename: String,
    sources: Vec<Source>,
    /// The suite whose packages are preferred.
    preferred: String,
}

impl Apt {
    /// Sets up the directories and fetches the package lists.
    pub fn open(cache: &Cache) -> Result<Self, PackageError> {
        Self::open_with(cache, &[])
    }

    /// The same with further suites of the release's own mirror, for example `trixie`.
    pub fn open_with(cache: &Cache, suites: &[&str]) -> Result<Self, PackageError> {
        let codename = release_codename();
        let mut sources = sources::with_backports(Path::new("/etc/apt"), &codename);
        let main = sources.iter().find(|source| source.suite == codename).cloned();
        for suite in suites {
            let is_known = sources.iter().any(|known| known.suite == *suite);
            let further = main.clone().map(|main| Source { suite: (*suite).to_owned(), ..main });
            sources.extend(further.filter(|_| !is_known));
        }
        let preferred = format!("{codename}-backports");
        Self::set_up(cache, codename, sources, preferred, INSTALLED)
    }

    /// With this suite of the release's own mirror alone, and as if nothing were installed.
    pub fn open_only(cache: &Cache, suite: &str) -> Result<Self, PackageError> {
        let codename = release_codename();
        let mut sources = sources::with_backports(Path::new("/etc/apt"), &codename);
        sources.retain(|source| source.suite == codename);
        sources.truncate(1);
        sources.iter_mut().for_each(|source| suite.clone_into(&mut source.suite));
        Self::set_up(cache, codename, sources, suite.to_owned(), NOTHING_INSTALLED)
    }

    fn set_up(
        cache: &Cache,
        codename: String,
        sources: Vec<Source>,
        preferred: String,
        installed: &str,
    ) -> Result<Self, PackageError> {
        if !Path::new("/usr/bin/apt-get").exists() {
            return Err(PackageError::NoApt);
        }
        if codename.is_empty() || sources.is_empty() {
            return Err(PackageError::NoSource { codename });
        }
        let apt = Self { root: cache.scratch()?, codename, sources, preferred };
        for dir in ["state/lists/partial", "cache/archives/partial", "sources.list.d"] {
            let path = apt.root.path().join(dir);
            std::fs::create_dir_all(&path).map_err(|source| PackageError::Io { path, source })?;
        }
        let lines: Vec<String> = apt.sources.iter().map(Source::to_line).collect();
        apt.write("sources.list", &(lines.join("\n") + "\n"))?;
        apt.write("apt.conf", &configuration(apt.root.path(), installed))?;
        apt.run("apt-get", &["-q", "update"])?;
        Ok(apt)
    }

    /// The source of the release itself, without its updates.
    pub fn mirror(&self) -> Result<&Source, PackageError> {
        let main = self.sources.iter().find(|source| source.suite == self.codename);
        main.ok_or_else(|| PackageError::NoSource { codename: self.codename.clone() })
    }

    /// The name of the first dependency of `package` that starts with `prefix`.
    pub fn dependency(&self, package: &str, prefix: &str) -> Result<String, PackageError> {
        let found = self.dependencies(package)?.into_iter().find(|name| name.starts_with(prefix));
        found.ok_or_else(|| PackageError::Unknown { name: package.to_owned() })
    }

    /// The names of all dependencies of `package`.
    pub fn dependencies(&self, package: &str) -> Result<Vec<String>, PackageError> {
        let output = self.run("apt-cache", &["depends", package]).map_err(|error| match error {
            CommandError::Failed { .. } => PackageError::Unknown { name: package.to_owned() },
            other => other.into(),
        })?;
        let output = String::from_utf8_lossy(&output).into_owned();
        let names = output.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(names.map(str::to_owned).collect())
    }

    /// The names of all available packages that match this regular expression.
    pub fn search(&self, pattern: &str) -> Result<Vec<String>, PackageError> {
        let output = self.run("apt-cache", &["search", "--names-only", pattern])?;
        let output = String::from_utf8_lossy(&output).into_owned();
        Ok(output.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect())
    }

    /// Downloads `package`, preferably from the backports, with all dependencies that are not
    /// installed, and unpacks them into `into`.
    pub fn unpack_with_dependencies(&self, package: &str, into: &Path) -> Result<(), PackageError> {
        self.unpack_all_with_dependencies(&[package], into)
    }

    /// The same for several packages.
    pub fn unpack_all_with_dependencies(
        &self,
        packages: &[&str],
        into: &Path,
    ) -> Result<(), PackageError> {
        let preferred = &self.preferred;
        let fixed = ["-q", "-y", "--download-only", "--no-install-recommends", "-t", preferred];
        self.run("apt-get", &[&fixed[..], &["install"], packages].concat())?;
        self.unpack_archives(&self.root.path().join("cache/archives"), into)
    }

    /// Downloads exactly these packages and unpacks them into `into`.
    pub fn unpack(&self, packages: &[&str], into: &Path) -> Result<(), PackageError> {
        let archives = self.root.path().join("download");
        std::fs::create_dir_all(&archives)
            .map_err(|source| PackageError::Io { path: archives.clone(), source })?;
        let spawn = self.command("apt-get").args(["-q", "download"]).args(packages);
        command::run("apt-get", spawn.current_dir(&archives))?;
        self.unpack_archives(&archives, into)
    }

    fn unpack_archives(&self, archives: &Path, into: &Path) -> Result<(), PackageError> {
        let failed = |source| PackageError::Io { path: archives.to_owned(), source };
        for entry in std::fs::read_dir(archives).map_err(failed)? {
            let archive = entry.map_err(failed)?.path();
            if archive.extension().is_some_and(|extension| extension == "deb") {
                command::run("dpkg", Spawn::new("dpkg").arg("-x").arg(&archive).arg(into))?;
            }
        }
        Ok(())
    }

    fn write(&self, name: &str, content: &str) -> Result<(), PackageError> {
        let path = self.root.path().join(name);
        std::fs::write(&path, content).map_err(|source| PackageError::Io { path, source })
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<Vec<u8>, CommandError> {
        command::run(program, self.command(program).args(args))
    }

    /// apt with our configuration read after the system's.
    fn command(&self, program: &str) -> Spawn {
        Spawn::new(program)
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .arg("-c")
            .arg(self.root.path().join("apt.conf"))
    }
}

/// Programs of packages in the cache, with their libraries.
#[derive(Debug, Clone)]
pub struct Unpacked(PathBuf);

impl Unpacked {
    /// The cache's entry of this name. If it is missing, these packages and all their
    /// dependencies are unpacked into it.
    pub fn provide(cache: &Cache, entry: &str, packages: &[&str]) -> Result<Self, PackageError> {
        let fill = |dir: &Path| {
            eprintln!("lab: unpacking {} into {}", packages.join(", "), cache.root().display());
            packages
                .iter()
                .try_for_each(|package| Apt::open(cache)?.unpack_with_dependencies(package, dir))
        };
        cache.directory(entry, fill).map(Self)
    }

    /// The same with all packages from this suite, for example `trixie`, and with all their
    /// dependencies, whether this system has them or not.
    pub fn provide_from(
        cache: &Cache,
        entry: &str,
        suite: &str,
        packages: &[&str],
    ) -> Result<Self, PackageError> {
        let fill = |dir: &Path| {
            let (all, root) = (packages.join(", "), cache.root().display());
            eprintln!("lab: unpacking {all} of {suite} into {root}");
            Apt::open_only(cache, suite)?.unpack_all_with_dependencies(packages, dir)
        };
        cache.directory(entry, fill).map(Self)
    }

    /// The packages that were unpacked into `root`.
    pub fn at(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// The directory.
    pub fn root(&self) -> &Path {
        &self.0
    }

    /// The path of a program: here, or the system's.
    pub fn program(&self, name: &str) -> PathBuf {
        let own = self.0.join("usr/bin").join(name);
        if own.is_file() { own } else { name.into() }
    }

    /// The value of `LD_LIBRARY_PATH` for its programs.
    pub fn libraries(&self) -> String {
        LIBRARIES.map(|dir| self.0.join(dir).display().to_string()).join(":")
    }
}

/// All paths are below `root`. Only the proxy, the keys and the list of installed packages are
/// the system's.
fn configuration(root: &Path, installed: &str) -> String {
    let root = root.display();
    format!(
        r#"Dir::State "{root}/state";
Dir::State::status "{installed}";
Dir::Cache "{root}/cache";
Dir::Etc::sourcelist "{root}/sources.list";
Dir::Etc::sourceparts "{root}/sources.list.d";
Acquire::Languages "none";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
APT::Keep-Downloaded-Packages "true";
// As root, apt would download as a user who cannot reach our directory.
APT::Sandbox::User "root";
// Only our own directories are written: the system's locks are for others.
Debug::NoLocking "true";
// Hooks of the system work on the system: some empty its cache.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
#clear DPkg::Pre-Install-Pkgs;
"#
    )
}

/// The release's code name, for example `bookworm`; empty when the machine does not state it.
pub(crate) fn release_codename() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    value.unwrap_or_default().trim_matches('"').to_owned()
}
