//! `data`: k-means over a generated table (Lloyd 1982), again and again; data analytics as in
//! CloudSuite.
//!
//! Each iteration reads the whole table in order. All of it is the working set, and with less
//! memory an LRU cache never hits. Rows lie around planted centres. When the computed centres no
//! longer move, their rows must be those of the planted ones.

use clap::Args;

use crate::args::megabytes;
use crate::error::WorkError;
use crate::memory::WorkMemory;
use crate::rng::Rng;
use crate::run::Worker;

/// Numbers in a row.
const COLUMNS: usize = 8;
/// Planted, and to be found.
const CENTRES: usize = 4;
/// Planted centres lie within this distance of the origin in each column …
const REACH: usize = 1 << 20;
/// … and rows within this distance of their centre.
const SPREAD: usize = 1 << 12;
const ROWS_PER_STEP: usize = 256;

type Row = [u64; COLUMNS];

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the table
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    let mut table = DataTable::default();
    for _ in 0..options.mb {
        if worker.shared.stopping() {
            return Ok(());
        }
        table.grow(&mut rng)?;
        worker.shared.mb.set(table.memory.len_mb());
    }
    loop {
        // The initial centres are rows of different clusters, so that Lloyd's algorithm finds all
        // clusters.
        let mut centres: [Row; CENTRES] = std::array::from_fn(|cluster| table.row(cluster));
        loop {
            let Some(clusters) = table.assign(&centres, worker) else { return Ok(()) };
            let moved = clusters.map(|cluster| cluster.mean());
            if moved == centres {
                table.check(&clusters)?;
                break;
            }
            centres = moved;
        }
    }
}

/// Rows one after the other; row `i` belongs to planted cluster `i % CENTRES`.
#[derive(Default)]
struct DataTable {
    memory: WorkMemory,
    planted: Vec<Row>,
}

/// The rows that are nearest to one centre.
#[derive(Clone, Copy, Default)]
struct Cluster {
    rows: u64,
    sums: Row,
}

impl Cluster {
    fn mean(&self) -> Row {
        self.sums.map(|sum| sum / self.rows.max(1))
    }
}

impl DataTable {
    fn rows(&self) -> usize {
        self.memory.words() / COLUMNS
    }

    fn row(&self, index: usize) -> Row {
        std::array::from_fn(|column| self.memory.get(index * COLUMNS + column))
    }

    /// Adds one MB of rows.
    fn grow(&mut self, rng: &mut Rng) -> Result<(), WorkError> {
        if self.planted.is_empty() {
            let mut centre = || std::array::from_fn(|_| rng.below(REACH) as u64);
            self.planted = (0..CENTRES).map(|_| centre()).collect();
        }
        let first = self.memory.words();
        self.memory.grow()?;
        for word in first..self.memory.words() {
            let centre = self.planted[word / COLUMNS % CENTRES][word % COLUMNS];
            self.memory.set(word, centre + rng.below(SPREAD) as u64);
        }
        Ok(())
    }

    /// Assigns each row to its nearest centre; `None` if it was stopped.
    fn assign(&self, centres: &[Row; CENTRES], worker: &mut Worker) -> Option<[Cluster; CENTRES]> {
        let mut clusters = [Cluster::default(); CENTRES];
        for first in (0..self.rows()).step_by(ROWS_PER_STEP) {
            if !worker.proceed(ROWS_PER_STEP) {
                return None;
            }
            for index in first..(first + ROWS_PER_STEP).min(self.rows()) {
                let row = self.row(index);
                let distances = centres.each_ref().map(|centre| distance(&row, centre));
                let nearest = (0..CENTRES).min_by_key(|at| distances[*at]).unwrap_or_default();
                let cluster = &mut clusters[nearest];
                cluster.rows += 1;
                cluster.sums.iter_mut().zip(row).for_each(|(sum, number)| *sum += number);
            }
            worker.done(ROWS_PER_STEP);
        }
        Some(clusters)
    }

    /// The clusters must be the planted ones, which are all of one size.
    fn check(&self, clusters: &[Cluster; CENTRES]) -> Result<(), WorkError> {
        let expected = (self.rows() / CENTRES) as u64;
        let wrong = clusters.iter().find(|cluster| cluster.rows != expected);
        wrong.map_or(Ok(()), |cluster| Err(WorkError::WrongResult { expected, got: cluster.rows }))
    }
}

/// The square of the distance.
fn distance(one: &Row, other: &Row) -> u64 {
    let square = |(one, other): (&u64, &u64)| one.abs_diff(*other).pow(2);
    one.iter().zip(other).map(square).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(seed: u64) -> DataTable {
        let mut table = DataTable::default();
        table.grow(&mut Rng::new(seed)).unwrap();
        table
    }

    #[test]
    fn the_planted_clusters_are_found() {
        let (table, mut worker) = (table(1), Worker::for_test());
        let mut centres = std::array::from_fn(|cluster| table.row(cluster));
        for _ in 0..3 {
            centres = table.assign(&centres, &mut worker).unwrap().map(|cluster| cluster.mean());
        }
        let clusters = table.assign(&centres, &mut worker).unwrap();
        table.check(&clusters).unwrap();
        for (centre, planted) in centres.iter().zip(&table.planted) {
            let middle = planted.map(|number| number + SPREAD as u64 / 2);
            assert!(
                distance(centre, &middle) < (SPREAD as u64 / 8).pow(2),
                "{centre:?} {planted:?}"
            );
        }
    }

    #[test]
    fn a_changed_row_fails_the_run() {
        let (mut table, mut worker) = (table(1), Worker::for_test());
        let centres = std::array::from_fn(|cluster| table.row(cluster));
        let other = table.row(1);
        (0..COLUMNS).for_each(|column| table.memory.set(4 * COLUMNS + column, other[column]));
        let clusters = table.assign(&centres, &mut worker).unwrap();
        assert!(table.check(&clusters).is_err());
    }

    #[test]
    fn one_seed_makes_one_table() {
        assert_eq!(table(5).row(77), table(5).row(77));
        assert_ne!(table(5).row(77), table(6).row(77));
    }
}
