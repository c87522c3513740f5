//! What was received and not yet understood.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// Where a buffer begins, in bytes: ten thousand connections that say nothing cost little.
const FIRST: usize = 16 << 10;
/// How far it grows while more comes than it holds, in bytes; a larger message lets it grow
/// further.
const USUAL: usize = 256 << 10;

/// A buffer that is filled at its end and emptied at its front.
#[derive(Debug, Default)]
pub struct Incoming {
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
    /// The message at its front has so many bytes.
    expected: usize,
}

impl Incoming {
    /// What was received.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.begin..self.end]
    }

    /// The first `n` bytes are understood.
    pub fn consume(&mut self, n: usize) {
        self.begin = self.begin.saturating_add(n).min(self.end);
        self.expected = 0;
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
    }

    /// The message at the front has `n` bytes: there is to be room for it.
    pub fn expect(&mut self, n: usize) {
        self.expected = n;
    }

    /// Forgets what was received.
    pub fn clear(&mut self) {
        self.consume(usize::MAX);
    }

    /// Receives more; ready with 0 at the end of the stream.
    ///
    /// # Errors
    ///
    /// The stream's.
    pub fn poll_fill(
        &mut self,
        stream: Pin<&mut impl AsyncRead>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        self.make_room();
        let mut free = ReadBuf::new(&mut self.buffer[self.end..]);
        ready!(stream.poll_read(context, &mut free))?;
        let n = free.filled().len();
        self.end += n;
        Poll::Ready(Ok(n))
    }

    /// Leaves room behind what was received: at least a byte, and for the whole message that is
    /// expected, but no more than as much again as has come. So a client that claims much and sends
    /// little is not believed.
    fn make_room(&mut self) {
        let received = self.end - self.begin;
        if received == 0 && self.buffer.len() > USUAL {
            self.buffer = Vec::new();
        }
        let is_full = self.end == self.buffer.len();
        if self.begin > 0 && (is_full || self.begin + self.expected > self.buffer.len()) {
            self.buffer.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, received);
        }
        if self.end == self.buffer.len() {
            let most = self.expected.max(USUAL).max(self.end + 1);
            self.buffer.resize((2 * self.end).clamp(FIRST, most), 0);
        }
    }
}
