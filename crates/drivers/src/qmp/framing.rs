//! Reads lines from a socket, with a hard limit on their length.
//!
//! QMP sends one JSON object per line. A peer that never ends its line would grow our buffer
//! without bound. So the connection is closed beyond a limit, because the client cannot
//! resynchronize. The limit is [`MAX_LINE`], or [`MAX_LARGE`] while a large answer is expected.
//! Reading is cancel-safe: a deadline in the middle of a line loses no data, because the
//! beginning stays in the buffer.

use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use super::QmpError;

/// The longest line that is accepted by default. Answers to the commands used here have up to
/// some kilobytes, events some hundred bytes.
pub const MAX_LINE: usize = 64 << 10;

/// The longest line while the answer may be large: the counters of a disk take two or three
/// kilobytes, and a VM may have hundreds of disks and RAM blocks.
pub const MAX_LARGE: usize = 1 << 20;

/// Capacity that is kept from line to line; memory beyond it is freed after a long line.
const KEPT: usize = 16 << 10;

/// Splits a socket's data into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    buffer: Vec<u8>,
    /// Start of the next line.
    start: usize,
    /// End of the part that was searched and has no end of line.
    searched: usize,
}

impl Lines {
    /// The next line, without its end.
    ///
    /// # Errors
    /// The stream ends, or a line has more than `limit` bytes.
    pub(crate) async fn next(
        &mut self,
        stream: &mut UnixStream,
        limit: usize,
    ) -> Result<&[u8], QmpError> {
        loop {
            if let Some(length) = self.buffer[self.searched..].iter().position(|&b| b == b'\n') {
                let (start, end) = (self.start, self.searched + length);
                if end - start > limit {
                    return Err(QmpError::TooLong { limit });
                }
                (self.start, self.searched) = (end + 1, end + 1);
                return Ok(self.buffer[start..end].trim_ascii());
            }
            if self.incomplete().len() > limit {
                return Err(QmpError::TooLong { limit });
            }
            self.make_room();
            if stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(QmpError::Closed);
            }
        }
    }

    /// The received part of the line that is not complete.
    pub(crate) fn incomplete(&self) -> &[u8] {
        &self.buffer[self.start..]
    }

    fn make_room(&mut self) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.searched = self.buffer.len();
        if self.buffer.is_empty() && self.buffer.capacity() > KEPT {
            self.buffer.shrink_to(KEPT);
        }
        self.buffer.reserve(4096);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn lines_come_whole_however_they_were_sent() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let writer = tokio::spawn(async move {
            for part in ["one\r\ntw", "o\nthr", "ee\n", "tail"] {
                theirs.write_all(part.as_bytes()).await.unwrap();
                tokio::task::yield_now().await;
            }
        });
        let mut lines = Lines::default();
        for expected in ["one", "two", "three"] {
            assert_eq!(lines.next(&mut ours, MAX_LINE).await.unwrap(), expected.as_bytes());
        }
        assert!(matches!(lines.next(&mut ours, MAX_LINE).await, Err(QmpError::Closed)));
        assert_eq!(lines.incomplete(), b"tail");
        writer.await.unwrap();
    }

    #[tokio::test]
    async fn a_line_without_end_is_cut_at_the_limit() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let writer =
            tokio::spawn(async move { while theirs.write_all(&[b'x'; 65_536]).await.is_ok() {} });
        let mut lines = Lines::default();
        let error = lines.next(&mut ours, MAX_LINE).await.unwrap_err();
        assert!(matches!(error, QmpError::TooLong { .. }), "{error}");
        let held = lines.buffer.capacity();
        assert!(held < 4 * MAX_LINE, "{held} bytes are held");
        drop(ours);
        writer.await.unwrap();
    }
}
