//! The optimal balance as Wang 2016 finds it (§4, Algorithm 1): the reference for
//! [`policy::optimum`].

use policy::optimum::Choice;

/// The least misses of sizes that together take at most `units`; `None` if not even the smallest
/// sizes fit.
///
/// `Miss(i, j) = min over k of Miss(i − 1, j − k) + misses_i(k)`, with j and k counted from the
/// smallest sizes on. The time is O(N · units · sizes), however simple the curves are.
#[must_use]
pub fn least_misses(choices: &[Choice], units: usize) -> Option<f64> {
    let least: usize = choices.iter().map(|choice| choice.least as usize).sum();
    let units = units.checked_sub(least)?;
    let mut before = vec![0.0];
    for Choice { misses, .. } in choices {
        let high = units.min(before.len() - 1 + misses.len() - 1);
        let mut miss = vec![f64::INFINITY; high + 1];
        for (j, least) in miss.iter_mut().enumerate() {
            // The VMs before this one cannot take more units than their curves have.
            for (k, misses) in misses.iter().enumerate().take(j + 1) {
                let sum = before.get(j - k).map_or(f64::INFINITY, |before| before + misses);
                *least = least.min(sum);
            }
        }
        before = miss;
    }
    before.into_iter().reduce(f64::min)
}
