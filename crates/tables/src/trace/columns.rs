//! Finds the column of a text that has the ids.
//!
//! A column is never guessed. The user names it, or exactly one column has a name that traces use
//! for ids, or there is only one column. A header is recognised by such a name, or by a second
//! line that has a number where the first has none. The last comment before the first line may
//! also be the header.
//!
//! A place on a disk is ambiguous without the disk. So if a header names a device and a place,
//! both together are the id.

/// Names that traces use for ids of objects.
const OBJECTS: [&str; 19] = [
    "id",
    "obj_id",
    "object_id",
    "objid",
    "objectid",
    "obj",
    "object",
    "item_id",
    "oid",
    "key",
    "anonymized_key",
    "cache_key",
    "cachekey",
    "url",
    "address",
    "addr",
    "page",
    "granule",
    "block_id",
];
/// Names that traces use for places on a disk.
const PLACES: [&str; 12] = [
    "lba",
    "lbn",
    "lsn",
    "block",
    "blockno",
    "block_number",
    "sector",
    "start_sector",
    "sector_number",
    "offset",
    "byte_offset",
    "logical_block_address",
];
/// Names that traces use for disks.
const DEVICES: [&str; 13] = [
    "device_id",
    "device",
    "dev",
    "disk_id",
    "diskid",
    "disk",
    "disknumber",
    "disk_number",
    "volume_id",
    "volumeid",
    "volume",
    "vdisk",
    "lun",
];
const SEPARATORS: [u8; 4] = [b',', b'\t', b';', b' '];
/// Number of columns that an error lists, and characters of each.
const LISTED: usize = 20;
const LISTED_CHARS: usize = 40;

/// A line's fault, and what would be valid.
pub(super) type Fault = (String, String);

/// The columns, as found from the first lines.
pub(super) struct Shape {
    pub(super) separator: Option<u8>,
    pub(super) columns: usize,
    /// The columns of the ids, from 0; several together are one id.
    pub(super) wanted: Vec<usize>,
    /// Whether the first line is a header.
    pub(super) has_header: bool,
    /// The header's names, or numbers without a header, as the user would write them.
    name: String,
}

/// The lines that are examined.
pub(super) struct Beginning<'a> {
    /// The first line that is not a comment.
    pub(super) first: &'a [u8],
    pub(super) second: Option<&'a [u8]>,
    /// The last comment before that line.
    pub(super) comment: Option<&'a [u8]>,
}

impl Shape {
    /// `column` is the user's choice: a name, a number from 1, or several of these with commas.
    pub(super) fn of(lines: &Beginning<'_>, column: Option<&str>) -> Result<Self, Fault> {
        let separator = SEPARATORS.into_iter().find(|separator| lines.first.contains(separator));
        let texts: Vec<&[u8]> = fields(lines.first, separator).collect();
        let is_looked_for = |name: &&[u8]| {
            let name = plain(name);
            let has = |names: &[&str]| names.contains(&name.as_str());
            has(&OBJECTS) || has(&PLACES) || column.is_some_and(|column| plain_text(column) == name)
        };
        let has_number = |line| fields(line, separator).any(is_numeric);
        let has_header = !has_number(lines.first)
            && (texts.iter().any(is_looked_for) || lines.second.is_some_and(has_number));
        let comment = || {
            let comment = lines.comment?.strip_prefix(b"#")?.trim_ascii();
            let names: Vec<&[u8]> = fields(comment, separator).collect();
            (names.len() == texts.len() && names.iter().any(is_looked_for)).then_some(names)
        };
        let header = if has_header { Some(texts.clone()) } else { comment() };
        let columns = Columns { header: header.as_deref(), texts: &texts };
        let wanted = match column {
            Some(column) => columns.said(column)?,
            None => columns.known()?,
        };
        let name = wanted.iter().map(|index| columns.name(*index)).collect::<Vec<_>>().join(",");
        Ok(Self { separator, columns: texts.len(), wanted, has_header, name })
    }

    /// The column, as the user would write it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The column in words, with the number of columns.
    pub(super) fn described(&self) -> String {
        let numbers: Vec<_> = self.wanted.iter().map(|index| (index + 1).to_string()).collect();
        let numbers = numbers.join(",");
        if numbers == self.name {
            format!("{numbers} of {}, which no header names", self.columns)
        } else {
            format!("{} ({numbers} of {})", self.name, self.columns)
        }
    }
}

/// The columns, by the header's names if there is one.
struct Columns<'a> {
    header: Option<&'a [&'a [u8]]>,
    texts: &'a [&'a [u8]],
}

impl Columns<'_> {
    /// The columns that the user names.
    fn said(&self, column: &str) -> Result<Vec<usize>, Fault> {
        if let Some(index) = self.find(column) {
            return Ok(vec![index]);
        }
        let parts = column.split(',').map(|part| self.find(part.trim()).ok_or(part.trim()));
        parts.collect::<Result<_, _>>().map_err(|part: &str| {
            let by_name = if self.header.is_some() { "" } else { ", and no header with names" };
            (format!("it has no column `{part}`{by_name}"), self.list())
        })
    }

    fn find(&self, column: &str) -> Option<usize> {
        let plain_column = plain_text(column);
        let by_name =
            self.header.and_then(|names| names.iter().position(|n| plain(n) == plain_column));
        let by_number = || column.parse().ok().and_then(|number: usize| number.checked_sub(1));
        by_name.or_else(by_number).filter(|index| *index < self.texts.len())
    }

    /// The only column that can have the ids.
    fn known(&self) -> Result<Vec<usize>, Fault> {
        if self.texts.len() == 1 {
            return Ok(vec![0]);
        }
        let say = || format!("say with --column which has the ids; {}", self.list());
        let many = self.texts.len();
        let Some(header) = self.header else {
            return Err((format!("it has {many} columns and no header"), say()));
        };
        let named = |known: &[&str]| -> Vec<usize> {
            let is_known = |name: &[u8]| known.contains(&plain(name).as_str());
            (0..header.len()).filter(|index| is_known(header[*index])).collect()
        };
        match (&named(&OBJECTS)[..], &named(&PLACES)[..]) {
            ([object], []) => Ok(vec![*object]),
            ([], [place]) => match &named(&DEVICES)[..] {
                [] => Ok(vec![*place]),
                [device] => Ok(vec![*device, *place]),
                _ => Err(("several of its columns name a device".into(), say())),
            },
            ([], []) => Err((format!("none of its {many} columns is known to have ids"), say())),
            _ => Err(("several of its columns may have the ids".into(), say())),
        }
    }

    fn name(&self, index: usize) -> String {
        self.header.map_or_else(|| (index + 1).to_string(), |names| shown(names[index]))
    }

    fn list(&self) -> String {
        let one = |(index, text): (usize, &&[u8])| format!("{} `{}`", index + 1, shown(text));
        let texts = self.header.unwrap_or(self.texts);
        let mut list: Vec<_> = texts.iter().enumerate().take(LISTED).map(one).collect();
        if texts.len() > LISTED {
            list.push(format!("and {} more", texts.len() - LISTED));
        }
        let what = if self.header.is_some() { "its columns" } else { "the first line" };
        format!("{what}: {}", list.join(", "))
    }
}

/// A name in the form for comparison.
fn plain(name: &[u8]) -> String {
    plain_text(&String::from_utf8_lossy(name))
}

fn plain_text(name: &str) -> String {
    name.trim().trim_start_matches('#').trim().to_lowercase().replace([' ', '-'], "_")
}

/// Text from a file, made fit for a terminal.
pub(super) fn shown(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let short: String = text.chars().take(LISTED_CHARS).collect();
    let cut = if short.len() < text.len() { "…" } else { "" };
    format!("{}{cut}", short.escape_debug())
}

/// A line's fields, without their quotes. A separator within quotes does not count; of several
/// spaces only the first does.
pub(super) fn fields(line: &[u8], separator: Option<u8>) -> impl Iterator<Item = &[u8]> {
    let mut in_quotes = false;
    line.split(move |byte| {
        in_quotes ^= *byte == b'"';
        !in_quotes && Some(*byte) == separator
    })
    .filter(move |field| separator != Some(b' ') || !field.is_empty())
    .map(unquoted)
}

/// The field without surrounding spaces and quotes.
pub(super) fn unquoted(field: &[u8]) -> &[u8] {
    let field = field.trim_ascii();
    field.strip_prefix(b"\"").and_then(|field| field.strip_suffix(b"\"")).unwrap_or(field)
}

/// A number of any kind, such as a time.
fn is_numeric(field: &[u8]) -> bool {
    let begins = matches!(field, [b'0'..=b'9' | b'-' | b'+' | b'.', ..]);
    let parses = || str::from_utf8(field).is_ok_and(|text| text.parse::<f64>().is_ok());
    number(field).is_some() || begins && parses()
}

/// A whole number below 2^64, decimal or `0x…`.
pub(super) fn number(field: &[u8]) -> Option<u64> {
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
