//! Overloads: VMs that page because they were given less memory than promised, and for how long
//! (Williams 2011 §4.1, §4.4.1).
//!
//! **Problem.** A short overload is best borne with other hosts' memory, a long one by moving a
//! VM away; while it lasts, its kind is unknown. **Rule.** Paging is measured in intervals of 10
//! s. An interval with more than 200 pages a second is an overload, and 8 such intervals among
//! the last 12 make it sustained: long overloads pause for up to a minute. Each VM's transient
//! overloads are counted by their length ([`Profile`]). After [`LEARN_FROM`] of them, an overload
//! that lasts longer than μ + 3σ of these lengths counts as sustained, if that is sooner.
//!
//! Only a VM that has less than its `max` can be overloaded. A VM that pages with all its
//! promised memory needs a larger size, which is its owner's decision (footnote 5). An interval
//! without data discards the earlier intervals.

use std::collections::BTreeMap;

use model::{
    Bytes, HostView, Learned, Overload, OverloadSpec, Profile, Reading, Reason, Severity, Time,
    Together, VmName, VmView,
};
use serde::{Deserialize, Serialize};

use crate::tuning::{self, STALE_AFTER};

/// The number of transient overloads from which their usual length is learned. The paper says "a
/// base amount", and that a whole profile took 25 overloads.
pub const LEARN_FROM: u32 = 25;

/// Distance above the mean length that a transient overload is unlikely to exceed, in standard
/// deviations.
const SIGMAS: f64 = 3.0;

/// The least number of overloaded intervals of a sustained overload: one alone may be a program
/// that starts.
const SHORTEST: u32 = 2;

const PAGE: u64 = 4096;

/// One VM's recent paging.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RecentPaging {
    /// The reading at the start of the current interval.
    begun: Option<Reading<Paged>>,
    intervals: Intervals,
    /// Pages a second in the latest interval.
    pages_per_s: Option<u64>,
}

/// A VM's last intervals, overloaded or not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intervals {
    /// One bit each; the lowest bit is the latest interval.
    last: u64,
    /// Number of consecutive overloaded intervals up to now.
    run: u32,
    is_sustained: bool,
}

/// A VM's count of pages, in and out, since some starting point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Paged {
    pages: u64,
    /// Whether the server of the VM's swap disk counts; otherwise the guest does.
    is_by_disk: bool,
}

/// When an overload is sustained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threshold {
    /// Length of the window in intervals.
    pub window: u32,
    /// Number of overloaded intervals in the window that makes an overload sustained.
    pub sustained: u32,
    /// The number of transient overloads from which it was learned; 0: it is configured.
    pub learned_from: u32,
}

impl Threshold {
    /// The configured threshold, or a lower one learned from the profile (Williams 2011 §4.1).
    #[must_use]
    pub fn of(spec: &OverloadSpec, profile: &Profile) -> Self {
        let configured = Self { window: spec.window, sustained: spec.sustained, learned_from: 0 };
        let count: u32 = profile.lengths.iter().sum();
        if count < LEARN_FROM {
            return configured;
        }
        let moment = |power: i32| -> f64 {
            let lengths = (1_u32..).zip(&profile.lengths);
            let sum: f64 =
                lengths.map(|(length, n)| f64::from(length).powi(power) * f64::from(*n)).sum();
            sum / f64::from(count)
        };
        let (mean, square) = (moment(1), moment(2));
        let limit = mean + SIGMAS * (square - mean * mean).max(0.0).sqrt();
        // The smallest number of intervals above the limit, and a window widened in proportion.
        let sustained = (SHORTEST..spec.sustained).find(|n| f64::from(*n) > limit);
        sustained.map_or(configured, |sustained| Self {
            window: (spec.window * sustained).div_ceil(spec.sustained),
            sustained,
            learned_from: count,
        })
    }
}

/// A VM's pages so far. `None`: no new data.
fn paged(vm: &VmView, now: Time) -> Option<Reading<Paged>> {
    let fresh = |at: Time| now.since(at) <= STALE_AFTER;
    let swap = vm.disks.values().filter(|disk| disk.value.repositories.is_some());
    let by_disk = swap.fold(None, |all: Option<Reading<u64>>, disk| {
        let pages = (disk.value.read.0 + disk.value.written.0) / PAGE;
        let (sum, at) = all.map_or((0, disk.at), |all| (all.value, all.at.min(disk.at)));
        Some(Reading::new(sum + pages, at))
    });
    if let Some(all) = by_disk {
        let paged = Paged { pages: all.value, is_by_disk: true };
        return fresh(all.at).then(|| Reading::new(paged, all.at));
    }
    let stats = vm.stats.filter(|stats| fresh(stats.at))?;
    let bytes = |size: Option<Bytes>| size.map(|size| size.0);
    let sum = bytes(stats.value.swap_in)?.saturating_add(bytes(stats.value.swap_out)?);
    Some(Reading::new(Paged { pages: sum / PAGE, is_by_disk: false }, stats.at))
}

impl RecentPaging {
    /// Updates the intervals. `is_short`: the VM has less than it was promised.
    pub(crate) fn note(
        &mut self,
        vm: &VmView,
        is_short: bool,
        spec: &OverloadSpec,
        profile: &mut Profile,
        now: Time,
    ) {
        let interval = spec.interval();
        let Some(latest) = paged(vm, now) else {
            if self.begun.is_some_and(|begun| now.since(begun.at) > interval.times(2)) {
                *self = Self::default();
            }
            return;
        };
        let Some(begun) = self.begun.filter(|begun| is_same_count(begun, &latest)) else {
            *self = Self { begun: Some(latest), ..Self::default() };
            return;
        };
        let elapsed = latest.at.since(begun.at);
        if elapsed < interval {
            return;
        }
        let pages = latest.value.pages - begun.value.pages;
        self.begun = Some(latest);
        let pages_per_s = pages.saturating_mul(1000) / elapsed.0;
        self.pages_per_s = Some(pages_per_s);
        let pages = pages_per_s > u64::from(spec.pages_per_s);
        self.intervals.push(is_short.then_some(pages), spec, profile);
    }

    /// The severity of the VM's overload, as of the last interval.
    pub(crate) fn severity(&self) -> Severity {
        self.intervals.severity()
    }

    /// Whether the last interval was overloaded.
    pub(crate) fn is_overloaded(&self) -> bool {
        self.intervals.last & 1 == 1
    }

    /// The VM's overload; `None`: no interval has been measured.
    fn verdict(&self, is_short: bool, spec: &OverloadSpec, profile: &Profile) -> Option<Overload> {
        let pages_per_s = self.pages_per_s?;
        let threshold = Threshold::of(spec, profile);
        let intervals = self.intervals.overloaded(&threshold);
        let Threshold { window, sustained, learned_from } = threshold;
        let above = u64::from(spec.pages_per_s);
        let (severity, reason) = if !is_short && pages_per_s > above {
            (Severity::None, Reason::OverloadItsOwn { pages_per_s })
        } else {
            let severity = self.intervals.severity();
            let seconds = spec.interval_s;
            let reason = match severity {
                Severity::Sustained => {
                    Reason::OverloadSustained { intervals, window, seconds, above, learned_from }
                }
                Severity::Transient => {
                    Reason::OverloadTransient { intervals, sustained, window, learned_from }
                }
                Severity::None => Reason::OverloadNone { pages_per_s, above },
            };
            (severity, reason)
        };
        Some(Overload { severity, pages_per_s, reason })
    }
}

impl Intervals {
    /// Adds an interval that has ended, with whether it was overloaded. `None`: the VM had all of
    /// its memory, so the interval tells nothing about how often it is overloaded without.
    pub fn push(&mut self, overloaded: Option<bool>, spec: &OverloadSpec, profile: &mut Profile) {
        let threshold = Threshold::of(spec, profile);
        let is_overloaded = overloaded.unwrap_or_default();
        self.last = self.last << 1 | u64::from(is_overloaded);
        profile.intervals += u64::from(overloaded.is_some());
        let was_sustained = self.is_sustained;
        self.is_sustained = self.overloaded(&threshold) >= threshold.sustained;
        if self.is_sustained && !was_sustained {
            // The run that counted as a transient overload is the start of a sustained one.
            let begin = u64::from(std::mem::take(&mut self.run)) + u64::from(is_overloaded);
            profile.sustained += begin;
            profile.sustained_overloads += 1;
        } else if self.is_sustained {
            profile.sustained += u64::from(is_overloaded);
        } else if is_overloaded {
            self.run += 1;
        } else if self.run > 0 {
            let length = std::mem::take(&mut self.run);
            profile.transient += u64::from(length);
            let place = length as usize - 1;
            if profile.lengths.len() <= place {
                profile.lengths.resize(place + 1, 0);
            }
            profile.lengths[place] += 1;
        }
    }

    /// Number of overloaded intervals in the window.
    fn overloaded(&self, threshold: &Threshold) -> u32 {
        (self.last & ((1 << threshold.window) - 1)).count_ones()
    }

    /// Severity of the VM's overload.
    #[must_use]
    pub const fn severity(&self) -> Severity {
        match (self.is_sustained, self.last & 1 == 1) {
            (true, _) => Severity::Sustained,
            (false, true) => Severity::Transient,
            (false, false) => Severity::None,
        }
    }
}

/// Whether both readings are of the same counter, without a restart of it.
fn is_same_count(begun: &Reading<Paged>, latest: &Reading<Paged>) -> bool {
    begun.value.is_by_disk == latest.value.is_by_disk && begun.value.pages <= latest.value.pages
}

/// The data about a VM's overload.
pub(crate) struct Watched<'a> {
    pub(crate) name: &'a VmName,
    pub(crate) watch: &'a mut RecentPaging,
    /// Whether the VM has less than it was promised.
    pub(crate) is_short: bool,
}

/// Updates the intervals of these VMs. Returns the overloads found.
pub(crate) fn watch<'a>(
    vms: impl Iterator<Item = Watched<'a>>,
    view: &HostView,
    spec: &OverloadSpec,
    learned: &mut Learned,
    now: Time,
) -> BTreeMap<VmName, Overload> {
    let profiles = &mut learned.profiles;
    let mut found = BTreeMap::new();
    for Watched { name, watch, is_short } in vms {
        let Some(vm) = view.vms.get(name) else { continue };
        let profile = profiles.entry(name.clone()).or_default();
        watch.note(vm, is_short, spec, profile, now);
        found.extend(watch.verdict(is_short, spec, profile).map(|found| (name.clone(), found)));
    }
    // The profile of a VM that has gone is kept, because the VM may come back.
    while profiles.len() > tuning::MOST_PROFILES.max(view.vms.len()) {
        let gone = profiles.keys().find(|name| !view.vms.contains_key(*name)).cloned();
        let Some(gone) = gone else { break };
        profiles.remove(&gone);
    }
    found
}

/// Counts the VMs that are overloaded at once, when an interval has passed.
pub(crate) fn count(
    found: &BTreeMap<VmName, Overload>,
    spec: &OverloadSpec,
    together: &mut Together,
    counted_at: &mut Option<Time>,
    now: Time,
) {
    let is_due = counted_at.is_none_or(|at| now.since(at) >= spec.interval());
    if found.is_empty() || !is_due {
        return;
    }
    *counted_at = Some(now);
    let count = |severity, counts: &mut Vec<u64>| {
        let n = found.values().filter(|overload| overload.severity == severity).count();
        if counts.len() <= n {
            counts.resize(n + 1, 0);
        }
        counts[n] += 1;
    };
    count(Severity::Transient, &mut together.transient);
    count(Severity::Sustained, &mut together.sustained);
}

#[cfg(test)]
mod tests {
    use model::{DiskReading, GuestStats, Link, Millis, RepositoriesReading};

    use super::*;

    const SPEC: OverloadSpec =
        OverloadSpec { interval_s: 10, pages_per_s: 200, window: 12, sustained: 8 };

    /// A VM with a given rate of paging, second by second.
    #[derive(Default)]
    struct PagingVm {
        watch: RecentPaging,
        profile: Profile,
        paged: u64,
        now: Time,
    }

    impl PagingVm {
        /// Runs intervals in which the VM pages `rate` pages a second.
        fn pages(&mut self, rate: u64, intervals: u64) -> &mut Self {
            for _ in 0..intervals * 10 {
                self.second(rate, true);
            }
            self
        }

        fn second(&mut self, rate: u64, is_short: bool) {
            let swap_in = Some(Bytes(self.paged * PAGE));
            let stats =
                GuestStats { swap_in, swap_out: Some(Bytes::ZERO), ..GuestStats::default() };
            let vm =
                VmView { stats: Some(Reading::new(stats, self.now)), ..VmView::unknown(Link::Up) };
            self.watch.note(&vm, is_short, &SPEC, &mut self.profile, self.now);
            self.paged += rate;
            self.now = self.now.after(Millis::secs(1));
        }

        fn severity(&self) -> Severity {
            self.verdict().severity
        }

        fn verdict(&self) -> Overload {
            self.watch.verdict(true, &SPEC, &self.profile).unwrap()
        }
    }

    #[test]
    fn an_overload_is_transient_until_8_of_the_last_12_intervals_were_overloaded() {
        let mut guest = PagingVm::default();
        guest.pages(200, 3);
        guest.second(200, true);
        assert_eq!(guest.severity(), Severity::None, "no more than 200");
        let reason = Reason::OverloadNone { pages_per_s: 200, above: 200 };
        assert_eq!(guest.verdict().reason, reason);
        guest.pages(300, 7);
        assert_eq!(guest.severity(), Severity::Transient);
        let (sustained, window, learned_from) = (8, 12, 0);
        let reason = Reason::OverloadTransient { intervals: 7, sustained, window, learned_from };
        assert_eq!(guest.verdict().reason, reason);
        guest.pages(300, 1);
        assert_eq!(guest.severity(), Severity::Sustained);
        // It does not end with a pause, but when fewer than eight overloaded intervals are left.
        guest.pages(0, 4);
        assert_eq!(guest.severity(), Severity::Sustained);
        guest.pages(0, 1);
        assert_eq!(guest.severity(), Severity::None);
        let Profile { transient, sustained, sustained_overloads, ref lengths, .. } = guest.profile;
        assert_eq!((transient, sustained, sustained_overloads, lengths.len()), (0, 8, 1, 0));
    }

    #[test]
    fn an_overload_that_pauses_for_less_than_a_minute_is_sustained_all_the_same() {
        let mut guest = PagingVm::default();
        guest.pages(500, 4).pages(0, 4).pages(500, 4);
        guest.second(0, true);
        assert_eq!(guest.severity(), Severity::Sustained);
        let mut guest = PagingVm::default();
        guest.pages(500, 4).pages(0, 5).pages(500, 4);
        guest.second(0, true);
        assert_eq!(guest.severity(), Severity::Transient);
    }

    #[test]
    fn who_has_all_that_it_was_promised_is_not_overloaded() {
        let mut guest = PagingVm::default();
        for _ in 0..200 {
            guest.second(5000, false);
        }
        let found = guest.watch.verdict(false, &SPEC, &guest.profile).unwrap();
        assert_eq!(found.reason, Reason::OverloadItsOwn { pages_per_s: 5000 });
        assert_eq!((found.severity, guest.profile.transient), (Severity::None, 0));
    }

    #[test]
    fn short_overloads_teach_that_a_longer_one_is_sustained() {
        let mut guest = PagingVm::default();
        for turn in 0..LEARN_FROM {
            guest.pages(500, 1 + u64::from(turn % 2)).pages(0, 3);
        }
        let count: u32 = guest.profile.lengths.iter().sum();
        assert!(count >= LEARN_FROM - 1, "{:?}", guest.profile);
        guest.pages(500, 1).pages(0, 3);
        // Mean 1.46, deviation 0.5: three intervals are more than three deviations above.
        let threshold = Threshold::of(&SPEC, &guest.profile);
        assert_eq!((threshold.sustained, threshold.window), (3, 5));
        guest.pages(500, 2).second(500, true);
        assert_eq!(guest.severity(), Severity::Transient);
        guest.pages(500, 1);
        let Reason::OverloadSustained { window: 5, learned_from, .. } = guest.verdict().reason
        else {
            panic!("{:?}", guest.verdict());
        };
        assert!(learned_from >= LEARN_FROM);
    }

    #[test]
    fn what_teaches_a_longer_threshold_changes_nothing() {
        let profile = Profile { lengths: vec![10, 0, 0, 0, 0, 0, 20], ..Profile::default() };
        let threshold = Threshold::of(&SPEC, &profile);
        assert_eq!(threshold, Threshold { window: 12, sustained: 8, learned_from: 0 });
    }

    #[test]
    fn a_gap_in_what_is_known_and_a_counter_that_begins_anew_end_what_was_known() {
        let mut guest = PagingVm::default();
        guest.pages(500, 7);
        guest.paged = 0;
        guest.pages(500, 3);
        assert_eq!(guest.severity(), Severity::Transient);
        guest.now = guest.now.after(Millis::secs(30));
        let silent = VmView::unknown(Link::Up);
        guest.watch.note(&silent, true, &SPEC, &mut guest.profile, guest.now);
        assert_eq!(guest.watch, RecentPaging::default());
    }

    #[test]
    fn the_disk_is_believed_before_the_guest() {
        let now = Time(1000);
        let stats = GuestStats {
            swap_in: Some(Bytes(PAGE)),
            swap_out: Some(Bytes(PAGE)),
            ..GuestStats::default()
        };
        let mut vm = VmView { stats: Some(Reading::new(stats, now)), ..VmView::unknown(Link::Up) };
        assert_eq!(paged(&vm, now).unwrap().value, Paged { pages: 2, is_by_disk: false });
        let disk = |repositories, read| {
            let disk = DiskReading { repositories, read: Bytes(read), ..DiskReading::default() };
            Reading::new(disk, now)
        };
        vm.disks.insert("data".to_owned(), disk(None, 100 * PAGE));
        assert_eq!(paged(&vm, now).unwrap().value.pages, 2, "a data disk does not count");
        let swap = disk(Some(RepositoriesReading::default()), 7 * PAGE);
        vm.disks.insert("swap".to_owned(), swap);
        assert_eq!(paged(&vm, now).unwrap().value, Paged { pages: 7, is_by_disk: true });
        assert_eq!(paged(&vm, now.after(Millis::secs(9))), None, "it is old");
    }
}
