//! The kernel's own merging (KSM), controlled for comparison: set up, observed, and restored.

use std::path::Path;

use crate::lab::LabError;

const DIR: &str = "/sys/kernel/mm/ksm";

/// KSM's scan rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Pages per batch.
    pub pages: u32,
    /// Pause after each batch.
    pub sleep_ms: u32,
}

/// The kernel's default.
pub const DEFAULT: Rate = Rate { pages: 100, sleep_ms: 20 };
/// The rate that tuning guides call fast: 50 pages per millisecond, less the time of the scan
/// itself.
pub const FAST: Rate = Rate { pages: 1250, sleep_ms: 25 };
/// Without a pause.
pub const FLAT_OUT: Rate = Rate { pages: 10_000, sleep_ms: 0 };

/// KSM at work; dropping it unmerges everything and puts the settings back.
#[derive(Debug)]
pub struct Ksm {
    before: Vec<(&'static str, String)>,
}

impl Ksm {
    /// Starts it.
    ///
    /// # Errors
    /// When the kernel has none, or this is not root.
    pub fn start(rate: Rate) -> Result<Self, LabError> {
        let ksm = Self::keep()?;
        if ksm.has("advisor_mode") {
            write("advisor_mode", "none")?;
        }
        write("pages_to_scan", &rate.pages.to_string())?;
        write("sleep_millisecs", &rate.sleep_ms.to_string())?;
        write("run", "1")?;
        Ok(ksm)
    }

    /// Starts it at the rate that the kernel's advisor finds, with smart scan: pages that found no
    /// match before are skipped at times. `None`: this kernel has no advisor (before Linux 6.8).
    ///
    /// # Errors
    /// When the kernel has none, or this is not root.
    pub fn start_advised() -> Result<Option<Self>, LabError> {
        let ksm = Self::keep()?;
        if !ksm.has("advisor_mode") || !ksm.has("smart_scan") {
            return Ok(None);
        }
        write("sleep_millisecs", &DEFAULT.sleep_ms.to_string())?;
        write("smart_scan", "1")?;
        write("advisor_mode", "scan-time")?;
        write("run", "1")?;
        Ok(Some(ksm))
    }

    /// Keeps the settings as they are, to be put back. Older kernels do not have all of them.
    fn keep() -> Result<Self, LabError> {
        let names = ["advisor_mode", "smart_scan", "pages_to_scan", "sleep_millisecs", "run"];
        let known = names.into_iter().filter(|name| Path::new(DIR).join(name).exists());
        let before =
            known.map(|name| Ok((name, chosen(&read(name)?)))).collect::<Result<_, LabError>>()?;
        Ok(Self { before })
    }

    fn has(&self, name: &str) -> bool {
        self.before.iter().any(|(known, _)| *known == name)
    }

    /// Stops its scan; merged pages stay merged.
    pub fn stop(&self) -> Result<(), LabError> {
        write("run", "0")
    }

    /// Resumes its scan.
    pub fn go_on(&self) -> Result<(), LabError> {
        write("run", "1")
    }

    /// CPU time that its thread has taken since boot, in seconds.
    pub fn cpu_s() -> Result<f64, LabError> {
        // Nanoseconds on a CPU, nanoseconds waiting, number of time slices.
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", Self::thread()?))?;
        let ns = text.split_whitespace().next().and_then(|word| word.parse::<f64>().ok());
        Ok(ns.unwrap_or(f64::NAN) / 1e9)
    }

    /// Memory that it saves at present, on the whole host.
    pub fn saved_mib() -> Result<f64, LabError> {
        Ok(number("pages_sharing")? as f64 / 256.0)
    }

    /// Pages of these processes that are merged with others at present.
    ///
    /// # Errors
    /// When a process is gone, or the kernel does not say (before Linux 5.19).
    pub fn merged_of(pids: &[u32]) -> Result<u64, LabError> {
        let of = |pid: &u32| number_in(Path::new(&format!("/proc/{pid}/ksm_merging_pages")));
        pids.iter().map(of).sum()
    }

    /// Pages that it has scanned since boot.
    ///
    /// # Errors
    /// When the kernel does not say (before Linux 6.6).
    pub fn scanned() -> Result<u64, LabError> {
        number("pages_scanned")
    }

    /// Its thread.
    pub fn thread() -> Result<u32, LabError> {
        for process in std::fs::read_dir("/proc")?.flatten() {
            let name = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            let pid = process.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some(pid) = pid.filter(|_| name.trim() == "ksmd") {
                return Ok(pid);
            }
        }
        Err(LabError::Daemon("the kernel has no ksmd".to_owned()))
    }
}

/// A rate of `pages` per millisecond, less the time of the scan itself, in batches with the
/// kernel's default pause.
pub fn pages_per_ms(pages: u32) -> Rate {
    Rate { pages: pages * DEFAULT.sleep_ms, sleep_ms: DEFAULT.sleep_ms }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        let _ = write("run", "2");
        for (name, value) in &self.before {
            let _ = write(name, value);
        }
    }
}

fn number(name: &str) -> Result<u64, LabError> {
    number_in(&Path::new(DIR).join(name))
}

fn number_in(path: &Path) -> Result<u64, LabError> {
    Ok(std::fs::read_to_string(path)?.trim().parse().map_err(std::io::Error::other)?)
}

fn read(name: &str) -> Result<String, LabError> {
    Ok(std::fs::read_to_string(Path::new(DIR).join(name))?)
}

/// The bracketed word of a list of words; without brackets, the whole text.
fn chosen(text: &str) -> String {
    let inside = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or(text.trim(), |(word, _)| word).to_owned()
}

fn write(name: &str, value: &str) -> Result<(), LabError> {
    Ok(std::fs::write(Path::new(DIR).join(name), value)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chosen_word_of_a_list_is_found() {
        assert_eq!(chosen("[none] scan-time\n"), "none");
        assert_eq!(chosen("none [scan-time]\n"), "scan-time");
        assert_eq!(chosen("100\n"), "100");
    }
}
