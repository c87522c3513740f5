//! The version of the kernel, for bugs that a trial would trigger: which versions have them.

/// The upstream version of a kernel, also where a distribution's release name says less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion([u32; 3]);

impl KernelVersion {
    /// The version of this host's kernel.
    #[must_use]
    pub fn of_host() -> Self {
        let of = |file| std::fs::read_to_string(file).unwrap_or_default();
        Self::told(
            &of("/proc/version_signature"),
            &of("/proc/version"),
            &of("/proc/sys/kernel/osrelease"),
        )
    }

    /// Parses Ubuntu's signature (`Ubuntu 5.15.0-91.101-generic 5.15.131`), Debian's (`… #1 SMP
    /// Debian 6.1.176-1 (2026-05-01)`), or else the release.
    fn told(ubuntu: &str, debian: &str, release: &str) -> Self {
        let ubuntu = ubuntu.split_whitespace().nth(2);
        // The compiler's version comes before it.
        let debian = || debian.rsplit_once(" Debian ")?.1.split_whitespace().next();
        let text = ubuntu.or_else(debian).unwrap_or(release);
        let mut numbers =
            text.split(['.', '-', '+', '_', '~']).map_while(|part| part.trim().parse().ok());
        Self(std::array::from_fn(|_| numbers.next().unwrap_or(0)))
    }

    /// Whether `MADV_PAGEOUT` skips a page that was touched since the last such call, and pages
    /// it out at the next call: before Linux 6.9.
    #[must_use]
    pub fn has_second_chance(self) -> bool {
        self < Self([6, 9, 0])
    }

    /// Whether `UFFDIO_MOVE` works on pages in the swap cache: from Linux 6.14, 6.13.7 and
    /// 6.12.19 on ("mm: fix kernel BUG when userfaultfd_move encounters swapcache"). Earlier
    /// kernels crash.
    #[must_use]
    pub fn moves_swapped(self) -> bool {
        match self.0 {
            [6, 12, patch] => patch >= 19,
            [6, 13, patch] => patch >= 7,
            _ => self >= Self([6, 14, 0]),
        }
    }

    /// Whether `memory.reclaim` can be told to take process memory before files
    /// (`swappiness=200`): from Linux 6.9 on.
    #[must_use]
    pub fn reclaims_by_swappiness(self) -> bool {
        !self.has_second_chance()
    }

    /// Whether a write can be lost when two threads touch a page in zram at the same time: before
    /// Linux 6.8, 6.6.19 and 6.1.80 (commit 13ddaf26be32, "mm/swap: fix race when skipping
    /// swapcache").
    #[must_use]
    pub fn loses_writes_in_zram(self) -> bool {
        match self.0 {
            [6, 1, patch] => patch < 80,
            [6, 6, patch] => patch < 19,
            _ => self < Self([6, 8, 0]),
        }
    }
}

impl std::fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}.{patch}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_by_what_distributions_say() {
        let told = |ubuntu, debian, release| KernelVersion::told(ubuntu, debian, release).0;
        let debian = "Linux version 6.1.0-56-cloud-amd64 (x@debian.org) (gcc-12 (Debian 12.2.0-14) \
                      12.2.0) #1 SMP PREEMPT_DYNAMIC Debian 6.1.176-1 (2026-05-01)";
        assert_eq!(told("", debian, "6.1.0-56-cloud-amd64\n"), [6, 1, 176]);
        let ubuntu = "Ubuntu 5.15.0-91.101-generic 5.15.131\n";
        assert_eq!(told(ubuntu, "", "5.15.0-91-generic\n"), [5, 15, 131]);
        assert_eq!(told("", "Linux version 6.18.44", "6.18.44-fc-v657\n"), [6, 18, 44]);
        assert_eq!(told("", "", "7.3\n"), [7, 3, 0]);
    }

    #[test]
    fn versions_say_how_a_kernel_pages() {
        let all = [[5, 15, 131], [6, 1, 79], [6, 6, 18], [6, 7, 12]].map(KernelVersion);
        assert!(all.iter().all(|it| it.loses_writes_in_zram() && it.has_second_chance()));
        let fixed = [[6, 1, 80], [6, 6, 19], [6, 8, 12], [6, 18, 44], [7, 3, 4]].map(KernelVersion);
        assert!(!fixed.iter().any(|it| it.loses_writes_in_zram()));
        assert!(!KernelVersion([6, 9, 0]).has_second_chance());
    }

    #[test]
    fn the_kernels_that_move_what_is_being_swapped_are_known() {
        let moves = |release| KernelVersion::told("", "", release).moves_swapped();
        for good in ["6.14.0", "6.18.44-fc", "7.0", "6.12.19", "6.12.74+deb13-amd64", "6.13.7"] {
            assert!(moves(good), "{good}");
        }
        for bad in ["6.8.0-50-generic", "6.12.18", "6.13.6-1", "6.11.5", "5.15.0", "6", "x.y"] {
            assert!(!moves(bad), "{bad}");
        }
    }
}
