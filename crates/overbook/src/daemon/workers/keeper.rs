//! One group's worker: started when there is work, watched, and restarted when it ends.
//!
//! The task owns the process and its pipes. Orders come over a watch channel (only the newest
//! counts). Reports and the worker's state go into a mutex that the loop copies from. A worker
//! that ends by itself is restarted after a pause that doubles. A worker without work gets empty
//! orders, gives everything back, and ends when its standard input is closed. When the daemon ends,
//! only the input is closed: shared and paged-out memory stays as it is.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::{GroupName, PagesPerMs, Reading, VmName, WorkerReading};
use sys::clock::boot_now;
use sys::process::{Child, Identity, Signal, Spawn};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::cgroup::{CgroupMembership, CgroupRecord};
use crate::daemon::log;
use crate::helper;
use worker::{Order, Orders, Report, VmReport};

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(30);
/// A worker that has run this long resets the pause. A faulty worker ends sooner, or else costs
/// at most one start in this time.
const GOOD_RUN: Duration = Duration::from_secs(3);
/// Interval at which orders are repeated and the worker's usage is read.
const REPEAT: Duration = Duration::from_secs(1);
/// Timeout for a worker to give everything back and end.
const GRACE: Duration = Duration::from_secs(2);
/// A worker that sends no report for this long is stuck; it reports once a second.
const MOST_SILENCE: Duration = Duration::from_secs(15);
/// Time that a worker's process may take to end after its output has closed.
const LAST_WORDS: Duration = Duration::from_millis(50);
/// Maximum length of a report: thousands of VMs with their curves.
const MOST_LINE: usize = 16 << 20;

/// The loop's handle of a worker. Dropping it ends the worker.
#[derive(Debug)]
pub(super) struct Keeper {
    wanted: watch::Sender<DesiredWorker>,
    known: Arc<Mutex<WorkerSnapshot>>,
    /// Whether a worker runs.
    runs: watch::Receiver<bool>,
    task: AbortHandle,
}

/// The loop's orders for a worker.
#[derive(Clone, Debug, Default, PartialEq)]
struct DesiredWorker {
    orders: Orders,
    /// The group that its CPU time is charged to, if it is not its own.
    payer: Option<GroupName>,
    /// Whether the worker ends and leaves its VMs as they are.
    ends: bool,
}

impl DesiredWorker {
    fn has_work(&self) -> bool {
        !self.orders.vms.is_empty() && !self.ends
    }
}

/// State of a group's worker, and its reports.
#[derive(Debug, Default)]
struct WorkerSnapshot {
    worker: WorkerReading,
    /// CPU time of ended workers.
    ended_cpu_us: u64,
    reports: BTreeMap<VmName, Reading<VmReport>>,
}

impl Keeper {
    /// Keeps a worker for `group` from now on.
    pub(super) fn start(group: GroupName, cgroups: CgroupRecord) -> Self {
        let (wanted, inbox) = watch::channel(DesiredWorker::default());
        let (running, runs) = watch::channel(false);
        let known = Arc::<Mutex<WorkerSnapshot>>::default();
        let task = KeeperTask { group, cgroups, inbox, known: Arc::clone(&known), running };
        let task = tokio::spawn(task.run()).abort_handle();
        Self { wanted, known, runs, task }
    }

    /// Sets the VMs to work on.
    pub(super) fn order(&self, vms: BTreeMap<VmName, Order>) {
        self.change(|wanted| wanted.orders.vms = vms);
    }

    /// Ends the worker. Its VMs stay as they are: the next daemon's worker goes on with them.
    pub(super) fn end(&self) {
        self.change(|wanted| wanted.ends = true);
    }

    /// Sets the tables of pages to look for first.
    pub(super) fn know(&self, tables: &[PathBuf]) {
        self.change(|wanted| wanted.orders.tables = tables.to_vec());
    }

    /// Sets the scan rate for identical pages, and the group that pays if it is not its own.
    pub(super) fn scan(&self, rate: Option<PagesPerMs>, payer: Option<GroupName>) {
        self.change(|wanted| {
            wanted.orders.scan_rate = rate;
            wanted.payer = payer;
        });
    }

    fn change(&self, change: impl FnOnce(&mut DesiredWorker)) {
        self.wanted.send_if_modified(|wanted| {
            let before = wanted.clone();
            change(wanted);
            *wanted != before
        });
    }

    /// The VMs in the latest order.
    pub(super) fn vms(&self) -> Vec<VmName> {
        self.wanted.borrow().orders.vms.keys().cloned().collect()
    }

    /// State of the worker.
    pub(super) fn reading(&self) -> WorkerReading {
        lock(&self.known).worker.clone()
    }

    /// The worker's latest reports.
    pub(super) fn reports(&self) -> BTreeMap<VmName, Reading<VmReport>> {
        lock(&self.known).reports.clone()
    }

    /// Waits until no worker runs. A worker that was told to end takes at most twice [`GRACE`].
    pub(super) fn idle(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut runs = self.runs.clone();
        async move {
            // An error means that the task and its worker are gone.
            let _ = timeout(GRACE * 2, runs.wait_for(|runs| !runs)).await;
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn lock(known: &Mutex<WorkerSnapshot>) -> MutexGuard<'_, WorkerSnapshot> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

struct KeeperTask {
    group: GroupName,
    cgroups: CgroupRecord,
    inbox: watch::Receiver<DesiredWorker>,
    known: Arc<Mutex<WorkerSnapshot>>,
    running: watch::Sender<bool>,
}

/// A running worker.
struct RunningWorker {
    child: Child,
    /// `None`: closed, which tells the worker to end.
    orders: Option<pipe::Sender>,
    reports: BufReader<pipe::Receiver>,
    line: Vec<u8>,
    /// `None`: the worker runs in the daemon's cgroup.
    seat: Option<CgroupMembership>,
}

impl Drop for RunningWorker {
    fn drop(&mut self) {
        // The daemon may be ending too: then no one can reap the child or report an error.
        let _ = self.child.signal(Signal::KILL);
    }
}

impl KeeperTask {
    async fn run(mut self) {
        let mut pause = FIRST_PAUSE;
        // An error means that the loop has dropped the handle.
        while self.inbox.wait_for(DesiredWorker::has_work).await.is_ok() {
            let started = Instant::now();
            self.running.send_replace(true);
            let ended = self.serve().await;
            self.note_end(&ended);
            self.running.send_replace(false);
            if ended.is_ok() {
                continue;
            }
            if started.elapsed() >= GOOD_RUN {
                pause = FIRST_PAUSE;
            }
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
            lock(&self.known).worker.restarts += 1;
        }
    }

    /// Runs one worker until it has no more work, or returns why it ended earlier.
    async fn serve(&mut self) -> Result<(), String> {
        let mut worker = self.spawn().map_err(|error| format!("cannot be started: {error}"))?;
        let ended = self.attend(&mut worker).await;
        // After an orderly end the process has gone, and the signal fails.
        let _ = worker.child.signal(Signal::KILL);
        if helper::ended(&mut worker.child, MOST_SILENCE).await.is_none() {
            log::warn(&format!("the killed worker of group {} does not end", self.group));
        }
        ended
    }

    async fn attend(&mut self, worker: &mut RunningWorker) -> Result<(), String> {
        let mut heard = Instant::now();
        let mut repeat = interval(REPEAT);
        repeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = self.inbox.changed() => {
                    let ends = changed.is_err() || self.inbox.borrow().ends;
                    if !ends {
                        self.pass_orders(worker).await?;
                    }
                    if ends || self.inbox.borrow().orders.vms.is_empty() {
                        return worker.end().await;
                    }
                }
                _ = repeat.tick() => {
                    if heard.elapsed() > MOST_SILENCE {
                        return Err(format!("has not reported for {} s", MOST_SILENCE.as_secs()));
                    }
                    self.pass_orders(worker).await?;
                    self.measure(worker.child.identity());
                }
                read = worker.reports.read_until(b'\n', &mut worker.line) => {
                    match read {
                        Ok(0) => return Err(worker.last_words().await),
                        Ok(_) => {
                            heard = Instant::now();
                            self.note_report(worker)?;
                        }
                        Err(error) => return Err(error.to_string()),
                    }
                }
            }
        }
    }

    fn spawn(&self) -> io::Result<RunningWorker> {
        let (stdin, orders) = io::pipe()?;
        let (reports, stdout) = io::pipe()?;
        // Always runs this same program, even after an upgrade has replaced its file.
        let spawn = Spawn::new("/proc/self/exe").arg("worker").arg(self.group.as_str());
        let child = spawn.stdin(stdin).stdout(stdout).die_with_parent().spawn()?;
        let seat = CgroupMembership::take(&self.group, child.identity().pid, &self.cgroups);
        let mut known = lock(&self.known);
        known.worker.pid = Some(child.identity().pid);
        if let Err(error) = &seat
            && known.worker.restarts == 0
        {
            let group = &self.group;
            log::info(&format!("the worker of group {group} has no cgroup of its own: {error}"));
        }
        Ok(RunningWorker {
            child,
            orders: Some(pipe::Sender::from_owned_fd(orders.into())?),
            reports: BufReader::new(pipe::Receiver::from_owned_fd(reports.into())?),
            line: Vec::new(),
            seat: seat.ok(),
        })
    }

    async fn pass_orders(&mut self, worker: &mut RunningWorker) -> Result<(), String> {
        let DesiredWorker { orders, payer, .. } = self.inbox.borrow_and_update().clone();
        self.charge(worker, payer.as_ref());
        let mut line = serde_json::to_vec(&orders).map_err(|error| error.to_string())?;
        line.push(b'\n');
        // A worker that does not read is stuck.
        let Some(orders) = &mut worker.orders else { return Ok(()) };
        match timeout(GRACE, orders.write_all(&line)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(worker.last_words().await),
            Err(_) => Err("does not read its orders".to_owned()),
        }
    }

    /// Charges `payer` for the worker. A failure shows in the reported payer, and the next orders
    /// try again.
    fn charge(&self, worker: &mut RunningWorker, payer: Option<&GroupName>) {
        let Some(seat) = &mut worker.seat else { return };
        if let Err(error) = seat.charge(payer) {
            let to = payer.unwrap_or(&self.group);
            log::warn(&format!(
                "the worker of group {} is not charged to {to}: {error}",
                self.group
            ));
        }
        lock(&self.known).worker.payer = seat.payer().cloned();
    }

    fn note_report(&self, worker: &mut RunningWorker) -> Result<(), String> {
        let line = std::mem::take(&mut worker.line);
        if line.len() > MOST_LINE {
            return Err("sent a report that is too long".to_owned());
        }
        let report: Report = serde_json::from_slice(&line)
            .map_err(|error| format!("sent a report that makes no sense: {error}"))?;
        // The report may have waited in the pipe, but it cannot be from the future.
        let at = report.at.min(boot_now());
        let reports = report.vms.into_iter().map(|(vm, r)| (vm, Reading::new(r, at)));
        let mut known = lock(&self.known);
        known.reports = reports.collect();
        known.worker.pool = report.pool;
        known.worker.known_pages = report.known_pages;
        if known.worker.why_not_known != report.why_not_known {
            if let Some(why) = &report.why_not_known {
                log::warn(&format!("cannot use the page tables of group {}: {why}", self.group));
            }
            known.worker.why_not_known = report.why_not_known;
        }
        Ok(())
    }

    fn measure(&self, worker: Identity) {
        let Some(usage) = worker.usage() else { return };
        let cpu_us = u64::try_from(usage.cpu.as_micros()).unwrap_or(u64::MAX);
        let mut known = lock(&self.known);
        known.worker.cpu_us = known.ended_cpu_us.saturating_add(cpu_us);
        known.worker.resident = usage.resident;
    }

    fn note_end(&self, ended: &Result<(), String>) {
        let mut known = lock(&self.known);
        known.ended_cpu_us = known.worker.cpu_us;
        known.reports.clear();
        known.worker.pid = None;
        known.worker.resident = model::Bytes::ZERO;
        known.worker.pool = model::Bytes::ZERO;
        known.worker.known_pages = 0;
        known.worker.payer = None;
        if let Err(why) = ended {
            log::warn(&format!("the worker of group {} {why}", self.group));
            known.worker.last_error = Some(why.clone());
        }
    }
}

impl RunningWorker {
    /// Tells the worker to end. It first gives back the memory of the VMs that are in its orders no
    /// more.
    async fn end(&mut self) -> Result<(), String> {
        self.orders = None;
        let ended = helper::ended(&mut self.child, GRACE).await;
        ended.map(drop).ok_or_else(|| "did not end when it was told to".to_owned())
    }

    /// How the worker ended.
    async fn last_words(&mut self) -> String {
        let ended = helper::ended(&mut self.child, LAST_WORDS).await;
        ended.map_or("closed its output".to_owned(), |status| format!("ended ({status})"))
    }
}
