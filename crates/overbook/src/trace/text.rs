//! Lines of text with an id in one of their columns.
//!
//! The first line decides: which of `,` tab `;` and space separates the columns, how many there
//! are, and whether it is a header (then its field in the id's column is no number). Without a
//! column from the user a header's `id`, `obj_id`, `key`, `address` … is taken, else the first.
//! Fields may stand in quotes. Ids are whole numbers, decimal or `0x…`; empty lines are passed
//! over.

use super::{TraceError, source::Source};

/// Names under which traces keep their ids.
const ID_NAMES: [&str; 12] = [
    "id",
    "obj_id",
    "object_id",
    "objid",
    "object",
    "key",
    "address",
    "addr",
    "page",
    "granule",
    "block",
    "lba",
];
const SEPARATORS: [u8; 4] = [b',', b'\t', b';', b' '];
const VALID_ID: &str = "an id is a whole number below 2^64, decimal or 0x…";

/// What the first line tells.
struct Shape {
    separator: Option<u8>,
    columns: usize,
    /// The id's, from 0.
    column: usize,
}

/// A reader of text.
pub(super) struct Text {
    wanted: Option<String>,
    shape: Option<Shape>,
    lines: u64,
    ids: u64,
    used: usize,
    ends_in_line: bool,
}

/// What is wrong with a line, and what would be valid.
type Fault = (String, String);

impl Text {
    pub(super) fn new(column: Option<&str>) -> Self {
        let wanted = column.map(str::to_owned);
        Self { wanted, shape: None, lines: 0, ids: 0, used: 0, ends_in_line: false }
    }

    pub(super) fn warning(&self) -> Option<String> {
        let words = "the last line has no line's end: the file may be cut off";
        self.ends_in_line.then(|| words.to_owned())
    }

    pub(super) fn next_batch(
        &mut self,
        source: &mut Source,
        ids: &mut Vec<u64>,
    ) -> Result<(), TraceError> {
        // A buffer of empty lines holds no id, and yet is not the end.
        while ids.is_empty() {
            let path = source.path();
            let buffer = source.advance(self.used)?;
            if buffer.is_empty() {
                return match self.ids {
                    0 => Err(TraceError::Empty { path, format: "csv", unit: "line with an id" }),
                    _ => Ok(()),
                };
            }
            let (read, fault) = self.read_lines(buffer, ids);
            self.used = read;
            let fault =
                fault.or_else(|| (read == 0).then(|| self.unended_line(source, ids)).flatten());
            if let Some((found, valid)) = fault {
                return Err(TraceError::Line { path, line: self.lines, found, valid });
            }
            self.ids += ids.len() as u64;
        }
        Ok(())
    }

    /// Reads all whole lines; answers how many bytes they have.
    fn read_lines(&mut self, buffer: &[u8], ids: &mut Vec<u64>) -> (usize, Option<Fault>) {
        let mut used = 0;
        for line in buffer.split_inclusive(|byte| *byte == b'\n') {
            let Some(line) = line.strip_suffix(b"\n") else { break };
            if let Err(fault) = self.read_line(line, ids) {
                return (used, Some(fault));
            }
            used += line.len() + 1;
        }
        (used, None)
    }

    /// What the buffer holds is one line without an end: the file's last, or one too long.
    fn unended_line(&mut self, source: &mut Source, ids: &mut Vec<u64>) -> Option<Fault> {
        if source.is_full() {
            self.lines += 1;
            return Some(("it is longer than 256 KiB".into(), "a line holds one reference".into()));
        }
        let line = source.advance(0).map(<[u8]>::to_vec).unwrap_or_default();
        self.used = line.len();
        self.ends_in_line = true;
        self.read_line(&line, ids).err()
    }

    fn read_line(&mut self, line: &[u8], ids: &mut Vec<u64>) -> Result<(), Fault> {
        self.lines += 1;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            return Ok(());
        }
        let Some(shape) = &self.shape else { return self.read_first(line, ids) };
        // The most common shape of all needs no fields.
        if shape.separator.is_none() {
            ids.push(number(line).ok_or_else(|| no_id(line))?);
            return Ok(());
        }
        let (mut columns, mut field) = (0, None);
        for (index, text) in fields(line, shape.separator).enumerate() {
            columns += 1;
            if index == shape.column {
                field = Some(text);
            }
        }
        match field {
            Some(field) if columns == shape.columns => {
                ids.push(number(field).ok_or_else(|| no_id(field))?);
                Ok(())
            }
            _ => Err((
                format!("it has {columns} columns"),
                format!("the first line has {}: the trace is cut off or mixed", shape.columns),
            )),
        }
    }

    fn read_first(&mut self, line: &[u8], ids: &mut Vec<u64>) -> Result<(), Fault> {
        let separator = SEPARATORS.into_iter().find(|separator| line.contains(separator));
        let names: Vec<String> = fields(line, separator)
            .map(|field| String::from_utf8_lossy(field).trim().to_lowercase())
            .collect();
        let column = self.column(&names)?;
        let is_header = number(names[column].as_bytes()).is_none();
        // Without letters it is no header but a wrong id.
        if is_header && !names[column].contains(|c: char| c.is_alphabetic() || c == '_') {
            return Err(no_id(names[column].as_bytes()));
        }
        self.shape = Some(Shape { separator, columns: names.len(), column });
        if !is_header {
            ids.extend(number(names[column].as_bytes()));
        }
        Ok(())
    }

    /// The id's column, from 0.
    fn column(&self, names: &[String]) -> Result<usize, Fault> {
        let Some(wanted) = &self.wanted else {
            let usual = ID_NAMES.iter().find_map(|id| names.iter().position(|name| name == id));
            return Ok(usual.unwrap_or(0));
        };
        let wanted = wanted.to_lowercase();
        let by_number = wanted.parse().ok().and_then(|number: usize| number.checked_sub(1));
        let by_number = by_number.filter(|index| *index < names.len());
        names.iter().position(|name| *name == wanted).or(by_number).ok_or_else(|| {
            let many = names.len();
            let has: String = names.join(", ").chars().take(200).collect();
            (format!("it has no column `{wanted}`"), format!("its {many} columns are: {has}"))
        })
    }
}

fn no_id(field: &[u8]) -> Fault {
    let text: String = String::from_utf8_lossy(field).chars().take(40).collect();
    (format!("`{text}` is no id"), VALID_ID.to_owned())
}

/// A line's fields, without their quotes. A separator within quotes separates nothing; of several
/// spaces only the first does.
fn fields(line: &[u8], separator: Option<u8>) -> impl Iterator<Item = &[u8]> {
    let mut in_quotes = false;
    line.split(move |byte| {
        in_quotes ^= *byte == b'"';
        !in_quotes && Some(*byte) == separator
    })
    .filter(move |field| separator != Some(b' ') || !field.is_empty())
    .map(|field| {
        let field = field.trim_ascii();
        field.strip_prefix(b"\"").and_then(|field| field.strip_suffix(b"\"")).unwrap_or(field)
    })
}

fn number(field: &[u8]) -> Option<u64> {
    let field = field.trim_ascii();
    if let Some(hex) = field.strip_prefix(b"0x").or_else(|| field.strip_prefix(b"0X")) {
        return u64::from_str_radix(str::from_utf8(hex).ok()?, 16).ok();
    }
    if field.is_empty() {
        return None;
    }
    field.iter().try_fold(0_u64, |number, byte| {
        let digit = byte.checked_sub(b'0').filter(|digit| *digit < 10)?;
        number.checked_mul(10)?.checked_add(u64::from(digit))
    })
}
