//! Tables as text: columns as wide as their widest cell, numbers aligned to the right.

use model::Bytes;

use super::fit;

/// A column's title and whether the column is aligned to the right.
pub(crate) type Column = (&'static str, bool);

/// Characters between two columns.
const GAP: usize = 2;
/// Names are shortened to this width before a column is left out.
const NAME: usize = 16;
/// The last column keeps this width before another one is left out.
const TEXT: usize = 20;

/// A table with a line for each row.
#[derive(Debug)]
pub(crate) struct TextTable {
    /// The titles.
    pub(crate) header: String,
    /// The rows, in their order.
    pub(crate) rows: Vec<String>,
}

impl TextTable {
    /// Lays out `rows` under `columns`. The first column has names, the last one text of any
    /// length.
    ///
    /// With a `width`, no line is longer. The columns with the titles in `droppable` are left out
    /// first, in that order; then the names are shortened and the text is cut.
    pub(crate) fn fitted(
        columns: &[Column],
        rows: &[Vec<String>],
        droppable: &[&str],
        width: Option<usize>,
    ) -> Self {
        let natural: Vec<usize> =
            columns.iter().enumerate().map(|(at, (title, _))| widest(rows, at, title)).collect();
        let last = columns.len().saturating_sub(1);
        let mut kept: Vec<usize> = (0..columns.len()).collect();
        let mut widths = natural.clone();
        if let Some(width) = width {
            let least = |kept: &[usize]| -> usize {
                let of = |&at: &usize| match at {
                    0 => natural[at].min(NAME),
                    at if at == last => natural[at].min(TEXT),
                    at => natural[at],
                };
                kept.iter().map(of).sum::<usize>() + GAP * kept.len().saturating_sub(1)
            };
            for title in droppable {
                if least(&kept) <= width {
                    break;
                }
                kept.retain(|&at| columns[at].0 != *title);
            }
            // The names get the room that the text does not need, then the text gets the rest.
            let between = kept.iter().filter(|&&at| at != 0 && at != last);
            let fixed: usize = between.map(|&at| natural[at] + GAP).sum();
            let room = width.saturating_sub(fixed + GAP);
            let text = natural[last].min(TEXT);
            widths[0] = natural[0].min(room.saturating_sub(text).max(NAME.min(room)));
            widths[last] = natural[last].min(room.saturating_sub(widths[0]));
        }
        let names = fit::shorten(rows.iter().map(|row| cell(row, 0)), widths[0]);
        let lay = |cells: &dyn Fn(usize) -> String| {
            let mut line = String::new();
            for &at in &kept {
                let text = fit::clip(&cells(at), widths[at]);
                let gap = " ".repeat(widths[at].saturating_sub(text.chars().count()));
                let (before, after) =
                    if columns[at].1 { (gap, String::new()) } else { (String::new(), gap) };
                line += &format!("{before}{text}{after}{}", " ".repeat(GAP));
            }
            let line = line.trim_end();
            width.map_or_else(|| line.to_owned(), |width| fit::clip(line, width))
        };
        let row = |(row, name): (&Vec<String>, &String)| {
            lay(&|at| if at == 0 { name.clone() } else { cell(row, at).to_owned() })
        };
        Self {
            header: lay(&|at| columns[at].0.to_owned()),
            rows: rows.iter().zip(&names).map(row).collect(),
        }
    }

    /// The header and the rows.
    pub(crate) fn text(&self) -> String {
        let lines = std::iter::once(&self.header).chain(&self.rows);
        lines.map(|line| format!("{line}\n")).collect()
    }
}

fn cell(row: &[String], at: usize) -> &str {
    row.get(at).map_or("", String::as_str)
}

fn widest(rows: &[Vec<String>], at: usize, title: &str) -> usize {
    let cells = rows.iter().map(|row| cell(row, at).chars().count());
    cells.chain([title.chars().count()]).max().unwrap_or(0)
}

/// Lays out `rows` under `columns`; the last column may be of any length.
pub(super) fn table(columns: &[Column], rows: &[Vec<String>]) -> String {
    TextTable::fitted(columns, rows, &[], None).text()
}

/// A size, or a dash.
pub(crate) fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string())
}

/// A rate, or a dash.
pub(crate) fn rate(bytes_per_second: Option<u64>) -> String {
    bytes_per_second.map_or_else(|| "-".to_owned(), |bytes| format!("{}/s", Bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_line_up_on_the_right() {
        let rows = [vec!["a".into(), "1 B".into(), "x".into()], vec!["bcd".into(), "10 B".into()]];
        let text = table(&[("VM", false), ("SIZE", true), ("WHY", false)], &rows);
        assert_eq!(text, "VM   SIZE  WHY\na     1 B  x\nbcd  10 B\n");
    }

    #[test]
    fn a_narrow_table_drops_columns_shortens_names_and_cuts_text() {
        let columns = [("VM", false), ("SIZE", true), ("AGE", true), ("WHY", false)];
        let rows: Vec<Vec<String>> = (0..100)
            .map(|n| format!("web-customer-frontend-{n:04}"))
            .map(|name| {
                [&name, "955.1 MiB", "1 s", "it is short of memory"].map(str::to_owned).into()
            })
            .collect();
        let all = TextTable::fitted(&columns, &rows, &["AGE"], Some(80));
        assert_eq!(
            all.rows[17],
            "web-customer-frontend-0017  955.1 MiB  1 s  it is short of memory"
        );
        let some = TextTable::fitted(&columns, &rows, &["AGE"], Some(50));
        assert_eq!(some.header, "VM                      SIZE  WHY");
        assert_eq!(some.rows[17], "web-customer…0017  955.1 MiB  it is short of memo…");
        for width in 1..100 {
            let table = TextTable::fitted(&columns, &rows, &["AGE"], Some(width));
            let fits = |line: &String| line.chars().count() <= width;
            assert!(fits(&table.header) && table.rows.iter().all(fits), "{width}: {table:#?}");
        }
    }

    #[test]
    fn a_table_without_rows_has_its_header() {
        let table = TextTable::fitted(&[("VM", false), ("WHY", false)], &[], &[], Some(80));
        assert_eq!(table.text(), "VM  WHY\n");
    }
}
