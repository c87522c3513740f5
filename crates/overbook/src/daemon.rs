//! The host daemon: a loop that runs once a second, and the tasks around it that answer clients.
//!
//! ```text
//!   every second    Drivers::view, Workers, HostKsm ─► policy::tick ─► Drivers::act
//!                   ─► Published ─► API, history, log
//!   SIGHUP          the configuration is read again; if it is faulty or takes much, the last good
//!                   one stays in force
//!   a question      pause, resume, release, rows of the history
//!   SIGTERM         ends; the guests' memory stays as it is (`overbook release` gives back)
//! ```
//!
//! The loop owns the policy's memory and the drivers. It never waits for QEMU (the drivers' tasks
//! do), for readers (a watch channel) or for the disk (the history has a thread). The daemon may
//! be killed at any instant: everything that it needs to undo an action is in the [`journal`]
//! before the action, and it learns again within seconds how the guests behave.
//!
//! [`journal`]: drivers::journal

mod api;
mod disks;
mod error;
mod ksm;
mod log;
mod notify;
mod on_disk;
mod proxmox;
mod steer;
mod workers;
mod world;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ::api::published::{Latest, Lender, MemberState, Published, TickTimes};
use drivers::journal::Journal;
use drivers::{BootClock, Drivers, Records, Settings, ksm::Hand};
use model::{Bytes, Hold, Millis, Mode, Pauses, Spec, VmName};
use policy::{Case, Kept, Memory, tuning};
use sys::clock::boot_now;
use sys::process::allow_many_files;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    time::{MissedTickBehavior, interval},
};

use self::disks::Disks;
use crate::{
    config_files::{CONFIRM, Reloader},
    foreseen::Foreseen,
    history::{self, History},
    http::{Ask, Doors, LoopAnswer, Question},
    learned_file::LearnedFile,
    lock::{Holder, StateLock},
    pause_file::PauseFile,
    pool::apart::Apart,
    pool::member::Member,
    release,
};
pub use error::DaemonError;
use ksm::HostKsm;
use workers::Workers;
use world::World;

/// Length of the loop's queue of questions; further questions wait outside.
const ASKS: usize = 16;
/// How long the host's repository is believed to be there without a word from it.
const LENDER_SILENT: Duration = Duration::from_secs(30);
/// Timeout for helper threads when the daemon ends.
const FAREWELL: Duration = Duration::from_secs(2);
/// The longest wait for the VMs that run already, before the daemon counts as up.
const FIRST_LOOK: Duration = Duration::from_secs(3);

/// Runs the daemon until it is asked to end.
///
/// # Errors
/// When it cannot start. Once it runs, nothing ends it but a signal.
pub fn run(config: &Path) -> Result<(), DaemonError> {
    // Each VM takes some files, in this process and in its children.
    if let Err(error) = allow_many_files() {
        log::warn(&format!("the limit of open files stays as it is: {error}"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let (daemon, doors) = Daemon::start(config)?;
        daemon.run(doors).await
    });
    // A helper thread may hang in the kernel, on a disk or on the memory map of a stuck QEMU.
    runtime.shutdown_timeout(FAREWELL);
    outcome
}

struct Daemon {
    reloader: Reloader,
    drivers: Drivers,
    workers: Workers,
    ksm: HostKsm,
    disks: Disks,
    memory: Memory,
    learned: LearnedFile,
    pause: PauseFile,
    history: History,
    history_file: PathBuf,
    ticks: TickTimes,
    log: log::Log,
    pool: Option<watch::Receiver<MemberState>>,
    /// The host's repository, and when it was last heard of.
    lender: Option<(Lender, Instant)>,
    /// The latest tick; `None`: there was none yet.
    latest: Option<Arc<Published>>,
    _lock: StateLock,
}

/// The memory that this host keeps for its pool.
fn kept(pool: &MemberState) -> Kept {
    Kept { targets: pool.share.targets, arrived: pool.arrived.clone() }
}

/// The memory that the host's repository may hold: its share in the pool, and beyond that only
/// memory that no VM wants. Wanted memory comes back by an eighth at a time.
fn may_hold(latest: &Published, lender: Lender) -> Bytes {
    let share = latest.pool.as_ref().map_or(Bytes::ZERO, |pool| pool.share.repositories);
    let of_spare = match latest.plan.spare {
        Some(spare) => lender.holds.plus(spare),
        None => lender.holds.minus(lender.holds.share(1, 8).max(Bytes::mib(64))),
    };
    share.max(of_spare).min(lender.most)
}

impl Daemon {
    fn start(config: &Path) -> Result<(Self, Doors), DaemonError> {
        let reloader = Reloader::start(config)?;
        let spec = reloader.spec();
        let state = &spec.host.state;
        let lock = StateLock::acquire(state, Holder::Daemon)?;
        let journal = Journal::open(state)?;
        if let Some(note) = journal.set_aside() {
            log::warn(note);
        }
        let records = Records::new(journal);
        let hand = Hand::new(sys::ksm::Ksm::of_host(), records.clone());
        let mut ksm = HostKsm::new(hand, sys::mergeable::processes);
        let period = Duration::from_millis(tuning::PERIOD.0);
        let (globs, groups) = (spec.host.globs(), spec.groups.clone());
        let processes = spec.host.attach == model::AttachSpec::On;
        let libvirt = spec.runtime_directory().join(model::libvirt::SOCKET_NAME);
        let settings = Settings { globs, processes, groups, period, libvirt, records };
        let drivers = Drivers::new(settings)?;
        let pause = PauseFile::in_state(state);
        let (pauses, is_paused) = match pause.pauses() {
            Ok(pauses) => (pauses, pause.is_set()),
            Err(why) => {
                log::warn(&why);
                (Pauses::default(), true)
            }
        };
        // Set before the drivers' tasks first run: a paused daemon touches nothing.
        let mut workers = Workers::in_state(state);
        drivers.set_pauses(pauses.clone());
        workers.set_pauses(pauses.clone());
        if is_paused {
            drivers.keep_hands_off();
            workers.set_paused(true);
            ksm.set_paused(true);
        }
        let (learned, unreadable) = LearnedFile::in_state(state);
        unreadable.iter().for_each(|why| log::warn(why));
        let memory = Memory::fresh(is_paused, pauses, learned.learned());
        let history_file = state.join(history::FILE_NAME);
        let history = History::start(&history_file)?;
        let doors = Doors::open(&spec.api)?;
        if let Some(address) = doors.tcp_address() {
            log::info(&format!("the API also answers on {address}"));
        }
        let daemon = Self {
            reloader,
            drivers,
            workers,
            ksm,
            disks: Disks::default(),
            memory,
            learned,
            pause,
            history,
            history_file,
            ticks: TickTimes::default(),
            log: log::Log::default(),
            pool: None,
            lender: None,
            latest: None,
            _lock: lock,
        };
        Ok((daemon, doors))
    }

    async fn run(mut self, doors: Doors) -> Result<(), DaemonError> {
        let (publish, latest) = watch::channel(Arc::new(self.tick()));
        let member = self.join_pool(&latest);
        let (asks, mut asked) = mpsc::channel(ASKS);
        let (end, ended) = oneshot::channel::<()>();
        let api = tokio::spawn(api::keep(doors, latest, asks, ended));
        tokio::spawn(proxmox::keep(self.drivers.proxmox()));

        let mut hangup = signal(SignalKind::hangup())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut clock = interval(Duration::from_millis(tuning::PERIOD.0));
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // `overbook status` right after the start shows every VM.
        self.drivers.first_look(FIRST_LOOK).await;
        self.publish(&publish);
        notify::ready();
        log::info("up");
        loop {
            tokio::select! {
                _ = clock.tick() => {
                    self.publish(&publish);
                    notify::alive();
                }
                Some(ask) = asked.recv() => self.answer(ask, &publish),
                _ = hangup.recv() => drop(self.reload(false)),
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
            }
        }
        notify::stopping();
        log::info("ends; every guest keeps the memory that it has, no more and no less");
        drop(end);
        // The task may be aborted: its intents are in the store.
        member.iter().for_each(tokio::task::JoinHandle::abort);
        self.workers.end();
        self.ksm.set_paused(true);
        let kept = self.learned.end(&self.memory.learned);
        tokio::join!(self.workers.ended(), self.ksm.rested(), kept);
        // The listener removes the socket's file.
        let _ = api.await;
        Ok(())
    }

    /// Starts the host's membership in its pool, if it has one.
    fn join_pool(&mut self, latest: &Latest) -> Option<tokio::task::JoinHandle<()>> {
        let spec = self.reloader.spec();
        let pool = spec.pool.clone()?;
        let store = Arc::new(Apart::start(pool.clone()));
        let hands = self.drivers.hands();
        let (member, state) = Member::new(&spec, pool, store, latest.clone(), hands);
        self.pool = Some(state);
        Some(tokio::spawn(member.run()))
    }

    fn publish(&mut self, to: &watch::Sender<Arc<Published>>) {
        let published = Arc::new(self.tick());
        self.latest = Some(Arc::clone(&published));
        self.history.record(&published);
        self.learned.keep(&published.memory.learned).iter().for_each(|why| log::warn(why));
        to.send_replace(published);
    }

    fn tick(&mut self) -> Published {
        let started = Instant::now();
        let (spec, before) = self.drivers.with_domains(&self.reloader.spec());
        if let Some(before) = before {
            self.let_go(&|vm| before.group_of(vm).is_some() && spec.group_of(vm).is_none());
        }
        let pool = self.pool.as_ref().map(|state| state.borrow().clone());
        self.memory.kept = pool.as_ref().map(kept).unwrap_or_default();
        let memory = self.memory.clone();
        let (drivers, workers, ksm) = (&mut self.drivers, &mut self.workers, &mut self.ksm);
        let disks = &mut self.disks;
        let mut world = World { drivers, workers, ksm, disks, spec: &spec };
        let (view, plan) = policy::cycle(&mut world, &BootClock, &spec, &mut self.memory);
        self.log.tell(&plan, &view);
        let taken_over = self.drivers.taken_over();
        if !taken_over.is_empty() {
            self.let_go(&|vm| taken_over.contains(vm));
        }
        pool.iter().for_each(|pool| self.log.tell_moves(&pool.moves));
        self.ticks.record(started.elapsed());
        Published {
            ticks: self.ticks,
            at: plan.at,
            wall_ms: wall_ms(),
            spec,
            view,
            memory,
            plan,
            paused: self.memory.paused,
            config_error: self.reloader.error(),
            waits_for_restart: self.reloader.waiting(),
            history_error: self.history.error(),
            pool,
            lender: self.lender.filter(|(_, at)| at.elapsed() < LENDER_SILENT).map(|(it, _)| it),
        }
    }

    /// Answers a question. A tick that shows the effects is published before the answer.
    fn answer(&mut self, ask: Ask, publish: &watch::Sender<Arc<Published>>) {
        let Ask { question, reply } = ask;
        let outcome = match question {
            Question::Release(scope) => {
                self.release(&scope, reply);
                return self.publish(publish);
            }
            Question::PreviewRelease => return self.preview(reply),
            Question::Sign => {
                // The client may have disconnected.
                let _ = reply.send(Ok(LoopAnswer::Done(String::new())));
                return;
            }
            Question::Lender(lender) => {
                self.lender = Some((lender, Instant::now()));
                let may_hold =
                    self.latest.as_deref().map_or(lender.holds, |latest| may_hold(latest, lender));
                // The client may have disconnected.
                let _ = reply.send(Ok(LoopAnswer::MayHold(may_hold)));
                return;
            }
            Question::Pause(scope) => self.pause(&scope, Hold::Kept),
            Question::Resume(scope) => self.resume(&scope),
            Question::Reload { is_sure } => self.reload(is_sure),
            of_history => {
                let file = self.history_file.clone();
                tokio::task::spawn_blocking(move || {
                    if let Some(outcome) = on_disk::answer(&file, &of_history) {
                        // The client may have disconnected.
                        let _ = reply.send(outcome);
                    }
                });
                return;
            }
        };
        self.publish(publish);
        // The client may have disconnected.
        let _ = reply.send(outcome.map(LoopAnswer::Done));
    }

    /// Reads the configuration again. One that takes much is held until it is confirmed, by
    /// `is_sure` or by a second reload.
    fn reload(&mut self, is_sure: bool) -> Result<String, String> {
        let before = self.reloader.spec();
        let latest = self.latest.clone().filter(|_| !is_sure);
        let objection = |new: &Spec| {
            let case = Case { spec: new.clone(), ..latest.as_ref()?.case() };
            objection_to(&case)
        };
        let news = self.reloader.reload(objection).map_err(|error| {
            log::warn(&error.to_string());
            error.to_string()
        })?;
        log::info(&format!("the configuration was read again: {news}"));
        self.reloader.waiting().iter().for_each(|waiting| log::warn(waiting));
        let (spec, _) = self.drivers.with_domains(&self.reloader.spec());
        if let Err(error) = self.drivers.configure(&spec) {
            log::warn(&error.to_string());
        }
        let is_new = before != self.reloader.spec() && spec.modes.balloon == Mode::Enforce;
        if is_new && spec.host.grace > Millis(0) {
            self.memory.begin_grace(spec.host.grace, boot_now());
            log::info(&format!(
                "nothing is taken from any VM for {}: `overbook plan` shows what follows, \
                 `overbook pause` keeps it from that",
                spec.host.grace
            ));
        }
        self.let_go(&|vm| spec.group_of(vm).is_none());
        let waiting = self.reloader.waiting().map(|waiting| format!("; {waiting}"));
        Ok(format!("the configuration is in force: {news}{}", waiting.unwrap_or_default()))
    }

    /// Restores VMs that are no longer in a group: they have no limits to bring their memory back
    /// to.
    fn let_go(&self, leaves: &dyn Fn(&VmName) -> bool) {
        let left = self.drivers.let_go(leaves);
        tokio::spawn(async move {
            let left = left.await;
            if !left.is_empty() {
                log::info(&release::summary(left, Vec::new(), Ok(None)).text);
            }
        });
    }
}

/// Why a configuration must be confirmed; `None`: it takes little. With `grace_s = 0` the operator
/// wants each change at once.
fn objection_to(case: &Case) -> Option<String> {
    if case.spec.host.grace == Millis(0) {
        return None;
    }
    let foreseen = Foreseen::of(case);
    let losses = foreseen.large_losses();
    let losses: Vec<_> =
        losses.iter().map(|(group, lost)| format!("{lost} of group {group}")).collect();
    (!losses.is_empty()).then(|| {
        format!(
            "the new configuration would take {}, more than a tenth: confirm it by a second \
             reload within {} min, or by `overbook reload --yes`\n{}",
            losses.join(" and "),
            CONFIRM.as_secs() / 60,
            foreseen.text().trim_end()
        )
    })
}

fn wall_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
