//! The workloads: one subcommand, one file each.
//!
//! Each file holds the workload's options and `fn run(&Options, &mut Worker) -> Result<(),
//! WorkError>`, which works until it is done or [`Worker::proceed`] says stop.

mod bursts;
mod copies;
mod data;
mod fileio;
mod gcc;
mod graph;
mod idle;
mod kinds;
mod kv;
mod matrix;
mod memhog;
mod nginx;
mod phases;
mod pi;
mod postgres;
mod probe;
mod random_array;
mod redis;
mod scan;
mod shell;
mod sort;
mod steps;
mod suite;
mod verify;
mod web;
mod wordcount;
mod zipf;

use clap::Subcommand;

pub(crate) use self::probe::Timing;
use crate::error::WorkError;
use crate::run::Worker;

/// The work to run.
#[derive(Debug, Subcommand)]
pub(crate) enum Workload {
    /// Random read-modify-write over an array whose size may change over time; ops = accesses
    RandomArray(random_array::Options),
    /// Touch memory at a given pace, hold it, free it; ops = MB touched
    Memhog(memhog::Options),
    /// Programs that take memory at very different paces and end; ops = programs
    Bursts(bursts::Options),
    /// Hold memory of which a part is the same in other guests, and touch it; ops = words
    Copies(copies::Options),
    /// Hold pages that other guests hold, and time one write to each; ops = writes
    Probe(probe::Options),
    /// Sort generated text, in memory or on a disk; ops = lines sorted into runs + lines merged
    Sort(sort::Options),
    /// Count the words of generated text, in memory or on a disk; ops = words
    Wordcount(wordcount::Options),
    /// Compute digits of pi (CPU only); ops = digits
    Pi,
    /// Random 16 KiB reads through the page cache; ops = reads
    Fileio(fileio::Options),
    /// Answer requests over a working set, open loop with --rate; ops = requests
    Web(web::Options),
    /// One kind of work after the other: memory, system calls, a disk; ops = pages or calls
    Kinds(kinds::Options),
    /// A nearly idle service: wakes up, touches 1 MB; ops = wake-ups
    Idle,
    /// Fill memory with a checkable pattern, rewrite and verify it; ops = MB verified
    Verify(verify::Options),
    /// Sweep over memory again and again; ops = pages
    Scan(scan::Options),
    /// Read and change records of Zipf popularity, hot ones side by side; ops = records
    Zipf(zipf::Options),
    /// A key-value store in memory, popular keys scattered; ops = requests
    Kv(kv::Options),
    /// Multiply matrices block by block; ops = products of two blocks
    Matrix(matrix::Options),
    /// PageRank and breadth-first searches on a random graph; ops = edges
    Graph(graph::Options),
    /// k-means over a table; ops = rows assigned
    Data(data::Options),
    /// Work in one part of the memory after the other; ops = accesses
    Phases(phases::Options),
    /// One program of a suite after the other, each a fixed amount of work; ops = accesses
    Suite(suite::Options),
    /// Take, sort and free memory step by step, as the host says; ops = MB
    Steps(steps::Options),
    /// Ask a real web server for documents; ops = requests
    Nginx(nginx::Options),
    /// Ask a real database for values, and change them; ops = requests
    Redis(redis::Options),
    /// Ask a real relational database for rows, and change them; ops = statements
    Postgres(postgres::Options),
    /// Compile files with a real compiler; ops = files
    Gcc(gcc::Options),
    /// Run a few small programs once a second; ops = runs
    Shell(shell::Options),
}

impl Workload {
    /// The name on the command line and in the report.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::RandomArray(_) => "random-array",
            Self::Memhog(_) => "memhog",
            Self::Bursts(_) => "bursts",
            Self::Copies(_) => "copies",
            Self::Probe(_) => "probe",
            Self::Sort(_) => "sort",
            Self::Wordcount(_) => "wordcount",
            Self::Pi => "pi",
            Self::Fileio(_) => "fileio",
            Self::Web(_) => "web",
            Self::Kinds(_) => "kinds",
            Self::Idle => "idle",
            Self::Verify(_) => "verify",
            Self::Scan(_) => "scan",
            Self::Zipf(_) => "zipf",
            Self::Kv(_) => "kv",
            Self::Matrix(_) => "matrix",
            Self::Graph(_) => "graph",
            Self::Suite(_) => "suite",
            Self::Data(_) => "data",
            Self::Phases(_) => "phases",
            Self::Steps(_) => "steps",
            Self::Nginx(_) => "nginx",
            Self::Redis(_) => "redis",
            Self::Postgres(_) => "postgres",
            Self::Gcc(_) => "gcc",
            Self::Shell(_) => "shell",
        }
    }

    pub(crate) fn run(&self, worker: &mut Worker) -> Result<(), WorkError> {
        match self {
            Self::RandomArray(options) => random_array::run(options, worker),
            Self::Memhog(options) => memhog::run(options, worker),
            Self::Bursts(options) => bursts::run(options, worker),
            Self::Copies(options) => copies::run(options, worker),
            Self::Probe(options) => probe::run(options, worker),
            Self::Sort(options) => sort::run(options, worker),
            Self::Wordcount(options) => wordcount::run(options, worker),
            Self::Pi => pi::run(worker),
            Self::Fileio(options) => fileio::run(options, worker),
            Self::Web(options) => web::run(options, worker),
            Self::Kinds(options) => kinds::run(options, worker),
            Self::Idle => idle::run(worker),
            Self::Verify(options) => verify::run(options, worker),
            Self::Scan(options) => scan::run(options, worker),
            Self::Zipf(options) => zipf::run(options, worker),
            Self::Kv(options) => kv::run(options, worker),
            Self::Matrix(options) => matrix::run(options, worker),
            Self::Graph(options) => graph::run(options, worker),
            Self::Suite(options) => suite::run(options, worker),
            Self::Data(options) => data::run(options, worker),
            Self::Phases(options) => phases::run(options, worker),
            Self::Steps(options) => steps::run(options, worker),
            Self::Nginx(options) => nginx::run(options, worker),
            Self::Redis(options) => redis::run(options, worker),
            Self::Postgres(options) => postgres::run(options, worker),
            Self::Gcc(options) => gcc::run(options, worker),
            Self::Shell(options) => shell::run(options, worker),
        }
    }
}
