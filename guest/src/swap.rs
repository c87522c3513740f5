//! The amount of the guest's memory that is in its swap and not in memory, from `/proc/meminfo`.
//!
//! A page that has come back keeps its slot in swap until it is written (`SwapCached`), so that
//! it need not be written out again. It is in memory, where the host sees it, so counting it here
//! would count it twice.

const MEMINFO: &str = "/proc/meminfo";

/// Memory in swap but not in memory, in KiB; `None` where there is no swap.
pub(crate) fn in_use_kb() -> Option<u64> {
    parse(&std::fs::read_to_string(MEMINFO).ok()?)
}

fn parse(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let total = field("SwapTotal:")?;
    let also_in_memory = field("SwapCached:")?;
    (total > 0).then_some(total.saturating_sub(field("SwapFree:")?).saturating_sub(also_in_memory))
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn swap_in_use_is_what_is_not_free() {
        let text = "SwapCached: 0 kB\nSwapTotal:      1024 kB\nSwapFree:  1000 kB\n";
        assert_eq!(parse(text), Some(24));
    }

    #[test]
    fn pages_that_are_in_memory_again_do_not_count() {
        let text = "SwapCached: 20 kB\nSwapTotal: 1024 kB\nSwapFree: 1000 kB\n";
        assert_eq!(parse(text), Some(4));
        // The kernel reads the fields one after the other, so they need not agree.
        let text = "SwapCached: 30 kB\nSwapTotal: 1024 kB\nSwapFree: 1000 kB\n";
        assert_eq!(parse(text), Some(0));
    }

    #[test]
    fn a_guest_without_swap_reports_none() {
        assert_eq!(parse("SwapCached: 0 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"), None);
        assert_eq!(parse("nonsense"), None);
    }
}
