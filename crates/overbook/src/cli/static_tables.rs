//! `overbook static`: tables of the pages that guests are expected to share.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use model::{Bytes, VmName};
use pages::offline::{
    Amount, PAGE_LEN, Sampling, Savings, Statistics, Table, TableRef, mix, overlap,
};
use policy::Case;
use serde::Serialize;

use super::{
    context::Context,
    error::CliError,
    mrc::{self, cpu_seconds},
    output::Output,
    table::{Column, table},
};
use crate::matrix_chart::MatrixChart;
use tables::offline::{self, BuildRequest, OfflineError, Work};

#[derive(Debug, Subcommand)]
pub(super) enum StaticCommand {
    /// Make a table of what images, packages, directories and executables hold
    Build(Build),
    /// Make a table of what a running VM has in memory
    Capture(Capture),
    /// Show what is in tables, and what they share
    Show(Show),
    /// Show what one table has and another has not
    Diff(Diff),
    /// Check that tables are whole
    Verify {
        /// The tables
        #[arg(required = true)]
        tables: Vec<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(super) struct Build {
    /// Executables, directories, Debian packages, disk images (ext4, squashfs; raw, qcow2),
    /// kernels
    #[arg(required = true, value_name = "SOURCE")]
    sources: Vec<PathBuf>,
    /// Where to write the table; guests of this source are known by the file's name
    #[arg(short, long, value_name = "FILE.spt")]
    output: PathBuf,
    /// Take all pages of all files, not only the code of executables
    #[arg(long)]
    all_pages: bool,
    /// Offsets of the four words of a page that tell its class
    #[arg(long, value_name = "OFFSETS", default_value = "0,1024,2048,3072", value_parser = sampling)]
    sample: Sampling,
    /// Open the backing files of qcow2 images, if they are in this directory
    #[arg(long, value_name = "DIR")]
    backing_dir: Option<PathBuf>,
    #[command(flatten)]
    format: super::Format,
}

#[derive(Debug, Args)]
pub(super) struct Capture {
    /// A VM that later VMs will resemble
    #[arg(add = super::names::vms())]
    vm: String,
    /// Where to write the table; guests of this source are known by the file's name
    #[arg(short, long, value_name = "FILE.spt")]
    output: PathBuf,
    #[command(flatten)]
    format: super::Format,
}

#[derive(Debug, Args)]
pub(super) struct Show {
    /// The tables
    #[arg(required = true, value_name = "TABLE")]
    tables: Vec<PathBuf>,
    /// Say what the given numbers of guests could save together, for example debian12=3,web=2
    #[arg(long, value_name = "NAME=GUESTS,…", value_delimiter = ',', value_parser = guests)]
    mix: Vec<(String, u32)>,
    /// Draw what they share here, as SVG
    #[arg(long, value_name = "FILE.svg")]
    picture: Option<PathBuf>,
    #[command(flatten)]
    format: super::Format,
}

#[derive(Debug, Args)]
pub(super) struct Diff {
    /// One table
    first: PathBuf,
    /// The other one
    second: PathBuf,
    #[command(flatten)]
    format: super::Format,
}

pub(super) fn run(context: &Context, question: &StaticCommand) -> Result<Output, CliError> {
    match question {
        StaticCommand::Build(arguments) => build(arguments),
        StaticCommand::Capture(arguments) => capture(context, arguments),
        StaticCommand::Show(arguments) => show(arguments),
        StaticCommand::Diff(arguments) => diff(arguments),
        StaticCommand::Verify { tables } => Ok(verify(tables)),
    }
}

/// A table that was built, and the cost.
#[derive(Debug, Serialize)]
struct Built {
    table: Contents,
    files: u64,
    bytes_classified: u64,
    seconds: f64,
    cpu_seconds: f64,
    left_out: u64,
    left_out_for_example: Vec<String>,
}

fn build(arguments: &Build) -> Result<Output, CliError> {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let request = BuildRequest {
        sources: arguments.sources.clone(),
        all_pages: arguments.all_pages,
        sampling: arguments.sample,
        backing_dir: arguments.backing_dir.clone(),
    };
    let bar = progress_bar();
    let built = offline::build(&request, |files, bytes| {
        bar.set_position(files);
        bar.set_message(Bytes(bytes).to_string());
    });
    bar.finish_and_clear();
    let (made, work) = built?;
    let built = Built::of(made, work, &arguments.output, (start, cpu))?;
    if arguments.format.json { Output::json(&built) } else { Ok(Output::text(&built.text())) }
}

fn capture(context: &Context, arguments: &Capture) -> Result<Output, CliError> {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let case: Case = context.client()?.get("/v1/case")?;
    let vm = VmName::from(arguments.vm.as_str());
    let pid = case.view.vms.get(&vm).and_then(|vm| vm.pid);
    let unknown = || OfflineError::Source {
        path: arguments.vm.clone().into(),
        what: "no VM of this name runs here; `overbook status` shows those that do".to_owned(),
    };
    let (made, work) = offline::capture(pid.ok_or_else(unknown)?, Sampling::default())?;
    let built = Built::of(made, work, &arguments.output, (start, cpu))?;
    if arguments.format.json { Output::json(&built) } else { Ok(Output::text(&built.text())) }
}

impl Built {
    /// Writes the table, and reads it back.
    fn of(
        made: Table,
        work: Work,
        output: &Path,
        (start, cpu): (Instant, f64),
    ) -> Result<Self, CliError> {
        let (seconds, cpu_seconds) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        offline::write(&made, output)?;
        drop(made);
        let loaded = Loaded::read(output)?;
        let Work { files, bytes, left_out, told } = work;
        Ok(Self {
            table: loaded.contents()?,
            files,
            bytes_classified: bytes,
            seconds,
            cpu_seconds,
            left_out,
            left_out_for_example: told,
        })
    }

    fn text(&self) -> String {
        let per_core = self.bytes_classified as f64 / 1e9 / self.cpu_seconds.max(1e-9);
        let read = format!("{} files, {}", self.files, Bytes(self.bytes_classified));
        let time = format!(
            "{:.2} s, {:.2} s of CPU ({per_core:.2} GB/s per core)",
            self.seconds, self.cpu_seconds
        );
        let mut lines = vec![("read", read), ("time", time)];
        if self.left_out > 0 {
            lines.push(("left out", self.left_out.to_string()));
        }
        lines.extend(self.left_out_for_example.iter().map(|why| ("", why.clone())));
        let lines = lines.iter().map(|(label, value)| format!("{label:<10}{value}\n"));
        lines.collect::<String>() + "\n" + &contents_table(std::slice::from_ref(&self.table))
    }
}

/// A table's file.
struct Loaded {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Loaded {
    fn read(path: &Path) -> Result<Self, CliError> {
        Ok(Self { path: path.into(), bytes: offline::read(path)? })
    }

    fn table(&self) -> Result<TableRef<'_>, CliError> {
        offline::parse(&self.bytes).map_err(|what| {
            let path = self.path.clone();
            OfflineError::Source { path, what }.into()
        })
    }

    fn contents(&self) -> Result<Contents, CliError> {
        Ok(Contents::of(&self.path, &self.table()?))
    }
}

/// The contents of a table.
#[derive(Debug, Serialize)]
struct Contents {
    name: String,
    path: PathBuf,
    sampled_at: [u16; 4],
    pages: u64,
    distinct_pages: u64,
    code_pages: u64,
    distinct_code_pages: u64,
    zero_pages: u64,
    classes: u64,
    classes_of_one_page: u64,
    largest_class: u64,
    mean_class: f64,
}

impl Contents {
    fn of(path: &Path, table: &TableRef<'_>) -> Self {
        let found = Statistics::of(table);
        let Amount { pages, distinct } = found.all;
        Self {
            name: table.name().to_owned(),
            path: path.into(),
            sampled_at: table.sampling().offsets(),
            pages,
            distinct_pages: distinct,
            code_pages: found.code.pages,
            distinct_code_pages: found.code.distinct,
            zero_pages: found.zeros,
            classes: found.classes,
            classes_of_one_page: found.single_classes,
            largest_class: found.largest_class,
            mean_class: found.mean_class,
        }
    }
}

const CONTENTS: [Column; 9] = [
    ("TABLE", false),
    ("PAGES", true),
    ("DISTINCT", true),
    ("SIZE", true),
    ("CODE", true),
    ("ZEROS", true),
    ("CLASSES", true),
    ("OF ONE PAGE", true),
    ("PER CLASS", true),
];

fn contents_table(all: &[Contents]) -> String {
    let row = |one: &Contents| {
        let numbers = [one.pages, one.distinct_pages].map(|number| number.to_string());
        let more = [one.distinct_code_pages, one.zero_pages, one.classes, one.classes_of_one_page];
        let mut row = vec![one.name.clone()];
        row.extend(numbers);
        row.push(size(one.distinct_pages));
        row.extend(more.map(|number| number.to_string()));
        row.push(format!("{:.1}, {} at most", one.mean_class, one.largest_class));
        row
    };
    table(&CONTENTS, &all.iter().map(row).collect::<Vec<_>>())
}

const MATRIX: &str = "of the row's distinct pages the column has";

/// Output of `overbook static show`.
#[derive(Debug, Serialize)]
struct TableReport {
    tables: Vec<Contents>,
    /// Distinct pages that are in both the row's table and the column's.
    shared: Vec<Vec<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mix: Option<Mixed>,
}

/// Memory that guests could save if each had its whole source in memory.
#[derive(Debug, Serialize)]
struct Mixed {
    guests: Vec<(String, u32)>,
    bytes: u64,
    bytes_saved: u64,
}

fn show(arguments: &Show) -> Result<Output, CliError> {
    let loaded: Vec<Loaded> =
        arguments.tables.iter().map(|path| Loaded::read(path)).collect::<Result<_, _>>()?;
    let tables: Vec<TableRef<'_>> = loaded.iter().map(Loaded::table).collect::<Result<_, _>>()?;
    let said = |error: &dyn std::error::Error| CliError::Said(error.to_string());
    let row = |first| tables.iter().map(|second| Ok(overlap(first, second)?.both)).collect();
    let shared: Result<_, pages::offline::UnlikeSamplings> = tables.iter().map(row).collect();
    let shown = TableReport {
        tables: loaded.iter().zip(&tables).map(|(l, table)| Contents::of(&l.path, table)).collect(),
        shared: shared.map_err(|error| said(&error))?,
        mix: (!arguments.mix.is_empty()).then(|| mixed(&tables, &arguments.mix)).transpose()?,
    };
    if let Some(path) = &arguments.picture {
        mrc::write(path, &shown.chart().svg())?;
    }
    if arguments.format.json { Output::json(&shown) } else { Ok(Output::text(&shown.text())) }
}

fn mixed(tables: &[TableRef<'_>], wanted: &[(String, u32)]) -> Result<Mixed, CliError> {
    let names = || tables.iter().map(TableRef::name).collect::<Vec<_>>().join(", ");
    let pick = |(name, guests): &(String, u32)| {
        let mut fitting = tables.iter().filter(|table| table.name() == name);
        match (fitting.next(), fitting.next()) {
            (Some(table), None) => Ok((*table, *guests)),
            (None, _) => Err(CliError::Said(format!("no table is {name:?}; valid: {}", names()))),
            _ => {
                Err(CliError::Said(format!("several tables are {name:?}; rename one and rebuild")))
            }
        }
    };
    let picked: Vec<_> = wanted.iter().map(pick).collect::<Result<_, _>>()?;
    let Savings { pages, saved } =
        mix(&picked).map_err(|error| CliError::Said(error.to_string()))?;
    let bytes = |pages: u64| pages.saturating_mul(PAGE_LEN as u64);
    Ok(Mixed { guests: wanted.to_vec(), bytes: bytes(pages), bytes_saved: bytes(saved) })
}

impl TableReport {
    fn text(&self) -> String {
        let mut text = contents_table(&self.tables);
        if self.tables.len() > 1 {
            text += &format!("\n{MATRIX}\n");
            text += &self.matrix();
        }
        if let Some(mixed) = &self.mix {
            let guests: Vec<_> =
                mixed.guests.iter().map(|(name, guests)| format!("{guests} of {name}")).collect();
            let share = mixed.bytes_saved as f64 / (mixed.bytes as f64).max(1.0) * 100.0;
            text += &format!(
                "\n{}: {} if all of it is in memory, of which {} ({share:.1} %) could be saved\n",
                guests.join(", "),
                Bytes(mixed.bytes),
                Bytes(mixed.bytes_saved)
            );
        }
        text
    }

    fn matrix(&self) -> String {
        // The columns are numbered, because the rows have the names.
        let width = self.tables.iter().map(|one| one.name.chars().count()).max().unwrap_or(0);
        let mut text = " ".repeat(width + 3);
        (1..=self.tables.len()).for_each(|column| text += &format!("{column:>9}"));
        text += "\n";
        for (index, (one, row)) in self.tables.iter().zip(&self.shared).enumerate() {
            text += &format!("{:<2} {:<width$}", index + 1, one.name);
            for both in row {
                text += &format!("{:>7.1} %", share(*both, one) * 100.0);
            }
            text += "\n";
        }
        text
    }

    fn chart(&self) -> MatrixChart {
        let name = |one: &Contents| (one.name.clone(), size(one.distinct_pages));
        let row = |(one, row): (&Contents, &Vec<u64>)| {
            row.iter().map(|both| share(*both, one)).collect::<Vec<_>>()
        };
        MatrixChart {
            title: format!("{MATRIX}, in %"),
            names: self.tables.iter().map(name).collect(),
            shares: self.tables.iter().zip(&self.shared).map(row).collect(),
        }
    }
}

fn share(both: u64, of: &Contents) -> f64 {
    both as f64 / (of.distinct_pages as f64).max(1.0)
}

#[derive(Debug, Serialize)]
struct Difference {
    first: String,
    second: String,
    only_first: u64,
    both: u64,
    /// Executable pages among those that both have.
    both_code: u64,
    only_second: u64,
}

fn diff(arguments: &Diff) -> Result<Output, CliError> {
    let (first, second) = (Loaded::read(&arguments.first)?, Loaded::read(&arguments.second)?);
    let (first, second) = (first.table()?, second.table()?);
    let found = overlap(&first, &second).map_err(|error| CliError::Said(error.to_string()))?;
    let difference = Difference {
        first: first.name().to_owned(),
        second: second.name().to_owned(),
        only_first: found.only_first,
        both: found.both,
        both_code: found.both_code,
        only_second: found.only_second,
    };
    if arguments.format.json {
        return Output::json(&difference);
    }
    let Difference { first, second, .. } = &difference;
    let row = |label: String, pages: u64| vec![label, pages.to_string(), size(pages)];
    let columns = [("DISTINCT PAGES", false), ("PAGES", true), ("SIZE", true)];
    Ok(Output::text(&table(
        &columns,
        &[
            row(format!("only {first}"), found.only_first),
            row("both".to_owned(), found.both),
            row("both, as code".to_owned(), found.both_code),
            row(format!("only {second}"), found.only_second),
        ],
    )))
}

fn verify(paths: &[PathBuf]) -> Output {
    let mut is_good = true;
    let line = |path: &PathBuf| match Loaded::read(path).and_then(|loaded| loaded.contents()) {
        Ok(found) => {
            let (distinct, pages) = (found.distinct_pages, found.pages);
            format!("{}: good, {distinct} distinct pages of {pages}\n", path.display())
        }
        Err(error) => {
            is_good = false;
            format!("{error}\n")
        }
    };
    let lines: String = paths.iter().map(line).collect();
    Output::text(&lines).with_code(u8::from(!is_good))
}

fn size(pages: u64) -> String {
    Bytes(pages.saturating_mul(PAGE_LEN as u64)).to_string()
}

fn sampling(text: &str) -> Result<Sampling, String> {
    let offsets: Result<Vec<u16>, _> = text.split(',').map(|word| word.trim().parse()).collect();
    let offsets = offsets.ok().and_then(|offsets| <[u16; 4]>::try_from(offsets).ok());
    let offsets = offsets.ok_or("valid: four offsets such as 0,1024,2048,3072")?;
    Sampling::new(offsets).map_err(|error| error.to_string())
}

fn guests(text: &str) -> Result<(String, u32), String> {
    let valid = "valid: a table's name and a number of guests, such as debian12=3";
    let (name, guests) = text.rsplit_once('=').ok_or(valid)?;
    Ok((name.to_owned(), guests.parse().map_err(|_| valid)?))
}

/// A progress bar on standard error, shown only on a terminal.
fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let style = ProgressStyle::with_template("{spinner} {pos} files, {msg}  {elapsed}");
    style.map(|style| bar.clone().with_style(style)).unwrap_or(bar)
}
