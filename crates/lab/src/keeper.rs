//! `lab up` and `lab down`: a lab that outlives the command that started it.
//!
//! **Idea.** `up` starts a detached keeper (`overbook-lab hold`, a session of its own). It writes
//! the list of guests to the keeper's standard input, and reads one line from its standard
//! output: ready, or the error. The keeper is the parent of everything and only waits for
//! SIGTERM; when it is killed, the kernel kills the guests. `down` ends the keeper and sweeps, in
//! any state of the lab.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sys::process::{Child, Spawn};

use crate::accel::Accel;
use crate::interrupt::{self, interrupted};
use crate::lab::{Lab, LabError, Machine, Provisions};
use crate::machine::MachineSpec;
use crate::state::{self, StateDir, StateError};

/// The hidden subcommand that makes a process the keeper.
pub const SUBCOMMAND: &str = "hold";
/// The keeper ends helpers and guests in order, which may take this long.
const KEEPER_GRACE: Duration = Duration::from_secs(30);

/// The message of `up` to the keeper.
#[derive(Debug, Serialize, Deserialize)]
struct KeeperOrder {
    accel: Accel,
    machines: Vec<MachineSpec>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum KeeperAnswer {
    Ready,
    Failed(String),
}

/// The state that `down` found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// A running lab; it is ended.
    Running,
    /// Remains of a crashed lab; they are removed.
    Leftovers,
    Nothing,
}

/// Starts a keeper with these guests and returns when they are up.
pub fn up(dir: &Path, with: &Provisions, machines: Vec<MachineSpec>) -> Result<(), LabError> {
    // The keeper takes the directory itself. Holding it first gives the better error, and sweeps.
    let state = StateDir::hold(dir)?;
    let dir = state.path().to_owned();
    crate::machine::check_all(&machines, &dir)?;
    drop(state);
    let (order_reader, mut order_writer) = std::io::pipe()?;
    let (answer_reader, answer_writer) = std::io::pipe()?;
    let mut keeper = Spawn::new(std::env::current_exe()?)
        .args([SUBCOMMAND, "--dir"])
        .arg(&dir)
        .stdin(OwnedFd::from(order_reader))
        .stdout(OwnedFd::from(answer_writer))
        .stderr(std::fs::File::create(dir.join("keeper.log"))?)
        .new_session()
        .spawn()?;
    let order = KeeperOrder { accel: with.accel, machines };
    order_writer.write_all(&serde_json::to_vec(&order)?)?;
    drop(order_writer);
    match wait_for_answer(answer_reader) {
        Ok(KeeperAnswer::Ready) => Ok(()),
        Ok(KeeperAnswer::Failed(error)) => give_up(&mut keeper, LabError::Keeper(error)),
        Err(error) => give_up(&mut keeper, error),
    }
}

fn give_up(keeper: &mut Child, error: LabError) -> Result<(), LabError> {
    keeper.end(KEEPER_GRACE)?;
    Err(error)
}

/// Reads on a thread of its own, so that Ctrl-C is seen while the guests boot.
fn wait_for_answer(reader: std::io::PipeReader) -> Result<KeeperAnswer, LabError> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(reader).read_line(&mut line);
        let _ = sender.send(read.map(|_| line));
    });
    loop {
        if let Ok(line) = receiver.recv_timeout(Duration::from_millis(50)) {
            let gone =
                || LabError::Keeper("the lab's keeper ended without a word: see keeper.log".into());
            return serde_json::from_str(&line?).map_err(|_| gone());
        }
        if interrupted() {
            return Err(interrupt::Interrupted.into());
        }
    }
}

/// The life of the keeper: start, answer, wait for SIGTERM, end everything.
pub fn hold(dir: &Path) -> Result<(), LabError> {
    let mut text = Vec::new();
    std::io::stdin().read_to_end(&mut text)?;
    let order: KeeperOrder = serde_json::from_slice(&text)?;
    let (lab, answer) = match start(dir, order) {
        Ok(lab) => (Some(lab), KeeperAnswer::Ready),
        Err(error) => (None, KeeperAnswer::Failed(error.to_string())),
    };
    let mut out = std::io::stdout();
    // The process that asked may have ended; then no process needs the answer.
    let _ = writeln!(out, "{}", serde_json::to_string(&answer)?).and_then(|()| out.flush());
    let Some(mut lab) = lab else { return Ok(()) };
    while !interrupted() {
        std::thread::sleep(Duration::from_millis(100));
    }
    lab.stop()
}

fn start(dir: &Path, order: KeeperOrder) -> Result<Lab, LabError> {
    let cache = crate::cache::Cache::open()?;
    let with = Provisions {
        qemu: crate::qemu::Qemu::provide(&cache)?,
        image: crate::image::Image::provide(&cache)?,
        accel: order.accel,
    };
    let lab = Lab::start(dir, &with, &order.machines)?;
    lab.machines().iter().for_each(Machine::hang_up);
    Ok(lab)
}

/// Ends the lab in `dir`, if there is one.
pub fn down(dir: &Path) -> Result<Ended, LabError> {
    if !dir.exists() {
        return Ok(Ended::Nothing);
    }
    match StateDir::hold(dir) {
        Ok(state) => Ok(if state.swept() { Ended::Leftovers } else { Ended::Nothing }),
        Err(StateError::Held { .. }) => {
            end_holder(dir)?;
            StateDir::hold(dir)?;
            Ok(Ended::Running)
        }
        Err(error) => Err(error.into()),
    }
}

fn end_holder(dir: &Path) -> Result<(), LabError> {
    // The holder writes its record right after it has the lock.
    let mut tries = 0;
    let record = loop {
        match state::read_record(dir) {
            Some(record) => break record,
            None if tries < 50 => tries += 1,
            None => return Err(LabError::Keeper("a lab is held, but does not say by whom".into())),
        }
        interrupt::sleep(Duration::from_millis(20))?;
    };
    let holder = record.holder.identity();
    holder.end(KEEPER_GRACE)?;
    // The kernel sends its children their signal as it ends; wait for the last of them.
    for child in &record.children {
        child.process.identity().wait_for(Duration::from_secs(5))?;
    }
    Ok(())
}
