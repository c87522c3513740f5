//! Random numbers from a seed (SplitMix64, Steele 2014), and the mixing function for page
//! content.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A permutation of the 64-bit numbers without visible structure.
pub(crate) const fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_mul(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A sequence of random numbers.
#[derive(Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The sequence of this seed.
    pub(crate) const fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// The next number.
    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    /// A number below `limit`, which is not zero; the bias of the remainder does not matter here.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        usize::try_from(self.next() % limit).unwrap_or(0)
    }

    /// True in `percent` of a hundred cases.
    pub(crate) fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
}
