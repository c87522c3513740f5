//! Tables as text: columns as wide as their widest cell, numbers aligned to the right.

use model::Bytes;

/// A column's title and whether the column is aligned to the right.
pub(super) type Column = (&'static str, bool);

/// Lays out `rows` under `columns`; the last column may be of any length.
pub(super) fn table(columns: &[Column], rows: &[Vec<String>]) -> String {
    let width = |index: usize, title: &str| {
        let cells = rows.iter().filter_map(|row| row.get(index));
        cells.map(|cell| cell.chars().count()).chain([title.chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> =
        columns.iter().enumerate().map(|(index, (title, _))| width(index, title)).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for ((cell, width), (_, right)) in cells.zip(&widths).zip(columns) {
            let gap = " ".repeat(width.saturating_sub(cell.chars().count()));
            let (before, after) = if *right { (gap, String::new()) } else { (String::new(), gap) };
            line += &format!("{before}{cell}{after}  ");
        }
        line.trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut columns.iter().map(|(title, _)| *title));
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

/// A size, or a dash.
pub(super) fn size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "-".to_owned(), |bytes| Bytes(bytes).to_string())
}

/// A rate, or a dash.
pub(super) fn rate(bytes_per_second: Option<u64>) -> String {
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
}
