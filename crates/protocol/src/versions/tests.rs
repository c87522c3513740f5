use super::*;

/// The newest versions of the releases that meet each other.
const RELEASES: std::ops::RangeInclusive<u16> = FIRST..=FIRST + 9;

/// The answer of a shim to a greeting: the version agreed on, or the shim's newest.
fn greet(shim: Versions, version: u16) -> Result<u16, u16> {
    if shim.contain(version) { Ok(version) } else { Err(shim.newest) }
}

/// The version that a worker and a shim agree on, and the number of greetings.
fn agree(worker: Versions, shim: Versions) -> (Option<u16>, u32) {
    let mut proposal = worker.newest;
    for greetings in 1.. {
        let theirs = match greet(shim, proposal) {
            Ok(version) => return (Some(version), greetings),
            Err(theirs) => theirs,
        };
        match worker.after_refusal(proposal, theirs) {
            Some(next) => proposal = next,
            None => return (None, greetings),
        }
    }
    unreachable!("each proposal is older than the one before")
}

#[test]
fn any_two_releases_find_the_highest_version_that_both_speak() {
    for worker in RELEASES.map(Versions::of_release) {
        for shim in RELEASES.map(Versions::of_release) {
            let common = (0..u16::MAX).rev().find(|v| worker.contain(*v) && shim.contain(*v));
            let (agreed, greetings) = agree(worker, shim);
            assert_eq!(agreed, common, "{worker:?} and {shim:?}");
            assert!(greetings <= 2);
            let apart = worker.newest.abs_diff(shim.newest);
            assert_eq!(agreed.is_some(), apart <= BEFORE, "{worker:?} and {shim:?}");
        }
    }
}

#[test]
fn a_shim_that_refuses_everything_ends_the_tries() {
    let worker = Versions::of_release(FIRST + BEFORE);
    for theirs in 0..FIRST + 9 {
        let mut proposal = Some(worker.newest);
        for _ in 0..=BEFORE + 1 {
            proposal = proposal.and_then(|refused| worker.after_refusal(refused, theirs));
        }
        assert_eq!(proposal, None, "a shim of version {theirs}");
    }
}

#[test]
fn a_release_speaks_its_own_version_and_version_9() {
    assert!(VERSIONS.contain(VERSION) && VERSIONS.contain(FIRST));
    assert!(!VERSIONS.contain(FIRST - 1) && !VERSIONS.contain(VERSION + 1));
}
