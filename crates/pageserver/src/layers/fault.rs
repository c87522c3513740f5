//! `fault`: for tests and experiments: a disk that is slow, fails, or does not answer at all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, watch};
use tokio::task::spawn_blocking;

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;

/// What is wrong at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Each read takes so much longer, one after the other: a disk with one head. (Writes lie in
    /// its cache first.)
    pub delay: Duration,
    /// And so much for each byte, in nanoseconds.
    pub ns_per_byte: f64,
    /// One of so many operations fails; 0: none.
    pub error_in: u64,
    /// Nothing is answered until this is no more.
    pub cut: bool,
}

/// Does to the layer below what it is told to.
pub struct Fault {
    below: Arc<dyn Layer>,
    faults: watch::Sender<Faults>,
    head: Mutex<()>,
    operations: AtomicU64,
}

impl Fault {
    /// Over `below`, as [`Fault::set`].
    #[must_use]
    pub fn over(below: Arc<dyn Layer>, faults: Faults) -> Self {
        let (faults, _) = watch::channel(faults);
        Self { below, faults, head: Mutex::new(()), operations: AtomicU64::new(0) }
    }

    /// From now on this is wrong, for what is under way, too.
    pub fn set(&self, faults: Faults) {
        self.faults.send_replace(faults);
    }

    /// What happens to a read of so many bytes, or to something else.
    async fn suffer(&self, read: Option<usize>) -> Result<(), Errno> {
        let mut faults = self.faults.subscribe();
        // The sender lives as long as this layer.
        let now =
            faults.wait_for(|faults| !faults.cut).await.map_or_else(|_| Faults::default(), |f| *f);
        #[expect(clippy::cast_precision_loss, reason = "requests are small")]
        let transfer = read.map_or(0.0, |bytes| bytes as f64 * now.ns_per_byte / 1e9);
        let delay = read.map_or(Duration::ZERO, |_| now.delay) + Duration::from_secs_f64(transfer);
        if !delay.is_zero() {
            let _head = self.head.lock().await;
            // The runtime's own clock goes by milliseconds.
            let _ = spawn_blocking(move || std::thread::sleep(delay)).await;
        }
        let operation = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        if now.error_in > 0 && operation.is_multiple_of(now.error_in) {
            return Err(Errno::Io);
        }
        Ok(())
    }
}

impl Layer for Fault {
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

    fn write<'a>(&'a self, offset: u64, data: &[u8]) -> Answer<'a> {
        let data = data.to_vec();
        Answer::Later(Box::pin(async move {
            self.suffer(None).await?;
            self.below.write(offset, &data).result().await
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
