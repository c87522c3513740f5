//! Whether memory that is being swapped can be moved.

use std::path::Path;

use crate::procfs::read;

/// Works with `UFFDIO_MOVE` on pages in the swap cache.
///
/// Not tried: where it does not work it stops the kernel ("mm: fix kernel BUG when userfaultfd_move
/// encounters swapcache", Linux 6.14, 6.13.7 and 6.12.19). So here a version is believed.
pub(super) fn moves_swapped() -> Result<String, String> {
    let path = Path::new("/proc/sys/kernel/osrelease");
    let text = read(path).map_err(|error| error.to_string())?;
    let release = text.trim();
    if is_mended(release) {
        Ok(format!("Linux {release}"))
    } else {
        Err(format!("Linux {release}: 6.14, 6.13.7 or 6.12.19 is needed"))
    }
}

fn is_mended(release: &str) -> bool {
    let numbers = release.split(['.', '-', '+', '_', '~']).map(|number| number.parse().ok());
    let numbers: Vec<u32> = numbers.map_while(|number| number).collect();
    let (major, minor) = (numbers.first().copied(), numbers.get(1).copied());
    let (Some(major), Some(minor)) = (major, minor) else { return false };
    let patch = numbers.get(2).copied().unwrap_or(0);
    match (major, minor) {
        (6, 12) => patch >= 19,
        (6, 13) => patch >= 7,
        _ => (major, minor) >= (6, 14),
    }
}

#[cfg(test)]
mod tests {
    use super::is_mended;

    #[test]
    fn the_kernels_that_were_mended_are_known() {
        for good in ["6.14.0", "6.18.44-fc", "7.0", "6.12.19", "6.12.74+deb13-amd64", "6.13.7"] {
            assert!(is_mended(good), "{good}");
        }
        for bad in ["6.8.0-50-generic", "6.12.18", "6.13.6-1", "6.11.5", "5.15.0", "6", "x.y"] {
            assert!(!is_mended(bad), "{bad}");
        }
    }
}
