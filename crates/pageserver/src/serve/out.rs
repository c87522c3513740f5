//! Replies that wait to be sent, and their memory.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::AsyncWrite;

use crate::budget::{Budget, BudgetCharge};

/// Bytes beyond a piece that are not charged to the budget: room for headers, so that the replies
/// to 64 requests for a page fit.
const BESIDE: usize = 64 << 10;
/// Step by which the buffer grows, in bytes.
const STEP: usize = 256 << 10;
/// Number of bytes waiting to be sent at which no more replies are made.
const MOST: usize = 1 << 20;

/// Replies that wait to be sent.
pub(super) struct Out {
    pub(super) buffer: Vec<u8>,
    sent: usize,
    held: BudgetCharge,
    free: usize,
}

impl Out {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        let free = budget.piece() + BESIDE;
        Self { buffer: Vec::new(), sent: 0, held: BudgetCharge::new(budget, free), free }
    }

    /// Whether no reply waits.
    pub(super) fn is_empty(&self) -> bool {
        self.sent == self.buffer.len()
    }

    /// Whether a reply with `data` bytes can be appended now; if so, memory for it is reserved.
    /// One piece always fits if no reply waits.
    pub(super) fn has_room(&mut self, data: usize) -> bool {
        if self.buffer.len() - self.sent >= MOST {
            return false;
        }
        let needs = self.buffer.len() + data + HEADERS;
        if needs <= self.buffer.capacity() {
            return true;
        }
        let capacity = if needs <= self.free { self.free } else { needs.next_multiple_of(STEP) };
        // While the buffer grows, two exist for a moment; only the larger one is charged.
        if !self.held.take(capacity - self.held.bytes()) {
            return false;
        }
        self.buffer.reserve_exact(capacity - self.buffer.len());
        true
    }

    /// Whether a part of the budget is held.
    pub(super) fn is_charged(&self) -> bool {
        self.held.is_charged()
    }

    /// Sends the bytes that the stream takes, and sets `has_sent` if there were any. Ready: all
    /// of them are sent.
    pub(super) fn send(
        &mut self,
        mut stream: Pin<&mut impl AsyncWrite>,
        context: &mut Context<'_>,
        has_sent: &mut bool,
    ) -> Poll<io::Result<()>> {
        while self.sent < self.buffer.len() {
            match stream.as_mut().poll_write(context, &self.buffer[self.sent..])? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(n) => self.sent += n,
                Poll::Pending => return Poll::Pending,
            }
            *has_sent = true;
        }
        self.buffer.clear();
        self.sent = 0;
        if self.held.is_charged() {
            self.buffer = Vec::new();
            self.held.give(self.held.bytes());
        }
        // A TLS stream buffers bytes that it could not send.
        let _ = stream.poll_flush(context)?;
        Poll::Ready(Ok(()))
    }
}

/// Upper bound of the headers before and after the data of one reply, in bytes.
const HEADERS: usize = 128;
