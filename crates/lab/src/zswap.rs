//! The kernel's compressed cache in front of swap (zswap), switched on for comparison, and
//! restored.

use std::fs;
use std::path::Path;

use model::Bytes;

use crate::lab::LabError;

const DIR: &str = "/sys/module/zswap/parameters";

/// Zswap at work; dropping it restores its settings. Pages in it stay there until they are
/// touched or their swap is removed.
#[derive(Debug)]
pub struct Zswap {
    before: Vec<(&'static str, String)>,
}

impl Zswap {
    /// Starts it with a pool of `pool_percent` of the machine's memory.
    ///
    /// # Errors
    /// When the kernel has none, or this is not root.
    pub fn start(pool_percent: u64) -> Result<Self, LabError> {
        let wanted = [("max_pool_percent", pool_percent.to_string()), ("enabled", "Y".to_owned())];
        let mut zswap = Self { before: Vec::new() };
        for (name, value) in wanted {
            let path = Path::new(DIR).join(name);
            zswap.before.push((name, fs::read_to_string(&path)?.trim().to_owned()));
            fs::write(path, value)?;
        }
        Ok(zswap)
    }

    /// Memory that its pool takes.
    ///
    /// # Errors
    /// When the kernel does not say (before Linux 5.19).
    pub fn pool() -> Result<Bytes, LabError> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let line = text.lines().find_map(|line| line.strip_prefix("Zswap:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
        let kib = kib.ok_or_else(|| std::io::Error::other("/proc/meminfo tells of no zswap"))?;
        Ok(Bytes::kib(kib))
    }
}

impl Drop for Zswap {
    fn drop(&mut self) {
        for (name, value) in self.before.iter().rev() {
            let _ = fs::write(Path::new(DIR).join(name), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;

    #[test]
    fn its_settings_are_put_back() {
        let enabled = || fs::read_to_string(Path::new(DIR).join("enabled")).unwrap_or_default();
        let before = enabled();
        let Some(zswap) = requires(Requirement::Zswap, Zswap::start(1)) else { return };
        assert_eq!(enabled().trim(), "Y");
        assert!(Zswap::pool().is_ok());
        drop(zswap);
        assert_eq!(enabled(), before);
    }
}
