//! The kernel of a virtual host: Debian's own, with the modules that a host of guests needs.
//!
//! **Idea.** The machine's mirror has several kernels, spread over its releases. The newest one
//! of a series is unpacked. Its modules are decompressed and put in the order in which they can
//! be loaded; no `depmod` is needed, because each module names its dependencies. Only the kernel
//! and these modules are kept.
//!
//! **Invariants.** A kernel may have built in any of [`MODULES`]: a module without a file is
//! skipped. A virtual host has no use for a kernel without KVM, so `kvm-amd` must be there.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use super::HostError;
use crate::cache::Cache;
use crate::image;
use crate::packages::Apt;

/// The name that asks for the newest kernel of all.
pub const NEWEST: &str = "newest";

/// The releases that are searched for kernels, in addition to the machine's own.
const SUITES: [&str; 5] = ["bookworm", "bookworm-backports", "trixie", "trixie-backports", "sid"];
/// The modules that are loaded, with all their dependencies.
const MODULES: [&str; 15] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_console",
    "ext4",
    "overlay",
    "loop",
    "nbd",
    "tun",
    "lzo",
    "lzo_rle",
    "lz4",
    "lz4hc",
    "zstd",
    "zram",
    NEEDED,
];
const NEEDED: &str = "kvm_amd";
/// The kernel's name in the cache's entry.
const KERNEL: &str = "vmlinuz";

/// A kernel, unpacked.
#[derive(Debug, Clone)]
pub(super) struct Kernel {
    /// The file that boots.
    pub(super) file: PathBuf,
    /// Its modules, in the order in which they can be loaded.
    pub(super) modules: Vec<PathBuf>,
}

impl Kernel {
    /// The newest kernel of this series, or [`NEWEST`]: from the cache, else from the mirror.
    /// `busybox` decompresses its modules.
    ///
    /// # Errors
    /// When the series is invalid, the mirror does not have it, or it lacks KVM.
    pub(super) fn provide(cache: &Cache, series: &str, busybox: &Path) -> Result<Self, HostError> {
        check(series)?;
        let mut hasher = DefaultHasher::new();
        MODULES.hash(&mut hasher);
        let entry = format!("host-kernel-{series}-{:016x}", hasher.finish());
        let root = cache.directory(&entry, |dir| unpack(cache, series, busybox, dir))?;
        let modules = root.join("modules");
        let failed = |source| HostError::Io { path: modules.clone(), source };
        let listed = std::fs::read_dir(&modules).map_err(failed)?;
        let paths: std::io::Result<BTreeSet<PathBuf>> =
            listed.map(|entry| entry.map(|entry| entry.path())).collect();
        let modules = paths.map_err(failed)?.into_iter().collect();
        Ok(Self { file: root.join(KERNEL), modules })
    }
}

fn check(series: &str) -> Result<(), HostError> {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
    let is_series = series.split_once('.').is_some_and(|(a, b)| is_number(a) && is_number(b));
    if is_series || series == NEWEST {
        return Ok(());
    }
    Err(HostError::Series { series: series.to_owned() })
}

fn unpack(cache: &Cache, series: &str, busybox: &Path, dir: &Path) -> Result<(), HostError> {
    let apt = Apt::open_with(cache, &SUITES)?;
    let names = apt.search("^linux-image-[0-9].*-cloud-amd64$")?;
    let Some(name) = newest(&names, series) else {
        let known: BTreeSet<Vec<u32>> =
            names.iter().filter_map(|name| Some(version(name)?[..2].to_vec())).collect();
        let known: Vec<String> = known.iter().map(|v| format!("{}.{}", v[0], v[1])).collect();
        return Err(HostError::NoSuchKernel { series: series.to_owned(), known: known.join(", ") });
    };
    eprintln!("lab: unpacking {name} into {}", cache.root().display());
    // Newer kernels consist of several packages.
    let is_part = |part: &String| {
        ["linux-binary-", "linux-modules-"].iter().any(|prefix| part.starts_with(prefix))
    };
    let parts: Vec<String> = apt.dependencies(name)?.into_iter().filter(is_part).collect();
    let packages: Vec<&str> =
        std::iter::once(name).chain(parts.iter().map(String::as_str)).collect();
    let scratch = cache.scratch()?;
    apt.unpack(&packages, scratch.path())?;
    let files = files_below(scratch.path())?;
    let incomplete =
        |what: &str| HostError::Incomplete { name: name.to_owned(), what: what.to_owned() };
    let is_kernel = |path: &&PathBuf| file_name(path).starts_with(KERNEL);
    let kernel = files.iter().find(is_kernel).ok_or_else(|| incomplete(KERNEL))?;
    copy(kernel, &dir.join(KERNEL))?;
    let found: BTreeMap<String, &PathBuf> =
        files.iter().filter_map(|path| Some((module_name(path)?, path))).collect();
    if !found.contains_key(NEEDED) {
        return Err(incomplete(NEEDED));
    }
    let mut ordered = Vec::new();
    for module in MODULES {
        order(module, &found, busybox, &mut ordered)?;
    }
    let modules = dir.join("modules");
    std::fs::create_dir(&modules)
        .map_err(|source| HostError::Io { path: modules.clone(), source })?;
    for (index, (name, content)) in ordered.iter().enumerate() {
        let path = modules.join(format!("{index:02}-{name}.ko"));
        std::fs::write(&path, content).map_err(|source| HostError::Io { path, source })?;
    }
    Ok(())
}

/// The package of the newest kernel of this series.
fn newest<'a>(names: &'a [String], series: &str) -> Option<&'a str> {
    let wanted: Vec<u32> = series.split('.').filter_map(|part| part.parse().ok()).collect();
    let versions = names.iter().filter_map(|name| Some((version(name)?, name.as_str())));
    let of_series = versions.filter(|(version, _)| version.starts_with(&wanted));
    of_series.max().map(|(_, name)| name)
}

/// The numbers of a package's name, two at least: 6, 12, 117 and 13 of
/// `linux-image-6.12.117+deb13-cloud-amd64`.
fn version(name: &str) -> Option<Vec<u32>> {
    let name = name.strip_prefix("linux-image-")?.strip_suffix("-cloud-amd64")?;
    let numbers = name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok());
    let numbers: Vec<u32> = numbers.collect();
    (numbers.len() >= 2).then_some(numbers)
}

/// Adds `module` to `ordered`, after all its dependencies. A module without a file is built in.
fn order(
    module: &str,
    found: &BTreeMap<String, &PathBuf>,
    busybox: &Path,
    ordered: &mut Vec<(String, Vec<u8>)>,
) -> Result<(), HostError> {
    let Some(path) = found.get(module) else { return Ok(()) };
    if ordered.iter().any(|(name, _)| name == module) {
        return Ok(());
    }
    let stem = file_name(path).split_once(".ko").map_or("", |(stem, _)| stem).to_owned();
    let content = image::read_module(&path.with_file_name(stem), busybox)?;
    for needed in needs(&content) {
        order(&needed, found, busybox, ordered)?;
    }
    ordered.push((module.to_owned(), content));
    Ok(())
}

/// The dependencies that a module names.
fn needs(module: &[u8]) -> Vec<String> {
    const FIELD: &[u8] = b"\0depends=";
    let Some(at) = module.windows(FIELD.len()).position(|window| window == FIELD) else {
        return Vec::new();
    };
    let list = module[at + FIELD.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list).replace('-', "_");
    list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// `kvm_amd` of `kvm-amd.ko.xz`: file names have `-` or `_`, module names have `_`.
fn module_name(path: &Path) -> Option<String> {
    let (stem, _) = file_name(path).split_once(".ko")?;
    Some(stem.replace('-', "_"))
}

fn file_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).unwrap_or_default()
}

fn files_below(root: &Path) -> Result<Vec<PathBuf>, HostError> {
    let (mut files, mut open) = (Vec::new(), vec![root.to_owned()]);
    while let Some(dir) = open.pop() {
        let failed = |source| HostError::Io { path: dir.clone(), source };
        for entry in std::fs::read_dir(&dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    Ok(files)
}

fn copy(from: &Path, to: &Path) -> Result<(), HostError> {
    let failed = |source| HostError::Io { path: from.to_owned(), source };
    std::fs::copy(from, to).map(drop).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Vec<String> {
        let names = [
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.12.95+deb12-cloud-amd64",
            "linux-image-6.12.117+deb13-cloud-amd64",
            "linux-image-7.3.4+deb13-cloud-amd64",
            "linux-image-cloud-amd64",
        ];
        names.map(str::to_owned).to_vec()
    }

    #[test]
    fn versions_compare_as_numbers_within_their_series() {
        let newest_of = |series| newest(&names(), series).map(str::to_owned);
        assert_eq!(newest_of("6.1").as_deref(), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert_eq!(newest_of("6.12").as_deref(), Some("linux-image-6.12.117+deb13-cloud-amd64"));
        assert_eq!(newest_of(NEWEST).as_deref(), Some("linux-image-7.3.4+deb13-cloud-amd64"));
        assert_eq!(newest_of("5.10"), None);
    }

    #[test]
    fn a_module_names_those_that_it_needs() {
        assert_eq!(needs(b"\x7fELF\0license=GPL\0depends=kvm,ccp-x\0name=y\0"), ["kvm", "ccp_x"]);
        assert_eq!(needs(b"\0depends=\0name=y\0"), Vec::<String>::new());
    }

    #[test]
    fn what_is_no_series_is_refused_before_anything_is_downloaded() {
        for series in ["6", "6.", "6.12.1", "v6.12", "../6.1", ""] {
            assert!(check(series).is_err(), "{series:?}");
        }
        assert!(check("6.12").is_ok() && check(NEWEST).is_ok());
    }
}
