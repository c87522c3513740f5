//! `overbook mrc TRACE`: the miss-ratio curve of a trace, by the code that tracks VMs.
//!
//! The curve is exact unless a sample is asked for. It is drawn, and on request written out in
//! full. A trace can have more distinct objects than fit in half of the available memory. The
//! command then ends with an error that suggests a sample of fixed size, before the kernel's OOM
//! killer chooses a process.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use model::Bytes;
use pages::{
    curve::{Histogram, MissRatioCurve},
    lru::{HashedStack, StackDistance as _},
    shards::Shards,
};
use serde::Serialize;
use sys::meminfo::MemInfo;

use super::{
    error::CliError,
    output::Output,
    table::{Column, table},
};
use crate::curve_chart::{Curve, CurveChart};
use crate::line_plot::PlotScale;
use tables::trace::{Format, Trace};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The trace: csv, binary or oracleGeneral, also compressed by gzip, xz or zstd; - is standard
    /// input
    trace: PathBuf,
    /// The trace's format, if its name does not tell it
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Where a csv trace has its ids: a column's name or its number, from 1; several with commas
    /// are one id together
    #[arg(long, value_name = "COLUMN")]
    column: Option<String>,
    /// Sample this share of the objects (SHARDS), for example 0.01
    #[arg(long, value_name = "RATE", conflicts_with = "shards_size")]
    shards: Option<f64>,
    /// Sample at most this many objects (SHARDS of fixed size), for example 8192
    #[arg(long, value_name = "OBJECTS")]
    shards_size: Option<usize>,
    /// Write the whole curve here, as csv
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a plot here, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    output: super::Format,
}

/// Miss ratios for which the size is printed.
const RATIOS: [f64; 7] = [0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01];
/// The miss ratio at which the working set counts as fitting.
const TOLERABLE: f64 = 0.05;
/// Points in a plot: one per pixel of its width.
const PLOT_POINTS: usize = 800;
/// Points in the JSON; the csv has all points.
const JSON_POINTS: usize = 200;

const COLUMNS: [Column; 2] = [("MISS RATIO", true), ("OBJECTS IN MEMORY", true)];

/// Samples of fewer objects get a warning. A ratio out of `n` objects is off by some 1/√n.
const FEW_OBJECTS: f64 = 256.0;

/// Memory limit of the stack. It is reached before the stack runs out of object numbers.
const MOST_BYTES: u64 = 32 << 30;

/// The method of finding the curve.
enum Method {
    Exact(Box<(HashedStack, Histogram)>),
    Shards(Box<Shards>),
}

/// The result.
#[derive(Debug, Serialize)]
struct MrcReport {
    trace: PathBuf,
    format: &'static str,
    /// The column of a csv that was read, as `--column` takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<String>,
    /// The column in words, with the number of columns.
    #[serde(skip)]
    column_words: Option<String>,
    method: &'static str,
    /// The sampled share of the objects, at the end.
    sampling_rate: f64,
    references: u64,
    /// Distinct objects; estimated if there is a sample.
    objects: f64,
    /// The share of references that miss with any amount of memory.
    floor: f64,
    /// The least number of objects in memory at which at most 5 % of the references miss.
    working_set_objects: Option<f64>,
    /// Memory used by the stack, at the end.
    memory_bytes: usize,
    seconds: f64,
    cpu_seconds: f64,
    /// Objects in memory and miss ratio.
    curve: Vec<(f64, f64)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
}

pub(super) fn run(arguments: &Arguments) -> Result<Output, CliError> {
    let start = Instant::now();
    let mut method = Method::new(arguments)?;
    let mut trace = Trace::open(&arguments.trace, arguments.format, arguments.column.as_deref())?;
    let available = MemInfo::read().map_or(MOST_BYTES, |info| info.available.0 / 2);
    let references = read(&mut trace, &mut method, Bytes(available.min(MOST_BYTES)))?;
    method.check(references)?;
    let curve = method.curve();
    let (column, column_words) =
        trace.column().map(|(column, words)| (column.to_owned(), words)).unzip();
    let report = MrcReport {
        trace: arguments.trace.clone(),
        format: trace.format().name(),
        column,
        column_words,
        method: method.name(),
        sampling_rate: method.rate(),
        references,
        objects: method.objects(),
        floor: curve.floor(),
        working_set_objects: curve.least_size(TOLERABLE).map(f64::ceil),
        memory_bytes: method.bytes(),
        seconds: start.elapsed().as_secs_f64(),
        cpu_seconds: cpu_seconds(),
        curve: pairs(&curve.resampled(JSON_POINTS)),
        warning: trace.warning().or_else(|| method.warning()),
    };
    if let Some(path) = &arguments.csv {
        write(path, &csv(&curve))?;
    }
    if let Some(path) = &arguments.plot {
        write(path, &report.chart(&curve).svg())?;
    }
    if arguments.output.json {
        return Output::json(&report);
    }
    Ok(Output::text(&report.text(&curve)))
}

/// Reads the whole trace; returns the number of references.
fn read(trace: &mut Trace, method: &mut Method, most: Bytes) -> Result<u64, CliError> {
    let bar = progress_bar(trace.file_bytes());
    let references = read_watched(trace, method, most, &bar);
    bar.finish_and_clear();
    references
}

fn read_watched(
    trace: &mut Trace,
    method: &mut Method,
    most: Bytes,
    bar: &ProgressBar,
) -> Result<u64, CliError> {
    let (mut ids, mut references) = (Vec::new(), 0);
    loop {
        trace.next_batch(&mut ids)?;
        if ids.is_empty() {
            return Ok(references);
        }
        references += ids.len() as u64;
        method.touch_all(&ids);
        bar.set_position(trace.bytes_read());
        if method.bytes() as u64 > most.0 {
            let objects = method.objects();
            return Err(CliError::Said(format!(
                "after {references} references there are {objects:.0} distinct objects, which \
                 take more than {most} (half of the available memory, 32 GiB at most); \
                 --shards-size 100000 takes 6 MB"
            )));
        }
    }
}

/// A progress bar on standard error, shown only on a terminal.
fn progress_bar(bytes: u64) -> ProgressBar {
    let bar = if bytes == 0 { ProgressBar::new_spinner() } else { ProgressBar::new(bytes) };
    let template = "{bar:40} {percent:>3} %  {bytes_per_sec}  {eta} left";
    let style = ProgressStyle::with_template(template);
    bar.enable_steady_tick(Duration::from_millis(200));
    style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
}

/// CPU time of this process so far.
pub(super) fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

pub(super) fn write(path: &Path, text: &str) -> Result<(), CliError> {
    fs::write(path, text).map_err(|error| CliError::File { path: path.into(), error })
}

fn csv(curve: &MissRatioCurve) -> String {
    let mut text = "objects,miss_ratio\n".to_owned();
    for point in curve.points() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{},{:.9}", point.size, point.ratio);
    }
    text
}

fn pairs(curve: &MissRatioCurve) -> Vec<(f64, f64)> {
    curve.points().iter().map(|point| (point.size, point.ratio)).collect()
}

impl Method {
    fn new(arguments: &Arguments) -> Result<Self, CliError> {
        let shards = match (arguments.shards, arguments.shards_size) {
            (Some(rate), _) => Shards::fixed_rate(rate)?,
            (None, Some(size)) => Shards::fixed_size(size)?,
            (None, None) => return Ok(Self::Exact(Box::default())),
        };
        Ok(Self::Shards(Box::new(shards)))
    }

    fn touch_all(&mut self, ids: &[u64]) {
        match self {
            Self::Exact(exact) => {
                let (stack, histogram) = exact.as_mut();
                stack.touch_all(ids, |distance| histogram.record(distance));
            }
            Self::Shards(shards) => shards.touch_all(ids),
        }
    }

    /// Returns an error if the sample has no object: it then has no curve.
    fn check(&self, references: u64) -> Result<(), CliError> {
        if self.objects() > 0.0 {
            return Ok(());
        }
        Err(CliError::Said(format!(
            "the sample has no object of the trace's {references} references: nothing is known of \
             them; valid: a higher rate, or --shards-size"
        )))
    }

    fn warning(&self) -> Option<String> {
        let objects = self.objects() * self.rate();
        let is_small = self.rate() < 1.0 && objects < FEW_OBJECTS;
        is_small.then(|| format!("the sample has {objects:.0} objects, which is little to go by"))
    }

    fn curve(&self) -> MissRatioCurve {
        match self {
            Self::Exact(exact) => exact.1.curve(),
            Self::Shards(shards) => shards.curve(),
        }
    }

    const fn name(&self) -> &'static str {
        match self {
            Self::Exact(_) => "exact",
            Self::Shards(_) => "shards",
        }
    }

    fn rate(&self) -> f64 {
        match self {
            Self::Exact(_) => 1.0,
            Self::Shards(shards) => shards.rate(),
        }
    }

    fn objects(&self) -> f64 {
        match self {
            Self::Exact(exact) => exact.0.len() as f64,
            Self::Shards(shards) => shards.distinct().round(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Exact(exact) => exact.0.bytes(),
            Self::Shards(shards) => shards.bytes(),
        }
    }
}

impl MrcReport {
    fn text(&self, curve: &MissRatioCurve) -> String {
        let million_per_s = self.references as f64 / 1e6 / self.cpu_seconds.max(1e-9);
        let about = if self.method == "exact" { "" } else { "about " };
        let lines = [
            ("trace", format!("{} ({})", self.trace.display(), self.format)),
            ("ids in column", self.column_words.clone().unwrap_or_default()),
            ("references", self.references.to_string()),
            ("objects", format!("{about}{:.0}", self.objects)),
            ("method", self.method_words()),
            (
                "first references",
                format!("{:.2} % of all: they miss at every size", self.floor * 100.0),
            ),
            (
                "time",
                format!(
                    "{:.2} s, {:.2} s of CPU ({million_per_s:.1} M references per CPU-second)",
                    self.seconds, self.cpu_seconds
                ),
            ),
        ];
        let lines = lines.iter().filter(|(_, value)| !value.is_empty());
        let mut text: String =
            lines.map(|(label, value)| format!("{label:<24}{value}\n")).collect();
        if let Some(warning) = &self.warning {
            text += &format!("{:<24}{warning}\n", "warning");
        }
        let row = |ratio: f64| {
            let size = curve.least_size(ratio);
            let size =
                size.map_or_else(|| "none is enough".into(), |size| format!("{:.0}", size.ceil()));
            vec![format!("{ratio:.2}"), size]
        };
        let rows: Vec<_> = RATIOS.into_iter().map(row).collect();
        text + "\n" + &table(&COLUMNS, &rows) + "\n" + &self.chart(curve).terminal()
    }

    fn method_words(&self) -> String {
        let memory = Bytes(self.memory_bytes as u64);
        match self.method {
            "exact" => format!("exact, in {memory}"),
            _ => format!("SHARDS, {:.3} % of the objects, in {memory}", self.sampling_rate * 100.0),
        }
    }

    fn chart(&self, curve: &MissRatioCurve) -> CurveChart {
        let name = self.trace.file_name().unwrap_or_default().to_string_lossy();
        let points = pairs(&curve.resampled(PLOT_POINTS));
        let working_set = self.working_set_objects;
        let mark = "at most 5 % miss from".to_owned();
        CurveChart {
            title: format!("miss ratio of {name}"),
            x_axis: "objects in memory",
            x_text: |objects| format!("{objects:.0}"),
            x_scale: PlotScale::Linear,
            curves: vec![Curve { name: self.method.to_owned(), points }],
            marks: working_set.map(|size| (size, mark)).into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_objects_end_with_the_way_out() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.bin");
        let ids: Vec<u8> = (0..200_000_u64).flat_map(u64::to_le_bytes).collect();
        fs::write(&path, ids).unwrap();
        let mut trace = Trace::open(&path, None, None).unwrap();
        let mut method = Method::Exact(Box::default());
        let error = read(&mut trace, &mut method, Bytes::mib(1)).unwrap_err().to_string();
        assert!(error.contains("take more than 1 MiB"), "{error}");
        assert!(error.contains("--shards-size 100000"), "{error}");
        assert!(method.objects() < 100_000.0, "it went on to {}", method.objects());
    }
}
