//! `count`: counts requests and bytes, and measures latencies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;

use crate::layer::{Answer, Layer, Read, Zeros};
use crate::nbd::reply::Extent;

/// Latencies are counted by powers of two of microseconds, from below 1 up to above half a
/// minute.
pub const BUCKETS: usize = 26;

/// Totals since the layer was made.
#[derive(Debug, Default)]
pub struct OperationCounters {
    /// Reads.
    pub reads: Operation,
    /// Writes, zeros and trims.
    pub writes: Operation,
    /// Bytes that were trimmed.
    pub trimmed: AtomicU64,
    /// Operations that failed.
    pub errors: AtomicU64,
}

/// One kind of operation.
#[derive(Debug, Default)]
pub struct Operation {
    /// Number of operations.
    pub count: AtomicU64,
    /// Number of their bytes.
    pub bytes: AtomicU64,
    /// `buckets[i]`: operations that took less than 2^i microseconds, and at least half of that.
    pub buckets: [AtomicU64; BUCKETS],
}

/// Counts the requests to the layer below.
pub struct Count {
    below: Arc<dyn Layer>,
    counters: Arc<OperationCounters>,
}

impl Count {
    /// Counts the requests to `below`.
    #[must_use]
    pub fn over(below: Arc<dyn Layer>) -> Self {
        Self { below, counters: Arc::default() }
    }

    /// The counters, which go on counting.
    #[must_use]
    pub fn counters(&self) -> Arc<OperationCounters> {
        self.counters.clone()
    }

    fn answer<'a>(
        &'a self,
        (begun, operation, bytes): (Instant, &'a Operation, u64),
        answer: Answer<'a>,
    ) -> Answer<'a> {
        match answer {
            Answer::Now(result) => {
                self.counters.note(operation, bytes, begun, result.is_ok());
                Answer::Now(result)
            }
            Answer::Later(future) => Answer::Later(Box::pin(async move {
                let result = future.await;
                self.counters.note(operation, bytes, begun, result.is_ok());
                result
            })),
        }
    }
}

impl OperationCounters {
    fn note(&self, operation: &Operation, bytes: u64, begun: Instant, is_ok: bool) {
        if !is_ok {
            self.errors.fetch_add(1, Ordering::Relaxed);
            return;
        }
        operation.count.fetch_add(1, Ordering::Relaxed);
        operation.bytes.fetch_add(bytes, Ordering::Relaxed);
        let us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        let bucket = ((u64::BITS - us.leading_zeros()) as usize).min(BUCKETS - 1);
        operation.buckets[bucket].fetch_add(1, Ordering::Relaxed);
    }
}

impl Operation {
    /// Latency that the given share of operations stayed below, in microseconds, rounded up to a
    /// power of two; 0 if there was no operation.
    #[must_use]
    pub fn latency_us(&self, share: f64) -> u64 {
        let counts: Vec<u64> =
            self.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect();
        let all: u64 = counts.iter().sum();
        #[expect(clippy::cast_precision_loss, reason = "a bucket is a power of two wide")]
        let wanted = share * all as f64;
        let mut seen = 0;
        for (bucket, count) in counts.iter().enumerate() {
            seen += count;
            #[expect(clippy::cast_precision_loss, reason = "a bucket is a power of two wide")]
            if all > 0 && seen as f64 >= wanted {
                return 1 << bucket;
            }
        }
        0
    }
}

impl Layer for Count {
    fn size(&self) -> u64 {
        self.below.size()
    }

    fn describe(&self) -> String {
        format!("count over {}", self.below.describe())
    }

    fn block(&self) -> u32 {
        self.below.block()
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let (begun, bytes) = (Instant::now(), into.len() as u64);
        let operation = &self.counters.reads;
        match self.below.read(offset, into) {
            Read::Now(result) => {
                self.counters.note(operation, bytes, begun, result.is_ok());
                Read::Now(result)
            }
            Read::Later(future) => Read::Later(Box::pin(async move {
                let result = future.await;
                self.counters.note(operation, bytes, begun, result.is_ok());
                result
            })),
        }
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        let noted = (Instant::now(), &self.counters.writes, data.len() as u64);
        self.answer(noted, self.below.write(offset, data))
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        if zeros == Zeros::Trim {
            self.counters.trimmed.fetch_add(length, Ordering::Relaxed);
        }
        let noted = (Instant::now(), &self.counters.writes, 0);
        self.answer(noted, self.below.zero(offset, length, zeros))
    }

    fn flush(&self) -> Answer<'_> {
        self.below.flush()
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        self.below.extents(offset, length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::memory::Memory;

    #[test]
    fn what_goes_through_is_counted() {
        let count = Count::over(Arc::new(Memory::new(1 << 20)));
        assert!(matches!(count.write(0, vec![1; 8192].into()), Answer::Now(Ok(()))));
        assert!(matches!(count.read(0, &mut [0; 4096]), Read::Now(Ok(()))));
        assert!(matches!(count.zero(0, 4096, Zeros::Trim), Answer::Now(Ok(()))));
        let counters = count.counters();
        assert_eq!(counters.reads.count.load(Ordering::Relaxed), 1);
        assert_eq!(counters.reads.bytes.load(Ordering::Relaxed), 4096);
        assert_eq!(counters.writes.bytes.load(Ordering::Relaxed), 8192);
        assert_eq!(counters.trimmed.load(Ordering::Relaxed), 4096);
        assert!(counters.reads.latency_us(0.5) >= 1);
        assert_eq!(Operation::default().latency_us(0.5), 0);
    }
}
