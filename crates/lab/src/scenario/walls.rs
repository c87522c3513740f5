//! `walls`: all attacks at once, and a tenant next to them that must not notice.
//!
//! Two guests of the tenant `shop` work under the real daemon. They share pages; `witness` has a
//! swap disk that Overbook serves, a part of which lies in a repository, and verifies its memory
//! all the time. Attackers of other users work for ten minutes in all against the daemon, the
//! disks of their own tenant and a repository, all at once, with quiet minutes before, between
//! and after. The speed of `witness` under attack is compared with its speed in the quiet minutes
//! on both sides.
//!
//! The guests have a CPU of their own, as on a host that reserves some for itself. The attackers
//! and all of Overbook's processes, including those of the disks of `witness`, have another one.
//! These disks have the CPU weight that their unit gives them. The operator bounds the CPU time
//! of a tenant (cgroups); that is not tested here.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use model::{DedupSpec, PagesPerMs};
use sys::process::{Identity, children_of};

use self::field::Field;
use super::prelude::*;
use crate::attack::Attacker;
use crate::pinning;
use crate::recording::Recording;
use crate::remote_swap::{Disk, RemoteSwap};

mod field;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "walls",
    summary: "ten minutes of all attacks at once, next to a tenant that notices nothing",
    measures: &[
        &[file!()],
        measured::POLICY,
        measured::DAEMON,
        measured::API,
        measured::WORKER,
        measured::SHIM,
        measured::DISKS,
    ],
    claims: claims! {
        "speed" >= 0.95 => "ratio", "Nine attackers at once leave another tenant's guest its speed";
        "bad_bytes" == 0.0 => "B",
            "Nine attackers at once damage no byte of another tenant's guest";
        "daemon_mib" <= DAEMON_MOST_MIB => "MiB", "The daemon stays small under nine attackers";
        "disks_mib" <= DISKS_MOST_MIB => "MiB",
            "The disks' process stays small under nine attackers";
        "misled_disks_mib" <= DISKS_MOST_MIB => "MiB",
            "A disks' process whose repository lies stays small";
        "repository_mib" <= REPOSITORY_MOST_MIB => "MiB",
            "A repository stays small under nine attackers";
    },
    run,
};

/// Minutes under attack.
const USUAL_MINUTES: u32 = 10;
const ATTACK: Duration = Duration::from_secs(150);
const QUIET: Duration = Duration::from_secs(40);
/// The beginning of a phase is not counted: attackers start, or their last connections end.
const SETTLE_S: f64 = 8.0;
const WITNESS: &str = "witness";
const MEMORY: Bytes = Bytes::mib(128);
const WORKLOAD: &str = "verify --mb 88";
const DISK: Disk =
    Disk { size: Bytes::mib(256), read_delay_us: 0, lent: Bytes::mib(64), cache: false };
const RATE: PagesPerMs = PagesPerMs(20);
/// The daemon's own process, without its workers, under any attack.
const DAEMON_MOST_MIB: f64 = 64.0;
/// A process of disks: its budget of 64 MiB, and its memory without clients.
const DISKS_MOST_MIB: f64 = 128.0;
/// A repository that lends 64 MiB: these, the budget, and its memory without clients.
const REPOSITORY_MOST_MIB: f64 = 192.0;

/// The most resident memory of each process, by its role.
type Most = BTreeMap<&'static str, Bytes>;

fn run(context: &Context) -> Result<Figures, LabError> {
    context.make_dir()?;
    // Attackers of other users have a directory of their own in it.
    let _open = Open::to_all(&context.dir)?;
    let swap = pinning::on_cpu(field::CPU, || {
        RemoteSwap::start(&context.dir.join("swap"), WITNESS, DISK)
    })?;
    if let Some(keeper) = swap.keeper() {
        pinning::weigh_as_a_service(keeper)?;
    }
    let guest = |name: &str, workload: &str| {
        context.guest(name, "shop", MEMORY, workload).with_shim(true).on_cpus(vec![0])
    };
    let specs = [swap.given_to(guest(WITNESS, WORKLOAD)), guest("mate", "verify --mb 40 --rate 4")];
    let mut lab = Lab::start(&context.dir.join("lab"), &context.provisions, &specs)?;
    swap.make_known(&lab)?;
    let mut field = pinning::on_cpu(field::CPU, || Field::start(&context.dir.join("field"), &lab))?;
    let settings = DaemonSettings { dedup: DedupSpec::Fixed(RATE), ..Mode::Enforce.into() };
    let daemon = pinning::on_cpu(field::CPU, || Daemon::start(&mut lab, settings))?;
    progress::wait_until_working(&lab)?;

    let (mut recording, mut most) = (Recording::begin(), Most::new());
    let (mut attacks, mut seen) = (Vec::new(), BTreeMap::new());
    let mut quiet_since = recording.phase("quiet");
    recording.record(&lab, QUIET, || daemon.latest())?;
    let minutes = context.minutes.unwrap_or(USUAL_MINUTES);
    let rounds = (Duration::from_secs(60) * minutes).as_secs().div_ceil(ATTACK.as_secs());
    for round in 1..=u32::try_from(rounds).unwrap_or(1) {
        context.say(&format!("Attack {round} of {rounds} ..."));
        let begun = recording.phase("attack");
        let attackers = field.attack(round)?;
        recording.record(&lab, ATTACK, || {
            note_memory(&mut most, &daemon, &swap, &field);
            daemon.latest()
        })?;
        let ended = recording.phase("quiet");
        note_seen(&mut seen, &attackers);
        drop(attackers);
        field.relieve()?;
        recording.record(&lab, QUIET, || daemon.latest())?;
        attacks.push(Attack { quiet_since, begun, ended, quiet_until: recording.now_s() });
        quiet_since = ended;
    }
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    field.end()?;
    swap.end()?;
    let speeds: Vec<f64> = attacks.iter().map(|attack| attack.speed(&recording)).collect();
    Ok(figures(context, &speeds, &most, &seen, bad_bytes))
}

/// A directory that every user may traverse, as long as this lives.
struct Open<'a>(&'a Path);

impl<'a> Open<'a> {
    fn to_all(dir: &'a Path) -> std::io::Result<Self> {
        fs::set_permissions(dir, Permissions::from_mode(0o711))?;
        Ok(Self(dir))
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // The next scenario reports it if it is left open.
        let _ = fs::set_permissions(self.0, Permissions::from_mode(0o700));
    }
}

/// Moments of an attack and of the quiet around it, in seconds of the recording.
struct Attack {
    quiet_since: f64,
    begun: f64,
    ended: f64,
    quiet_until: f64,
}

impl Attack {
    /// The speed of [`WITNESS`] under the attack, as a share of its speed before and after.
    fn speed(&self, recording: &Recording) -> f64 {
        let rate = |from: f64, until| recording.rate(WITNESS, from + SETTLE_S, until);
        let before = rate(self.quiet_since, self.begun);
        let after = rate(self.ended, self.quiet_until);
        rate(self.begun, self.ended) / f64::midpoint(before, after)
    }
}

fn note_memory(most: &mut Most, daemon: &Daemon, swap: &RemoteSwap, field: &Field) {
    let mut note = |what, process: Option<Identity>| {
        let Some(usage) = process.and_then(|process| process.usage()) else { return };
        let entry = most.entry(what).or_insert(Bytes::ZERO);
        *entry = (*entry).max(usage.resident);
    };
    // The process that keeps the sockets of a group's disks has one child, which serves them.
    let serving = |keeper: Option<Identity>| children_of(keeper?.pid).ok()?.into_iter().next();
    note("daemon", Some(daemon.process()));
    note("disks", serving(swap.keeper()));
    note("misled disks", serving(field.misled.as_ref().map(|child| child.identity())));
    note("repository", Some(field.repository.identity()));
}

/// Notes the last thing that each attacker saw.
fn note_seen(
    seen: &mut BTreeMap<&'static str, String>,
    attackers: &BTreeMap<&'static str, Attacker>,
) {
    for (name, attacker) in attackers {
        if let Some(last) = attacker.all_seen().pop() {
            seen.insert(name, last);
        }
    }
}

fn figures(
    context: &Context,
    speeds: &[f64],
    most: &Most,
    seen: &BTreeMap<&'static str, String>,
    bad_bytes: u64,
) -> Figures {
    let mut figures = context.figures(SCENARIO.name, u32::try_from(speeds.len()).unwrap_or(0));
    let each: Vec<String> = speeds.iter().map(|speed| format!("{speed:.3}")).collect();
    let note = format!(
        "of `{WITNESS}` under attack to that in the quiet around it, the median of {}",
        each.join(", ")
    );
    figures.tell("speed", median(speeds.iter().copied()), "ratio", note);
    let note = "wrong bytes found by `verify` in both guests";
    figures.tell("bad_bytes", bad_bytes as f64, "B", note);
    let processes = [
        ("daemon_mib", "daemon"),
        ("disks_mib", "disks"),
        ("misled_disks_mib", "misled disks"),
        ("repository_mib", "repository"),
    ];
    for (name, process) in processes {
        let mib = most.get(process).map_or(f64::NAN, |bytes| bytes.as_mib());
        figures.tell(name, mib, "MiB", "most resident under attack");
    }
    let saw = seen.iter().map(|(name, last)| format!("{name}: {last}"));
    let note =
        format!("attackers that saw something; last: {}", saw.collect::<Vec<_>>().join("; "));
    figures.check("attackers", seen.len() as f64, "count", note, Target::AtLeast(9.0));
    figures
}
