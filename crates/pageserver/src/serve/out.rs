//! Replies that wait to be sent, and what they may hold.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::AsyncWrite;

use crate::budget::{Budget, Held};

/// Beyond a piece, so much is free of charge, in bytes: what stands before the data, and the
/// replies to 64 requests for a page.
const BESIDE: usize = 64 << 10;
/// Step by which the buffer grows, in bytes.
const STEP: usize = 256 << 10;
/// Bytes that wait to be sent, from which on no more replies are made.
const MOST: usize = 1 << 20;

/// Replies that wait to be sent.
pub(super) struct Out {
    pub(super) buffer: Vec<u8>,
    sent: usize,
    held: Held,
    free: usize,
}

impl Out {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        let free = budget.piece() + BESIDE;
        Self { buffer: Vec::new(), sent: 0, held: Held::new(budget, free), free }
    }

    /// Nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.sent == self.buffer.len()
    }

    /// Whether the reply with `data` bytes can be appended now; there is room for it then. There
    /// always is for one piece where nothing waits.
    pub(super) fn has_room(&mut self, data: usize) -> bool {
        if self.buffer.len() - self.sent >= MOST {
            return false;
        }
        let needs = self.buffer.len() + data + HEADERS;
        if needs <= self.buffer.capacity() {
            return true;
        }
        let capacity = if needs <= self.free { self.free } else { needs.next_multiple_of(STEP) };
        // While it grows there are two for a moment; the larger one is charged.
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

    /// Sends what the stream takes. Ready: all of it is sent; whether that was anything. Pending:
    /// how much was sent is told by `has_sent`.
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
        // TLS keeps what it could not send.
        let _ = stream.poll_flush(context)?;
        Poll::Ready(Ok(()))
    }
}

/// Headers before and behind the data of one reply are shorter than this, in bytes.
const HEADERS: usize = 128;
