//! Limits how much of one writer's data is read.
//!
//! Each host writes freely under its own prefix. Without a limit, one host could make the others
//! and the controller read and keep gigabytes, or make their reads fail at the limit of a
//! message. So each value, and all values of one writer together, have a limit. Data beyond it
//! are treated as missing, which concerns that writer alone.

/// The most bytes of a value: a report of 5,000 VMs has less than 1 MiB.
pub(super) const MOST_OF_A_VALUE: usize = 1 << 20;
/// The most bytes of all keys and values of one writer.
pub(super) const MOST_OF_A_WRITER: usize = 4 << 20;
/// The most keys of one writer: three, and two for each VM that comes or goes.
pub(super) const MOST_KEYS_OF_A_WRITER: usize = 4096;

/// The decision on a value.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is kept.
    Keep,
    /// It is left out.
    Skip,
    /// It is left out, and so are all following values with this prefix.
    SkipAll(String),
}

/// Counts the kept data of the writer whose keys are being read. Keys come in their order.
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
        // Every value that is read costs time, kept or not.
        self.keys += 1;
        self.bytes += bytes.min(MOST_OF_A_VALUE);
        match self.keys > MOST_KEYS_OF_A_WRITER || self.bytes > MOST_OF_A_WRITER {
            true => Verdict::SkipAll(self.writer.clone()),
            false if is_fat => Verdict::Skip,
            false => Verdict::Keep,
        }
    }
}

/// The prefix under which the writer of `key` may write.
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
