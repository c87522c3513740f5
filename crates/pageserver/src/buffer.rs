//! Bytes that were received and not parsed yet.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// Initial size of a buffer, in bytes: ten thousand connections that send nothing cost little.
const FIRST: usize = 16 << 10;
/// Size up to which a buffer grows when input fills it, in bytes. It grows beyond that only for a
/// larger message.
const USUAL: usize = 256 << 10;

/// A buffer that is filled at its end and emptied at its front.
#[derive(Debug, Default)]
pub struct Incoming {
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
    /// Length of the message at the front, in bytes.
    expected: usize,
}

impl Incoming {
    /// The received bytes that are not consumed yet.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.begin..self.end]
    }

    /// Drops the first `n` bytes, which have been parsed.
    pub fn consume(&mut self, n: usize) {
        self.begin = self.begin.saturating_add(n).min(self.end);
        self.expected = 0;
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        }
    }

    /// Announces that the message at the front has `n` bytes, so that there will be room for it.
    pub fn expect(&mut self, n: usize) {
        self.expected = n;
    }

    /// Drops all received bytes.
    pub fn clear(&mut self) {
        self.consume(usize::MAX);
    }

    /// Receives more bytes; ready with 0 at the end of the stream.
    ///
    /// # Errors
    ///
    /// Errors of the stream.
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

    /// Leaves room behind the received bytes: at least one byte, and the whole expected message,
    /// but at most as much again as has arrived. So a client that announces much and sends little
    /// makes the buffer grow only a little.
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
