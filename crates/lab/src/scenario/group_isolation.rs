//! `group-isolation`: two groups with the same content share nothing, and no guest learns from
//! the duration of its writes what the guests of other groups hold.
//!
//! Guests of three groups hold the same content under the real daemon. In `shop` and `cafe` two
//! guests each share it; in `spy` only one guest has it, next to an idle neighbour. When all
//! memory has been scanned several times, the kernel's data show which guests share a physical
//! page, and what the workers can access. Then the guest in `spy` and one in `shop` time writes
//! to their pages (`probe`). The one in `shop` is the control, which shows that timing reveals
//! sharing where there is any.

use model::{Dedup, DedupSpec, GroupName, PagesPerMs, VmName};

use self::shared::{Group, Pages, Reach};
use super::prelude::*;

mod shared;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "group-isolation",
    summary: "groups with the same content share nothing, and no guest can tell what another group holds",
    measures: &[&[file!()], measured::MANAGED],
    claims: claims! {
        "shared_across" == 0.0 => "pages",
            "Groups with the same content share no page (three groups, by physical frames)";
        "shared_content_mib" >= 12.0 => "MiB",
            "Guests within a group share the 16 MiB of content that they have in common";
        "pools" == 3.0 => "count", "Each group has a pool";
        "worker_cgroups" == 3.0 => "count", "Each group's worker has a cgroup of its own";
        "foreign_holders" == 0.0 => "count", "No worker holds a page of another group";
        "foreign_descriptors" == 0.0 => "count", "No worker has a descriptor into another group";
        "timing_difference" <= 0.05 => "share",
            "No guest learns from the time of its writes the contents of another group (8,192 \
             first writes)";
        "timing_difference_within" >= 0.2 => "share", "A guest would see it within its own group";
    },
    run,
};

const GROUPS: [&str; 3] = ["shop", "cafe", SPY];
/// The group in which only one guest has the content.
const SPY: &str = "spy";
/// Guests that time their writes: another guest of `INSIDER`'s group has the same pages; of
/// `OUTSIDER`'s group, none has.
const INSIDER: &str = "insider";
const OUTSIDER: &str = "outsider";
const MEMORY: Bytes = Bytes::mib(128);
/// Content that all guests hold, except the outsider's neighbour.
const SAME_MB: u32 = 16;
const OWN_MB: u32 = 4;
const RATE: PagesPerMs = PagesPerMs(200);
/// Ends of passes to wait for once all memory is filled: at least two passes have begun after
/// that.
const PASSES: u64 = 3;
const PAGES_PER_MIB: f64 = 256.0;
/// From full memory to the first write; the kernel's data must be read before.
const PROBE_AFTER_S: u32 = 240;
const FILL_LIMIT: Duration = Duration::from_secs(60);
const SETTLE_LIMIT: Duration = Duration::from_secs(230);
/// Merging has settled when this time passes with no more than [`LITTLE`] shared.
const QUIET: Duration = Duration::from_secs(20);
const LITTLE: Bytes = Bytes::mib(1);
const PROBE_LIMIT: Duration = Duration::from_secs(PROBE_AFTER_S as u64 + 60);

fn run(context: &Context) -> Result<Figures, LabError> {
    let copies = format!("copies --same-mb {SAME_MB} --own-mb {OWN_MB} --rest");
    let probe = format!("probe --mb {SAME_MB} --after {PROBE_AFTER_S}");
    let guests = [
        ("shop-1", "shop", &copies),
        (INSIDER, "shop", &probe),
        ("cafe-1", "cafe", &copies),
        ("cafe-2", "cafe", &copies),
        (OUTSIDER, SPY, &probe),
        ("neighbour", SPY, &"idle".to_owned()),
    ];
    let spec = |(place, (name, group, work)): (usize, (&str, &str, &String))| {
        context.guest(name, group, MEMORY, work).seeded(place as u64).with_shim(true)
    };
    let mut lab = context.start(guests.into_iter().enumerate().map(spec))?;
    let settings = DaemonSettings { dedup: DedupSpec::Fixed(RATE), ..Mode::Observe.into() };
    let daemon = Daemon::start(&mut lab, settings)?;
    lab.wait_for("every guest to have filled its memory", FILL_LIMIT, |lab| {
        Ok(lab.machines().iter().all(is_full))
    })?;
    context.say("The guests' memory is looked through ...");
    wait_until_settled(&lab, &daemon)?;
    let groups = groups(&lab, &daemon)?;
    let reach = Reach::of(&groups, daemon.process().pid)?;
    let pages = Pages::of(&groups)?;
    for name in [INSIDER, OUTSIDER] {
        if lab.machine(name)?.reported("ops") > 0.0 {
            let what = format!("{name} not to write before the kernel was asked");
            return Err(LabError::Timeout { what, limit: SETTLE_LIMIT });
        }
    }
    context.say("Two guests write by the clock ...");
    lab.wait_for("both probes to have written", PROBE_LIMIT, |lab| {
        let [inside, outside] = [INSIDER, OUTSIDER].map(|guest| told(lab, guest, "same_slower"));
        Ok(inside?.is_finite() && outside?.is_finite())
    })?;
    let mut figures = context.figures(SCENARIO.name, 1);
    add_pages(&mut figures, &lab, &pages)?;
    add_reach(&mut figures, &reach);
    add_timing(&mut figures, &lab)?;
    lab.stop()?;
    Ok(figures)
}

fn is_full(machine: &Machine) -> bool {
    let filled = match machine.spec().workload.first().map(String::as_str) {
        Some("copies") => SAME_MB + OWN_MB,
        Some("probe") => 2 * SAME_MB,
        _ => 0,
    };
    machine.reported("mb") >= f64::from(filled)
}

/// Waits until every guest was scanned [`PASSES`] times from now on, and nothing more is merged.
fn wait_until_settled(lab: &Lab, daemon: &Daemon) -> Result<(), LabError> {
    let all = || -> Result<Option<Vec<Dedup>>, LabError> {
        let Some(case) = daemon.latest()? else { return Ok(None) };
        let of = |machine: &Machine| {
            let vm = case.view.vms.get(&VmName::from(machine.spec().name.as_str()))?;
            Some(vm.dedup.as_ref()?.value)
        };
        Ok(lab.machines().iter().map(of).collect())
    };
    let mut first = None;
    let mut last_change = (Instant::now(), Bytes::ZERO);
    lab.wait_for("every guest to be looked through, and merging to settle", SETTLE_LIMIT, |_| {
        let Some(now) = all()? else { return Ok(false) };
        let first = first.get_or_insert_with(|| now.clone());
        let shared = now.iter().map(|dedup| dedup.shared).sum();
        if shared > last_change.1.plus(LITTLE) {
            last_change = (Instant::now(), shared);
        }
        let mut both = now.iter().zip(first.iter());
        Ok(both.all(|(now, first)| now.passes >= first.passes + PASSES)
            && last_change.0.elapsed() > QUIET)
    })
}

/// The processes of each group, in the order of [`GROUPS`].
fn groups(lab: &Lab, daemon: &Daemon) -> Result<Vec<Group>, LabError> {
    let case = daemon.case()?;
    let group = |name: &&str| {
        let worker = case.view.workers.get(&GroupName::from(*name));
        let worker = worker.and_then(|reading| reading.value.pid);
        let worker =
            worker.ok_or_else(|| LabError::Daemon(format!("no worker runs for {name}")))?;
        let machines = lab.machines().iter().filter(|machine| machine.spec().group == *name);
        Ok(Group { qemus: machines.map(|machine| machine.process().pid).collect(), worker })
    };
    GROUPS.iter().map(group).collect()
}

fn add_pages(figures: &mut Figures, lab: &Lab, pages: &Pages) -> Result<(), LabError> {
    let note = "physical pages behind guests of more than one group, of all that are in memory";
    // Where no page was seen to be shared at all, none across groups says nothing.
    let has_seen = pages.within.values().any(|shared| *shared > 0);
    let across = if has_seen { pages.across as f64 } else { f64::NAN };
    figures.tell("shared_across", across, "pages", note);
    let mib = |machine: &Machine| {
        let shared = pages.within.get(&machine.process().pid).copied();
        shared.map_or(f64::NAN, |pages| pages as f64 / PAGES_PER_MIB)
    };
    let note = "what the outsider shares with its idle neighbour, which has none of the content: merging is at work there";
    let system = mib(lab.machine(OUTSIDER)?);
    figures.check("shared_system_mib", system, "MiB", note, Target::AtLeast(1.0));
    let has_mate = |machine: &&Machine| machine.spec().group != SPY;
    let mates: Vec<&Machine> = lab.machines().iter().filter(has_mate).collect();
    let least = mates.iter().map(|machine| mib(machine)).smallest();
    let each = |machine: &&Machine| format!("{} {:.1}", machine.spec().name, mib(machine));
    let each = mates.iter().map(each).collect::<Vec<_>>().join(", ");
    let note = format!("the least that a guest of shop or cafe shares within its group ({each})");
    figures.tell("shared_within_mib", least, "MiB", note);
    let note = format!("the same less the outsider's; {SAME_MB} MiB are known to be the same");
    figures.tell("shared_content_mib", least - system, "MiB", note);
    Ok(())
}

fn add_reach(figures: &mut Figures, reach: &Reach) {
    let groups = GROUPS.len() as f64;
    let mut add = |name, value: usize, target, note| {
        figures.check(name, value as f64, "count", note, target);
    };
    add("pools", reach.pools, Target::Equals(groups), "different pools that guests map");
    let note = "processes that map or hold a pool of another group, or of none of theirs";
    add("foreign_holders", reach.foreign_holders, Target::Equals(0.0), note);
    let note = "descriptors of workers into QEMUs of other groups, or into any other process";
    add("foreign_descriptors", reach.foreign_descriptors, Target::Equals(0.0), note);
    let note = "the same into QEMUs of their own groups: they would be seen";
    add("own_descriptors", reach.own_descriptors, Target::AtLeast(2.0 * groups), note);
    // Without cgroup v2 this claim does not hold, and the run has not passed.
    let cgroups = reach.cgroups.map_or(f64::NAN, |cgroups| cgroups as f64);
    let note = "in which workers are, one each; not the daemon's";
    figures.tell("worker_cgroups", cgroups, "count", note);
}

/// A probe's result; NaN while it has none.
fn told(lab: &Lab, guest: &str, what: &str) -> Result<f64, LabError> {
    let sample = lab.machine(guest)?.last_metric();
    Ok(sample.and_then(|sample| sample.value["timing"][what].as_f64()).unwrap_or(f64::NAN))
}

fn add_timing(figures: &mut Figures, lab: &Lab) -> Result<(), LabError> {
    let what = [
        ("timing_difference", OUTSIDER, "other groups"),
        ("timing_difference_within", INSIDER, "its own group (the control)"),
    ];
    for (name, guest, where_held) in what {
        let difference = (told(lab, guest, "same_slower")? - 0.5).abs();
        let [same_us, own_us] =
            [told(lab, guest, "same_ns")?, told(lab, guest, "own_ns")?].map(|ns| ns / 1000.0);
        let note = format!(
            "how far from 0.5 the chance is that a write to a page that is also held in {where_held} takes longer \
             than one to a page that nobody else has; medians {same_us:.2} and {own_us:.2} us"
        );
        figures.tell(name, difference, "share", note);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pools, cgroups and descriptors as they must be.
    fn good() -> Reach {
        let (pools, cgroups, own_descriptors) = (3, Some(3), 6);
        Reach { pools, cgroups, own_descriptors, ..Reach::default() }
    }

    fn met(reach: &Reach, name: &str) -> bool {
        let mut figures = Figures::new(SCENARIO.name, "m".into(), 1, 1);
        add_reach(&mut figures, reach);
        figures.met(name)
    }

    #[test]
    fn what_cannot_be_seen_does_not_pass() {
        let names = [
            "pools",
            "worker_cgroups",
            "foreign_holders",
            "foreign_descriptors",
            "own_descriptors",
        ];
        assert!(names.iter().all(|name| met(&good(), name)));
        let bad = [
            ("pools", Reach { pools: 2, ..good() }),
            ("worker_cgroups", Reach { cgroups: None, ..good() }),
            ("worker_cgroups", Reach { cgroups: Some(1), ..good() }),
            ("foreign_holders", Reach { foreign_holders: 1, ..good() }),
            ("foreign_descriptors", Reach { foreign_descriptors: 1, ..good() }),
            ("own_descriptors", Reach { own_descriptors: 0, ..good() }),
        ];
        assert!(bad.iter().all(|(name, reach)| !met(reach, name)));
    }
}
