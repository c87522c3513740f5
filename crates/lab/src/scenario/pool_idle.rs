//! `pool-idle`: the writes of a host with an idle guest to its pool's store.
//!
//! The daemon is the real one, and so is etcd, with one member. Etcd counts each change of its
//! keys in its revision. The scenario reads it once the host has reported its guest and some time
//! has passed, and again a minute later. Renewing the host's lease changes no key, and does not
//! count. A part of a report is the host's free memory, so other programs on the host count. A
//! daemon with nothing to move looks every three seconds and waits for five between two reports,
//! so these alone are 0.17 a second at most.

use cluster::records::Records;
use cluster::store::Snapshot;
use model::{HostName, VmName};

use super::prelude::*;
use crate::pool::{HOSTS, HostPool, PoolSettings};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "pool-idle",
    summary: "what a host whose guest does nothing writes into its pool's store",
    measures: &[&[file!()], measured::DAEMON, measured::POOL],
    claims: claims! {
        "writes_per_s" <= 0.2 => "count",
            "A host whose guest does nothing writes little into its pool's store";
    },
    run,
};

const GUEST: &str = "idles";
/// The guest's host is the first one; the other is never started.
const HOST: usize = 0;
/// The longest time until the first report with the guest in it.
const LIMIT: Duration = Duration::from_secs(120);
/// Time for a freshly booted guest to come to rest.
const SETTLE: Duration = Duration::from_secs(30);
const MEASURE: Duration = Duration::from_secs(60);

fn run(context: &Context) -> Result<Figures, LabError> {
    let (given, promised) = (Bytes::mib(128), Bytes::mib(256));
    let spec = MachineSpec::new(GUEST, "pool", given, promised, "idle");
    context.make_dir()?;
    let (near, far) = (context.dir.join("a"), context.dir.join("b"));
    let mut lab = Lab::start(&near, &context.provisions, std::slice::from_ref(&spec))?;
    let settings = PoolSettings {
        guest: GUEST,
        given,
        promised,
        others: &[],
        budget: promised,
        balloon: &["enforce"; 2],
        host: "",
        overload: "",
        pool: "",
        members: 1,
    };
    let mut pool = HostPool::new(&lab, &[far], &settings)?;
    pool.start(HOST)?;
    let begun = Instant::now();
    while !is_reported(&read(&pool)?) {
        interrupt::sleep(Duration::from_millis(200))?;
        if begun.elapsed() > LIMIT {
            let what = "the host's report".to_owned();
            return Err(LabError::Timeout { what, limit: LIMIT });
        }
    }
    interrupt::sleep(SETTLE)?;
    let (first, begun) = (read(&pool)?, Instant::now());
    interrupt::sleep(MEASURE)?;
    let (last, took) = (read(&pool)?, begun.elapsed());
    drop(pool);
    lab.stop()?;

    let writes = (last.revision - first.revision) as f64;
    let mut figures = context.figures(SCENARIO.name, 1);
    let note = "changes of etcd's keys; to keep a seat is none";
    figures.tell("writes_per_s", writes / took.as_secs_f64(), "1/s", note);
    let is_there = f64::from(u8::from(is_reported(&last)));
    let note = "the host has its seat at the end, and its guest stands in its report";
    figures.check("reported", is_there, "bool", note, Target::Equals(1.0));
    let size = last.values.values().map(Vec::len).sum::<usize>() as f64;
    figures.tell("kept_bytes", size, "B", "all values in the store");
    Ok(figures)
}

fn read(pool: &HostPool) -> Result<Snapshot, LabError> {
    Ok(pool.snapshot().map_err(std::io::Error::other)?)
}

/// Whether the host's lease lives, and its report names the guest.
fn is_reported(snapshot: &Snapshot) -> bool {
    let (records, host, guest) =
        (Records::of(snapshot), HostName::from(HOSTS[HOST]), VmName::from(GUEST));
    let report = records.reports.get(&host);
    records.seated.contains(&host) && report.is_some_and(|report| report.vms.contains_key(&guest))
}
