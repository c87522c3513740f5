//! `matrix`: multiplies square matrices block by block; dense numerics as in SPEC's and LINPACK's
//! kernels.
//!
//! Three matrices of doubles fill `--mb`. Blocks of 64 x 64 numbers are stored together (32 KiB),
//! so the inner work runs in few pages. The walk over blocks decides when each page is needed: a
//! row of A is used over and over, B as a whole once per row, C once. The result is checked by a
//! random vector (Freivalds): C x = A (B x).

use clap::Args;

use crate::args::megabytes;
use crate::error::WorkError;
use crate::memory::{MB, WorkMemory};
use crate::rng::Rng;
use crate::run::Worker;

/// Numbers per side of a block.
const SIDE: usize = 64;
const BLOCK: usize = SIDE * SIDE;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the three matrices together
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    let memory = WorkMemory::filled(options.mb, &mut rng, &worker.shared)?;
    let mut matrices = Matrices::new(memory, &mut rng);
    while matrices.multiply(worker) {
        matrices.check(&mut rng)?;
    }
    Ok(())
}

/// A, B and C, one behind the other, each of `blocks` x `blocks` blocks.
struct Matrices {
    memory: WorkMemory,
    blocks: usize,
}

impl Matrices {
    /// As large as fits; A and B hold small whole numbers, so that every sum is exact.
    fn new(memory: WorkMemory, rng: &mut Rng) -> Self {
        let fits = memory.len_mb() * MB / 8 / (3 * BLOCK);
        let mut matrices = Self { memory, blocks: fits.isqrt().max(1) };
        for index in 0..2 * matrices.blocks * matrices.blocks * BLOCK {
            matrices.set(index, rng.below(16) as f64);
        }
        matrices
    }

    fn get(&self, index: usize) -> f64 {
        f64::from_bits(self.memory.get(index))
    }

    fn set(&mut self, index: usize, value: f64) {
        self.memory.set(index, value.to_bits());
    }

    /// The index of the first number of a block of matrix 0, 1 or 2.
    fn block(&self, matrix: usize, row: usize, column: usize) -> usize {
        (matrix * self.blocks * self.blocks + row * self.blocks + column) * BLOCK
    }

    /// C = A B; false if it was stopped.
    fn multiply(&mut self, worker: &mut Worker) -> bool {
        for row in 0..self.blocks {
            for column in 0..self.blocks {
                let mut sum = vec![0.0; BLOCK];
                for inner in 0..self.blocks {
                    if !worker.proceed(1) {
                        return false;
                    }
                    self.add_product(
                        &mut sum,
                        self.block(0, row, inner),
                        self.block(1, inner, column),
                    );
                    worker.done(1);
                }
                let at = self.block(2, row, column);
                sum.iter().enumerate().for_each(|(i, &value)| self.set(at + i, value));
            }
        }
        true
    }

    fn add_product(&self, sum: &mut [f64], a: usize, b: usize) {
        for i in 0..SIDE {
            let into = &mut sum[i * SIDE..(i + 1) * SIDE];
            for k in 0..SIDE {
                let factor = self.get(a + i * SIDE + k);
                let row = b + k * SIDE;
                into.iter_mut().enumerate().for_each(|(j, s)| *s += factor * self.get(row + j));
            }
        }
    }

    fn check(&self, rng: &mut Rng) -> Result<(), WorkError> {
        let x: Vec<f64> = (0..self.blocks * SIDE).map(|_| rng.below(4) as f64).collect();
        let expected = self.times(0, &self.times(1, &x));
        let wrong = self.times(2, &x).into_iter().zip(expected).find(|(got, want)| got != want);
        wrong.map_or(Ok(()), |(got, want)| {
            Err(WorkError::WrongResult { expected: want.to_bits(), got: got.to_bits() })
        })
    }

    /// The product of a matrix and a vector.
    fn times(&self, matrix: usize, x: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; x.len()];
        for row in 0..self.blocks {
            for column in 0..self.blocks {
                let at = self.block(matrix, row, column);
                for i in 0..BLOCK {
                    y[row * SIDE + i / SIDE] += self.get(at + i) * x[column * SIDE + i % SIDE];
                }
            }
        }
        y
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrices(mb: usize) -> (Matrices, Worker, Rng) {
        let (worker, mut rng) = (Worker::for_test(), Rng::new(1));
        let memory = WorkMemory::filled(mb, &mut rng, &worker.shared).unwrap();
        (Matrices::new(memory, &mut rng), worker, rng)
    }

    #[test]
    fn products_are_right_and_a_wrong_number_is_found() {
        let (mut matrices, mut worker, mut rng) = matrices(1);
        assert_eq!(matrices.blocks, 3);
        assert!(matrices.multiply(&mut worker));
        assert_eq!(worker.shared.ops(), 27);
        matrices.check(&mut rng).unwrap();
        let at = matrices.block(2, 1, 1);
        matrices.set(at, matrices.get(at) + 1.0);
        // The vector may hold a 0 at that place; ten vectors do not.
        assert!((0..10).any(|_| matrices.check(&mut rng).is_err()));
    }
}
