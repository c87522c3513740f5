//! A store in etcd, for many hosts.
//!
//! A writer's lease is a key bound to an etcd lease; its fencing token is the revision that
//! created the key. Each write is a transaction that compares that token. So a holder whose lease
//! has expired writes nothing, even if it does not know this or its write arrives late. (etcd's
//! own elections have shown two winners.)

use std::time::Duration;

pub use etcd_client::{Certificate, Identity, TlsOptions};
use etcd_client::{
    Client, Compare, CompareOp, ConnectOptions, Error, GetOptions, GetResponse, PutOptions, Txn,
    TxnOp, TxnOpResponse, TxnResponse, WatchOptions,
};
use futures_util::future::BoxFuture;
use model::words::plain;
use tokio::time::{Instant, sleep, timeout};

use super::share::{Share, Verdict};
use super::{Change, LIMIT, SEAT_TTL, Snapshot, Still, Store, StoreError, WriterLease};

/// The number of keys requested first, and after each value that is too large. (A page may have
/// 4 MiB, the client's limit, and a value 1.5, the server's.)
const FIRST_PAGE: i64 = 16;
/// The most keys in one request.
const LARGEST_PAGE: i64 = 1024;
/// The client's message for a page that is too large (with the code OUT_OF_RANGE).
const TOO_LARGE: &str = "message length too large";

/// The longest wait for a change; after it the caller reads.
const QUIET: Duration = Duration::from_secs(10);
/// The interval and the timeout of a connection's keep-alive.
const ALIVE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(3));

/// The pause before another member is tried.
const PAUSE: Duration = Duration::from_millis(50);
/// The client's message for a lease that has expired.
const LEASE_GONE: &str = "lease not found";
/// Codes of gRPC that mean that nothing was done and a retry is useless: INVALID_ARGUMENT,
/// PERMISSION_DENIED, UNAUTHENTICATED. A store without a leader, or a full one, may recover
/// later.
const REFUSALS: [i32; 3] = [3, 7, 16];

/// A store in etcd. All keys begin with the pool's prefix.
pub struct Etcd {
    client: Client,
    prefix: String,
}

impl Etcd {
    /// The store of the pool `pool`, at these members. It connects at the first request.
    ///
    /// # Errors
    ///
    /// An address or a certificate is invalid.
    pub async fn connect(
        endpoints: &[String],
        tls: Option<TlsOptions>,
        pool: &str,
    ) -> Result<Self, StoreError> {
        let mut options = ConnectOptions::new()
            .with_timeout(LIMIT)
            .with_connect_timeout(LIMIT)
            .with_keep_alive(ALIVE.0, ALIVE.1)
            .with_keep_alive_while_idle(true);
        if let Some(tls) = tls {
            options = options.with_tls(tls);
        }
        let client = Client::connect(endpoints, Some(options)).await.map_err(failed)?;
        Ok(Self { client, prefix: format!("/overbook/{pool}/") })
    }

    fn full(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Retries until a member answers, because a member that has just died may be tried first,
    /// and another one has the same data. The request may be carried out twice.
    async fn ask<T, F>(&self, what: impl Fn(Client) -> F + Send) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, Error>> + Send,
    {
        let end = Instant::now() + LIMIT;
        let mut last = None;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match in_time(left, what(self.client.clone())).await {
                Err(error @ StoreError::Unreachable(_)) => {
                    // An attempt without time left does not show the cause.
                    if Instant::now() + PAUSE >= end {
                        return Err(last.filter(|_| Instant::now() >= end).unwrap_or(error));
                    }
                    last = Some(error);
                    sleep(PAUSE).await;
                }
                done => return done,
            }
        }
    }

    async fn txn(&self, all: Txn) -> Result<TxnResponse, StoreError> {
        let done = self.ask(|mut client| {
            let all = all.clone();
            async move { client.txn(all).await }
        });
        done.await
    }

    /// Keys and values from `from` to before `end`; `None`: they do not fit into a message.
    async fn page(
        &self,
        from: &[u8],
        end: &[u8],
        options: GetOptions,
    ) -> Result<Option<GetResponse>, StoreError> {
        let found = self.ask(|mut client| {
            let (from, options) = (from.to_owned(), options.clone().with_range(end));
            async move {
                match client.get(from, Some(options)).await {
                    Err(Error::GRpcStatus(status)) if status.message().contains(TOO_LARGE) => {
                        Ok(None)
                    }
                    found => found.map(Some),
                }
            }
        });
        found.await
    }

    /// Reads each writer's share of the values with this prefix, all at one revision.
    async fn read_by_pages(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        let mut from = self.full(prefix).into_bytes();
        let end = end_of(&from);
        let (mut snapshot, mut share, mut limit) =
            (Snapshot::default(), Share::default(), FIRST_PAGE);
        loop {
            let options = GetOptions::new().with_revision(snapshot.revision);
            let Some(page) = self.page(&from, &end, options.clone().with_limit(limit)).await?
            else {
                if limit > 1 {
                    limit = 1;
                    continue;
                }
                // It does not fit even alone: its key alone tells where to continue.
                let options = options.with_keys_only().with_limit(1);
                let found = self.page(&from, &end, options).await?;
                let Some(key) = found.as_ref().and_then(|found| found.kvs().first()) else {
                    return Err(StoreError::Refused("a key is too long to be read".to_owned()));
                };
                from = [key.key(), &[0]].concat();
                continue;
            };
            if snapshot.revision == 0 {
                snapshot.revision = page.header().map_or(0, |header| header.revision());
            }
            let mut is_over = !page.more();
            for found in page.kvs() {
                from = [found.key(), &[0]].concat();
                let key = found.key_str().ok().and_then(|key| key.strip_prefix(&self.prefix));
                let Some(key) = key else { continue };
                match share.judge(key, found.value().len()) {
                    Verdict::Keep => {
                        snapshot.values.insert(key.to_owned(), found.value().to_vec());
                    }
                    Verdict::Skip => {}
                    Verdict::SkipAll(prefix) => {
                        from = end_of(self.full(&prefix).as_bytes());
                        is_over = false;
                        break;
                    }
                }
            }
            if is_over || from >= end {
                return Ok(snapshot);
            }
            limit = (limit * 2).clamp(1, LARGEST_PAGE);
        }
    }

    async fn revoke(&self, lease: i64) -> Result<(), StoreError> {
        let done = self.ask(|mut client| async move { client.lease_revoke(lease).await });
        done.await.map(drop)
    }

    /// The condition that exactly this lease is still held.
    fn is_taken(&self, seat: &WriterLease) -> Compare {
        Compare::create_revision(self.full(&seat.key), CompareOp::Equal, seat.number)
    }
}

/// The first key after all keys with this prefix.
fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_owned();
    // Our prefixes end with a character, which is never the byte 255.
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

fn failed(error: Error) -> StoreError {
    match error {
        Error::InvalidArgs(_) | Error::InvalidUri(_) | Error::EndpointError(_) => {
            StoreError::Refused(error.to_string())
        }
        Error::LeaseKeepAliveError(why) if why == LEASE_GONE => StoreError::Refused(why),
        Error::GRpcStatus(status) if REFUSALS.contains(&(status.code() as i32)) => {
            StoreError::Refused(plain(status.message()))
        }
        Error::GRpcStatus(status) => {
            let said = Some(status.message()).filter(|said| !said.is_empty());
            StoreError::Unreachable(with_cause(
                said.unwrap_or(status.code().description()),
                &status,
            ))
        }
        other => StoreError::Unreachable(plain(&other.to_string())),
    }
}

/// A message with its root cause.
fn with_cause(said: &str, error: &dyn std::error::Error) -> String {
    let mut cause = error.source();
    while let Some(deeper) = cause.and_then(|cause| cause.source()) {
        cause = Some(deeper);
    }
    let cause = cause.map(ToString::to_string).filter(|cause| !said.contains(cause));
    plain(&cause.map_or_else(|| said.to_owned(), |cause| format!("{said}: {cause}")))
}

async fn in_time<T>(
    limit: Duration,
    what: impl Future<Output = Result<T, Error>>,
) -> Result<T, StoreError> {
    match timeout(limit, what).await {
        Ok(done) => done.map_err(failed),
        Err(_) => Err(StoreError::Unreachable(format!("nothing within {limit:?}"))),
    }
}

impl Store for Etcd {
    fn read<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Snapshot, StoreError>> {
        Box::pin(async move { self.read_by_pages(prefix).await })
    }

    fn changed<'a>(&'a self, prefix: &'a str, since: i64) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let key = self.full(prefix);
            let watched = self.ask(|mut client| {
                let options = WatchOptions::new()
                    .with_prefix()
                    .with_fragment()
                    .with_start_revision(since + 1);
                let key = key.clone();
                async move { client.watch(key, Some(options)).await }
            });
            let mut stream = watched.await?;
            let news = async {
                while let Some(news) = stream.message().await? {
                    // A canceled watch means that its revision is compacted, so there were
                    // changes.
                    if !news.events().is_empty() || news.canceled() {
                        break;
                    }
                }
                Ok(())
            };
            match timeout(QUIET, news).await {
                Ok(done) => done.map_err(failed),
                Err(_) => Ok(()),
            }
        })
    }

    fn sit<'a>(
        &'a self,
        key: &'a str,
        who: &'a str,
    ) -> BoxFuture<'a, Result<Option<WriterLease>, StoreError>> {
        Box::pin(async move {
            let ttl = i64::try_from(SEAT_TTL.as_secs()).unwrap_or(i64::MAX);
            let lease = self.ask(|mut client| async move { client.lease_grant(ttl, None).await });
            let lease = lease.await?.id();
            let is_free = Compare::create_revision(self.full(key), CompareOp::Equal, 0);
            let put = PutOptions::new().with_lease(lease);
            let take = TxnOp::put(self.full(key), who, Some(put));
            let all = Txn::new().when([is_free]).and_then([take]);
            // If the first answer is lost, the retry finds the key taken by this very lease,
            // which is then revoked.
            let taken = self.txn(all).await?;
            if taken.succeeded() {
                let number = taken.header().map_or(0, |header| header.revision());
                return Ok(Some(WriterLease { key: key.to_owned(), number, lease }));
            }
            // An error does not matter: the lease expires by itself.
            let _ = self.revoke(lease).await;
            Ok(None)
        })
    }

    fn stay<'a>(&'a self, seat: &'a WriterLease) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let lease = seat.lease;
            let kept = self.ask(|mut client| async move { client.lease_keep_alive(lease).await });
            match kept.await {
                Err(StoreError::Refused(why)) if why == LEASE_GONE => {
                    Err(StoreError::Unseated(seat.key.clone()))
                }
                kept => kept.map(drop),
            }
        })
    }

    fn rise(&self, seat: WriterLease) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move { self.revoke(seat.lease).await })
    }

    fn write<'a>(
        &'a self,
        seat: &'a WriterLease,
        still: Vec<Still>,
        changes: Vec<Change>,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let changes: Vec<TxnOp> = changes
                .into_iter()
                .map(|change| match change {
                    Change::Put { key, value } => TxnOp::put(self.full(&key), value, None),
                    Change::Delete { key } => TxnOp::delete(self.full(&key), None),
                })
                .collect();
            let still = still.into_iter().map(|Still { key, value }| match value {
                Some(value) => Compare::value(self.full(&key), CompareOp::Equal, value),
                None => Compare::version(self.full(&key), CompareOp::Equal, 0),
            });
            let when: Vec<Compare> = std::iter::once(self.is_taken(seat)).chain(still).collect();
            let look = TxnOp::get(self.full(&seat.key), None);
            let done = self.txn(Txn::new().when(when).and_then(changes).or_else([look])).await?;
            if done.succeeded() {
                return Ok(());
            }
            let is_seated = done.op_responses().iter().any(|found| match found {
                TxnOpResponse::Get(found) => {
                    found.kvs().iter().any(|found| found.create_revision() == seat.number)
                }
                _ => false,
            });
            let unseated = || StoreError::Unseated(seat.key.clone());
            Err(if is_seated { StoreError::Changed } else { unseated() })
        })
    }
}
