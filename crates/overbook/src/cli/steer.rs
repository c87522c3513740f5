//! `overbook pause`, `resume` and `release`.
//!
//! `release` must work in every state, even when the daemon is dead: then the journal says what
//! to undo. A daemon that cannot be asked is ended first.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use api::client::ClientError;
use api::wire::Done;

use super::{context::Context, error::CliError, output::Output};
use crate::{
    lock::{self, Holder, LockError},
    release::{self, ReleaseError, eviction::evict},
};

pub(super) fn pause(context: &Context, json: bool) -> Result<Output, CliError> {
    shown(&context.client()?.post("/v1/pause")?, json)
}

pub(super) fn resume(context: &Context, json: bool) -> Result<Output, CliError> {
    shown(&context.client()?.post("/v1/resume")?, json)
}

/// Arguments of `overbook reload`.
#[derive(Debug, clap::Args)]
pub(super) struct ReloadArguments {
    /// Use the configuration although it takes much
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    format: super::Format,
}

pub(super) fn reload(context: &Context, arguments: &ReloadArguments) -> Result<Output, CliError> {
    let path = format!("/v1/reload?yes={}", arguments.yes);
    shown(&context.client()?.post(&path)?, arguments.format.json)
}

/// Number of health checks of a silent daemon. A busy daemon may answer late.
const SIGNS: u32 = 3;
/// Maximum time that a daemon may lack a socket: it checks the socket once a second, or has just
/// started.
const DEAF: Duration = Duration::from_secs(10);
/// Maximum wait for another `overbook release`.
const OTHERS: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(200);

/// Arguments of `overbook release`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// For the unit's `ExecStopPost=`: only if systemd does not start this unit again at once
    #[arg(long, hide = true, value_name = "UNIT")]
    unless_restarting: Option<String>,
    #[command(flatten)]
    format: super::Format,
}

/// Releases through the daemon that holds the state; a daemon that cannot be asked is ended first.
pub(super) fn release(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let json = arguments.format.json;
    if let Some(unit) = arguments.unless_restarting.as_deref().filter(|unit| is_restarting(unit)) {
        let message =
            format!("{unit} is being restarted: every guest keeps the memory that it has");
        return shown(&Done { message }, json);
    }
    let (state, qmp) = release::own_places(&context.config);
    let said = |error: &dyn ToString| CliError::Said(error.to_string());
    let mut since = Instant::now();
    let mut evicted = None;
    loop {
        // An unreadable configuration does not say where the daemon is; the lock tells whether
        // one runs.
        let is_hung = match ask(context, &state) {
            Ok(done) => return shown(&after(evicted, done.message), json),
            Err(
                error @ CliError::Client(ClientError::Refused(_) | ClientError::NotPermitted(_)),
            ) => {
                return Err(error);
            }
            Err(CliError::Client(ClientError::Silent { .. })) => true,
            Err(_) => false,
        };
        let holder = match release::offline(&state, &qmp) {
            Ok(summary) => {
                let code = u8::from(!summary.is_complete);
                return Ok(shown(&after(evicted, summary.text), json)?.with_code(code));
            }
            Err(ReleaseError::Lock(LockError::Held { holder, .. })) => holder,
            Err(error) => return Err(said(&after(evicted, error.to_string()).message)),
        };
        let is_daemon = holder.by == Some(Holder::Daemon);
        let patience = match holder.by {
            Some(Holder::Release) => OTHERS,
            _ if is_hung => Duration::ZERO,
            _ => DEAF,
        };
        if since.elapsed() < patience {
            std::thread::sleep(PAUSE);
        } else if is_daemon && evicted.is_none() && context.socket.is_none() {
            evicted = Some(evict(&state, holder).map_err(|error| said(&error))?);
            // Another daemon may have been started meanwhile. It is paused.
            since = Instant::now();
        } else {
            let error = format!(
                "{holder} uses {} and cannot be asked: end it, then release again",
                state.display()
            );
            return Err(said(&after(evicted, error).message));
        }
    }
}

/// Whether the job that ends this unit will start it again. systemd tells the unit's processes
/// only how the service has ended, not why. If systemd cannot be asked, or does not answer within
/// ten seconds, the unit counts as stopped.
fn is_restarting(unit: &str) -> bool {
    let jobs = std::process::Command::new("timeout")
        .args(["--kill-after=1", "10", "systemctl"])
        .args(["list-jobs", "--no-legend", "--plain", unit])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    jobs.is_ok_and(|jobs| names_a_restart(&String::from_utf8_lossy(&jobs.stdout), unit))
}

/// Looks for the unit in lines of `JOB UNIT TYPE STATE`.
fn names_a_restart(jobs: &str, unit: &str) -> bool {
    jobs.lines().any(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        matches!(words[..], [_, of, "restart", ..] if of == unit)
    })
}

/// Asks the daemon to release, if it lives: a hung daemon gets a shorter timeout than a working
/// one. Unless the user names a socket, it must be the socket of the daemon that holds this state.
fn ask(context: &Context, state: &Path) -> Result<Done, CliError> {
    let client = context.client()?;
    let is_anothers = || {
        let holder = lock::held_in(state).and_then(|held| held.pid);
        client.peer().zip(holder).is_some_and(|(peer, holder)| peer != holder)
    };
    if context.socket.is_none() && is_anothers() {
        return Err(CliError::Said("the socket is another daemon's".to_owned()));
    }
    for sign in 1.. {
        match client.get_text("/healthz") {
            // A daemon that answers, even late, is alive.
            Ok(_) | Err(ClientError::Refused(_)) => break,
            Err(ClientError::Silent { .. }) if sign < SIGNS => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(client.post("/v1/release")?)
}

fn after(evicted: Option<String>, message: String) -> Done {
    let lines: Vec<String> = evicted.into_iter().chain([message]).collect();
    Done { message: lines.join("\n") }
}

fn shown(done: &Done, json: bool) -> Result<Output, CliError> {
    if json { Output::json(done) } else { Ok(Output::text(&format!("{}\n", done.message))) }
}
