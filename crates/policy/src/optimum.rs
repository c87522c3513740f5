//! The least misses that a number of memory units allows, and their distribution over VMs.
//!
//! **Problem** (Wang 2016 §4). Each VM has a least size and may have more units of memory, and
//! each size has its misses; the sizes may add up to `units` at most. Which sizes have the fewest
//! misses in total? The paper's dynamic programming takes O(N² (M/S)²): some seconds for a large
//! host. It is the multiple-choice knapsack problem, whose hard part is small here.
//!
//! **Idea.** Memory is dealt out along each VM's *lower convex hull*, the steepest piece first,
//! until the units are used up. That solves the problem for the hulls instead of the curves,
//! whose misses are a lower bound, and leaves one VM, the *split*, in the middle of a piece. If
//! its curve touches its hull there, this is the optimum: always so for convex curves. Otherwise
//! the gap to the bound is small, and only sizes that cost less than the gap still matter
//! (Pisinger 1995: the *core*). They go through a dynamic programming of their own, with few
//! states.
//!
//! **Proof.** Let λ be the misses that the split piece saves per unit, x the sizes without it,
//! and r the remaining units. For sizes j, let `cost(j) = miss(j) − miss(x) + λ (j − x)`: at
//! least 0, because x minimises `miss + λ size` on a hull. For any sizes that fit, with d = Σ (j
//! − x) ≤ r,
//!
//! ```text
//! Σ miss(j) = [Σ miss(x) − λ r] + Σ cost(j) + λ (r − d)
//! ```
//!
//! The bracket is the lower bound, and the other terms are not negative. So a size whose cost is
//! above the gap between the best known solution and the bound is in no better solution.
//!
//! **Bound.** [`Placement::excess`] is 0 unless [`WORK`] ended the search; then it is at most the
//! distance of the split VM's curve from its hull at one point.
//!
//! **Leaves out.** Misses that rise with memory: such a size is no better than the one before it.

use std::cmp::Reverse;

/// The largest number of visited states: some milliseconds.
const WORK: usize = 3_000_000;

/// A solution this close to the bound, as a share of all misses, is the optimum except for
/// rounding.
const PRECISION: f64 = 1e-12;

/// The possible sizes of one VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// The fewest units.
    pub least: u32,
    /// Misses at that size, at one unit more, and so on. At least one value; finite, not
    /// negative, never rising.
    pub misses: Vec<f64>,
}

/// The size of each VM.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placement {
    /// Units of each VM, in the order of the VMs. Units that would save nothing are not given
    /// out.
    pub units: Vec<u32>,
    /// Total misses.
    pub misses: f64,
    /// The largest possible excess of `misses` over the optimum.
    pub excess: f64,
}

/// The sizes with the fewest misses that together take at most `units`. If not even the least
/// sizes fit, those.
#[must_use]
pub fn place(choices: &[Choice], units: u64) -> Placement {
    place_within(choices, units, WORK)
}

/// [`place`], visiting at most `work` states.
#[must_use]
pub fn place_within(choices: &[Choice], units: u64, work: usize) -> Placement {
    let least: u64 = choices.iter().map(|choice| u64::from(choice.least)).sum();
    let mut given = vec![0; choices.len()];
    let relaxed = relax(choices, units.saturating_sub(least), &mut given);
    let mut excess = 0.0;
    if let Some(split) = relaxed {
        let mut search = Search::new(choices, &given, split);
        excess = search.run(work);
        search.apply(&mut given);
    }
    let misses = choices.iter().zip(&given).map(|(choice, given)| choice.misses[*given]).sum();
    let units = choices.iter().zip(&given).map(|(c, given)| c.least + to_u32(*given)).collect();
    Placement { units, misses, excess }
}

/// A piece of a VM's hull.
#[derive(Clone, Copy, Debug)]
struct HullSegment {
    vm: usize,
    from: usize,
    to: usize,
    /// Misses saved per unit; above 0.
    slope: f64,
}

/// The end of dealing out: this piece of one VM fits only in part.
#[derive(Clone, Copy, Debug)]
struct Split {
    piece: HullSegment,
    /// Remaining units, fewer than the piece has.
    left: usize,
}

/// Deals out `units` along the hulls in whole pieces. Returns the first piece that does not fit.
fn relax(choices: &[Choice], units: u64, given: &mut [usize]) -> Option<Split> {
    let mut pieces = Vec::new();
    let mut hull = Vec::new();
    for (vm, choice) in choices.iter().enumerate() {
        pieces_of(vm, &choice.misses, &mut hull, &mut pieces);
    }
    let steepest_first = |a: &HullSegment, b: &HullSegment| {
        b.slope.total_cmp(&a.slope).then((a.vm, a.from).cmp(&(b.vm, b.from)))
    };
    // Sorting all pieces would be most of the work, but only a piece's side of the split matters.
    let mut open = pieces.as_mut_slice();
    let mut left = usize::try_from(units).unwrap_or(usize::MAX);
    while !open.is_empty() {
        let middle = open.len() / 2;
        let (steeper, piece, _) = open.select_nth_unstable_by(middle, steepest_first);
        let taken: usize = steeper.iter().map(|piece| piece.to - piece.from).sum();
        if taken > left {
            open = &mut open[..middle];
            continue;
        }
        for piece in steeper.iter() {
            given[piece.vm] = given[piece.vm].max(piece.to);
        }
        left -= taken;
        if piece.to - piece.from > left {
            return Some(Split { piece: *piece, left });
        }
        given[piece.vm] = given[piece.vm].max(piece.to);
        left -= piece.to - piece.from;
        open = &mut open[middle + 1..];
    }
    None
}

/// Adds the pieces of the lower convex hull of `misses` that save something; `hull` is scratch.
fn pieces_of(vm: usize, misses: &[f64], hull: &mut Vec<usize>, pieces: &mut Vec<HullSegment>) {
    let slope = |from: usize, to: usize| (misses[from] - misses[to]) / (to - from) as f64;
    hull.clear();
    for size in 0..misses.len() {
        while let [.., before, last] = hull[..]
            && slope(before, last) <= slope(last, size)
        {
            hull.pop();
        }
        hull.push(size);
    }
    let falling = hull.windows(2).map(|ends| (ends[0], ends[1], slope(ends[0], ends[1])));
    pieces.extend(
        falling.filter(|(.., slope)| *slope > 0.0).map(|(from, to, slope)| HullSegment {
            vm,
            from,
            to,
            slope,
        }),
    );
}

/// A size that may be in a solution better than the best known one.
#[derive(Clone, Copy, Debug)]
struct Size {
    /// Units more than the relaxed solution gives.
    more: isize,
    /// The cost as defined in the head of this file.
    cost: f64,
}

/// A VM with more than one size that may be in a better solution.
#[derive(Debug)]
struct Class {
    vm: usize,
    /// In ascending order of cost; the first one is the relaxed solution's.
    sizes: Vec<Size>,
}

/// The search from the relaxed solution to the optimum.
#[derive(Debug)]
struct Search {
    lambda: f64,
    left: isize,
    /// Ordered by likely effect, the largest first.
    classes: Vec<Class>,
    /// The best known solution's misses above the bound, and its deviations from the relaxed
    /// solution.
    best: f64,
    deviations: Vec<(usize, isize)>,
    /// The numeric precision of misses.
    precision: f64,
}

impl Search {
    fn new(choices: &[Choice], given: &[usize], split: Split) -> Self {
        let Split { piece: HullSegment { vm, from, slope: lambda, .. }, left } = split;
        let misses = &choices[vm].misses;
        // All remaining units go to the split VM.
        let best = misses[from + left] - misses[from] + lambda * left as f64;
        let total: f64 = choices.iter().zip(given).map(|(c, given)| c.misses[*given]).sum();
        let mut search = Self {
            lambda,
            left: to_isize(left),
            classes: Vec::new(),
            best,
            deviations: vec![(vm, to_isize(left))],
            precision: total * PRECISION,
        };
        if search.best > search.precision {
            search.alone(choices, given);
            search.classes = choices
                .iter()
                .zip(given)
                .enumerate()
                .filter_map(|(vm, (choice, given))| search.class(vm, choice, *given))
                .collect();
            let next_best = |class: &Class| class.sizes[1].cost;
            search.classes.sort_by(|a, b| next_best(a).total_cmp(&next_best(b)));
        }
        search
    }

    /// The best solution that differs from the relaxed one in a single VM.
    fn alone(&mut self, choices: &[Choice], given: &[usize]) {
        for (vm, (choice, given)) in choices.iter().zip(given).enumerate() {
            let most = choice.misses.len().min(given + 1 + self.left.unsigned_abs());
            for size in *given..most {
                let Size { more, cost } = self.size(choice, *given, size);
                let above = cost + self.lambda * (self.left - more) as f64;
                if above < self.best {
                    (self.best, self.deviations) = (above, vec![(vm, more)]);
                }
            }
        }
    }

    fn size(&self, choice: &Choice, given: usize, size: usize) -> Size {
        let more = to_isize(size) - to_isize(given);
        let cost = choice.misses[size] - choice.misses[given] + self.lambda * more as f64;
        Size { more, cost: cost.max(0.0) }
    }

    /// The sizes of a VM that may be in a better solution; `None`: only the relaxed solution's.
    fn class(&self, vm: usize, choice: &Choice, given: usize) -> Option<Class> {
        let others = (0..choice.misses.len()).filter(|size| *size != given);
        let others = others.map(|size| self.size(choice, given, size));
        let mut sizes: Vec<Size> = others.filter(|o| o.cost < self.best).collect();
        if sizes.is_empty() {
            return None;
        }
        sizes.push(Size { more: 0, cost: 0.0 });
        sizes.sort_by(|a, b| a.cost.total_cmp(&b.cost).then((a.more != 0).cmp(&(b.more != 0))));
        Some(Class { vm, sizes })
    }

    /// Searches the core. Returns the largest possible excess of the best solution over the
    /// optimum.
    fn run(&mut self, work: usize) -> f64 {
        let mut states = States { first: 0, costs: vec![0.0] };
        let mut steps: Vec<(isize, Vec<u32>)> = Vec::new();
        let mut best_at = None;
        let mut work_left = work;
        let classes = std::mem::take(&mut self.classes);
        for class in &classes {
            if self.best <= self.precision {
                break;
            }
            let within = class.sizes.iter().take_while(|option| option.cost < self.best);
            let sizes: Vec<Size> = within.copied().take(usize::from(u16::MAX)).collect();
            let Some(left) = work_left.checked_sub(sizes.len() * states.costs.len()) else {
                self.trace(&classes, &steps, best_at);
                return self.best;
            };
            work_left = left;
            let (next, by) = states.with(&sizes, self.best);
            states = next;
            steps.push((states.first, by));
            if let Some((above, at)) = states.best(self.left, self.lambda)
                && above < self.best
            {
                (self.best, best_at) = (above, Some((steps.len(), at)));
            }
            states.drop_dominated(self.lambda);
        }
        self.trace(&classes, &steps, best_at);
        0.0
    }

    /// Records the solution that ends after the given number of classes at the given number of
    /// units more.
    fn trace(
        &mut self,
        classes: &[Class],
        steps: &[(isize, Vec<u32>)],
        best_at: Option<(usize, isize)>,
    ) {
        let Some((count, mut at)) = best_at else { return };
        self.deviations.clear();
        for (class, (first, by)) in classes.iter().zip(steps).take(count).rev() {
            let Size { more, .. } = class.sizes[by[(at - first).unsigned_abs()] as usize];
            self.deviations.push((class.vm, more));
            at -= more;
        }
    }

    fn apply(&self, given: &mut [usize]) {
        for (vm, more) in &self.deviations {
            given[*vm] = given[*vm].saturating_add_signed(*more);
        }
    }
}

/// The least cost for each number of units above the relaxed solution.
#[derive(Debug)]
struct States {
    first: isize,
    /// Indexed from `first`; infinite for a number that no solution has.
    costs: Vec<f64>,
}

impl States {
    /// All sums of these states and one of `sizes`, with the size's index. Sums of `limit` or
    /// more are dropped.
    fn with(&self, sizes: &[Size], limit: f64) -> (Self, Vec<u32>) {
        let least = sizes.iter().map(|size| size.more).min().unwrap_or(0);
        let most = sizes.iter().map(|size| size.more).max().unwrap_or(0);
        let first = self.first + least;
        let len = self.costs.len() + (most - least).unsigned_abs();
        let (mut costs, mut by) = (vec![f64::INFINITY; len], vec![0; len]);
        for (index, size) in (0..).zip(sizes) {
            let shift = (size.more - least).unsigned_abs();
            let ways = costs[shift..].iter_mut().zip(&mut by[shift..]);
            for ((cost, by), before) in ways.zip(&self.costs) {
                let sum = before + size.cost;
                if sum < *cost && sum < limit {
                    (*cost, *by) = (sum, index);
                }
            }
        }
        (Self { first, costs }, by)
    }

    /// The best state that fits into `left`, and its misses above the bound.
    fn best(&self, left: isize, lambda: f64) -> Option<(f64, isize)> {
        let fitting = (self.first..=left).zip(&self.costs);
        let above = fitting.map(|(more, cost)| (cost + lambda * (left - more) as f64, more));
        above.min_by(|a, b| a.0.total_cmp(&b.0).then(Reverse(a.1).cmp(&Reverse(b.1))))
    }

    /// Drops states that take more units than another one and miss no less, and trims the ends.
    fn drop_dominated(&mut self, lambda: f64) {
        let mut least = f64::INFINITY;
        for (more, cost) in (self.first..).zip(&mut self.costs) {
            let misses = *cost - lambda * more as f64;
            if misses < least {
                least = misses;
            } else {
                *cost = f64::INFINITY;
            }
        }
        let is_state = |cost: &f64| cost.is_finite();
        let skipped = self.costs.iter().position(is_state).unwrap_or(0);
        let end = self.costs.iter().rposition(is_state).map_or(0, |last| last + 1);
        self.costs.truncate(end);
        self.costs.drain(..skipped);
        self.first += to_isize(skipped);
    }
}

fn to_isize(units: usize) -> isize {
    isize::try_from(units).unwrap_or(isize::MAX)
}

fn to_u32(units: usize) -> u32 {
    u32::try_from(units).unwrap_or(u32::MAX)
}
