//! A Debian for guests: real programs on a real file system, as tenants' guests have them.
//!
//! **Problem.** Guests with one static program have little in common, and run nothing that a user
//! runs. Servers, compilers and their libraries show what page sharing saves, and whether it
//! corrupts a byte.
//!
//! **Idea.** `debootstrap` makes the machine's own release from the machine's own mirror, with a
//! web server, a database and a compiler. `mke2fs -d` makes a file system of it. All guests read
//! the same image and write to their own memory (an overlay, see `init.sh`). The tree stays next
//! to the image, so the content of the guests' page cache is known without a guest.
//!
//! **Cost.** Once: about a minute, root, and 600 MB of the cache. The entry's name is a hash of
//! everything that it is made of.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pages::offline::Sampling;
use sys::process::Spawn;
use tables::offline::{self, BuildRequest, OfflineError};

use crate::cache::{Cache, CacheError};
use crate::command::{self, CommandError};
use crate::lab::{Lab, LabError};
use crate::packages::{self, Apt, PackageError};

/// Packages in addition to the smallest Debian that has apt.
const PACKAGES: [&str; 5] = ["nginx", "redis-server", "gcc", "libc6-dev", "make"];
/// The additional package of the system with a relational database.
const DATABASE: &str = "postgresql";
/// Packages of a host: an init system and QEMU, and nothing of Overbook's own.
const HOST_PACKAGES: [&str; 4] = ["dbus", "qemu-system-x86", "systemd", "systemd-sysv"];
/// Makes the database that the guests' program `postgres` expects.
const MAKE_DATABASE: &str = "exec setpriv --reuid=postgres --regid=postgres --clear-groups \
    /usr/lib/postgresql/*/bin/initdb -D /var/lib/postgresql/guest \
    --auth=trust --encoding=UTF8 --locale=C --no-sync";
/// Directories that no program needs to run.
const LEFT_OUT: [&str; 6] = [
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
];
/// The file system has no journal, because it is never written, and no identity or time of its
/// own.
const FILE_SYSTEM: [&str; 13] = [
    "-q",
    "-t",
    "ext4",
    "-O",
    "^has_journal",
    "-m",
    "0",
    "-U",
    "0b500000-0000-4000-8000-000000000000",
    "-E",
    "hash_seed=0b500000-0000-4000-8000-000000000000",
    "-L",
    "debian",
];
/// Size of the image, which is sparse: it occupies only its content.
const SIZE: &str = "2G";
const TREE: &str = "tree";
const IMAGE: &str = "root.ext4";

/// Timeout for the guests to check their programs twice.
const CHECK_LIMIT: Duration = Duration::from_secs(600);

/// Why there is no Debian for guests.
#[derive(Debug, thiserror::Error)]
pub enum DebianError {
    /// This user is not root; the files of a Debian belong to many users.
    #[error("building a Debian needs root: run this once as root")]
    NotRoot,
    /// debootstrap could not be downloaded, or the mirror is unknown.
    #[error("getting debootstrap failed: {0}")]
    Package(#[from] PackageError),
    /// debootstrap or mke2fs failed, or is missing.
    #[error("building a Debian for guests failed: {0}")]
    Command(#[from] CommandError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The table of its code could not be built.
    #[error(transparent)]
    Table(#[from] OfflineError),
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// A root file system for guests, and what is in it.
#[derive(Debug, Clone)]
pub struct Debian {
    /// An ext4 file system, to be read only.
    pub image: PathBuf,
    /// The same files, for this host to read.
    pub tree: PathBuf,
}

impl Debian {
    /// From the cache, else built from the distribution.
    ///
    /// # Errors
    /// When it has to be built, and this is not root, no Debian, or the mirror does not answer.
    pub fn provide(cache: &Cache) -> Result<Self, DebianError> {
        Self::of_release(cache, &packages::release_codename())
    }

    /// Same as [`Self::provide`], with a relational database.
    pub fn with_database(cache: &Cache) -> Result<Self, DebianError> {
        Self::with(cache, &packages::release_codename(), &[&PACKAGES[..], &[DATABASE]].concat())
    }

    /// Same as [`Self::provide`] for another release, for example `trixie`, from the same mirror.
    ///
    /// # Errors
    /// As for [`Self::provide`], and when the mirror does not have it.
    pub fn of_release(cache: &Cache, codename: &str) -> Result<Self, DebianError> {
        Self::with(cache, codename, &PACKAGES)
    }

    fn with(cache: &Cache, codename: &str, packages: &[&str]) -> Result<Self, DebianError> {
        let mut hasher = DefaultHasher::new();
        (codename, packages, LEFT_OUT, FILE_SYSTEM, SIZE).hash(&mut hasher);
        if packages.contains(&DATABASE) {
            MAKE_DATABASE.hash(&mut hasher);
        }
        let entry = format!("debian-{codename}-{:016x}", hasher.finish());
        let root = cache.directory(&entry, |dir| build(cache, codename, packages, dir))?;
        Ok(Self { image: root.join(IMAGE), tree: root.join(TREE) })
    }
}

/// A directory tree with the smallest Debian that can be a host: systemd, QEMU and apt.
pub fn host(cache: &Cache) -> Result<PathBuf, DebianError> {
    let codename = packages::release_codename();
    let mut hasher = DefaultHasher::new();
    HOST_PACKAGES.hash(&mut hasher);
    let entry = format!("host-{codename}-{:016x}", hasher.finish());
    let fill = |dir: &Path| debootstrap(cache, &codename, &HOST_PACKAGES, &dir.join(TREE));
    Ok(cache.directory(&entry, fill)?.join(TREE))
}

/// A table of the code of all executables of these systems, as `overbook static build` makes it.
pub fn code(systems: &[&Debian]) -> Result<Vec<u8>, DebianError> {
    let request = BuildRequest {
        sources: systems.iter().map(|debian| debian.tree.clone()).collect(),
        all_pages: false,
        sampling: Sampling::default(),
        backing_dir: None,
    };
    let (table, _) = offline::build(&request, |_, _| {})?;
    Ok(table.to_bytes("debian").map_err(OfflineError::from)?)
}

/// Installs the smallest Debian that has apt, and these packages, into `tree`.
fn debootstrap(
    cache: &Cache,
    codename: &str,
    packages: &[&str],
    tree: &Path,
) -> Result<(), DebianError> {
    if !rustix::process::geteuid().is_root() {
        return Err(DebianError::NotRoot);
    }
    eprintln!("lab: building a Debian into {}, a minute", cache.root().display());
    let tools = cache.scratch()?;
    let apt = Apt::open(cache)?;
    // debootstrap needs wget, which not every Debian has.
    apt.unpack_with_dependencies("debootstrap", tools.path())?;
    let mirror = apt.mirror()?;
    let tool = |path: &str| tools.path().join(path).display().to_string();
    // debootstrap mounts file systems, and its packages might start servers. All that ends with
    // these namespaces.
    let mut debootstrap = Spawn::new("unshare")
        .args(["--mount", "--pid", "--fork", "--kill-child", "sh"])
        .arg(tool("usr/sbin/debootstrap"))
        .env("DEBOOTSTRAP_DIR", tool("usr/share/debootstrap"))
        .env("PATH", format!("/usr/sbin:/usr/bin:/sbin:/bin:{}", tool("usr/bin")))
        .env("LD_LIBRARY_PATH", tool("usr/lib/x86_64-linux-gnu"))
        .env("LC_ALL", "C.UTF-8")
        .args(["--variant=minbase", &format!("--include={}", packages.join(","))]);
    if let Some(key) = &mirror.signed_by {
        debootstrap = debootstrap.arg(format!("--keyring={key}"));
    }
    command::run("debootstrap", debootstrap.arg(codename).arg(tree).arg(&mirror.uri))?;
    Ok(())
}

fn build(cache: &Cache, codename: &str, packages: &[&str], dir: &Path) -> Result<(), DebianError> {
    let tree = dir.join(TREE);
    debootstrap(cache, codename, packages, &tree)?;
    if packages.contains(&DATABASE) {
        let chroot = Spawn::new("chroot").env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command::run("initdb", chroot.arg(&tree).args(["sh", "-c", MAKE_DATABASE]))?;
    }
    for left_out in LEFT_OUT {
        let path = tree.join(left_out);
        if path.is_dir() {
            let failed = |source| DebianError::Io { path: path.clone(), source };
            std::fs::remove_dir_all(&path).map_err(failed)?;
        }
    }
    let mke2fs = Spawn::new("mke2fs")
        .env("PATH", "/usr/sbin:/sbin")
        .env("E2FSPROGS_FAKE_TIME", "1")
        .args(FILE_SYSTEM)
        .arg("-d")
        .arg(&tree)
        .arg(dir.join(IMAGE))
        .arg(SIZE);
    command::run("mke2fs", mke2fs)?;
    Ok(())
}

/// Wrong bytes in the answers of a Debian's programs, and wrong files among the programs
/// themselves. It waits until every guest that has a Debian has checked its programs once more.
///
/// # Errors
/// When no guest has a Debian, or one does not finish its check: then nothing is proven.
pub fn bad_bytes(lab: &Lab) -> Result<u64, LabError> {
    let mut total = None;
    for machine in lab.machines().iter().filter(|machine| machine.spec().root_disk.is_some()) {
        let unproven = || LabError::NothingVerified(machine.spec().name.clone());
        let number = |name: &str| machine.last_metric()?.value[name].as_u64();
        let begun = number("checks").ok_or_else(unproven)?;
        // The check under way may have read a file already, so a second one must follow.
        lab.wait_for("the programs to be checked again", CHECK_LIMIT, |_| {
            Ok(number("checks").is_some_and(|now| now >= begun.saturating_add(2)))
        })?;
        let found = number("bad_bytes").ok_or_else(unproven)?;
        total = Some(found.saturating_add(total.unwrap_or(0)));
    }
    total.ok_or_else(|| LabError::NothingVerified("the lab".to_owned()))
}
