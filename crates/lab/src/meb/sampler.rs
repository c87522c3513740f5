//! The estimate of a VM's active memory that ESX uses, for contrast.
//!
//! ```text
//! each period of 30 s:  100 pages, chosen at random, are made to trap at their next touch
//!                       share = the part of them that was touched
//!                       slow  = slowly moving average of the shares; fast = quickly moving one
//!                       now   = the fast one, including the running period
//! active = memory × the largest of slow, fast and now
//! ```
//!
//! It takes the largest of the three, so that growth shows soon and memory is taken late. It
//! cannot see beyond the allocation, and does not predict the cost of less memory. Source:
//! Waldspurger, "Memory Resource Management in VMware ESX Server", OSDI 2002, §5.3. The paper
//! gives no gains. Here they are chosen so that the slow average covers some four periods, and
//! the newest period makes up two thirds of the fast one.

use std::time::Duration;

/// Length of a sample's period.
pub const PERIOD: Duration = Duration::from_secs(30);
/// Number of pages in a sample.
pub const PAGES: usize = 100;

const SLOW_GAIN: f64 = 0.25;
const FAST_GAIN: f64 = 0.67;

/// State of the estimator.
#[derive(Debug, Clone, Default)]
pub struct Sampler {
    averages: Option<Averages>,
}

#[derive(Debug, Clone, Copy)]
struct Averages {
    slow: f64,
    fast: f64,
}

impl Sampler {
    /// Ends a period, in which `share` of the sample was touched.
    pub fn end_period(&mut self, share: f64) {
        let moved = |average: f64, gain: f64| average + gain * (share - average);
        self.averages = Some(match self.averages {
            None => Averages { slow: share, fast: share },
            Some(Averages { slow, fast }) => {
                Averages { slow: moved(slow, SLOW_GAIN), fast: moved(fast, FAST_GAIN) }
            }
        });
    }

    /// The share of memory that is active; `so_far` is the share of the running period's sample
    /// that was touched.
    pub fn active(&self, so_far: f64) -> f64 {
        let Some(Averages { slow, fast }) = self.averages else { return so_far };
        let now = fast + FAST_GAIN * (so_far - fast);
        slow.max(fast).max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_shows_within_the_period_and_shrinking_takes_several() {
        let mut sampler = Sampler::default();
        sampler.end_period(0.1);
        assert!((sampler.active(0.0) - 0.1).abs() < 1e-9);
        assert!(sampler.active(0.9) > 0.6);
        sampler.end_period(0.9);
        let mut periods = 0;
        while sampler.active(0.1) > 0.15 {
            sampler.end_period(0.1);
            periods += 1;
        }
        assert!((3..10).contains(&periods), "{periods}");
    }

    #[test]
    fn before_the_first_period_ends_the_running_one_is_all_there_is() {
        assert!((Sampler::default().active(0.3) - 0.3).abs() < 1e-9);
    }
}
