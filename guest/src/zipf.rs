//! Zipf's law: the item of rank `k` is chosen with probability proportional to 1 / k^skew, like
//! keys of caches, words of texts and visitors of pages.
//!
//! The distribution is cut once into 4096 parts of equal probability. A choice picks a part and a
//! rank in it: two random numbers and no logarithm (that counts under emulation). Ranks of one
//! part are equally likely, which is exact where a part holds one rank and off by less than a
//! part elsewhere.

use crate::rng::Rng;

const PARTS: u32 = 4096;
/// Ranks that are summed one by one; beyond, an integral replaces the sum.
const SUMMED: usize = 1024;

/// A distribution over ranks from 0.
#[derive(Debug, Clone)]
pub(crate) struct Zipf {
    /// The first rank of each part, and the number of ranks.
    bounds: Vec<usize>,
}

impl Zipf {
    /// Over `items` ranks (at least 1); a skew of 0 is uniform.
    pub(crate) fn new(items: usize, skew: f64) -> Self {
        let items = items.max(1);
        let weight = |rank: usize| ((rank + 1) as f64).powf(-skew);
        let head = items.min(SUMMED);
        let mut sums = vec![0.0];
        sums.extend((0..head).scan(0.0, |sum, rank| {
            *sum += weight(rank);
            Some(*sum)
        }));
        let head_sum = sums[head];
        let edge = head as f64 + 0.5;
        let total = head_sum + integral(items as f64 + 0.5, skew) - integral(edge, skew);
        let rank_at = |sum: f64| {
            if sum <= head_sum {
                sums.partition_point(|&s| s <= sum).saturating_sub(1)
            } else {
                let end = inverse(integral(edge, skew) + sum - head_sum, skew) - 0.5;
                rank(end).clamp(head, items)
            }
        };
        let share = |part: u32| total * f64::from(part) / f64::from(PARTS);
        let mut bounds: Vec<usize> = (0..PARTS).map(|part| rank_at(share(part))).collect();
        bounds.push(items);
        Self { bounds }
    }

    /// Chooses a rank.
    pub(crate) fn choose(&self, rng: &mut Rng) -> usize {
        let part = rng.below(PARTS as usize);
        let (first, end) = (self.bounds[part], self.bounds[part + 1]);
        if end <= first + 1 { first } else { first + rng.below(end - first) }
    }
}

/// The integral of x^-skew, up to a constant.
fn integral(x: f64, skew: f64) -> f64 {
    if (skew - 1.0).abs() < 1e-9 { x.ln() } else { x.powf(1.0 - skew) / (1.0 - skew) }
}

fn inverse(value: f64, skew: f64) -> f64 {
    if (skew - 1.0).abs() < 1e-9 {
        value.exp()
    } else {
        (value * (1.0 - skew)).powf(1.0 / (1.0 - skew))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
fn rank(x: f64) -> usize {
    x as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share_of_first(items: usize, skew: f64, ranks: usize) -> f64 {
        let (zipf, mut rng) = (Zipf::new(items, skew), Rng::new(1));
        let hits = (0..200_000).filter(|_| zipf.choose(&mut rng) < ranks).count();
        hits as f64 / 200_000.0
    }

    fn expected(items: usize, skew: f64, ranks: usize) -> f64 {
        let sum = |n: usize| (1..=n).map(|k| (k as f64).powf(-skew)).sum::<f64>();
        sum(ranks) / sum(items)
    }

    #[test]
    fn ranks_come_as_often_as_the_law_says() {
        for (items, skew, ranks) in
            [(100_000, 0.8, 1000), (100_000, 1.0, 100), (5000, 1.2, 10), (50_000, 0.99, 20_000)]
        {
            let (got, want) = (share_of_first(items, skew, ranks), expected(items, skew, ranks));
            assert!((got - want).abs() < 0.01, "{items} {skew} {ranks}: {got} {want}");
        }
    }

    #[test]
    fn without_skew_it_is_uniform_and_every_rank_is_inside() {
        assert!((share_of_first(1000, 0.0, 250) - 0.25).abs() < 0.01);
        let (zipf, mut rng) = (Zipf::new(3, 1.0), Rng::new(1));
        let mut seen = [0; 3];
        (0..1000).for_each(|_| seen[zipf.choose(&mut rng)] += 1);
        assert!(seen.iter().all(|&n| n > 100), "{seen:?}");
        assert_eq!(Zipf::new(1, 0.8).choose(&mut rng), 0);
    }
}
