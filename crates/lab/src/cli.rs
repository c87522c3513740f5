//! The command line of `overbook lab`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate};
use model::{Bytes, Millis};
use overbook::cli::{completion, when};
use serde::Serialize;
use serde_json::json;

use crate::accel::Choice;
use crate::evidence::tree::SourceTree;
use crate::evidence::{EvidenceError, page, papers, queue, recorder};
use crate::interrupt::{self, EXIT_INTERRUPTED};
use crate::keeper::{self, Ended};
use crate::lab::{LabError, Provisions};
use crate::scenario::{self, Context, SCENARIOS, Scenario};
use crate::virtual_host::{HostError, USUAL_MEMORY, VirtualHost};
use crate::{attack, fleet, nbd_servers, state, status, stress};

/// The exit code that `timeout` uses.
const EXIT_TIMED_OUT: u8 = 124;
/// The exit code of `overbook lab host` itself, as opposed to a script's.
const EXIT_NO_HOST: u8 = 125;

/// Real QEMU guests on this machine: to try Overbook, and to measure what it is worth.
#[derive(Debug, Parser)]
#[command(name = "overbook lab", bin_name = "overbook lab", version = version::VERSION)]
pub struct Cli {
    #[command(subcommand)]
    command: LabCommand,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Args)]
struct Common {
    /// Directory of the lab's state [default: $OVERBOOK_LAB_DIR, or /var/tmp/overbook-lab-UID]
    #[arg(long, global = true, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Accelerator of the guests; `auto` boots a probe guest to find out
    #[arg(long, global = true, value_enum, default_value = "auto")]
    accel: Choice,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// Bring up the quickstart guests and leave them running
    Up {
        /// Seed of everything random
        #[arg(long, value_name = "N", default_value_t = 1)]
        seed: u64,
    },
    /// End the lab and remove all but its logs
    Down,
    /// Show what runs
    Status,
    /// List the scenarios
    List,
    /// Run a scenario and print its figures
    Run {
        /// The scenario (see `list`)
        #[arg(value_parser = parse_scenario, add = ArgValueCandidates::new(scenarios))]
        scenario: &'static Scenario,
        /// Seed of everything random
        #[arg(long, value_name = "N", default_value_t = 1)]
        seed: u64,
        /// How long, for each `-soak`, kvm-host, readings, shim-stress, starve, walls; for
        /// dedup-vs-ksm, the time at rest
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1440))]
        minutes: Option<u32>,
        /// A kernel for kvm-host, such as 6.12 [default: 6.1, 6.12 and newest]; repeatable
        #[arg(long = "kernel", value_name = "KERNEL")]
        kernels: Vec<String>,
        /// Write `results/SCENARIO.json`, in Overbook's source tree
        #[arg(long)]
        record: bool,
    },
    /// Write CLAIMS.md and the page on the papers, in Overbook's source tree
    Claims,
    /// Run all scenarios without a fresh record, one after the other
    Evidence(EvidenceArgs),
    /// Run a script in a virtual host: an emulated machine whose kernel has KVM
    Host(HostArgs),
    /// Hold a lab for `up`
    #[command(name = keeper::SUBCOMMAND, hide = true)]
    Hold,
    /// Serve memory by NBD, for `page-server-vs`
    #[command(name = nbd_servers::SUBCOMMAND, hide = true)]
    ServeMemory(nbd_servers::ServeMemory),
    /// Attack the isolation of tenants until ended
    #[command(name = attack::SUBCOMMAND, hide = true)]
    Attack {
        name: String,
        #[arg(allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Act as a hostile worker of a shim, for `shim-stress`
    #[command(hide = true)]
    Torment {
        #[arg(long)]
        pid: u32,
        #[arg(long)]
        seed: u64,
        #[arg(long)]
        millis: u64,
    },
}

/// Run all scenarios without a fresh record, one after the other.
///
/// It waits until the machine is quiet. Each record is written when its scenario has ended, so the
/// command can be ended at any time and begun again. Run it in Overbook's source tree after `make
/// build`, and `make claims` after it.
#[derive(Debug, Args)]
struct EvidenceArgs {
    /// Only scenarios whose code has changed since their record
    #[arg(long)]
    stale: bool,
    /// Only scenarios of one paper: kim, imr, meb, overdriver or smd
    #[arg(long, value_name = "NAME")]
    paper: Option<String>,
    /// The longest time, such as 90min or 8h
    #[arg(long, value_name = "TIME", default_value = "8h", value_parser = when::length)]
    budget: Millis,
}

impl EvidenceArgs {
    fn run(&self, dir: &std::path::Path, accel: Choice) -> Result<ExitCode, LabError> {
        let tree = SourceTree::find()?;
        let papers = papers::all()
            .map_err(|fault| EvidenceError::Faulty { path: tree.path(papers::PAGE), fault })?;
        let of_name = |name: &String| papers.iter().find(|paper| paper.name == name);
        let paper = match &self.paper {
            None => None,
            Some(name) => Some(of_name(name).ok_or_else(|| {
                let known: Vec<&str> = papers.iter().map(|paper| paper.name).collect();
                LabError::NoPaper { name: name.clone(), known: known.join(", ") }
            })?),
        };
        let accel = accel.to_possible_value().map_or(String::new(), |it| it.get_name().to_owned());
        let selection = queue::Selection { only_stale: self.stale, paper };
        let budget = Duration::from_millis(self.budget.0);
        queue::run(&tree, selection, budget, &queue::options(dir, &accel))
    }
}

/// Run a script in a virtual host: an emulated machine whose kernel has KVM.
///
/// In it the lab and Overbook run as they do here, with a kernel of your choice: its KVM with
/// nested page tables, cgroups (v2), multi-generational LRU, DAMON, zram and KSM are real. It is
/// some 30 times slower than this machine. The script is run by `sh` as root, in a directory with
/// the files of `--file`; `overbook`, `overbook-lab` and busybox are in its PATH. Its output comes
/// out here as it is written.
///
/// The exit code is the script's; 124: it took too long; 125: there is no such host, or it died.
#[derive(Debug, Args)]
struct HostArgs {
    /// Series of Debian's kernels, such as 6.1 or 6.12, or `newest`
    #[arg(value_name = "KERNEL")]
    kernel: String,
    /// The script: a file
    #[arg(value_name = "SCRIPT")]
    script: PathBuf,
    /// How long it may take, in seconds
    #[arg(long, value_name = "S", default_value_t = 600)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    timeout: u64,
    /// Its memory
    #[arg(long, value_name = "SIZE", default_value_t = USUAL_MEMORY)]
    memory: Bytes,
    /// Its CPUs
    #[arg(long, value_name = "N", default_value_t = 2)]
    cpus: u32,
    /// A file to copy into the script's directory, a program with its libraries; repeatable
    #[arg(long = "file", value_name = "PATH")]
    files: Vec<PathBuf>,
    /// Write its kernel's console to this file
    #[arg(long, value_name = "PATH")]
    console: Option<PathBuf>,
}

impl HostArgs {
    fn run(&self) -> Result<ExitCode, LabError> {
        let failed = |source| HostError::Io { path: self.script.clone(), source };
        let script = std::fs::read(&self.script).map_err(failed)?;
        let host = VirtualHost {
            kernel: self.kernel.clone(),
            memory: self.memory,
            cpus: self.cpus,
            files: self.files.clone(),
            console: self.console.clone(),
        };
        let limit = Duration::from_secs(self.timeout);
        let outcome = host.run(&script, limit, &mut std::io::stdout())?;
        Ok(ExitCode::from(outcome.code))
    }
}

fn scenarios() -> Vec<CompletionCandidate> {
    let offer = |scenario: &Scenario| {
        CompletionCandidate::new(scenario.name).help(Some(scenario.summary.into()))
    };
    SCENARIOS.iter().map(offer).collect()
}

fn parse_scenario(name: &str) -> Result<&'static Scenario, String> {
    let known: Vec<&str> = SCENARIOS.iter().map(|scenario| scenario.name).collect();
    scenario::find(name).ok_or_else(|| format!("no such scenario; there is: {}", known.join(", ")))
}

/// Runs the command line. Exit code 0: done and passed; 1: failed; 130: interrupted.
pub fn main() -> ExitCode {
    completion::complete("overbook-lab", Cli::command);
    let cli = Cli::parse();
    let is_host = matches!(cli.command, LabCommand::Host(_));
    let result = match cli.command {
        LabCommand::Run { .. } | LabCommand::Hold => as_parent_of_all(|| dispatch(&cli)),
        _ => interrupt::watch_signals().map_err(LabError::from).and_then(|()| dispatch(&cli)),
    };
    match result {
        Ok(code) => code,
        Err(LabError::Interrupted(_) | LabError::Host(HostError::Interrupted(_))) => {
            ExitCode::from(EXIT_INTERRUPTED)
        }
        // An interruption ends helper programs too, which then fail with errors of their own.
        Err(_) if interrupt::interrupted() => ExitCode::from(EXIT_INTERRUPTED),
        Err(error) => {
            eprintln!("overbook lab: {error}");
            match error {
                LabError::Host(HostError::TimedOut { .. }) => ExitCode::from(EXIT_TIMED_OUT),
                _ if is_host => ExitCode::from(EXIT_NO_HOST),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// For a process that holds a lab: it adopts the processes that its helpers leave behind, and
/// ends them.
fn as_parent_of_all(
    hold: impl FnOnce() -> Result<ExitCode, LabError>,
) -> Result<ExitCode, LabError> {
    interrupt::watch_signals()?;
    sys::process::become_subreaper()?;
    let result = hold();
    sys::process::end_remaining_children()?;
    result
}

fn dispatch(cli: &Cli) -> Result<ExitCode, LabError> {
    let dir = cli.common.dir.clone().unwrap_or_else(state::default_dir);
    let json = cli.common.json;
    match &cli.command {
        LabCommand::Up { seed } => {
            let provisions = Provisions::provide(cli.common.accel)?;
            keeper::up(&dir, &provisions, fleet::quickstart(*seed))?;
            show(json, &status::read(&dir), |status| status.to_table())?;
        }
        LabCommand::Down => {
            let ended = keeper::down(&dir)?;
            show(json, &json!({ "ended": ended }), |_| down_text(ended).to_owned())?;
        }
        LabCommand::Status => show(json, &status::read(&dir), |status| status.to_table())?,
        LabCommand::List => {
            let line = |s: &Scenario| format!("{:<14} {}\n", s.name, s.summary);
            let entry = |s: &Scenario| json!({ "name": s.name, "summary": s.summary });
            let entries: Vec<_> = SCENARIOS.iter().map(entry).collect();
            show(json, &entries, |_| SCENARIOS.iter().map(line).collect())?;
        }
        LabCommand::Run { scenario, seed, minutes, kernels, record } => {
            let provisions = Provisions::provide(cli.common.accel)?;
            let (minutes, kernels) = (*minutes, kernels.clone());
            let context = Context { dir, provisions, seed: *seed, minutes, kernels };
            let figures = match record {
                true => recorder::run(context, scenario)?.1,
                false => (scenario.run)(&context)?,
            };
            show(json, &figures, |figures| figures.to_table())?;
            return Ok(if figures.passed() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        LabCommand::Claims => {
            let changed = page::write_all(&SourceTree::find()?)?;
            let words = if changed { "written" } else { "as they were" };
            println!("{} and {}: {words}", page::CLAIMS, papers::PAGE);
        }
        LabCommand::Evidence(evidence) => return evidence.run(&dir, cli.common.accel),
        LabCommand::Host(host) => return host.run(),
        LabCommand::Hold => keeper::hold(&dir)?,
        LabCommand::ServeMemory(server) => server.run()?,
        LabCommand::Attack { name, args } => attack::run(name, args)?,
        LabCommand::Torment { pid, seed, millis } => {
            stress::torment::live(*pid, *seed, Duration::from_millis(*millis))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn down_text(ended: Ended) -> &'static str {
    match ended {
        Ended::Running => "the lab is ended\n",
        Ended::Leftovers => "no lab ran; what a crashed one had left is removed\n",
        Ended::Nothing => "no lab runs here, nothing to end\n",
    }
}

/// Prints a value as JSON, or as text for people.
fn show<T: Serialize>(json: bool, value: &T, text: impl Fn(&T) -> String) -> Result<(), LabError> {
    let text = if json { serde_json::to_string(value)? + "\n" } else { text(value) };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Cli as clap::CommandFactory>::command().debug_assert();
    }
}
