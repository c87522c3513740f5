//! Typed readers over one TOML table, which note faults and continue.
//!
//! A reader that is asked for a key also records the key. So the list of valid keys in an
//! "unknown key" message is the list of keys that the code really reads, and never goes stale.

use std::{
    cell::RefCell,
    collections::BTreeSet,
    fmt::Display,
    ops::{Range, RangeInclusive},
    sync::Arc,
};

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::Fault;
use crate::{Bytes, ColdSpec, DedupSpec, PagesPerMs, TrackingBudget, spec::LendSpec};

/// The place of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SourceLocation {
    pub(super) file: Arc<str>,
    pub(super) line: usize,
}

impl SourceLocation {
    /// A fault at this place.
    pub(super) fn fault(&self, message: impl Into<String>) -> Fault {
        Fault { file: self.file.to_string(), line: Some(self.line), message: message.into() }
    }
}

/// A value with its place.
#[derive(Clone, Debug)]
pub(super) struct Located<T> {
    pub(super) value: T,
    pub(super) place: SourceLocation,
}

/// One file: turns byte offsets into lines and collects the file's faults.
pub(super) struct Source<'a> {
    name: Arc<str>,
    text: &'a str,
    line_starts: Vec<usize>,
    faults: RefCell<Vec<Fault>>,
}

impl<'a> Source<'a> {
    pub(super) fn new(name: &str, text: &'a str) -> Self {
        let ends = text.bytes().enumerate().filter(|(_, b)| *b == b'\n').map(|(i, _)| i + 1);
        let line_starts = std::iter::once(0).chain(ends).collect();
        Self { name: name.into(), text, line_starts, faults: RefCell::default() }
    }

    /// The file's tree; `None` when the text is not TOML (every syntax error has been noted).
    pub(super) fn parse(&self) -> Option<Spanned<DeTable<'a>>> {
        let (root, errors) = DeTable::parse_recoverable(self.text);
        for error in &errors {
            let span = error.span().unwrap_or_default();
            let message = match error.message() {
                "duplicate key" => self.twice(&span),
                other => format!("not valid TOML: {other}"),
            };
            self.fault(&span, message);
        }
        errors.is_empty().then_some(root)
    }

    /// The fault of a key that stands twice.
    fn twice(&self, span: &Range<usize>) -> String {
        let key = self.text.get(span.clone()).unwrap_or_default().trim();
        let before = self.place(span).line.saturating_sub(1);
        let names_it = |line: &str| {
            let (line, _) = line.split_once('#').unwrap_or((line, ""));
            let (name, _) = line.split_once('=').unwrap_or((line, ""));
            let name = name.trim().trim_matches(['[', ']']);
            name.strip_suffix(key).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        let lines: Vec<&str> = self.text.lines().take(before).collect();
        let first = lines.iter().rposition(|line| !key.is_empty() && names_it(line));
        let first = first.map_or(String::new(), |at| format!("; it stands in line {} too", at + 1));
        format!("not valid TOML: the key `{}` is written twice{first}", printable(key))
    }

    /// The readable part of the file's tree.
    pub(super) fn parse_readable(&self) -> Spanned<DeTable<'a>> {
        DeTable::parse_recoverable(self.text).0
    }

    pub(super) fn into_faults(self) -> Vec<Fault> {
        self.faults.into_inner()
    }

    fn place(&self, span: &Range<usize>) -> SourceLocation {
        let line = self.line_starts.partition_point(|start| *start <= span.start);
        SourceLocation { file: self.name.clone(), line }
    }

    fn fault(&self, span: &Range<usize>, message: impl Into<String>) {
        self.faults.borrow_mut().push(self.place(span).fault(message));
    }
}

/// A table that is being read. [`TableReader::finish`] reports the keys that no reader asked for.
pub(super) struct TableReader<'a> {
    source: &'a Source<'a>,
    /// The title as a person would write it: `[group.web]`; empty for the file's top level.
    title: String,
    entries: &'a DeTable<'a>,
    place: SourceLocation,
    asked: RefCell<BTreeSet<&'static str>>,
}

impl<'a> TableReader<'a> {
    /// The top level of a file.
    pub(super) fn root(source: &'a Source<'a>, entries: &'a DeTable<'a>) -> Self {
        Self::new(source, String::new(), entries, source.place(&(0..0)))
    }

    fn new(
        source: &'a Source<'a>,
        title: String,
        entries: &'a DeTable<'a>,
        place: SourceLocation,
    ) -> Self {
        Self { source, title, entries, place, asked: RefCell::default() }
    }

    /// The place of the table.
    pub(super) fn place(&self) -> SourceLocation {
        self.place.clone()
    }

    fn get(&self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.asked.borrow_mut().insert(key);
        self.entries.get(key)
    }

    /// The place of `key`, whether its value is right or not.
    pub(super) fn place_of(&self, key: &'static str) -> Option<SourceLocation> {
        self.get(key).map(|value| self.source.place(&value.span()))
    }

    fn at<T>(&self, value: &Spanned<DeValue<'_>>, read: T) -> Located<T> {
        Located { value: read, place: self.source.place(&value.span()) }
    }

    fn wrong_type(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        let kind = kind(value.get_ref());
        self.source.fault(&value.span(), format!("`{key}` must be {wanted}, not {kind}"));
    }

    /// A size above zero, with its unit.
    pub(super) fn size(&self, key: &'static str) -> Option<Located<Bytes>> {
        let value = self.get(key)?;
        let text = match value.get_ref() {
            DeValue::String(text) => text.to_string(),
            // The size's own parser handles numbers: its message asks for the unit.
            DeValue::Integer(number) if number.radix() == 10 => number.as_str().to_owned(),
            _ => {
                self.wrong_type(key, value, "a size such as \"512MiB\"");
                return None;
            }
        };
        match text.parse::<Bytes>() {
            Ok(Bytes::ZERO) => {
                self.source.fault(&value.span(), format!("`{key}` must be more than zero"));
                None
            }
            Ok(size) => Some(self.at(value, size)),
            Err(error) => {
                let error = printable(&text).parse::<Bytes>().err().unwrap_or(error);
                self.source.fault(&value.span(), format!("`{key}`: {error}"));
                None
            }
        }
    }

    /// A text that is not empty and has no control characters.
    pub(super) fn text(&self, key: &'static str) -> Option<Located<String>> {
        self.text_of(key, self.get(key)?)
    }

    fn text_of(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Option<Located<String>> {
        let DeValue::String(text) = value.get_ref() else {
            self.wrong_type(key, value, "a text in quotes");
            return None;
        };
        if let Some(wrong) = unfit(text) {
            self.source.fault(&value.span(), format!("`{key}` {wrong}"));
            return None;
        }
        Some(self.at(value, text.to_string()))
    }

    /// `true` or `false`.
    pub(super) fn flag(&self, key: &'static str) -> Option<bool> {
        let value = self.get(key)?;
        if let DeValue::Boolean(flag) = value.get_ref() {
            return Some(*flag);
        }
        self.wrong_type(key, value, "true or false");
        None
    }

    /// `true`, `false`, or the name of a circle of groups. A circle that is called as a flag
    /// would be written is a mistake.
    pub(super) fn lend(&self, key: &'static str) -> Option<LendSpec> {
        let value = self.get(key)?;
        match value.get_ref() {
            DeValue::Boolean(all) => return Some(LendSpec::Open(*all)),
            DeValue::String(text) => {
                let is_flag = ["true", "false", "yes", "no", "on", "off"].contains(&&**text);
                if !is_flag {
                    return Some(LendSpec::Circle(self.text_of(key, value)?.value));
                }
                let fault = format!(
                    "`{key}` is `{text}`: write true or false without quotes, \
                     or the name of a circle of groups"
                );
                self.source.fault(&value.span(), fault);
            }
            _ => self.wrong_type(key, value, "true, false or the name of a circle of groups"),
        }
        None
    }

    /// A list of at least one text; empty when the list is faulty.
    pub(super) fn texts(&self, key: &'static str) -> Option<Located<Vec<Located<String>>>> {
        let value = self.get(key)?;
        let DeValue::Array(items) = value.get_ref() else {
            self.wrong_type(key, value, "a list of texts such as [\"web-*\"]");
            return Some(self.at(value, Vec::new()));
        };
        if items.is_empty() {
            self.source.fault(&value.span(), format!("`{key}` must not be empty"));
        }
        let read: Vec<_> = items.iter().filter_map(|item| self.text_of(key, item)).collect();
        let whole = if read.len() == items.len() { read } else { Vec::new() };
        Some(self.at(value, whole))
    }

    /// Users, each by name or number: one, or a list of at least one; empty when the value is
    /// faulty.
    pub(super) fn users(&self, key: &'static str) -> Option<Located<Vec<Located<String>>>> {
        let value = self.get(key)?;
        let items = match value.get_ref() {
            DeValue::Array(items) => items.iter().collect(),
            _ => vec![value],
        };
        let read: Vec<_> = items.iter().filter_map(|item| self.user(key, item)).collect();
        if items.is_empty() {
            self.source.fault(&value.span(), format!("`{key}` must not be empty"));
        }
        let whole = if read.len() == items.len() { read } else { Vec::new() };
        Some(self.at(value, whole))
    }

    fn user(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Option<Located<String>> {
        match value.get_ref() {
            DeValue::String(_) => self.text_of(key, value),
            DeValue::Integer(number) if number.radix() == 10 => {
                let uid = number.as_str().parse::<u32>().ok();
                if uid.is_none() {
                    let shown = printable(number.as_str());
                    let wanted = "a user's name or number, such as \"libvirt-qemu\" or 64055";
                    self.source
                        .fault(&value.span(), format!("`{key}` is {shown}; valid: {wanted}"));
                }
                Some(self.at(value, uid?.to_string()))
            }
            _ => {
                self.wrong_type(key, value, "a user's name or number, or a list of these");
                None
            }
        }
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy>(&self, key: &'static str, choices: &[(&str, T)]) -> Option<T> {
        let value = self.get(key)?;
        let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
        let DeValue::String(text) = value.get_ref() else {
            self.wrong_type(key, value, &format!("one of: {}", words.join(", ")));
            return None;
        };
        let found = choices.iter().find(|(word, _)| word == text);
        if found.is_none() {
            let hint = did_you_mean(text, &words);
            let text = printable(text);
            let message = format!("`{key}` is \"{text}\"; valid: {}{hint}", words.join(", "));
            self.source.fault(&value.span(), message);
        }
        found.map(|(_, choice)| *choice)
    }

    /// A whole number within a range.
    pub(super) fn count<T>(&self, key: &'static str, range: &RangeInclusive<T>) -> Option<T>
    where
        T: TryFrom<u64> + PartialOrd + Display,
    {
        let value = self.get(key)?;
        let wanted = format!("a whole number from {} to {}", range.start(), range.end());
        let DeValue::Integer(number) = value.get_ref() else {
            self.wrong_type(key, value, &wanted);
            return None;
        };
        let count = u64::from_str_radix(number.as_str(), number.radix()).ok();
        let count = count.and_then(|count| T::try_from(count).ok());
        let count = count.filter(|count| range.contains(count));
        if count.is_none() {
            let shown = printable(number.as_str());
            self.source.fault(&value.span(), format!("`{key}` is {shown}; valid: {wanted}"));
        }
        count
    }

    /// The budget of tracking: a percentage of one vCPU, or "off".
    pub(super) fn tracking(&self, key: &'static str) -> Option<TrackingBudget> {
        const WANTED: &str = "\"off\" or a share of one vCPU from \"0.1%\" to \"10%\"";
        let value = self.get(key)?;
        let DeValue::String(text) = value.get_ref() else {
            self.wrong_type(key, value, WANTED);
            return None;
        };
        let budget = parse_tracking(text);
        if budget.is_none() {
            let text = printable(text);
            self.source.fault(&value.span(), format!("`{key}` is \"{text}\"; valid: {WANTED}"));
        }
        budget
    }

    /// Whether the host pages out cold memory: a word, or a bound on refaults.
    pub(super) fn cold(&self, key: &'static str) -> Option<ColdSpec> {
        const WANTED: &str = "\"off\", \"when-needed\" or a share of the working set that may be \
             touched again in a minute, from \"0.01%\" to \"10%\"";
        let value = self.get(key)?;
        let DeValue::String(text) = value.get_ref() else {
            self.wrong_type(key, value, WANTED);
            return None;
        };
        let cold = match text.as_ref() {
            "off" => Some(ColdSpec::Off),
            "when-needed" => Some(ColdSpec::WhenNeeded),
            text => basis_points(text)
                .filter(|points| ColdSpec::RANGE.contains(points))
                .map(ColdSpec::Ahead),
        };
        if cold.is_none() {
            let text = printable(text);
            self.source.fault(&value.span(), format!("`{key}` is \"{text}\"; valid: {WANTED}"));
        }
        cold
    }

    /// How identical pages are searched for: a word, or a rate.
    pub(super) fn dedup(&self, key: &'static str) -> Option<DedupSpec> {
        const WANTED: &str =
            "\"off\", \"adaptive\", \"adaptive-c\", \"adaptive-cs\" or 1 to 1000 pages per ms";
        let value = self.get(key)?;
        let (shown, dedup) = match value.get_ref() {
            DeValue::String(text) => {
                let dedup = match text.as_ref() {
                    "off" => Some(DedupSpec::Off),
                    "adaptive" => Some(DedupSpec::Adaptive),
                    "adaptive-c" => Some(DedupSpec::AdaptiveC),
                    "adaptive-cs" => Some(DedupSpec::AdaptiveCs),
                    _ => None,
                };
                (format!("\"{}\"", printable(text)), dedup)
            }
            DeValue::Integer(number) => {
                let rate = u32::from_str_radix(number.as_str(), number.radix()).ok();
                let rate = rate.filter(|rate| DedupSpec::RANGE.contains(rate)).map(PagesPerMs);
                (printable(number.as_str()), rate.map(DedupSpec::Fixed))
            }
            _ => {
                self.wrong_type(key, value, WANTED);
                return None;
            }
        };
        if dedup.is_none() {
            self.source.fault(&value.span(), format!("`{key}` is {shown}; valid: {WANTED}"));
        }
        dedup
    }

    /// The table `[key]`.
    pub(super) fn table(&self, key: &'static str) -> Option<TableReader<'a>> {
        let value = self.get(key)?;
        let DeValue::Table(entries) = value.get_ref() else {
            self.wrong_type(key, value, "a table");
            return None;
        };
        let place = self.source.place(&value.span());
        Some(TableReader::new(self.source, format!("[{key}]"), entries, place))
    }

    /// The tables `[key.*]`, by name. Invalid names are noted as faults and left out.
    pub(super) fn named_tables(&self, key: &'static str) -> Vec<(String, TableReader<'a>)> {
        let Some(outer) = self.table(key) else {
            return Vec::new();
        };
        let mut tables = Vec::new();
        for (name, value) in outer.entries {
            let title = format!("[{key}.{}]", quoted_if_needed(name.get_ref()));
            let DeValue::Table(entries) = value.get_ref() else {
                let text = name.get_ref();
                self.source.fault(
                    &name.span(),
                    format!("`{}` in [{key}] must be a table: {title}", printable(text)),
                );
                continue;
            };
            if let Some(wrong) = unfit(name.get_ref()).or_else(|| too_long(name.get_ref())) {
                self.source.fault(&name.span(), format!("the name in {title} {wrong}"));
                continue;
            }
            let place = self.source.place(&name.span());
            let table = TableReader::new(self.source, title, entries, place);
            tables.push((name.get_ref().to_string(), table));
        }
        tables
    }

    /// Reports each key that no reader asked for.
    pub(super) fn finish(&self) {
        let asked = self.asked.borrow();
        let valid: Vec<&str> = asked.iter().copied().collect();
        for (key, value) in self.entries {
            if asked.contains(key.get_ref().as_ref()) {
                continue;
            }
            let hint = did_you_mean(key.get_ref(), &valid);
            let name = printable(key.get_ref());
            let valid = valid.join(", ");
            let message = match (self.title.as_str(), value.get_ref()) {
                ("", DeValue::Table(_)) => format!("unknown table [{name}]; valid: {valid}{hint}"),
                ("", _) => format!("unknown key `{name}` outside any table; tables: {valid}{hint}"),
                (title, _) => format!("unknown key `{name}` in {title}; valid: {valid}{hint}"),
            };
            self.source.fault(&key.span(), message);
        }
    }
}

/// `1%`, `0.25 %` or `off`.
fn parse_tracking(text: &str) -> Option<TrackingBudget> {
    if text == "off" {
        return Some(TrackingBudget::Off);
    }
    let points = basis_points(text)?;
    TrackingBudget::RANGE.contains(&points).then_some(TrackingBudget::BasisPoints(points))
}

/// A percentage in hundredths of a percent, the finest step: `1%`, `0.25 %`.
fn basis_points(text: &str) -> Option<u16> {
    let number = text.strip_suffix('%')?.trim_end();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.chars().all(|c| c.is_ascii_digit());
    if whole.is_empty() || fraction.len() > 2 || !digits(whole) || !digits(fraction) {
        return None;
    }
    format!("{whole}{fraction:0<2}").parse().ok()
}

/// Why a text cannot be a name, a pattern or a path.
fn unfit(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        Some("must not be empty")
    } else if text.chars().any(char::is_control) {
        Some("holds a control character")
    } else {
        None
    }
}

/// The longest name of a VM or group, in bytes: the limit of libvirt and of file systems.
pub(super) const NAME_BYTES: usize = 255;

/// Why a text cannot be a name.
pub(super) fn too_long(text: &str) -> Option<&'static str> {
    (text.len() > NAME_BYTES).then_some("is longer than 255 bytes")
}

/// A text from a file, made safe for a terminal: escaped and of bounded length.
pub(super) fn printable(text: &str) -> String {
    const SHOWN: usize = 60;
    let mut shown: String =
        text.chars().take(SHOWN).flat_map(|c| c.escape_debug().collect::<Vec<_>>()).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown.replace("\\'", "'").replace("\\\"", "\"")
}

fn quoted_if_needed(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if !name.is_empty() && name.chars().all(bare) {
        printable(name)
    } else {
        format!("\"{}\"", printable(name))
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn did_you_mean(text: &str, valid: &[&str]) -> String {
    let near = valid.iter().map(|word| (edits(text, word), word)).min();
    match near {
        Some((1..=2, word)) => format!("; did you mean `{word}`?"),
        _ => String::new(),
    }
}

/// Levenshtein distance. Long texts are far from every key, so only short ones are compared.
fn edits(a: &str, b: &str) -> usize {
    if a.len() > 32 {
        return usize::MAX;
    }
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
