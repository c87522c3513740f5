//! `pool-idle`: what a host whose guest does nothing writes into its pool's store.
//!
//! The daemon is the real one, and so is etcd, with one member. etcd counts each change of its keys
//! in its revision: that is read once the host has reported its guest and some time has passed, and
//! again a minute later. To keep a seat prolongs a lease, which changes no key, and is not counted.
//! A report is written when something in it has changed by 16 MiB. Part of it is how much memory
//! the host has left: other programs on it count. A daemon with nothing to move looks every three
//! seconds and waits for five between two reports, so these alone are 0.17 a second at most.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cluster::records::Records;
use cluster::store::etcd::Etcd;
use cluster::store::{Snapshot, Store};
use model::{Bytes, HostName, VmName};
use sys::process::{Signal, Spawn};
use tokio::runtime::Runtime;

use super::{Context, Scenario};
use crate::etcd::Members;
use crate::figures::{Figure, Figures, Target};
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::{inside, interrupt};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "pool-idle",
    summary: "what a host whose guest does nothing writes into its pool's store",
    run,
};

const GUEST: &str = "idles";
const HOST: &str = "a";
/// How long the first report with the guest in it may take.
const LIMIT: Duration = Duration::from_secs(120);
/// Then a guest that has just booted comes to rest.
const SETTLE: Duration = Duration::from_secs(30);
const MEASURE: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_secs(10);

fn run(context: &Context) -> Result<Figures, LabError> {
    let spec = MachineSpec::new(GUEST, "shop", Bytes::mib(128), Bytes::mib(256), "idle");
    let dir = &context.dir;
    let mut lab = Lab::start(dir, &context.provisions, std::slice::from_ref(&spec))?;
    let members = Members::start(1, dir)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let store = runtime.block_on(Etcd::connect(&members.endpoints(), None, "default"));
    let store: Arc<dyn Store> = Arc::new(store.map_err(std::io::Error::other)?);
    let config = configure(dir, &members.endpoints())?;
    let log = fs::File::create(dir.join("log/daemon"))?;
    let spawn = Spawn::new(inside::built("overbook")?).arg("--config").arg(config).arg("daemon");
    let mut daemon = spawn.output_to(log)?.die_with_parent().spawn()?;
    let begun = Instant::now();
    while !is_reported(&read(&runtime, &*store)?) {
        interrupt::sleep(Duration::from_millis(200))?;
        if begun.elapsed() > LIMIT {
            let what = "the host's report".to_owned();
            return Err(LabError::Timeout { what, limit: LIMIT });
        }
    }
    interrupt::sleep(SETTLE)?;
    let (first, begun) = (read(&runtime, &*store)?, Instant::now());
    interrupt::sleep(MEASURE)?;
    let (last, took) = (read(&runtime, &*store)?, begun.elapsed());
    daemon.signal(Signal::TERM)?;
    daemon.wait_for(GRACE)?;
    drop(members);
    lab.stop()?;

    #[expect(clippy::cast_precision_loss, reason = "a figure is a float")]
    let writes = (last.revision - first.revision) as f64;
    let mut figures = context.figures(SCENARIO.name, 1);
    let note = "changes of etcd's keys; to keep a seat is none";
    let figure = Figure::new(writes / took.as_secs_f64(), "1/s", note);
    figures.add("writes_per_s", figure.target(Target::AtMost(0.2)));
    let is_there = f64::from(u8::from(is_reported(&last)));
    let note = "the host has its seat at the end, and its guest stands in its report";
    figures.add("reported", Figure::new(is_there, "bool", note).target(Target::Equals(1.0)));
    #[expect(clippy::cast_precision_loss, reason = "a figure is a float")]
    let size = last.values.values().map(Vec::len).sum::<usize>() as f64;
    figures.add("kept_bytes", Figure::new(size, "B", "all values in the store"));
    Ok(figures)
}

fn read(runtime: &Runtime, store: &dyn Store) -> Result<Snapshot, LabError> {
    Ok(runtime.block_on(store.read("")).map_err(std::io::Error::other)?)
}

/// The host has a seat, and its report names the guest.
fn is_reported(snapshot: &Snapshot) -> bool {
    let (records, host, guest) = (Records::of(snapshot), HostName::from(HOST), VmName::from(GUEST));
    let report = records.reports.get(&host);
    records.seated.contains(&host) && report.is_some_and(|report| report.vms.contains_key(&guest))
}

fn configure(dir: &Path, endpoints: &[String]) -> Result<std::path::PathBuf, LabError> {
    fs::create_dir_all(dir.join("run/state"))?;
    fs::create_dir_all(dir.join("etc"))?;
    let shown = dir.display();
    let text = format!(
        "[host]\nqmp = [\"{shown}/qmp/*.sock\"]\nstate = \"{shown}/run/state\"\n\
         [mode]\nballoon = \"enforce\"\n\
         [api]\nsocket = \"{shown}/run/overbook.sock\"\n\
         [group.shop]\nvms = [\"{GUEST}\"]\nbase = \"128MiB\"\nmax = \"256MiB\"\n\
         [pool]\nhost = \"{HOST}\"\netcd = {endpoints:?}\nmovable = [\"{GUEST}\"]\n"
    );
    let config = dir.join("etc/overbook.toml");
    fs::write(&config, text)?;
    Ok(config)
}
