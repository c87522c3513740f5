//! Content that is known to be common to all guests or unique to one, so that the saving of a
//! host that keeps identical pages once is known in advance.

use crate::args::ranged;
use crate::error::WorkError;
use crate::memory::{WorkMemory, fill_random};
use crate::rng::{Rng, mix};
use crate::run::RunState;

/// Seed of the common content.
const COMMON_SEED: u64 = 0x0c09_1e50;

/// Content of every guest.
pub(crate) fn common() -> Rng {
    Rng::new(COMMON_SEED)
}

/// One of many different parts of the common content.
pub(crate) fn common_part(number: usize) -> Rng {
    Rng::new(COMMON_SEED ^ mix(number as u64))
}

/// Content of only the guest with this seed; other workloads of the same seed have other words.
pub(crate) fn own(seed: u64) -> Rng {
    Rng::new(!seed ^ COMMON_SEED)
}

/// Memory full of common content, as a tenant's VMs have a system and data in common; untouched
/// from now on.
pub(crate) fn held(mb: usize, shared: &RunState) -> Result<WorkMemory, WorkError> {
    WorkMemory::filled(mb, &mut common(), shared)
}

/// `--parts`.
pub(crate) fn parts(text: &str) -> Result<usize, String> {
    ranged(text, 1, 16)
}

/// Fills with random bytes that repeat `parts` times, so that they compress by that factor.
pub(crate) fn fill_in_parts(bytes: &mut [u8], parts: usize, rng: &mut Rng) {
    let part = bytes.len() / parts;
    fill_random(&mut bytes[..part], rng);
    for at in part..bytes.len() {
        bytes[at] = bytes[at - part];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_in_parts_says_the_same_again_and_again() {
        let mut bytes = [0; 96];
        fill_in_parts(&mut bytes, 3, &mut common());
        assert_eq!(bytes[..32], bytes[32..64]);
        assert_eq!(bytes[..32], bytes[64..]);
        assert_ne!(bytes[..8], bytes[8..16]);
    }

    #[test]
    fn what_is_held_is_the_same_in_every_guest_and_no_page_of_it_comes_twice() {
        let mut guests = [(); 2].map(|()| held(2, &RunState::new()).unwrap());
        let [one, other] = &mut guests;
        let pages: Vec<Vec<u8>> = (0..one.pages()).map(|page| one.page(page).to_vec()).collect();
        assert!(pages.iter().enumerate().all(|(number, page)| other.page(number) == page));
        let different: std::collections::HashSet<_> = pages.iter().collect();
        assert_eq!(different.len(), pages.len());
    }
}
