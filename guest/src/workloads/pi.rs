//! `pi`: pure CPU work with a result that is easy to check.
//!
//! Rabinowitz and Wagon, "A spigot algorithm for the digits of pi" (American Mathematical
//! Monthly, 1995): pi in a mixed base in which all its digits are 2; multiplying by ten and
//! carrying through the array yields one decimal digit. A 9 is held back until it is known
//! whether a carry runs through it. The first 1,000 digits are computed over and over, so that a
//! digit costs the same at any time. The checksum is the one of a block, and a deviating block
//! fails the run.

use crate::checksum::Checksum;
use crate::error::WorkError;
use crate::run::Worker;

/// Digits per block.
const DIGITS: usize = 1000;
/// More terms than the last digit needs, so that held-back digits come out too.
const TERMS: usize = (DIGITS + 16) * 10 / 3 + 1;

pub(crate) fn run(worker: &mut Worker) -> Result<(), WorkError> {
    loop {
        let mut spigot = Spigot::new();
        let mut checksum = Checksum::new();
        let mut missing = DIGITS;
        while missing > 0 {
            if !worker.proceed(1) {
                return Ok(());
            }
            // A step yields no digit while 9s are held back, and all of them after.
            let digits = spigot.step();
            let take = digits.len().min(missing);
            checksum.add(&digits[..take]);
            missing -= take;
            worker.done(take);
        }
        let expected = *worker.shared.checksum.get_or_init(|| checksum.value());
        if expected != checksum.value() {
            return Err(WorkError::WrongResult { expected, got: checksum.value() });
        }
    }
}

/// Pi as a stream of decimal digits (values 0 to 9).
struct Spigot {
    terms: Vec<u32>,
    /// The digit that a carry may still change, and the number of 9s that follow it.
    held: Option<u8>,
    nines: usize,
    released: Vec<u8>,
}

impl Spigot {
    fn new() -> Self {
        Self { terms: vec![2; TERMS], held: None, nines: 0, released: Vec::new() }
    }

    /// One multiplication by ten; the digits that became final by it.
    fn step(&mut self) -> &[u8] {
        let mut carry = 0;
        for i in (1..self.terms.len()).rev() {
            // The base of place i is i / (2i + 1); indices are below 2^13, so nothing overflows.
            let place = u32::try_from(i).unwrap_or(u32::MAX);
            let x = self.terms[i] * 10 + carry * (place + 1);
            let divisor = 2 * place + 1;
            self.terms[i] = x % divisor;
            carry = x / divisor;
        }
        let x = self.terms[0] * 10 + carry;
        self.terms[0] = x % 10;
        self.release(x / 10);
        &self.released
    }

    fn release(&mut self, digit: u32) {
        self.released.clear();
        if digit == 9 {
            self.nines += 1;
            return;
        }
        let overflow = digit == 10;
        if let Some(held) = self.held {
            self.released.push(held + u8::from(overflow));
        }
        let nine = if overflow { 0 } else { 9 };
        self.released.resize(self.released.len() + self.nines, nine);
        self.nines = 0;
        self.held = Some(if overflow { 0 } else { digit.to_le_bytes()[0] });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digits() -> String {
        let mut spigot = Spigot::new();
        let mut text = String::new();
        while text.len() < DIGITS {
            text.extend(spigot.step().iter().map(|&d| char::from(b'0' + d)));
        }
        text.truncate(DIGITS);
        text
    }

    #[test]
    fn the_digits_are_those_of_pi() {
        let digits = digits();
        assert!(digits.starts_with("31415926535897932384626433832795028841971693993751"));
        // Feynman's point, six nines from decimal 762 on: the held-back digits come out right.
        assert_eq!(&digits[762..768], "999999");
        assert!(digits.ends_with("216420198"), "{}", &digits[980..]);
    }
}
