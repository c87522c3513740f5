//! Random numbers that are the same on every run: SplitMix64.
//!
//! Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
//! It needs eight bytes of state and a few instructions per number (that counts under emulation).
//! The state is a counter, so any member of a stream can be computed without its predecessors,
//! which `verify` needs.

/// The golden-ratio step between two states.
pub(crate) const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The output function: mixes all bits of `state` (a bijection).
pub(crate) fn mix(state: u64) -> u64 {
    let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A stream of numbers fixed by its seed.
#[derive(Debug, Clone)]
pub(crate) struct Rng {
    state: u64,
}

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self { state: mix(seed) }
    }

    pub(crate) fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        mix(self.state)
    }

    /// Uniform in `0..bound` (`bound` > 0), by multiply and shift; the bias is below 2^-32 for our
    /// bounds.
    #[expect(clippy::cast_possible_truncation, reason = "the high half is below `bound`, a usize")]
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next_u64()) * bound as u128) >> 64) as usize
    }

    /// Uniform in `0.0..1.0`.
    fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform between the two.
    pub(crate) fn between(&mut self, (low, high): (f64, f64)) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Exponential with mean 1: the time between two arrivals of a Poisson process.
    pub(crate) fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_the_published_splitmix64() {
        // First outputs for state 1234567, from the reference implementation by S. Vigna.
        let mut rng = Rng { state: 1_234_567 };
        assert_eq!(rng.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(rng.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn below_reaches_all_values_and_no_other() {
        let mut rng = Rng::new(7);
        let mut seen = [0; 10];
        for _ in 0..10_000 {
            seen[rng.below(10)] += 1;
        }
        assert!(seen.iter().all(|&n| (850..1150).contains(&n)), "{seen:?}");
    }

    #[test]
    fn exponential_has_mean_one() {
        let mut rng = Rng::new(7);
        let mean = (0..100_000).map(|_| rng.exponential()).sum::<f64>() / 1e5;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
    }
}
