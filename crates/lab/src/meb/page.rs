//! Plots of an experiment: a page with all of them, and the first one as a separate picture.

use std::fmt::Write as _;
use std::path::Path;

use crate::chart::{self, Chart};
use crate::figures::Figures;
use crate::lab::LabError;
use crate::report::ReportError;

/// Plots with their headings, in order.
#[derive(Debug, Default)]
pub struct Page {
    plots: Vec<(String, Chart)>,
}

impl Page {
    /// Adds a plot.
    pub fn add(&mut self, heading: &str, chart: Chart) {
        self.plots.push((heading.to_owned(), chart));
    }

    /// Writes `<scenario>.html` and `<scenario>.svg` into the logs of the lab that was in `dir`,
    /// and puts their path into the figures' preface.
    ///
    /// # Errors
    /// When a plot cannot be drawn or a file cannot be written.
    pub fn write(self, dir: &Path, figures: &mut Figures) -> Result<(), LabError> {
        let mut body = String::new();
        let mut first = None;
        for (heading, chart) in &self.plots {
            let svg = chart::svg(chart).map_err(ReportError::from)?;
            let _ = write!(body, "<h2>{}</h2>{svg}", escaped(heading));
            first.get_or_insert(svg);
        }
        let name = figures.scenario.clone();
        let page = format!(
            "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Overbook: {name}</title>\
             <style>body{{font:15px sans-serif;max-width:920px;margin:2em auto;padding:0 1em}}\
             pre{{background:#f4f4f4;padding:1em;overflow-x:auto}}svg{{max-width:100%;height:auto}}</style>\
             <h1>Overbook: {name}</h1><pre>{}</pre>{body}</html>\n",
            escaped(&figures.to_table()),
        );
        let log = dir.join("log");
        save(&log.join(format!("{name}.svg")), first.unwrap_or_default().as_bytes())?;
        let path = log.join(format!("{name}.html"));
        save(&path, page.as_bytes())?;
        figures.preface = format!("\nReport with plots: {}\n\n", path.display());
        Ok(())
    }
}

/// Writes a file of the report.
///
/// # Errors
/// When it cannot be written.
pub fn save(path: &Path, content: &[u8]) -> Result<(), LabError> {
    let written = std::fs::write(path, content);
    Ok(written.map_err(|error| ReportError::Write { path: path.to_owned(), error })?)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
