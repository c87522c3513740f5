//! Bytes that were received and not parsed yet.
//!
//! A payload is passed on as a part of the buffer, without a copy ([`Incoming::take`]). As long as
//! it is in use, its buffer cannot be filled from the front again. When such a buffer is full,
//! another one takes its place; the earlier one is charged to the budget until its last payload is
//! dropped, and is then filled again.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::budget::{Budget, BudgetCharge};

/// Initial size of a buffer, in bytes: ten thousand connections that send nothing cost little.
const FIRST: usize = 16 << 10;
/// Size up to which a buffer grows when input fills it, in bytes: a long piece of a payload, and
/// the headers before it. It grows beyond that only for a larger message.
const USUAL: usize = (256 + 4) << 10;
/// Upper bound of the memory that earlier buffers hold for one connection, in bytes: QEMU has
/// sixteen requests in flight, of at most 1 MiB each.
const MOST_EARLIER: usize = 16 << 20;

/// A buffer that is filled at its end and emptied at its front.
#[derive(Debug, Default)]
pub struct Incoming {
    now: ReceiveBuffer,
    /// Length of the message at the front, in bytes.
    expected: usize,
    /// The last receive filled the buffer, so there may be more to receive at once.
    is_filled: bool,
    /// Full buffers, of which payloads are in use.
    earlier: Vec<ReceiveBuffer>,
    /// A buffer that is not in use.
    spare: Option<ReceiveBuffer>,
    /// The memory of `earlier`; `None`: no payload is taken.
    charge: Option<BudgetCharge>,
}

#[derive(Debug, Default)]
struct ReceiveBuffer {
    /// Received bytes, and the room behind them.
    bytes: BytesMut,
    /// Size of the whole buffer, in bytes.
    size: usize,
}

impl ReceiveBuffer {
    fn new(size: usize) -> Self {
        let bytes = BytesMut::with_capacity(size);
        Self { size: bytes.capacity(), bytes }
    }

    /// Whether there is room for `n` bytes behind the received ones, after these have moved to the
    /// front if need be. No payload in use has to move.
    fn has_room(&mut self, n: usize) -> bool {
        self.bytes.try_reclaim(n)
    }

    /// Whether it holds no received bytes, and no payload in it is in use.
    fn is_unused(&mut self) -> bool {
        self.bytes.is_empty() && self.bytes.try_reclaim(self.size)
    }
}

impl Incoming {
    /// Charges the memory of payloads in use to `budget`, except the first buffer. No payload is
    /// longer than a piece of the budget.
    pub(crate) fn charge_to(&mut self, budget: &Arc<Budget>) {
        let free = USUAL.max(budget.piece() + FIRST);
        self.charge = Some(BudgetCharge::new(budget.clone(), free));
    }

    /// The received bytes that are not consumed yet.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.now.bytes
    }

    /// Drops the first `n` bytes, which have been parsed.
    pub fn consume(&mut self, n: usize) {
        self.now.bytes.advance(n.min(self.now.bytes.len()));
        self.expected = 0;
    }

    /// Takes the first `n` bytes, a payload.
    pub(crate) fn take(&mut self, n: usize) -> Bytes {
        self.expected = 0;
        if n == 0 {
            return Bytes::new();
        }
        self.now.bytes.split_to(n.min(self.now.bytes.len())).freeze()
    }

    /// Announces that the message at the front has `n` bytes, so that there will be room for it.
    pub fn expect(&mut self, n: usize) {
        self.expected = n;
    }

    /// Drops all received bytes.
    pub fn clear(&mut self) {
        self.consume(usize::MAX);
    }

    /// Receives more bytes; ready with 0 at the end of the stream. It is pending as well if the
    /// budget has no room for another buffer. Then the caller polls again when a payload has been
    /// dropped.
    ///
    /// # Errors
    ///
    /// Errors of the stream.
    pub fn poll_fill(
        &mut self,
        mut stream: Pin<&mut impl AsyncRead>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if !self.make_room() {
            return Poll::Pending;
        }
        let received = ready!(pin!(stream.read_buf(&mut self.now.bytes)).poll(context));
        self.is_filled = self.now.bytes.len() == self.now.bytes.capacity();
        Poll::Ready(received)
    }

    /// Finds the buffers whose payloads have been dropped. If `none` is set, no payload is in use
    /// by a request of this connection.
    pub(crate) fn reclaim(&mut self, none: bool) {
        let mut i = 0;
        while i < self.earlier.len() {
            let is_unused = self.earlier[i].is_unused();
            if !is_unused && !none {
                i += 1;
                continue;
            }
            let buffer = self.earlier.swap_remove(i);
            if let Some(charge) = &mut self.charge {
                charge.give(buffer.size);
            }
            if is_unused && (self.now.size..=USUAL).contains(&buffer.size) {
                self.spare = Some(buffer);
            }
        }
    }

    /// Leaves room behind the received bytes: at least one byte, and the whole expected message,
    /// but at most as much again as has arrived. So a client that announces much and sends little
    /// makes the buffer grow only a little. Returns whether there is room.
    fn make_room(&mut self) -> bool {
        let received = self.now.bytes.len();
        let grows = std::mem::take(&mut self.is_filled) && self.now.size < USUAL;
        if grows && self.replace(received, 2 * self.now.size) {
            return true;
        }
        if received == 0 {
            if self.now.size > USUAL {
                self.now = ReceiveBuffer::default();
            } else if self.now.size > 0 && self.now.is_unused() {
                return true;
            }
        }
        let room = self.now.bytes.capacity() - received;
        let lacks = self.expected.saturating_sub(received).min(self.now.size - received).max(1);
        if room >= lacks || self.now.has_room(lacks) {
            return true;
        }
        self.replace(received, (2 * received).max(self.now.size))
    }

    /// Continues in another buffer, of this size if that is in bounds.
    fn replace(&mut self, received: usize, size: usize) -> bool {
        self.reclaim(false);
        let now = self.now.size;
        let may = self
            .charge
            .as_mut()
            .is_none_or(|charge| charge.bytes() + now <= MOST_EARLIER && charge.take(now));
        if !may {
            return false;
        }
        let most = self.expected.max(USUAL).max(received + 1);
        let size = size.clamp(FIRST, most);
        let spare = self.spare.take().filter(|spare| spare.size >= size);
        let mut next = spare.unwrap_or_else(|| ReceiveBuffer::new(size));
        next.bytes.extend_from_slice(&self.now.bytes);
        self.now.bytes.clear();
        self.earlier.push(std::mem::replace(&mut self.now, next));
        self.reclaim(false);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Receives up to `n` bytes of this value; returns whether there was room.
    fn fill(input: &mut Incoming, value: u8, n: usize) -> bool {
        let bytes = vec![value; n];
        let mut stream = &bytes[..];
        let mut context = Context::from_waker(Waker::noop());
        matches!(input.poll_fill(Pin::new(&mut stream), &mut context), Poll::Ready(Ok(1..)))
    }

    #[test]
    fn a_payload_stays_as_it_is_while_more_is_received() {
        let mut input = Incoming::default();
        input.charge_to(&Arc::new(Budget::new(usize::MAX, 4096)));
        let mut payloads = Vec::new();
        for value in 0..200 {
            input.expect(4096);
            while input.bytes().len() < 4096 {
                let lacks = 4096 - input.bytes().len();
                assert!(fill(&mut input, value, lacks));
            }
            payloads.push(input.take(4096));
        }
        for (payload, value) in payloads.iter().zip(0..) {
            assert!(payload.iter().all(|byte| *byte == value), "payload {value}");
        }
        assert!(!input.earlier.is_empty());
        payloads.clear();
        input.reclaim(false);
        assert!(input.earlier.is_empty() && input.spare.is_some());
        assert_eq!(input.charge.map(|charge| charge.bytes()), Some(0));
    }

    #[test]
    fn buffers_whose_payloads_are_in_use_are_charged() {
        let mut input = Incoming::default();
        let budget = Arc::new(Budget::new(1 << 20, 4096));
        input.charge_to(&budget);
        let mut payloads = Vec::new();
        while fill(&mut input, 1, 64 << 10) {
            // One byte keeps its whole buffer.
            payloads.push(input.take(1));
            input.clear();
            assert!(payloads.len() < 1000, "there is no bound");
        }
        let held: usize = input.earlier.iter().map(|buffer| buffer.size).sum();
        assert!(held > budget.used() && budget.used() > 512 << 10, "{held} {}", budget.used());
        payloads.clear();
        input.reclaim(false);
        assert!(fill(&mut input, 1, 1) && budget.used() == 0);
        // A payload that another part of the program keeps does not stop the connection.
        while fill(&mut input, 1, 64 << 10) {
            payloads.push(input.take(1));
            input.clear();
        }
        input.reclaim(true);
        assert!(fill(&mut input, 1, 1) && budget.used() == 0);
    }
}
