//! `overbook repository`, the part that watches its own host: lent memory goes back when the host
//! is short of memory.
//!
//! [`policy::lent`] tells how much is to go back. Free slabs go at once, leased ones after a notice
//! of [`NOTICE`] if there is time for it. When the host has had room for a while, slabs are pinned
//! again, one each second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use model::Bytes;
use pageserver::layers::memory::SLAB;
use pageserver::repository::Repository;
use policy::lent::{self, Holding, Need};
use sys::cgroup;
use sys::meminfo::MemInfo;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use sys::log;

/// Interval at which the host is checked.
const LOOK: Duration = Duration::from_secs(1);
/// Interval at which the daemon is asked.
const ASK: Duration = Duration::from_secs(2);
/// How long the daemon's word holds.
const BELIEVED: Duration = Duration::from_secs(30);
/// How long a slab can be read after its notice.
const NOTICE: Duration = Duration::from_secs(5);
/// How long the host must have had enough memory before slabs are pinned again.
const CALM: Duration = Duration::from_secs(60);

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
    let (available, reserve) = (host.available, lent::reserve(host.total));
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

/// Watches the host for as long as it is polled. `may_hold` asks the daemon, which may be gone, how
/// much a repository with this much may hold.
pub async fn mind_host(
    repository: Arc<Repository>,
    may_hold: impl Fn(Bytes) -> Option<Bytes> + Send + Sync + 'static,
) {
    let (told, heard) = watch::channel(None);
    tokio::spawn(ask(repository.clone(), Arc::new(may_hold), told));
    let (mut noticed_at, mut short_at) = (None, Instant::now());
    loop {
        sleep(LOOK).await;
        let Ok(host) = MemInfo::read() else { continue };
        let leaving = Bytes((repository.lent().leaving * SLAB) as u64);
        let holds = held(&repository);
        let word = heard.borrow().filter(|(_, at): &(Bytes, Instant)| at.elapsed() < BELIEVED);
        let holding = word.map(|(may, _)| Holding { holds, may: whole_slabs(may) });
        let need = lent::need(host.total, host.available, leaving, holding);
        if !matches!(need, Need::HasRoom | Need::Lacks) {
            short_at = Instant::now();
        }
        match need {
            Need::Now(short) => {
                let slabs = slabs(short);
                let taken = work(&repository, move |repository| repository.take_back(slabs)).await;
                say(&host, taken, "taken back");
            }
            // Slabs with notice are taken back first: they may be enough.
            Need::Soon(short) if noticed_at.is_none() => {
                let slabs = slabs(short);
                let done = work(&repository, move |repository| repository.give_notice(slabs)).await;
                noticed_at = Some(Instant::now());
                say(&host, done, "given notice of, or taken back");
            }
            Need::Lacks => {
                work(&repository, Repository::pin_one).await;
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

/// Asks the daemon now and then. The host is watched meanwhile, because the daemon may hang.
async fn ask(
    repository: Arc<Repository>,
    may_hold: Arc<impl Fn(Bytes) -> Option<Bytes> + Send + Sync + 'static>,
    told: watch::Sender<Option<(Bytes, Instant)>>,
) {
    loop {
        let (may_hold, holds) = (may_hold.clone(), held(&repository));
        if let Ok(Some(may)) = spawn_blocking(move || may_hold(holds)).await {
            told.send_replace(Some((may, Instant::now())));
        }
        sleep(ASK).await;
    }
}

/// The memory that the repository holds, lent or free.
fn held(repository: &Repository) -> Bytes {
    let lent = repository.lent();
    Bytes(((lent.free + lent.lent) * SLAB) as u64)
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
        log::info(&format!("the host has {available} available: {size} {what}"));
    }
}

/// The part of this that whole slabs hold.
fn whole_slabs(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 / SLAB as u64 * SLAB as u64)
}

/// The number of slabs that hold this much.
fn slabs(bytes: Bytes) -> usize {
    usize::try_from(bytes.0.div_ceil(SLAB as u64)).unwrap_or(usize::MAX)
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
}
