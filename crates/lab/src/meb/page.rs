//! Plots of an experiment: a page with all of them, and the first one as a separate picture.

use std::path::Path;

use crate::chart::Chart;
use crate::figures::Figures;
use crate::lab::LabError;
use crate::page;
use crate::report::ReportError;

/// Plots with their headings, in order.
#[derive(Debug, Default)]
pub struct Page {
    plots: Vec<(String, Chart)>,
}

impl Page {
    /// A page with one plot.
    pub fn of(heading: &str, chart: Chart) -> Self {
        Self { plots: vec![(heading.to_owned(), chart)] }
    }

    pub fn add(&mut self, heading: &str, chart: Chart) {
        self.plots.push((heading.to_owned(), chart));
    }

    /// Writes `<scenario>.html` and `<scenario>.svg` into the logs of the lab that was in `dir`,
    /// and puts their path into the figures' preface.
    pub fn write(self, dir: &Path, figures: &mut Figures) -> Result<(), LabError> {
        let path = page::write(&dir.join("log"), figures, "", &self.plots)?;
        figures.preface = format!("\nReport with plots: {}\n\n", path.display());
        Ok(())
    }
}

/// Writes a file of the report.
pub fn save(path: &Path, content: &[u8]) -> Result<(), LabError> {
    let written = std::fs::write(path, content);
    Ok(written.map_err(|error| ReportError::Write { path: path.to_owned(), error })?)
}
