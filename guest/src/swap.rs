//! How much of the guest's memory lies in its swap: what its kernel tells any program in `/proc/meminfo`.

const MEMINFO: &str = "/proc/meminfo";

/// Swap in use, in KiB; `None` where there is none.
pub(crate) fn in_use_kb() -> Option<u64> {
    parse(&std::fs::read_to_string(MEMINFO).ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let total = field("SwapTotal:")?;
    (total > 0).then_some(total.saturating_sub(field("SwapFree:")?))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn swap_in_use_is_what_is_not_free() {
        let text = "MemTotal: 100 kB\nSwapTotal:      1024 kB\nSwapFree:  1000 kB\n";
        assert_eq!(parse(text), Some(24));
    }

    #[test]
    fn a_guest_without_swap_reports_none() {
        assert_eq!(parse("SwapTotal: 0 kB\nSwapFree: 0 kB\n"), None);
        assert_eq!(parse("nonsense"), None);
    }
}
