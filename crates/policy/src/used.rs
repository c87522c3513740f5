//! The memory that a VM occupies, joined from the readings of several sources.

use model::{Bytes, FreePages, Reading, VmView};

use crate::tuning;

/// Physical memory that the guest occupies on the host: the kernel's count and its part of the
/// group's shared pages, without the memory that it has freed and the host can take. `None`: not
/// counted.
#[must_use]
pub fn used(view: &VmView) -> Option<Reading<Bytes>> {
    let counted = view.used?;
    Some(Reading { value: counted.value.minus(lazy(view)).plus(view.pool_part), ..counted })
}

/// Memory that the guest has freed and the host can take, which the kernel counts all the same.
pub(crate) fn lazy(view: &VmView) -> Bytes {
    let is_recent = |free: &Reading<FreePages>| {
        view.used.is_some_and(|used| free.age(used.at) <= tuning::FREED_STALE_AFTER)
    };
    view.free_pages.filter(is_recent).map_or(Bytes::ZERO, |free| free.value.lazy)
}

#[cfg(test)]
mod tests {
    use model::{Link, Time};

    use super::*;

    #[test]
    fn freed_memory_does_not_count_and_a_part_of_the_pool_does() {
        let mut view = VmView::unknown(Link::Up);
        assert_eq!(used(&view), None);
        let free =
            FreePages { freed: Bytes::mib(60), lazy: Bytes::mib(50), ..FreePages::default() };
        view.used = Some(Reading::new(Bytes::mib(180), Time(40_000)));
        view.free_pages = Some(Reading::new(free, Time(39_000)));
        view.pool_part = Bytes::mib(10);
        assert_eq!(used(&view).unwrap(), Reading::new(Bytes::mib(140), Time(40_000)));
        view.free_pages = Some(Reading::new(free, Time(0)));
        assert_eq!(used(&view).unwrap().value, Bytes::mib(190), "the count of freed pages is old");
    }
}
