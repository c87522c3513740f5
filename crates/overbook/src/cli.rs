//! The command line: one table, from which help, completions and man pages are also made.
//!
//! Each command is one file with one function from arguments to text. Only this module prints. So
//! a closed pipe ends every command quietly, and no name of a guest can write escape sequences to
//! the operator's terminal ([`output`]). Exit codes: 0 done, 1 failed, 2 wrong usage, 3 no daemon
//! answers. With `--exit-code`, `overbook status` has those of a monitoring plugin instead.

mod api;
mod capacity;
mod check;
mod cluster;
pub mod completion;
mod context;
mod controller;
mod daemon;
mod disks;
mod doctor;
mod error;
mod explain;
pub(crate) mod fit;
mod group;
mod history;
mod lab;
mod libvirt;
mod mrc;
mod names;
pub(crate) mod output;
mod pages;
mod pki;
mod plan;
mod proxmox;
mod release;
mod repository;
mod scope;
pub(crate) mod screen;
mod static_tables;
pub(crate) mod status;
mod steer;
mod store;
pub(crate) mod table;
pub(crate) mod vm;
pub mod when;
mod worker;

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Args, CommandFactory, Parser, Subcommand};

use context::Context;
pub use error::CliError;
use output::Output;

use crate::config_files::DEFAULT_PATH;

/// The daemon's socket, unless the configuration names another.
pub const DEFAULT_SOCKET: &str = "/run/overbook/overbook.sock";

const EXIT_CODES: &str = "Exit codes: 0 done; 1 it failed, or is not complete; 2 the command line \
    is wrong; 3 no daemon answers. `overbook status --exit-code` has those of a monitoring plugin.";

/// Moves memory between virtual machines of one group, to where it is needed.
#[derive(Debug, Parser)]
#[command(name = "overbook", version = version::VERSION, max_term_width = 100, after_help = EXIT_CODES)]
pub struct Cli {
    /// The configuration; files in `overbook.d` in the same directory are read after it
    #[arg(long, global = true, value_name = "PATH", default_value = DEFAULT_PATH)]
    config: PathBuf,
    /// The daemon's socket, instead of the one in the configuration
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    /// Run the host daemon in the foreground
    Daemon,
    /// Answer the API; started by the daemon, which it talks JSON lines with
    #[command(hide = true)]
    Api(api::Arguments),
    /// Ask the pool's store; started by the daemon, which it talks JSON lines with
    #[command(hide = true)]
    Store,
    /// Track the memory of a group's VMs; started by the daemon, which it talks JSON lines with
    #[command(hide = true)]
    Worker(worker::Arguments),
    /// Serve the disks of a group's VMs by NBD, in the foreground
    Disks(disks::Arguments),
    /// Lend memory to other hosts, for pages that their VMs have swapped out; in the foreground
    Repository(repository::Arguments),
    /// Decide which VMs of a pool change hosts; in the foreground
    Controller(controller::Arguments),
    /// Show a pool of hosts, what is wrong in it, and what moves
    #[command(subcommand)]
    Cluster(cluster::Question),
    /// Make certificates for a small pool of hosts
    #[command(subcommand)]
    Pki(pki::PkiCommand),
    /// Check the configuration and report every fault with its file and line; or check the host
    ///
    /// Exit code 1: a fault in the configuration; with `--host`, something is missing without which
    /// no VM on this host can be managed.
    Check(check::Arguments),
    /// Say of each VM of the host what it can have, and the line that mends what it lacks
    ///
    /// It needs no daemon, changes nothing, and opens no VM's socket. Exit code 1: something is to
    /// be mended.
    Doctor(doctor::Arguments),
    /// Show the host, its groups and its VMs, after a verdict in one line
    ///
    /// With `--exit-code`, the exit code is the verdict's: 0 OK, 1 WARNING, 2 CRITICAL (also where
    /// no daemon answers), 3 UNKNOWN.
    Status(status::Arguments),
    /// Watch the host live
    Top(crate::top::Arguments),
    /// Show one VM, or all; draw a VM's miss-ratio curve
    Vm(vm::Arguments),
    /// Show one group, or all
    Group(OptionalName),
    /// Say in words why a VM has the memory that it has
    Explain(Name),
    /// Say how many VMs like these fit, and what is kept free for their overloads
    Capacity(capacity::Arguments),
    /// Show the latest plan, write out what it was made from, or decide such a file
    Plan(plan::Arguments),
    /// Stop all changes until `overbook resume`: on the host, or on single VMs and groups
    ///
    /// A VM that is paused by name is still measured. Nothing is taken from it, and memory that
    /// was taken stays taken.
    Pause(Names),
    /// Go on after a pause
    Resume(Names),
    /// Have the daemon read its configuration again
    ///
    /// A configuration that would take more than a tenth of a group's memory is not used until it
    /// is confirmed: by `--yes`, or by a second reload. `overbook check --diff` shows what it
    /// would change.
    Reload(steer::ReloadArguments),
    /// Give VMs back what they had before Overbook touched them; a running daemon then pauses
    ///
    /// With names, only these VMs and groups are released and paused. `--dry-run` tells what would
    /// be given back, and changes nothing.
    ///
    /// Without names, a daemon that does not answer is told to end, and killed if it does not. A
    /// daemon that is started later is also paused.
    Release(release::Arguments),
    /// Show what a VM had and what was done to it, or what a group lent and borrowed
    History(history::Arguments),
    /// Find the miss-ratio curve of a trace of references
    Mrc(mrc::Arguments),
    /// Make tables of the pages that guests are going to share, and compare them
    #[command(subcommand)]
    Static(static_tables::StaticCommand),
    /// Write shell completions to standard output
    Completions(pages::Shell),
    /// Write the man pages into a directory, or the main one to standard output
    Man(pages::Directory),
    /// Real guests on this machine: runs `overbook-lab`
    Lab(lab::Arguments),
    /// Manage domains of libvirt: runs `overbook-libvirt`, a package of its own
    Libvirt(libvirt::Arguments),
    /// Manage VMs of Proxmox
    #[command(subcommand)]
    Proxmox(proxmox::ProxmoxCommand),
}

/// The output format.
#[derive(Debug, Args)]
struct Format {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Names {
    /// VMs and groups; the whole host without one
    #[arg(value_name = "VM|GROUP", add = names::vms_and_groups())]
    names: Vec<String>,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
struct OptionalName {
    /// Its name; all without one
    #[arg(add = names::groups())]
    name: Option<String>,
    #[command(flatten)]
    format: Format,
}

#[derive(Debug, Args)]
struct Name {
    /// Its name
    #[arg(add = names::vms())]
    name: String,
    #[command(flatten)]
    format: Format,
}

/// Parses the arguments, runs the command and returns its exit code.
#[must_use]
pub fn main() -> ExitCode {
    completion::answer();
    let cli = Cli::parse();
    match run(cli).and_then(|output| output.print()) {
        Ok(code) => code,
        Err(error) => {
            // Standard error may have gone with its terminal.
            let _ = writeln!(io::stderr(), "overbook: {}", output::clean(&error.to_string()));
            error.exit_code()
        }
    }
}

fn run(cli: Cli) -> Result<Output, CliError> {
    let context = Context { config: cli.config, socket: cli.socket };
    match cli.command {
        CliCommand::Daemon => daemon::run(&context),
        CliCommand::Api(arguments) => api::run(&arguments),
        CliCommand::Store => store::run(),
        CliCommand::Worker(arguments) => worker::run(&arguments),
        CliCommand::Disks(arguments) => disks::run(&context, &arguments),
        CliCommand::Repository(arguments) => repository::run(&context, &arguments),
        CliCommand::Controller(arguments) => controller::run(&context, &arguments),
        CliCommand::Cluster(question) => cluster::run(&context, &question),
        CliCommand::Pki(question) => pki::run(&question),
        CliCommand::Check(arguments) => check::run(&context, &arguments),
        CliCommand::Doctor(arguments) => doctor::run(&context, &arguments),
        CliCommand::Capacity(arguments) => capacity::run(&context, &arguments),
        CliCommand::Status(arguments) => status::run(&context, &arguments),
        CliCommand::Top(arguments) => {
            crate::top::run(&context.socket()?, &arguments).map(|()| Output::nothing())
        }
        CliCommand::Vm(arguments) => vm::run(&context, &arguments),
        CliCommand::Group(group) => group::run(&context, group.name.as_deref(), group.format.json),
        CliCommand::Explain(vm) => explain::run(&context, &vm.name, vm.format.json),
        CliCommand::Plan(arguments) => plan::run(&context, &arguments),
        CliCommand::Pause(asked) => steer::order(&context, "pause", &asked),
        CliCommand::Resume(asked) => steer::order(&context, "resume", &asked),
        CliCommand::Reload(arguments) => steer::reload(&context, &arguments),
        CliCommand::Release(arguments) => release::run(&context, &arguments),
        CliCommand::History(arguments) => history::run(&context, &arguments),
        CliCommand::Mrc(arguments) => mrc::run(&arguments),
        CliCommand::Static(question) => static_tables::run(&context, &question),
        CliCommand::Completions(shell) => pages::completions(&shell),
        CliCommand::Man(directory) => pages::man(&directory, Cli::command()),
        CliCommand::Lab(arguments) => lab::run(&arguments),
        CliCommand::Libvirt(arguments) => libvirt::run(&arguments),
        CliCommand::Proxmox(command) => proxmox::run(&command),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_table_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_options_may_stand_behind_the_command() {
        let cli = Cli::try_parse_from(["overbook", "status", "--json", "--socket", "/s"]).unwrap();
        assert_eq!(cli.socket, Some("/s".into()));
        let CliCommand::Status(status) = cli.command else { panic!() };
        assert!(status.format.json && !status.exit_code && status.watch.is_none());
    }

    #[test]
    fn watch_may_have_its_seconds() {
        let watch = |line: &[&str]| {
            let cli = Cli::try_parse_from([&["overbook", "status"], line].concat()).ok()?;
            let CliCommand::Status(status) = cli.command else { panic!() };
            status.watch
        };
        assert_eq!(watch(&["--watch"]), Some(2));
        assert_eq!(watch(&["--watch", "5"]), Some(5));
        assert_eq!(watch(&["--watch", "--socket", "/s"]), Some(2));
        for wrong in [["--watch", "0"], ["--watch", "--json"], ["--watch", "--exit-code"]] {
            assert_eq!(watch(&wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn the_lab_gets_its_arguments_untouched() {
        let line = ["overbook", "lab", "run", "quickstart", "--json", "--help"];
        let CliCommand::Lab(lab) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        assert_eq!(lab.arguments, ["run", "quickstart", "--json", "--help"]);
    }
}
