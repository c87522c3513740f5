//! Random numbers from a seed, so that an experiment can be repeated (SplitMix64, Steele 2014).

use std::time::Duration;

#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A time between these numbers of milliseconds.
    pub const fn millis(&mut self, (least, most): (u64, u64)) -> Duration {
        Duration::from_millis(self.between(least, most))
    }

    /// A number from `least` to `most`, both included; the bias of the remainder does not matter
    /// here.
    pub const fn between(&mut self, least: u64, most: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        least + (z ^ (z >> 31)) % (most - least + 1)
    }
}
