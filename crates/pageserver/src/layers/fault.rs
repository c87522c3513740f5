//! `fault`: for tests and experiments: a disk that is slow, fails, or does not answer at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Mutex, watch};
use tokio::task::spawn_blocking;

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;

/// The faults in force.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct InjectedFaults {
    /// Additional time of each read. Reads wait for one another, as on a disk with one head.
    /// (Writes go to the disk's cache first.)
    pub delay: Duration,
    /// Additional time for each byte of a read, in nanoseconds.
    pub ns_per_byte: f64,
    /// One in `error_in` operations fails; 0: none.
    pub error_in: u64,
    /// No request is answered while this is set.
    pub cut: bool,
}

/// Applies faults to the layer below.
pub struct FaultLayer {
    below: Arc<dyn Layer>,
    faults: watch::Sender<InjectedFaults>,
    head: Mutex<()>,
    operations: AtomicU64,
}

impl FaultLayer {
    /// Applies `faults` to `below`.
    #[must_use]
    pub fn over(below: Arc<dyn Layer>, faults: InjectedFaults) -> Self {
        let (faults, _) = watch::channel(faults);
        Self { below, faults, head: Mutex::new(()), operations: AtomicU64::new(0) }
    }

    /// Sets the faults from now on, also for requests that wait for the end of a cut.
    pub fn set(&self, faults: InjectedFaults) {
        self.faults.send_replace(faults);
    }

    /// Applies the faults to one request: a read of `read` bytes, or another operation.
    async fn suffer(&self, read: Option<usize>) -> Result<(), Errno> {
        let mut faults = self.faults.subscribe();
        // The sender lives as long as this layer.
        let now = faults
            .wait_for(|faults| !faults.cut)
            .await
            .map_or_else(|_| InjectedFaults::default(), |f| *f);
        #[expect(clippy::cast_precision_loss, reason = "requests are small")]
        let transfer = read.map_or(0.0, |bytes| bytes as f64 * now.ns_per_byte / 1e9);
        let delay = read.map_or(Duration::ZERO, |_| now.delay) + Duration::from_secs_f64(transfer);
        if !delay.is_zero() {
            let _head = self.head.lock().await;
            // The runtime's own clock has a resolution of milliseconds.
            let _ = spawn_blocking(move || std::thread::sleep(delay)).await;
        }
        let operation = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        if now.error_in > 0 && operation.is_multiple_of(now.error_in) {
            return Err(Errno::Io);
        }
        Ok(())
    }
}

impl Layer for FaultLayer {
    fn size(&self) -> u64 {
        self.below.size()
    }

    fn describe(&self) -> String {
        format!("fault over {}", self.below.describe())
    }

    fn block(&self) -> u32 {
        self.below.block()
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let length = into.len();
        Read::Later(Box::pin(async move {
            self.suffer(Some(length)).await?;
            layer::read(&*self.below, offset, length).await
        }))
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        Answer::Later(Box::pin(async move {
            self.suffer(None).await?;
            self.below.write(offset, data).result().await
        }))
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        Answer::Later(Box::pin(async move {
            self.suffer(None).await?;
            self.below.zero(offset, length, zeros).result().await
        }))
    }

    fn flush(&self) -> Answer<'_> {
        Answer::Later(Box::pin(async move {
            self.suffer(None).await?;
            self.below.flush().result().await
        }))
    }
}
