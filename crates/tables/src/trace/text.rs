//! Lines of text with an id each, in one of their columns (`columns.rs` finds it).
//!
//! The first line tells which of `,` tab `;` and space separates the columns, and the number of
//! columns. Fields may be quoted. Ids are whole numbers, decimal or `0x…`. Anything else is a
//! word and is hashed (XXH3-64); two words collide once in 2^64. Empty lines, comments (`#`) and
//! lines that are `*`, at the end of LIRS traces, are skipped.

use xxhash_rust::xxh3::xxh3_64;

use super::{
    TraceError,
    columns::{Beginning, Fault, Shape, fields, number, shown, unquoted},
    source::TraceInput,
};

/// Bytes of a file that are checked for being text.
const LOOK: usize = 4096;
const UTF8_MARK: &[u8] = b"\xef\xbb\xbf";
const TO_UTF8: &str =
    "text is UTF-8; `iconv -f UTF-16 -t UTF-8 FILE | overbook mrc - --format csv` reads it";

/// A reader of text.
pub(super) struct Text {
    column: Option<String>,
    shape: Option<Shape>,
    /// Whether the header still has to be skipped.
    is_at_header: bool,
    lines: u64,
    /// Number of ids that are not words, including those of several columns.
    numbers: u64,
    words: u64,
    /// Its line and its text.
    first_word: Option<(u64, String)>,
    /// The fields of an id that consists of several.
    together: Vec<u8>,
    used: usize,
    ends_in_line: bool,
}

impl Text {
    pub(super) fn new(column: Option<&str>) -> Self {
        Self {
            column: column.map(str::to_owned),
            shape: None,
            is_at_header: false,
            lines: 0,
            numbers: 0,
            words: 0,
            first_word: None,
            together: Vec::new(),
            used: 0,
            ends_in_line: false,
        }
    }

    /// The columns, once a line was read.
    pub(super) const fn shape(&self) -> Option<&Shape> {
        self.shape.as_ref()
    }

    pub(super) fn warning(&self) -> Option<String> {
        let mut warnings = Vec::new();
        if let (Some((line, word)), 1..) = (&self.first_word, self.numbers) {
            let Self { words, numbers, .. } = self;
            warnings.push(format!(
                "{words} ids are words and {numbers} are numbers; the first word is `{word}` in \
                 line {line}"
            ));
        }
        if self.ends_in_line {
            warnings.push("the last line has no line's end: the file may be cut off".to_owned());
        }
        (!warnings.is_empty()).then(|| warnings.join("; "))
    }

    pub(super) fn next_batch(
        &mut self,
        source: &mut TraceInput,
        ids: &mut Vec<u64>,
    ) -> Result<(), TraceError> {
        // A buffer of empty lines has no id, but is not the end.
        while ids.is_empty() {
            source.advance(std::mem::take(&mut self.used))?;
            let (path, buffer, is_full) = (source.path(), source.buffer(), source.is_full());
            if buffer.is_empty() {
                return match self.numbers + self.words {
                    0 => Err(TraceError::Empty { path, format: "csv", unit: "line with an id" }),
                    _ => Ok(()),
                };
            }
            if let Err((found, valid)) = self.read(buffer, is_full, ids) {
                return Err(TraceError::Line { path, line: self.lines, found, valid });
            }
        }
        Ok(())
    }

    /// Reads all whole lines of the buffer. A buffer that is not full contains the file's end.
    fn read(&mut self, buffer: &[u8], is_full: bool, ids: &mut Vec<u64>) -> Result<(), Fault> {
        let mut rest = buffer;
        if self.lines == 0 {
            rest = text_of(buffer).inspect_err(|_| self.lines = 1)?;
        }
        if self.shape.is_none() {
            self.find_shape(rest, is_full)?;
        }
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.read_line(&rest[..end], ids)?;
            rest = &rest[end + 1..];
        }
        let read = buffer.len() - rest.len();
        if read == 0 && is_full {
            self.lines += 1;
            return Err(("it is longer than 256 KiB".into(), "a line holds one reference".into()));
        }
        if is_full || rest.is_empty() {
            self.used = read;
            return Ok(());
        }
        self.ends_in_line = true;
        self.used = buffer.len();
        self.read_line(rest, ids)
    }

    /// Examines the first lines that are not comments, if they are in the buffer.
    fn find_shape(&mut self, buffer: &[u8], is_full: bool) -> Result<(), Fault> {
        let whole = buffer.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let buffer = if is_full { &buffer[..whole] } else { buffer };
        let mut lines = buffer.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        let (mut before, mut comment) = (0, None);
        let first = lines.by_ref().find(|line| {
            before += 1;
            if line.starts_with(b"#") {
                comment = Some(*line);
            }
            !is_passed_over(line)
        });
        let Some(first) = first else { return Ok(()) };
        let at = self.lines + before;
        if first.starts_with(b"{") {
            self.lines = at;
            let valid = "a csv; `jq -r .NAME FILE | overbook mrc - --format csv` reads one field";
            return Err(("it is JSON".to_owned(), valid.to_owned()));
        }
        let second = lines.find(|line| !is_passed_over(line));
        let beginning = Beginning { first, second, comment };
        let shape = Shape::of(&beginning, self.column.as_deref());
        let shape = shape.inspect_err(|_| self.lines = at)?;
        self.is_at_header = shape.has_header;
        self.shape = Some(shape);
        Ok(())
    }

    fn read_line(&mut self, line: &[u8], ids: &mut Vec<u64>) -> Result<(), Fault> {
        self.lines += 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        // Empty lines and comments are skipped.
        let (Some(shape), false) = (&self.shape, is_passed_over(line)) else { return Ok(()) };
        if self.is_at_header {
            self.is_at_header = false;
            return Ok(());
        }
        let (columns, separator) = (shape.columns, shape.separator);
        let mut found = 0;
        match shape.wanted[..] {
            [_] if separator.is_none() => self.take(line, ids),
            [wanted] => {
                let mut field = None;
                for text in fields(line, separator) {
                    if found == wanted {
                        field = Some(text);
                    }
                    found += 1;
                }
                match field {
                    Some(field) if found == columns => self.take(field, ids),
                    _ => Err(other_columns(found, columns)),
                }
            }
            _ => {
                let texts: Vec<&[u8]> = fields(line, separator).collect();
                if texts.len() != columns {
                    return Err(other_columns(texts.len(), columns));
                }
                self.together.clear();
                for index in &shape.wanted {
                    self.together.extend(clean(texts[*index])?);
                    self.together.push(0);
                }
                self.numbers += 1;
                ids.push(xxh3_64(&self.together));
                Ok(())
            }
        }
    }

    fn take(&mut self, field: &[u8], ids: &mut Vec<u64>) -> Result<(), Fault> {
        if let Some(number) = number(field) {
            self.numbers += 1;
            ids.push(number);
            return Ok(());
        }
        let field = clean(unquoted(field))?;
        if let Some(number) = number(field) {
            self.numbers += 1;
            ids.push(number);
            return Ok(());
        }
        self.words += 1;
        self.first_word.get_or_insert_with(|| (self.lines, shown(field)));
        ids.push(xxh3_64(field));
        Ok(())
    }
}

/// The beginning without a byte-order mark; an error if it is not text.
fn text_of(buffer: &[u8]) -> Result<&[u8], Fault> {
    if is_utf16(buffer) {
        return Err(("it is UTF-16".to_owned(), TO_UTF8.to_owned()));
    }
    if buffer[..buffer.len().min(LOOK)].contains(&0) {
        return Err(("it has bytes of zeros, as no UTF-8 text has".into(), TO_UTF8.into()));
    }
    Ok(buffer.strip_prefix(UTF8_MARK).unwrap_or(buffer))
}

/// Whether a byte-order mark says that it is UTF-16.
pub(super) fn is_utf16(buffer: &[u8]) -> bool {
    buffer.starts_with(b"\xff\xfe") || buffer.starts_with(b"\xfe\xff")
}

/// Whether the buffer is text only.
pub(super) fn is_text(buffer: &[u8]) -> bool {
    let look = &buffer[..buffer.len().min(LOOK)];
    let valid = match str::from_utf8(look) {
        Ok(text) => text,
        // The last character may be cut.
        Err(error) if error.error_len().is_none() && look.len() == LOOK => {
            str::from_utf8(&look[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    valid.chars().all(|c| !c.is_control() || matches!(c, '\t' | '\r' | '\n'))
}

fn is_passed_over(line: &[u8]) -> bool {
    match line {
        [b'0'..=b'9', ..] => false,
        _ => matches!(line.trim_ascii(), [] | [b'#', ..] | b"*"),
    }
}

fn other_columns(found: usize, columns: usize) -> Fault {
    let first = format!("the first line has {columns}: the trace is cut off or mixed");
    (format!("it has {found} columns"), first)
}

/// The field of an id; an error if it is empty or not text.
fn clean(field: &[u8]) -> Result<&[u8], Fault> {
    let valid = "an id is a whole number or a word";
    match field {
        [] => Err(("its id is empty".to_owned(), valid.to_owned())),
        _ if field.contains(&b'\r') => {
            let valid = "lines end in a line feed; `tr '\\r' '\\n'` makes such lines";
            Err((format!("`{}` has a carriage return", shown(field)), valid.to_owned()))
        }
        _ if field.iter().any(|byte| *byte < b' ' || *byte == 0x7f) => {
            Err((format!("`{}` is no id", shown(field)), valid.to_owned()))
        }
        _ => Ok(field),
    }
}
