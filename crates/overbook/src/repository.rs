//! `overbook repository`, the part that watches its own host: lent memory goes back when the host
//! is short of memory.
//!
//! While more than the reserve is available, no memory is taken back. Below it, slabs go back:
//! free ones at once, leased ones after a notice of [`NOTICE`]. Below half of the reserve there
//! is no time for a notice. When twice the reserve has been available for a while, slabs are
//! pinned again, one each second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use model::Bytes;
use pageserver::layers::memory::SLAB;
use pageserver::repository::Repository;
use sys::cgroup;
use sys::meminfo::MemInfo;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

/// Interval at which the host is checked.
const LOOK: Duration = Duration::from_secs(1);
/// How long a slab can be read after its notice.
const NOTICE: Duration = Duration::from_secs(5);
/// How long the host must have had enough memory before slabs are pinned again.
const CALM: Duration = Duration::from_secs(60);
/// Memory that must stay available on the host, in percent of its memory: the same as for grants.
const RESERVE_PERCENT: u64 = policy::tuning::HOST_RESERVE_PERCENT;

/// Maximum memory that a repository needs in addition to what it lends, for any behaviour of its
/// clients: the budget, 640 KiB for each of 512 connections, and the process itself.
const BESIDE: Bytes = Bytes::mib(448);

/// Why this amount cannot be lent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooMuchError {
    /// The host has too little memory.
    #[error(
        "`--memory` {wanted} is more than this host can lend: {available} are available, and \
         {reserve} of these stay with it"
    )]
    Host {
        /// The amount to be lent.
        wanted: Bytes,
        /// The memory available on the host.
        available: Bytes,
        /// The reserve that the host keeps.
        reserve: Bytes,
    },
    /// The limit of the service is too low.
    #[error(
        "`--memory` {wanted} and {BESIDE} for its clients are more than the {limit} that this \
         service may have: raise MemoryMax= as well"
    )]
    Service {
        /// The amount to be lent.
        wanted: Bytes,
        /// The limit of its cgroup.
        limit: Bytes,
    },
}

/// Whether this amount can be lent: all of it is pinned.
///
/// # Errors
/// Why it cannot be lent.
pub fn can_lend(wanted: Bytes) -> Result<(), TooMuchError> {
    let limit = own_limit();
    if let Some(limit) = limit.filter(|limit| wanted.plus(BESIDE) > *limit) {
        return Err(TooMuchError::Service { wanted, limit });
    }
    // If meminfo cannot be read, pinning the memory will show whether it is enough.
    MemInfo::read().map_or(Ok(()), |host| host_can_lend(&host, wanted))
}

fn host_can_lend(host: &MemInfo, wanted: Bytes) -> Result<(), TooMuchError> {
    let (available, reserve) = (host.available, host.total.percent(RESERVE_PERCENT));
    if wanted.plus(reserve) > available {
        return Err(TooMuchError::Host { wanted, available, reserve });
    }
    Ok(())
}

/// The memory limit of this process' cgroup; `None`: there is none.
pub(crate) fn own_limit() -> Option<Bytes> {
    let own = cgroup::of_process(std::process::id()).ok()??;
    cgroup::memory_max(&own).map(Bytes)
}

/// The host's need for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// This number of slabs, at once.
    Now(usize),
    /// This number of further slabs, after notice.
    Soon(usize),
    /// No slabs.
    Nothing,
    /// No slabs, and there is memory to lend more.
    HasRoom,
}

/// Watches the host for as long as it is polled.
pub async fn mind_host(repository: Arc<Repository>) {
    let (mut noticed_at, mut short_at) = (None, Instant::now());
    loop {
        sleep(LOOK).await;
        let Ok(host) = MemInfo::read() else { continue };
        let need = need(&host, repository.lent().leaving);
        if need != Need::HasRoom {
            short_at = Instant::now();
        }
        match need {
            Need::Now(slabs) => {
                let taken = work(&repository, move |repository| repository.take_back(slabs)).await;
                say(&host, taken, "taken back");
            }
            // Slabs with notice are taken back first: they may be enough.
            Need::Soon(slabs) if noticed_at.is_none() => {
                let done = work(&repository, move |repository| repository.give_notice(slabs)).await;
                noticed_at = Some(Instant::now());
                say(&host, done, "given notice of, or taken back");
            }
            Need::HasRoom if short_at.elapsed() >= CALM => {
                work(&repository, Repository::pin_one).await;
            }
            Need::Soon(_) | Need::Nothing | Need::HasRoom => {}
        }
        if noticed_at.is_some_and(|at: Instant| at.elapsed() >= NOTICE) {
            noticed_at = None;
            let taken = work(&repository, Repository::take_back_noticed).await;
            say(&host, taken, "taken back after notice");
        }
    }
}

/// Freeing and pinning memory is slow, so clients are served meanwhile.
async fn work<T: Default + Send + 'static>(
    repository: &Arc<Repository>,
    what: impl FnOnce(&Repository) -> T + Send + 'static,
) -> T {
    let repository = repository.clone();
    spawn_blocking(move || what(&repository)).await.unwrap_or_default()
}

fn say(host: &MemInfo, slabs: usize, what: &str) {
    if slabs > 0 {
        let (size, available) = (Bytes((slabs * SLAB) as u64), host.available);
        eprintln!("overbook: the host has {available} available: {size} {what}");
    }
}

fn need(host: &MemInfo, leaving: usize) -> Need {
    let slab = Bytes(SLAB as u64);
    let slabs = |bytes: Bytes| usize::try_from(bytes.0.div_ceil(slab.0)).unwrap_or(usize::MAX);
    let reserve = host.total.percent(RESERVE_PERCENT);
    let short = reserve.minus(host.available);
    if host.available < reserve.share(1, 2) {
        return Need::Now(slabs(short));
    }
    match slabs(short).saturating_sub(leaving) {
        0 if host.available > reserve.plus(reserve) => Need::HasRoom,
        0 => Need::Nothing,
        more => Need::Soon(more),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_lent_than_the_host_can_do_without() {
        let host = MemInfo {
            total: Bytes::mib(24_064),
            available: Bytes::mib(22_000),
            swap_total: Bytes::ZERO,
            swap_free: Bytes::ZERO,
        };
        assert_eq!(host_can_lend(&host, Bytes::mib(20_000)), Ok(()));
        let error = host_can_lend(&host, Bytes::mib(900 << 10)).unwrap_err().to_string();
        assert!(error.starts_with("`--memory` 900 GiB is more than this host can lend"), "{error}");
    }

    #[test]
    fn what_a_host_needs_follows_from_what_it_has_available() {
        let host = |available| MemInfo {
            total: Bytes::mib(100 * 1024),
            available: Bytes::mib(available),
            swap_total: Bytes::ZERO,
            swap_free: Bytes::ZERO,
        };
        // The reserve is 5 GiB.
        assert_eq!(need(&host(50_000), 0), Need::HasRoom);
        assert_eq!(need(&host(6_000), 0), Need::Nothing);
        assert_eq!(need(&host(5_100), 0), Need::Soon(2));
        assert_eq!(need(&host(5_100), 2), Need::Nothing);
        assert_eq!(need(&host(2_000), 2), Need::Now(195));
    }
}
