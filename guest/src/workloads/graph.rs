//! `graph`: PageRank and breadth-first searches on a random graph of unequal degrees; graph
//! analytics as in CloudSuite.
//!
//! The edges are read in order, sweep after sweep, while their targets lie anywhere, mostly at
//! popular vertices. That is a scan and a skewed random pattern at once; then a search starts
//! cold. After each PageRank iteration the ranks still sum to one; a deviation fails the run.

use std::collections::VecDeque;

use clap::Args;

use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::WorkMemory;
use crate::rng::Rng;
use crate::run::Worker;
use crate::zipf::Zipf;

/// Edges out of each vertex.
const DEGREE: usize = 16;
/// A vertex has its rank, its next rank, and its distance in the search.
const STATE_WORDS: usize = 3;
/// Skew of the in-degrees.
const SKEW: f64 = 0.7;
const DAMPING: f64 = 0.85;
const ITERATIONS_PER_SEARCH: usize = 3;
const VERTICES_PER_STEP: usize = 64;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the graph
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Words of each vertex in addition to its edges, which are not read
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = properties)]
    properties: usize,
}

fn properties(text: &str) -> Result<usize, String> {
    ranged(text, 0, 4096)
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    let mut memory = WorkMemory::default();
    for _ in 0..options.mb {
        memory.grow()?;
    }
    worker.shared.mb.set(options.mb);
    let mut graph = Graph::new(memory, options.properties);
    graph.connect(&mut rng, worker);
    loop {
        for _ in 0..ITERATIONS_PER_SEARCH {
            if !graph.rank_once(worker)? {
                return Ok(());
            }
        }
        let start = rng.below(graph.vertices);
        if !graph.search(start, worker) {
            return Ok(());
        }
    }
}

/// First all edges, each vertex's followed by its properties, then all states.
struct Graph {
    memory: WorkMemory,
    vertices: usize,
    /// Words from one vertex's edges to the next one's.
    stride: usize,
}

#[derive(Clone, Copy)]
enum Field {
    Rank,
    Next,
    Distance,
}

impl Graph {
    /// As many vertices as fit.
    fn new(memory: WorkMemory, properties: usize) -> Self {
        let stride = DEGREE + properties;
        Self { vertices: memory.words() / (stride + STATE_WORDS), stride, memory }
    }

    /// The vertex of popularity `r` is `r` times an odd number, modulo their count, so that
    /// popular vertices lie anywhere.
    fn connect(&mut self, rng: &mut Rng, worker: &Worker) {
        let popularity = Zipf::new(self.vertices, SKEW);
        let step = 0x9E37_79B1;
        for edge in 0..self.vertices * DEGREE {
            if edge % (1 << 16) == 0 && worker.shared.stopping() {
                return;
            }
            let target = popularity.choose(rng).wrapping_mul(step) % self.vertices;
            self.memory.set(self.edge(edge / DEGREE, edge % DEGREE), target as u64);
        }
        let rank = 1.0 / self.vertices as f64;
        (0..self.vertices).for_each(|vertex| self.set_number(vertex, Field::Rank, rank));
    }

    fn targets(&self, vertex: usize) -> impl Iterator<Item = usize> {
        let target = move |edge| self.memory.get(self.edge(vertex, edge));
        (0..DEGREE).map(move |edge| usize::try_from(target(edge)).unwrap_or(0))
    }

    fn edge(&self, vertex: usize, edge: usize) -> usize {
        vertex * self.stride + edge
    }

    fn at(&self, vertex: usize, field: Field) -> usize {
        self.vertices * self.stride + vertex * STATE_WORDS + field as usize
    }

    fn number(&self, vertex: usize, field: Field) -> f64 {
        f64::from_bits(self.memory.get(self.at(vertex, field)))
    }

    fn set_number(&mut self, vertex: usize, field: Field, value: f64) {
        self.memory.set(self.at(vertex, field), value.to_bits());
    }

    /// One iteration of PageRank; false if it was stopped.
    fn rank_once(&mut self, worker: &mut Worker) -> Result<bool, WorkError> {
        let jump = (1.0 - DAMPING) / self.vertices as f64;
        (0..self.vertices).for_each(|vertex| self.set_number(vertex, Field::Next, jump));
        for first in (0..self.vertices).step_by(VERTICES_PER_STEP) {
            if !worker.proceed(VERTICES_PER_STEP * DEGREE) {
                return Ok(false);
            }
            for vertex in first..(first + VERTICES_PER_STEP).min(self.vertices) {
                let share = self.number(vertex, Field::Rank) * DAMPING / DEGREE as f64;
                let targets: [usize; DEGREE] = self.edges(vertex);
                for target in targets {
                    let next = self.number(target, Field::Next) + share;
                    self.set_number(target, Field::Next, next);
                }
            }
            worker.done(VERTICES_PER_STEP * DEGREE);
        }
        let mut sum = 0.0;
        for vertex in 0..self.vertices {
            let next = self.number(vertex, Field::Next);
            self.set_number(vertex, Field::Rank, next);
            sum += next;
        }
        let right = (sum - 1.0).abs() < 1e-6;
        let wrong = || WorkError::WrongResult { expected: 1_f64.to_bits(), got: sum.to_bits() };
        right.then_some(true).ok_or_else(wrong)
    }

    fn edges(&self, vertex: usize) -> [usize; DEGREE] {
        let mut targets = self.targets(vertex);
        std::array::from_fn(|_| targets.next().unwrap_or(0))
    }

    /// Distances of all vertices from `start`; false if it was stopped.
    fn search(&mut self, start: usize, worker: &mut Worker) -> bool {
        for vertex in 0..self.vertices {
            self.memory.set(self.at(vertex, Field::Distance), u64::MAX);
        }
        self.memory.set(self.at(start, Field::Distance), 0);
        let mut queue = VecDeque::from([start]);
        while let Some(vertex) = queue.pop_front() {
            if !worker.proceed(DEGREE) {
                return false;
            }
            let next = self.memory.get(self.at(vertex, Field::Distance)) + 1;
            for target in self.edges(vertex) {
                let at = self.at(target, Field::Distance);
                if self.memory.get(at) == u64::MAX {
                    self.memory.set(at, next);
                    queue.push_back(target);
                }
            }
            worker.done(DEGREE);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(properties: usize) -> (Graph, Worker) {
        let (worker, mut memory) = (Worker::for_test(), WorkMemory::default());
        memory.grow().unwrap();
        let mut graph = Graph::new(memory, properties);
        graph.connect(&mut Rng::new(1), &worker);
        (graph, worker)
    }

    #[test]
    fn ranks_sum_to_one_and_are_unequal() {
        let (mut graph, mut worker) = graph(0);
        for _ in 0..5 {
            assert!(graph.rank_once(&mut worker).unwrap());
        }
        let ranks: Vec<f64> = (0..graph.vertices).map(|v| graph.number(v, Field::Rank)).collect();
        let largest = ranks.iter().copied().fold(0.0, f64::max);
        assert!(largest * graph.vertices as f64 > 20.0, "{largest}");
    }

    #[test]
    fn a_search_finds_the_shortest_ways() {
        for properties in [0, 112] {
            let (mut graph, mut worker) = graph(properties);
            assert!(graph.rank_once(&mut worker).unwrap() && graph.search(3, &mut worker));
            let distance = |v: usize| graph.memory.get(graph.at(v, Field::Distance));
            assert_eq!(distance(3), 0);
            for vertex in (0..graph.vertices).filter(|&v| distance(v) != u64::MAX) {
                let is_near = |target| distance(target) <= distance(vertex) + 1;
                assert!(graph.targets(vertex).all(is_near));
            }
        }
    }

    #[test]
    fn a_lost_rank_fails_the_run() {
        let (mut graph, mut worker) = graph(0);
        graph.set_number(0, Field::Rank, 5.0);
        assert!(graph.rank_once(&mut worker).is_err());
    }
}
