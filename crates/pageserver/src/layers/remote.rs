//! `remote`: pages in the memory of other hosts.
//!
//! A table holds the place of each page: a repository, and a page of the lease there. A new page
//! goes to the repository with the most room. When a connection breaks, all pages there are lost.
//! A task reconnects, and later writes find room there again. If a repository refuses a request,
//! it has taken the slab back or is about to. The pages of that request are then dropped, nothing
//! more is written to that slab, and the next write finds room elsewhere. Reads of pages without
//! a place fail, and so do requests that a repository does not answer.
//!
//! A repository may claim to lend any amount: this layer uses no more than it asked for, and its
//! tables grow only with what is written.
//!
//! A place is reused as soon as its page is written elsewhere or trimmed, and a repository may
//! answer with any content. So this layer must only be read through `seal`, which knows what each
//! page must contain.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, select, try_join_all};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::client::{self, Client, ClientError};
use crate::dead_peers;
use crate::layer::{Answer, Layer, Read, Zeros};
use crate::layers::memory::SLAB;
use crate::layers::seal::PAGE;
use crate::nbd::Errno;
use crate::nbd::dialogue::Wanted;
use crate::nbd::reply::{self, Extent};
use crate::nbd::wire;
use crate::repository::LEASE;
use crate::tls::Connector;

/// Pause before a repository is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// Timeout of connecting.
const CONNECT: Duration = Duration::from_secs(5);
/// Interval at which a repository is checked for still answering.
const LOOK: Duration = Duration::from_secs(1);
/// Pages that share a lock.
const SHARD: usize = 4096;
/// Pages of a slab.
const SLAB_PAGES: usize = SLAB / PAGE;

/// Address of a repository.
#[derive(Clone)]
pub enum Address {
    /// A socket on this host.
    Unix(std::path::PathBuf),
    /// On another host: name or address, and port.
    Tcp(String, Option<Connector>),
}

/// The host part of an address with a port, as certificates name it.
pub(crate) fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_matches(['[', ']'])
}

/// Place of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageLocation {
    repository: u16,
    /// Number of the lease there.
    lease: NonZeroU32,
    /// Page within the lease.
    page: u32,
}

/// There is one for each page.
const _: () = assert!(size_of::<Option<PageLocation>>() == 12);

impl PageLocation {
    fn slab(self) -> usize {
        self.page as usize / SLAB_PAGES
    }
}

/// Pages in other hosts' memory.
pub struct Remote {
    size: u64,
    /// Places of all pages, in shards. An empty shard has no places and takes no memory.
    places: Vec<Mutex<Box<[Option<PageLocation>]>>>,
    repositories: Vec<Arc<Repository>>,
    /// Whether new pages are written there.
    admits: AtomicBool,
    tasks: Vec<JoinHandle<()>>,
}

/// One repository, as this host sees it.
struct Repository {
    address: Address,
    /// Number of slabs to ask for.
    slabs: u64,
    lease: Mutex<Option<Lease>>,
    leases: AtomicU32,
}

/// Memory leased from a repository.
struct Lease {
    number: NonZeroU32,
    client: Client,
    /// Number of its pages.
    pages: u32,
    /// First page that was never used; all later ones were not either.
    fresh: u32,
    /// Pages before `fresh` that are unused. None of them is in a refused slab.
    free: Vec<u32>,
    /// Slabs that the repository has taken back, or is about to.
    refused: HashSet<usize>,
    /// Number of fresh pages in refused slabs.
    refused_fresh: u32,
}

/// Pages that are adjacent here and within one slab there.
struct RemoteRun {
    client: Client,
    first: PageLocation,
    /// Indices of its pages within the request.
    pages: Range<usize>,
}

impl Remote {
    /// A layer of `size` bytes in these repositories; each is asked for a lease of the full size.
    /// Connects in the background.
    #[must_use]
    pub fn new(size: u64, addresses: Vec<Address>) -> Self {
        let slabs = size.div_ceil(SLAB as u64);
        let repository = |address| {
            let (lease, leases) = (Mutex::new(None), AtomicU32::new(1));
            Arc::new(Repository { address, slabs, lease, leases })
        };
        let repositories: Vec<_> = addresses.into_iter().map(repository).collect();
        let tasks = repositories.iter().cloned().map(|r| tokio::spawn(r.keep_connected()));
        let pages = usize::try_from(size / PAGE as u64).unwrap_or(usize::MAX);
        Self {
            size,
            places: (0..pages.div_ceil(SHARD)).map(|_| Mutex::default()).collect(),
            tasks: tasks.collect(),
            repositories,
            admits: AtomicBool::new(true),
        }
    }

    /// Sets whether new pages are written there.
    pub fn admit(&self, admits: bool) {
        self.admits.store(admits, Ordering::Relaxed);
    }

    /// Whether new pages are written there.
    #[must_use]
    pub fn admits(&self) -> bool {
        self.admits.load(Ordering::Relaxed)
    }

    /// Number of repositories that are connected.
    #[must_use]
    pub fn connected(&self) -> usize {
        self.repositories.iter().filter(|repository| repository.lease().is_some()).count()
    }

    /// Number of pages in repositories that are connected.
    #[must_use]
    pub fn pages(&self) -> u64 {
        let shards = self.places.iter().map(|shard| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.iter().flatten().filter(|place| self.client(place).is_some()).count() as u64
        });
        shards.sum()
    }

    fn shard(&self, page: u64) -> (MutexGuard<'_, Box<[Option<PageLocation>]>>, usize) {
        let page = usize::try_from(page).unwrap_or(usize::MAX);
        let shard = self.places[page / SHARD].lock().unwrap_or_else(PoisonError::into_inner);
        (shard, page % SHARD)
    }

    /// Place of a page.
    fn place(&self, page: u64) -> Option<PageLocation> {
        let (shard, page) = self.shard(page);
        shard.get(page).copied().flatten()
    }

    /// Records the place of a page.
    fn set_place(&self, page: u64, place: Option<PageLocation>) {
        let (mut shard, page) = self.shard(page);
        if shard.is_empty() {
            *shard = vec![None; SHARD].into_boxed_slice();
        }
        shard[page] = place;
    }

    /// Removes the place of a page, if `was` accepts it, and returns it.
    fn take_place(
        &self,
        page: u64,
        was: impl FnOnce(&PageLocation) -> bool,
    ) -> Option<PageLocation> {
        let (mut shard, page) = self.shard(page);
        shard.get_mut(page)?.take_if(|place| was(place))
    }

    /// Client for the page at `place`; `None`: the page is lost.
    fn client(&self, place: &PageLocation) -> Option<Client> {
        let lease = self.repositories[usize::from(place.repository)].lease();
        lease.as_ref().filter(|lease| lease.number == place.lease).map(|l| l.client.clone())
    }

    /// An unused place in the repository with the most room.
    fn find_room(&self) -> Option<PageLocation> {
        let room = |repository: &Repository| repository.lease().as_ref().map(Lease::room);
        let repositories = self.repositories.iter().enumerate();
        let (index, repository) = repositories.max_by_key(|(_, repository)| room(repository))?;
        let mut lease = repository.lease();
        let lease = lease.as_mut()?;
        let page = lease.take_room()?;
        Some(PageLocation { repository: u16::try_from(index).ok()?, lease: lease.number, page })
    }

    /// Marks a place as unused.
    fn free(&self, place: PageLocation) {
        let mut lease = self.repositories[usize::from(place.repository)].lease();
        if let Some(lease) = lease.as_mut().filter(|lease| lease.number == place.lease)
            && !lease.refused.contains(&place.slab())
        {
            lease.free.push(place.page);
        }
    }

    /// Whether the place can be written again.
    fn is_writable(&self, place: PageLocation) -> bool {
        let lease = self.repositories[usize::from(place.repository)].lease();
        let lease = lease.as_ref().filter(|lease| lease.number == place.lease);
        lease.is_some_and(|lease| !lease.refused.contains(&place.slab()))
    }

    /// Places of these pages, in runs; `None`: a page is lost, or `place` has none for it.
    fn runs(
        &self,
        pages: impl Iterator<Item = u64>,
        mut place: impl FnMut(u64) -> Option<PageLocation>,
    ) -> Option<Vec<RemoteRun>> {
        let mut runs: Vec<RemoteRun> = Vec::new();
        let mut last: Option<PageLocation> = None;
        for (i, page) in pages.enumerate() {
            let found = place(page)?;
            let follows = last.is_some_and(|last| {
                PageLocation { page: last.page + 1, ..last } == found && last.slab() == found.slab()
            });
            match runs.last_mut().filter(|_| follows) {
                Some(run) => run.pages.end = i + 1,
                None => runs.push(RemoteRun {
                    client: self.client(&found)?,
                    first: found,
                    pages: i..i + 1,
                }),
            }
            last = Some(found);
        }
        Some(runs)
    }

    /// Place for writing a page: its present one if that can be written, or else a new one.
    fn place_for(&self, page: u64) -> Option<PageLocation> {
        let has = self.place(page);
        if has.is_some_and(|place| self.is_writable(place)) {
            return has;
        }
        let found = self.find_room();
        self.set_place(page, found);
        found
    }

    fn forget(&self, pages: impl Iterator<Item = u64>) {
        for page in pages {
            if let Some(place) = self.take_place(page, |_| true) {
                self.free(place);
            }
        }
    }

    /// Handles the failure of a run, in a request that begins at page `begin`.
    fn failed(&self, error: &ClientError, run: &RemoteRun, begin: u64) -> Errno {
        let PageLocation { repository, lease: number, page: first } = run.first;
        if !matches!(error, ClientError::Refused(_)) {
            return Errno::Io;
        }
        let slab = run.first.slab();
        let mut lease = self.repositories[usize::from(repository)].lease();
        if let Some(lease) = lease.as_mut().filter(|lease| lease.number == number) {
            lease.refuse(slab);
        }
        drop(lease);
        for (page, there) in run.pages.clone().zip(first..) {
            let was = PageLocation { page: there, ..run.first };
            self.take_place(begin + page as u64, |now| *now == was);
        }
        Errno::Io
    }

    async fn read(
        &self,
        runs: Vec<RemoteRun>,
        (offset, length): (u64, usize),
    ) -> Result<Vec<u8>, Errno> {
        let read = async |run: &RemoteRun| {
            let read = run.client.read(run.at(), run.length()).await;
            read.map_err(|error| self.failed(&error, run, offset / PAGE as u64))
        };
        if let [run] = &runs[..] {
            return read(run).await;
        }
        let parts = try_join_all(runs.iter().map(read)).await?;
        let mut data = Vec::with_capacity(length);
        parts.iter().for_each(|part| data.extend_from_slice(part));
        Ok(data)
    }
}

/// Returns when the server has owed answers for too long.
async fn silence(client: &Client) {
    while client.silent_for() < dead_peers::LATEST {
        sleep(LOOK).await;
    }
}

/// The pages of a range.
fn pages_of(offset: u64, length: u64) -> Range<u64> {
    offset / PAGE as u64..(offset + length) / PAGE as u64
}

impl RemoteRun {
    /// Offset in the lease at which it begins, in bytes.
    fn at(&self) -> u64 {
        u64::from(self.first.page) * PAGE as u64
    }

    fn length(&self) -> u32 {
        u32::try_from(self.pages.len() * PAGE).unwrap_or(u32::MAX)
    }
}

impl Lease {
    /// Number of unused pages that can be written.
    fn room(&self) -> usize {
        self.free.len() + (self.pages - self.fresh - self.refused_fresh) as usize
    }

    fn take_room(&mut self) -> Option<u32> {
        if let Some(page) = self.free.pop() {
            return Some(page);
        }
        while self.fresh < self.pages {
            let page = self.fresh;
            self.fresh += 1;
            if !self.refused.contains(&(page as usize / SLAB_PAGES)) {
                return Some(page);
            }
            self.refused_fresh -= 1;
        }
        None
    }

    /// Marks a slab to which nothing more is written.
    fn refuse(&mut self, slab: usize) {
        if !self.refused.insert(slab) {
            return;
        }
        self.free.retain(|page| *page as usize / SLAB_PAGES != slab);
        let bound =
            |page: usize| u32::try_from(page).unwrap_or(u32::MAX).clamp(self.fresh, self.pages);
        self.refused_fresh += bound((slab + 1) * SLAB_PAGES) - bound(slab * SLAB_PAGES);
    }
}

impl Repository {
    fn lease(&self) -> MutexGuard<'_, Option<Lease>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn keep_connected(self: Arc<Self>) {
        loop {
            if let Ok(Ok((client, connection))) = timeout(CONNECT, self.connect()).await {
                self.begin(client.clone());
                // A repository that stays silent is treated like one that is gone.
                select(connection, Box::pin(silence(&client))).await;
                *self.lease() = None;
            }
            sleep(RETRY).await;
        }
    }

    async fn connect(&self) -> Result<(Client, BoxFuture<'static, ClientError>), ClientError> {
        let name = format!("{LEASE}{}", self.slabs);
        let wanted = |name| Wanted { name, tls: false, status: false };
        Ok(match &self.address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).await?;
                let (client, connection) = client::connect(stream, wanted(name)).await?;
                (client, Box::pin(connection.run()))
            }
            Address::Tcp(address, connector) => {
                let stream = TcpStream::connect(address).await?;
                stream.set_nodelay(true)?;
                dead_peers::notice(&stream);
                match connector {
                    None => {
                        let (client, connection) = client::connect(stream, wanted(name)).await?;
                        (client, Box::pin(connection.run()))
                    }
                    Some(connector) => {
                        let with = (connector, host_of(address));
                        let (client, connection) =
                            client::connect_tls(stream, name, false, with).await?;
                        (client, Box::pin(connection.run()))
                    }
                }
            }
        })
    }

    fn begin(&self, client: Client) {
        let wanted = self.slabs.saturating_mul(SLAB as u64);
        let pages = client.session().export.size.min(wanted) / PAGE as u64;
        *self.lease() = Some(Lease {
            number: NonZeroU32::new(self.leases.fetch_add(1, Ordering::Relaxed))
                .unwrap_or(NonZeroU32::MAX),
            client,
            pages: u32::try_from(pages).unwrap_or(u32::MAX),
            fresh: 0,
            free: Vec::new(),
            refused: HashSet::new(),
            refused_fresh: 0,
        });
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Layer for Remote {
    fn size(&self) -> u64 {
        self.size
    }

    fn describe(&self) -> String {
        format!("remote ({} of {} connected)", self.connected(), self.repositories.len())
    }

    fn block(&self) -> u32 {
        4096
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let length = into.len();
        let runs = self.runs(pages_of(offset, length as u64), |page| self.place(page));
        match runs {
            Some(runs) => Read::Later(Box::pin(self.read(runs, (offset, length)))),
            None => Read::Now(Err(Errno::Io)),
        }
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        let pages = pages_of(offset, data.len() as u64);
        if !self.admits() {
            self.forget(pages);
            return Answer::Now(Err(Errno::NoSpace));
        }
        let Some(runs) = self.runs(pages.clone(), |page| self.place_for(page)) else {
            self.forget(pages);
            return Answer::Now(Err(Errno::NoSpace));
        };
        Answer::Later(Box::pin(async move {
            let write = async |run: &RemoteRun, part: Bytes| {
                let written = run.client.write(run.at(), part).await;
                written.map_err(|error| self.failed(&error, run, pages.start))
            };
            if let [run] = &runs[..] {
                return write(run, data).await;
            }
            let part = |run: &RemoteRun| data.slice(run.pages.start * PAGE..run.pages.end * PAGE);
            try_join_all(runs.iter().map(|run| write(run, part(run)))).await.map(|_| ())
        }))
    }

    /// Frees the places of the pages. Zeros have no place, so this layer cannot write them.
    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        if zeros == Zeros::Write {
            return Answer::Now(Err(Errno::NotSupported));
        }
        self.forget(pages_of(offset, length));
        Answer::Now(Ok(()))
    }

    fn flush(&self) -> Answer<'_> {
        Answer::Now(Ok(()))
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        reply::join(pages_of(offset, length.into()).map(|page| {
            let place = self.place(page);
            let is_hole = place.is_none_or(|place| self.client(&place).is_none());
            Extent { length: wire::length(PAGE), is_hole }
        }))
    }
}
