//! Lines of JSON between the daemon and its child processes.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt};

/// A request or its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Numbered<T> {
    /// Identifies the request among those in flight.
    pub id: u64,
    /// The request, or the answer.
    pub what: T,
}

/// Encodes `value` as a line.
///
/// # Errors
/// It has maps whose keys are not strings.
pub fn line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

/// Reads values, one a line.
pub struct JsonLines<R> {
    reader: R,
    line: Vec<u8>,
    most: usize,
}

impl<R: AsyncBufRead + Unpin> JsonLines<R> {
    /// Accepts lines of at most `most` bytes.
    pub const fn new(reader: R, most: usize) -> Self {
        Self { reader, line: Vec::new(), most }
    }

    /// The next value; `None` at the end. Cancel-safe: a dropped future loses no data.
    ///
    /// # Errors
    /// Errors of the reader; a line that is too long, cut off, or invalid.
    pub async fn next<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let left = (self.most + 1).saturating_sub(self.line.len());
        let mut within = (&mut self.reader).take(left as u64);
        within.read_until(b'\n', &mut self.line).await?;
        let line = std::mem::take(&mut self.line);
        match line.last() {
            None => Ok(None),
            Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
            Some(_) if line.len() > self.most => {
                Err(nonsense(format!("a line of more than {} bytes", self.most)))
            }
            Some(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// An error for a peer that violates this format.
pub fn nonsense(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[tokio::test]
    async fn a_line_that_comes_in_pieces_is_one_and_a_reader_that_gives_up_loses_none() {
        let bytes = line(&Numbered { id: 1, what: true }).unwrap();
        let (mut ours, theirs) = tokio::io::duplex(16);
        let mut lines = JsonLines::new(tokio::io::BufReader::new(theirs), 1024);
        let mut rest: VecDeque<u8> = bytes.into();
        while let Some(byte) = rest.pop_front() {
            tokio::io::AsyncWriteExt::write_all(&mut ours, &[byte]).await.unwrap();
            if !rest.is_empty() {
                let early = tokio::select! {
                    biased;
                    read = lines.next::<Numbered<bool>>() => Some(read),
                    () = tokio::task::yield_now() => None,
                };
                assert!(early.is_none(), "{early:?}");
            }
        }
        let read = lines.next::<Numbered<bool>>().await.unwrap().unwrap();
        assert_eq!(read, Numbered { id: 1, what: true });
    }

    #[tokio::test]
    async fn lines_that_are_too_long_or_cut_off_or_make_no_sense_are_refused() {
        for (text, why) in [
            ("x".repeat(11), "a line of more than 10 bytes"),
            ("12345".to_owned(), "unexpected end of file"),
            ("[1]\n".to_owned(), "invalid type: sequence, expected u64 at line 1 column 0"),
        ] {
            let read = JsonLines::new(text.as_bytes(), 10).next::<u64>().await;
            assert_eq!(read.unwrap_err().to_string(), why);
        }
        assert_eq!(JsonLines::new(&b""[..], 10).next::<u64>().await.unwrap(), None);
    }
}
