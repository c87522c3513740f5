//! The number of programs that the guest's kernel has killed because memory ran out, from
//! `/proc/vmstat`.

const VMSTAT: &str = "/proc/vmstat";

/// Kills since the guest booted; `None` where the kernel does not count them.
pub(crate) fn kills() -> Option<u64> {
    parse(&std::fs::read_to_string(VMSTAT).ok()?)
}

fn parse(vmstat: &str) -> Option<u64> {
    vmstat.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn kills_are_found_among_the_kernels_counters() {
        assert_eq!(parse("drop_slab 3\noom_kill_other 9\noom_kill 2\n"), Some(2));
        assert_eq!(parse("drop_slab 3\n"), None);
    }
}
