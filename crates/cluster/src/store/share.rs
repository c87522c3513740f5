//! How much of what one writer has written is read.
//!
//! Each host writes what it likes below its own prefix. If all of that were read, one host could
//! have the others, and the controller, read and keep gigabytes, or end their reads at the limit of
//! a message. So each value, and all of one writer together, have a limit. Data beyond it
//! are as if they were not there, which concerns that writer alone.

/// Bytes of a value: a report of 5,000 VMs has less than 1 MiB.
pub(super) const MOST_OF_A_VALUE: usize = 1 << 20;
/// Bytes of all keys and values of one writer.
pub(super) const MOST_OF_A_WRITER: usize = 4 << 20;
/// Keys of one writer: three, and two for each VM that comes or goes.
pub(super) const MOST_KEYS_OF_A_WRITER: usize = 4096;

/// The decision on a value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is kept.
    Keep,
    /// It is left out.
    Skip,
    /// It is left out, and so is all that follows with this prefix.
    SkipAll(String),
}

/// Counts what is kept of the writer whose keys are being read. Keys come in their order.
#[derive(Debug, Default)]
pub(super) struct Share {
    writer: String,
    keys: usize,
    bytes: usize,
}

impl Share {
    /// Decides on this value.
    pub(super) fn judge(&mut self, key: &str, value: usize) -> Verdict {
        let writer = writer_of(key);
        if self.writer != writer {
            *self = Self { writer: writer.to_owned(), ..Self::default() };
        }
        let bytes = key.len().saturating_add(value);
        let is_fat = bytes > MOST_OF_A_VALUE;
        // Each one that is looked at costs, kept or not.
        self.keys += 1;
        self.bytes += bytes.min(MOST_OF_A_VALUE);
        match self.keys > MOST_KEYS_OF_A_WRITER || self.bytes > MOST_OF_A_WRITER {
            true => Verdict::SkipAll(self.writer.clone()),
            false if is_fat => Verdict::Skip,
            false => Verdict::Keep,
        }
    }
}

/// The prefix of all that the writer of `key` may write.
fn writer_of(key: &str) -> &str {
    let parts = if key.starts_with("hosts/") { 2 } else { 1 };
    let ends = key.match_indices('/').map(|(at, _)| at + 1);
    ends.take(parts).last().map_or(key, |end| &key[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_is_a_writer_and_so_is_the_controller() {
        assert_eq!(writer_of("hosts/a/source/web/1"), "hosts/a/");
        assert_eq!(writer_of("controller/intents/x"), "controller/");
        assert_eq!((writer_of("hosts/a"), writer_of("x")), ("hosts/", "x"));
    }

    #[test]
    fn one_writer_has_its_share_and_leaves_the_others_theirs() {
        let mut share = Share::default();
        let mut kept = 0;
        let all = loop {
            match share.judge(&format!("hosts/a/{kept}"), 1_000_000) {
                Verdict::Keep => kept += 1,
                Verdict::Skip => {}
                Verdict::SkipAll(prefix) => break prefix,
            }
        };
        assert_eq!((kept, all.as_str()), (4, "hosts/a/"));
        assert_eq!(share.judge("hosts/b/seat", 10), Verdict::Keep);
        let mut many =
            (0..).take_while(|n| share.judge(&format!("hosts/c/{n}"), 1) == Verdict::Keep);
        assert_eq!(many.by_ref().count(), MOST_KEYS_OF_A_WRITER);
    }

    #[test]
    fn a_fat_value_is_left_out_and_many_end_the_reading() {
        let mut share = Share::default();
        let fat = MOST_OF_A_VALUE + 1;
        let mut verdicts = (0..).map(|n| share.judge(&format!("hosts/a/{n}"), fat));
        assert!(verdicts.by_ref().take(4).all(|verdict| verdict == Verdict::Skip));
        assert_eq!(verdicts.next(), Some(Verdict::SkipAll("hosts/a/".to_owned())));
    }
}
