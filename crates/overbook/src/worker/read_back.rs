//! Brings back what is paged out of VMs, when no worker does it any more.

use std::time::{Duration, Instant};

use protocol::State;
use sys::memory_of::Counters;
use sys::process::Identity;

use super::link::{Link, LinkError, News};
use super::outside::recall_all;

/// How long it is waited for each VM: its shim reads as long as the host has memory for that.
const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(5);

/// Has what is paged out of the guests of these QEMU processes read back: by their shims, or from
/// outside where there is none. What cannot be read stays in the host's swap, and comes back at a
/// touch.
pub fn read_back(processes: &[Identity]) {
    let is_out = |process: &&Identity| {
        Counters::of(process.pid).is_ok_and(|counters| !counters.swapped.is_zero())
    };
    std::thread::scope(|scope| {
        for &process in processes.iter().filter(is_out) {
            // A shim that does not answer, or has another worker, is no obstacle to the others.
            scope.spawn(move || {
                if matches!(of_shim(process), Err(LinkError::NoShim { .. })) {
                    let _ = recall_all(process, PATIENCE);
                }
            });
        }
    });
}

fn of_shim(process: Identity) -> Result<(), LinkError> {
    let mut link = Link::connect(process)?;
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        match link.poll()? {
            Some(News::Welcome(State::Unsupported { .. }) | News::Released) => return Ok(()),
            Some(News::Welcome(_)) => link.release()?,
            _ => std::thread::sleep(POLL),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::fake_shim::FakeShim;
    use super::*;

    #[test]
    fn a_shim_is_asked_to_read_and_is_waited_for() {
        let mut shim = FakeShim::new(512);
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| of_shim(Identity::own().unwrap()));
            while !asked.is_finished() {
                shim.serve();
            }
            assert!(asked.join().is_ok_and(|asked| asked.is_ok()));
        });
        assert_eq!(shim.releases, 1);
    }

    #[test]
    fn a_process_without_a_shim_is_passed_over() {
        let gone = Identity { pid: u32::MAX, start_ticks: 0 };
        assert!(of_shim(gone).is_err());
        read_back(&[gone]);
    }
}
