//! `overdriver-excess`: three hosts keep the space for overloads that their controller has
//! computed, and one overload uses it (Overdriver §4.2, §4.3).
//!
//! The hosts are directories with real daemons and [`OwnMemory`](crate::own_memory); etcd and the
//! controller are real, too. The overbooked guest `web` is on the first host, which has no room
//! for the guest's promise. The other two are alike: each could keep that room, or give it to three
//! local guests that page for want of it. The daemons know from the start that `web` is in
//! sustained overload for a twentieth of the time, which takes hours to learn. The local guests
//! start once the space is shared out. Then `web` gets a burst of clients.
//!
//! The host that keeps the space must have it when the burst comes, and `web` must move there,
//! once. Its local guests keep all their memory meanwhile. After the burst they should get what
//! `web` gives back.

use model::cluster::ExcessPlan;
use model::{HostName, Learned, Profile, VmName};

use super::prelude::*;
use crate::machine::Files;
use crate::own_memory::OwnMemory;
use crate::pool::{HOSTS, HostPool, LOCAL, PoolSettings};
use crate::qmp::{Qmp, QmpLine};
use crate::remote_swap::{Disk, RemoteSwap};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "overdriver-excess",
    summary: "three hosts keep space for overloads, and one overload uses it",
    measures: &[&[file!()], measured::POLICY, measured::DAEMON, measured::POOL],
    claims: claims! {
        "kept_free_mib" >= 256.0 => "MiB",
            "The host that keeps space for overloads has it when one comes, though its own guests \
             want it";
        "got_mib" >= 256.0 => "MiB", "The overloaded VM gets all that it was promised there";
        "got_s" <= 60.0 => "s", "It has that soon after the decision";
        "moves" == 1.0 => "count", "It moves once for its overload";
        "taken_mib" == 0.0 => "MiB", "No guest of that host loses memory to it";
        "back_s" => "s", "It begins to give memory back this soon after its burst";
        "gave_back_mib" >= 64.0 => "MiB",
            "After the burst other guests have what it got for its overload";
    },
    run,
};

const GUEST: &str = "web";
const GIVEN: Bytes = Bytes::mib(128);
const PROMISED: Bytes = Bytes::mib(256);
/// Memory of the three hosts. The first has 64 MiB beyond its guest, the kernel and the reserve.
/// The others have 368 MiB beyond their local guests, which want 384; the promise of `web` is 256.
const MEMORY: [Bytes; 3] = [Bytes::mib(320), Bytes::mib(880), Bytes::mib(880)];
const RESERVE: Bytes = Bytes::mib(64);
/// Working sets in MB: of `web` when calm, more in its burst, and of each local guest.
const CALM_MB: u32 = 64;
const BURST_MB: u32 = 128;
const LOCAL_MB: u32 = 190;
/// Time on the guest's clock until the burst, in which all else comes up.
const OFF: Duration = Duration::from_secs(180);
const BURST: Duration = Duration::from_secs(90);
/// Time after the burst that is observed.
const AFTER: Duration = Duration::from_secs(120);
/// Time before the burst in which the local guests have all that they can get.
const SETTLED: Duration = Duration::from_secs(15);
/// Time that the local guests need to start and to settle.
const STARTS: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(500);
/// A change of a balloon that counts.
const STEP_MIB: f64 = 4.0;
/// Local guests of each of the two hosts.
const LOCALS: usize = 3;

/// The pool at one moment. Memory is in MiB, and NaN where there is none.
#[derive(Debug, Clone, Copy)]
struct PoolMoment {
    /// Seconds since the overbooked guest opened.
    at: f64,
    /// The host that runs the overbooked guest.
    on: Option<usize>,
    /// Whether the controller has decided a move by now.
    is_decided: bool,
    /// Memory of the overbooked guest.
    web: f64,
    /// Memory of the local guests of the host that keeps the space, and of the other one.
    kept_locals: f64,
    other_locals: f64,
    /// Memory that the first of these hosts could give.
    free: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    context.make_dir()?;
    let near = context.dir.join("a");
    let far = ["b", "c"].map(|host| context.dir.join(host));
    let disk = Disk { size: PROMISED, read_delay_us: 0, lent: PROMISED, cache: false };
    let swap = RemoteSwap::start(&context.dir.join("swap"), GUEST, disk)?;
    let (on, off) = (BURST.as_secs(), OFF.as_secs());
    let load = format!("web --rate 50 --mb {CALM_MB} --burst 12:{on}:{off} --burst-mb {BURST_MB}");
    let guest = context.guest(GUEST, "pool", GIVEN, &load).up_to(PROMISED);
    let mut lab = Lab::start(&near, &context.provisions, &[swap.given_to(guest)])?;
    lab.wait_for("the guest to be open", LIMIT, |lab| {
        let newest = lab.machine(GUEST)?.last_metric();
        Ok(newest.is_some_and(|sample| sample.value.get("dropped").is_some()))
    })?;
    let opened = Instant::now();
    let settings = PoolSettings {
        guest: GUEST,
        given: GIVEN,
        promised: PROMISED,
        others: &["local-*"],
        budget: Bytes((LOCALS as u64 + 1) * PROMISED.0),
        balloon: &["observe", "enforce", "enforce"],
        host: &format!("reserve = \"{}B\"", RESERVE.0),
        overload: "interval_s = 2\npages_per_s = 300\nwindow = 4\nsustained = 3",
        pool: "rest_s = 10\nprecopy_s = 6",
        members: 1,
    };
    let mut pool = HostPool::new(&lab, &far, &settings)?;
    pool.have(&MEMORY, PROMISED)?;
    let text = serde_json::to_vec(&learned()).map_err(std::io::Error::other)?;
    for dir in &pool.dirs {
        std::fs::write(dir.join("run/state/learned.json"), &text)?;
    }
    for process in 0..=pool.controller() {
        pool.start(process)?;
    }
    let keeper = keeper(&pool, opened)?;
    context.say(&format!("host {} keeps the space", HOSTS[keeper]));
    let mut locals = far
        .iter()
        .zip(&HOSTS[1..])
        .map(|(dir, host)| {
            Lab::start(&dir.join(LOCAL), &context.provisions, &of_host(context, host))
        })
        .collect::<Result<Vec<Lab>, LabError>>()?;
    let mut rows = Vec::new();
    while opened.elapsed() < OFF + BURST + AFTER {
        rows.push(look(&pool, keeper, &locals, opened));
        interrupt::sleep(POLL)?;
    }
    drop(pool);
    for lab in locals.iter_mut().chain([&mut lab]) {
        lab.stop()?;
    }
    swap.end()?;
    let mut figures = context.figures(SCENARIO.name, 1);
    add_figures(&mut figures, &rows, keeper);
    plot(&rows, keeper).write(&near, &mut figures)?;
    Ok(figures)
}

/// The local guests of a host. They page a little: their working sets are larger than their
/// memory.
fn of_host(context: &Context, host: &str) -> [MachineSpec; LOCALS] {
    std::array::from_fn(|n| {
        let (name, load) = (format!("local-{host}-{n}"), format!("web --rate 10 --mb {LOCAL_MB}"));
        let guest = context.guest(&name, "pool", GIVEN, &load).up_to(PROMISED);
        guest.seeded(n as u64).with_swap(PROMISED, None)
    })
}

/// The history of `web` as a daemon has it after hours: 5 % of the time in sustained overload.
fn learned() -> Learned {
    let profile = Profile {
        intervals: 5_000,
        transient: 250,
        sustained: 250,
        lengths: vec![100, 50],
        sustained_overloads: 5,
    };
    let calm = Profile { intervals: 5_000, ..Profile::default() };
    let names = |host: &&str| [0, 1, 2].map(|n| VmName::from(format!("local-{host}-{n}").as_str()));
    let locals = HOSTS[1..].iter().flat_map(names).map(|name| (name, calm.clone()));
    let profiles = locals.chain([(VmName::from(GUEST), profile)]).collect();
    Learned { profiles, ..Learned::default() }
}

/// The host that keeps room for the guest, once the controller has shared the space out.
fn keeper(pool: &HostPool, opened: Instant) -> Result<usize, LabError> {
    loop {
        let shares = plan(pool).shares;
        let keeps = |host: &str| {
            shares.get(&HostName::from(host)).is_some_and(|share| share.targets >= PROMISED)
        };
        if let Some(host) = HOSTS.iter().position(|host| keeps(host)) {
            return Ok(host);
        }
        if opened.elapsed() > OFF.saturating_sub(STARTS) {
            let what = "the controller to share out the space".to_owned();
            return Err(LabError::Timeout { what, limit: opened.elapsed() });
        }
        interrupt::sleep(POLL)?;
    }
}

/// The plan in force; an empty one if the store does not answer.
fn plan(pool: &HostPool) -> ExcessPlan {
    pool.records().map(|records| records.excess).unwrap_or_default()
}

fn look(pool: &HostPool, keeper: usize, locals: &[Lab], opened: Instant) -> PoolMoment {
    let mib = |bytes: Option<Bytes>| bytes.map_or(f64::NAN, Bytes::as_mib);
    let all = |lab: &Lab| lab.machines().iter().map(|machine| mib(machine.balloon().ok())).sum();
    let on = (0..pool.dirs.len()).find(|host| pool.runs(*host));
    let balloon = |host: usize| {
        let line = QmpLine::new(&Files::new(&pool.dirs[host], GUEST).lab_socket);
        line.with(Qmp::balloon).ok().map(Bytes)
    };
    PoolMoment {
        at: opened.elapsed().as_secs_f64(),
        on,
        is_decided: pool.records().is_some_and(|records| !records.intents.is_empty()),
        web: mib(on.and_then(balloon)),
        kept_locals: all(&locals[keeper - 1]),
        other_locals: all(&locals[2 - keeper]),
        free: mib(pool.memory(keeper).map(OwnMemory::available)) - RESERVE.as_mib(),
    }
}

fn add_figures(figures: &mut Figures, rows: &[PoolMoment], keeper: usize) {
    let (burst, end) = (OFF.as_secs_f64(), (OFF + BURST).as_secs_f64());
    let decided = rows.iter().position(|row| row.is_decided).unwrap_or(rows.len());
    let settled: Vec<&PoolMoment> =
        rows[..decided].iter().filter(|row| row.at >= burst - SETTLED.as_secs_f64()).collect();
    let of_settled = |of: fn(&PoolMoment) -> f64| settled.iter().map(move |row| of(row));
    let note = "the least free memory of the host that keeps the space, before the move";
    figures.tell("kept_free_mib", of_settled(|row| row.free).smallest(), "MiB", note);
    let withheld = of_settled(|row| row.other_locals - row.kept_locals).smallest();
    let note = "its local guests have so much less than those of the host that keeps none";
    figures.check("withheld_mib", withheld, "MiB", note, Target::AtLeast(64.0));

    let there: Vec<&PoolMoment> = rows.iter().filter(|row| row.on == Some(keeper)).collect();
    let got = there.iter().filter(|row| row.at <= end).map(|row| row.web).largest();
    figures.tell("got_mib", got, "MiB", "the VM's memory on the host that keeps the space, most");
    let has_all = |row: &&&PoolMoment| row.web >= PROMISED.as_mib() - STEP_MIB;
    let seconds = |from: Option<&PoolMoment>, to: Option<&PoolMoment>| match (from, to) {
        (Some(from), Some(to)) => to.at - from.at,
        _ => f64::NAN,
    };
    let got_s = seconds(rows.get(decided), there.iter().find(has_all).copied());
    figures.tell("got_s", got_s, "s", "from the decision to that memory");
    let hosts: Vec<usize> = rows.iter().filter_map(|row| row.on).collect();
    let moves = hosts.windows(2).filter(|pair| pair[0] != pair[1]).count();
    figures.tell("moves", moves as f64, "count", "the VM was seen on another host");

    let before = rows.get(decided).map_or(f64::NAN, |row| row.kept_locals);
    let least = there.iter().filter(|row| row.at <= end).map(|row| row.kept_locals).smallest();
    let taken = before - least;
    let taken = if taken < STEP_MIB { 0.0 } else { taken };
    figures.tell("taken_mib", taken, "MiB", "taken from its local guests, decision to burst's end");

    let after: Vec<&PoolMoment> = there.iter().filter(|row| row.at > end).copied().collect();
    let gives = |row: &&&PoolMoment| row.web <= got - STEP_MIB;
    let back = after.iter().find(gives).map_or(f64::NAN, |row| row.at - end);
    figures.tell("back_s", back, "s", "from the burst's end to the first memory back");
    let lost = got - after.last().map_or(f64::NAN, |row| row.web);
    let gain = after.last().map_or(f64::NAN, |row| row.kept_locals) - before;
    let note = "lost by the VM and gained by local guests, two minutes after the burst";
    figures.tell("gave_back_mib", [lost, gain].into_iter().smallest(), "MiB", note);
}

fn plot(rows: &[PoolMoment], keeper: usize) -> Page {
    let line = |name: &str, of: fn(&PoolMoment) -> f64| {
        Line::new(name, rows.iter().map(move |row| (row.at, of(row))))
    };
    let lines = [
        line("the overbooked guest", |row| row.web),
        line("local guests where space is kept", |row| row.kept_locals),
        line("local guests of the other host", |row| row.other_locals),
        line("free where space is kept", |row| row.free),
    ];
    let mut page = Page::default();
    page.add(
        &format!("Host {} keeps the space", HOSTS[keeper]),
        Chart::linear("MiB", "seconds", lines),
    );
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The guest moves 10 s after its burst has begun, and gives back 10 s after it.
    fn course() -> Vec<PoolMoment> {
        let row = |second: u64| {
            let at = second as f64;
            let is_there = second >= 192;
            let is_over = second >= 280;
            PoolMoment {
                at,
                on: Some(if is_there { 2 } else { 0 }),
                is_decided: second >= 190,
                web: if is_there && !is_over { 256.0 } else { 128.0 },
                kept_locals: if is_over { 460.0 } else { 360.0 },
                other_locals: 512.0,
                free: if is_there { 16.0 } else { 260.0 },
            }
        };
        (100..390).map(row).collect()
    }

    fn figures(rows: &[PoolMoment]) -> Figures {
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, rows, 2))
    }

    fn changed(change: impl Fn(&mut PoolMoment)) -> Figures {
        let mut rows = course();
        rows.iter_mut().for_each(change);
        figures(&rows)
    }

    #[test]
    fn a_course_as_it_should_be_meets_all() {
        let good = figures(&course());
        for name in ["kept_free_mib", "got_mib", "got_s", "moves", "taken_mib", "gave_back_mib"] {
            assert!(good.met(name), "{name}");
        }
        let value = |name: &str| good.get(name).unwrap().value;
        let found = ["got_s", "moves", "back_s", "gave_back_mib"].map(value);
        assert_eq!(found, [2.0, 1.0, 10.0, 100.0]);
    }

    #[test]
    fn each_fault_of_a_course_misses() {
        assert!(!changed(|row| row.free = 200.0).met("kept_free_mib"));
        assert!(!changed(|row| row.other_locals = row.kept_locals).met("withheld_mib"));
        assert!(!changed(|row| row.on = Some(1)).met("got_mib"));
        assert!(!changed(|row| row.is_decided = false).met("got_s"));
        let fro = |row: &mut PoolMoment| row.on = if row.at > 300.0 { Some(1) } else { row.on };
        assert!(!changed(fro).met("moves"));
        let squeezed =
            |row: &mut PoolMoment| row.kept_locals -= if row.at > 195.0 { 50.0 } else { 0.0 };
        assert!(!changed(squeezed).met("taken_mib"));
        assert!(!changed(|row| row.kept_locals = 360.0).met("gave_back_mib"));
        assert!(!changed(|row| row.web = f64::NAN).met("gave_back_mib"));
        assert!(!figures(&[]).met("kept_free_mib"));
    }
}
