//! FNV-1a, 64 bits: the result of a workload as one number, to compare runs.

/// A running checksum over bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Checksum(u64);

impl Checksum {
    pub(crate) fn new() -> Self {
        Self(0xCBF2_9CE4_8422_2325)
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
        }
    }

    pub(crate) fn value(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_published_fnv_1a() {
        let mut sum = Checksum::new();
        sum.add(b"foobar");
        assert_eq!(sum.value(), 0x8594_4171_F739_67E8);
    }
}
