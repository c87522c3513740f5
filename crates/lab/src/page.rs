//! A page with the figures and the plots of a scenario: one file, so that it can be mailed.
//!
//! It follows the viewer's preference for light or dark. A narrow screen gets narrow pictures, and
//! each figure as a block of its own, so that no note is cut.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use model::date;
use overbook::line_plot::PlotSize;
use overbook::markup::escaped;

use crate::chart::{self, Chart};
use crate::figures::Figures;
use crate::report::ReportError;

const STYLE: &str = "\
    :root{color-scheme:light dark;--back:#fff;--text:#16191f;--quiet:#555d6b;--line:#d4d8df;\
    --raised:#f6f7f9;--warn:#a34a00}\
    @media(prefers-color-scheme:dark){:root{--back:#14171c;--text:#e7eaef;--quiet:#a5adba;\
    --line:#363c47;--raised:#1c2027;--warn:#ffb066}}\
    body{font:15px/1.45 system-ui,sans-serif;max-width:880px;margin:1.5rem auto;padding:0 12px;\
    background:var(--back);color:var(--text)}\
    .quiet{color:var(--quiet)}.missed{color:var(--warn);font-weight:600}\
    pre{background:var(--raised);padding:12px;overflow-x:auto}svg{max-width:100%;height:auto}\
    table{border-collapse:collapse;width:100%}th,td{text-align:left;vertical-align:top;\
    padding:4px 12px 4px 0;border-bottom:1px solid var(--line);overflow-wrap:anywhere}\
    td:first-child{overflow-wrap:normal}td.number{text-align:right;white-space:nowrap}.narrow{display:none}\
    @media(max-width:640px){.wide{display:none}.narrow{display:block}thead{display:none}\
    tr{display:block;padding:6px 0;border-bottom:1px solid var(--line)}\
    td,td.number{display:inline;border:0;padding:0 6px 0 0;text-align:left;white-space:normal}\
    td:first-child,td:last-child{display:block;overflow-wrap:anywhere}}";

/// Writes `<scenario>.html`, and the first plot as `<scenario>.svg`, into `dir`. `table`: text
/// above the figures.
pub(crate) fn write(
    dir: &Path,
    figures: &Figures,
    table: &str,
    plots: &[(String, Chart)],
) -> Result<PathBuf, ReportError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = date::utc(u64::try_from(now.as_millis()).unwrap_or_default());
    if let Some((_, first)) = plots.first() {
        save(dir, figures, "svg", &chart::svg(first, PlotSize::Wide))?;
    }
    save(dir, figures, "html", &html(figures, &now, table, plots))
}

fn html(figures: &Figures, now: &str, table: &str, plots: &[(String, Chart)]) -> String {
    let name = escaped(&figures.scenario);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <title>Overbook: {name}</title><style>{STYLE}</style></head>\n<body>\
         <h1>Overbook: {name}</h1>\n<p class=\"quiet\">{} · {now} · seed {}, {} · {}</p>\n",
        if figures.passed() { "passed" } else { "FAILED" },
        figures.seed,
        if figures.runs == 1 { "1 run".to_owned() } else { format!("{} runs", figures.runs) },
        escaped(&figures.machine),
    );
    // Writing to a string cannot fail.
    if !table.is_empty() {
        let _ = writeln!(page, "<pre>{}</pre>", escaped(table));
    }
    page += "<table><thead><tr><th>figure<th>value<th>target<th>note</tr></thead><tbody>\n";
    for [figure, value, unit, target, verdict, note] in figures.rows() {
        let class = if verdict == "MISSED" { "missed" } else { "quiet" };
        let _ = writeln!(
            page,
            "<tr><td>{}</td><td class=\"number\">{} {}</td><td>{} \
             <span class=\"{class}\">{verdict}</span></td><td class=\"quiet\">{}</td></tr>",
            escaped(&figure),
            escaped(&value),
            escaped(&unit),
            escaped(&target),
            escaped(&note),
        );
    }
    page += "</tbody></table>\n";
    for (heading, plot) in plots {
        let _ = writeln!(page, "<h2>{}</h2>", escaped(heading));
        for (class, size) in [("wide", PlotSize::Wide), ("narrow", PlotSize::Narrow)] {
            let _ = writeln!(page, "<div class=\"{class}\">{}</div>", chart::svg(plot, size));
        }
    }
    page + "</body></html>\n"
}

fn save(dir: &Path, figures: &Figures, end: &str, text: &str) -> Result<PathBuf, ReportError> {
    let path = dir.join(format!("{}.{end}", figures.scenario));
    match std::fs::write(&path, text) {
        Ok(()) => Ok(path),
        Err(error) => Err(ReportError::Write { path, error }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::Line;
    use crate::figures::{Figure, Target};

    #[test]
    fn a_page_has_date_figures_and_plots_of_both_sizes() {
        let mut figures = Figures::new("s", "a <machine>".into(), 1, 3);
        let figure = Figure::new(2.0, "ratio", "a long note").target(Target::AtLeast(3.0));
        figures.add("speedup", figure);
        let line = Line { name: "web-1".into(), points: vec![(0.0, 1.0), (5.0, 900.0)] };
        let plot = Chart {
            unit: "operations/s",
            across: "seconds",
            is_log: true,
            lines: vec![line],
            marks: Vec::new(),
        };
        let dir = tempfile::tempdir().unwrap();
        let plots = [("Operations".to_owned(), plot)];
        let path = write(dir.path(), &figures, "a -> b", &plots).unwrap();
        let page = std::fs::read_to_string(&path).unwrap();
        for words in [
            "a &lt;machine&gt;",
            "seed 1, 3 runs",
            "FAILED · 2",
            "name=\"viewport\"",
            "prefers-color-scheme:dark",
            "<td>speedup</td>",
            "2 ratio",
            "MISSED",
            "a long note",
            "a -&gt; b",
            "operations/s (logarithmic)",
        ] {
            assert!(page.contains(words), "{words} is missing in\n{page}");
        }
        assert_eq!(page.matches("<svg").count(), 2);
        assert!(dir.path().join("s.svg").exists());
        let error = write(&dir.path().join("none"), &figures, "", &plots).unwrap_err();
        assert!(error.to_string().contains("none/s.svg: No such file"), "{error}");
    }
}
