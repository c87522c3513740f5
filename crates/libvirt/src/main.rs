//! `overbook-libvirt`: libvirt's domains for the Overbook daemon, by libvirt's own calls.
//!
//! **Problem.** libvirt marks a domain as tainted once another program speaks to its QEMU, and is
//! surprised by changes that it did not make. But a host without libvirt should not need its
//! library, and a libvirt that hangs should not hang the daemon.
//!
//! **Idea.** This program is the only one that links libvirt. It is a process and a package of its
//! own, without configuration and without state:
//!
//! ```text
//! libvirtd ◄── statistics, events, set-memory ── overbook-libvirt ◄── JSON lines ──► daemon
//!              (watch, raw)                       (board, serve)       (model::libvirt)
//! ```
//!
//! The daemon decides; this program has no policy. It may be killed at any instant: balloons stay
//! as they are, and the daemon takes nothing from domains whose state it does not hear of.
//! `manage` and `unmanage` edit a domain's persistent description ([`manage`]).

mod board;
mod calls;
mod connection;
mod description;
mod manage;
mod nova;
mod places;
mod qemu;
mod raw;
mod serve;
mod wake;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

/// Lets Overbook work on libvirt's domains, by libvirt's own calls.
#[derive(Debug, Parser)]
#[command(name = "overbook-libvirt", version = version::VERSION, max_term_width = 100)]
struct CommandLine {
    /// The connection to libvirt
    #[arg(long, global = true, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    #[command(subcommand)]
    order: LibvirtOrder,
}

#[derive(Debug, Subcommand)]
enum LibvirtOrder {
    /// Serve the daemon on this host, in the foreground
    Serve {
        /// The socket on which it answers
        #[arg(long, value_name = "PATH", default_value = "/run/overbook/libvirt.sock")]
        socket: PathBuf,
    },
    /// Load the shim into a domain's QEMU from its next start on, and report free pages
    ///
    /// Shows the difference first, and asks. `unmanage` undoes it exactly.
    Manage {
        #[command(flatten)]
        edit: Edit,
        /// The shim
        #[arg(long, value_name = "PATH", default_value = "/usr/lib/overbook/liboverbook_shim.so")]
        shim: PathBuf,
    },
    /// Undo `manage`, and keep all other edits
    Unmanage(Edit),
}

#[derive(Debug, Args)]
struct Edit {
    /// The domain's name
    domain: String,
    /// Write it without asking
    #[arg(long)]
    yes: bool,
}

fn main() -> ExitCode {
    let line = CommandLine::parse();
    let outcome = match &line.order {
        LibvirtOrder::Serve { socket } => serve::run(&line.connect, socket)
            .map_err(|error| format!("{}: {error}", socket.display())),
        LibvirtOrder::Manage { edit: Edit { domain, yes }, shim } => {
            manage::manage(&line.connect, domain, shim, *yes)
        }
        LibvirtOrder::Unmanage(Edit { domain, yes }) => {
            manage::unmanage(&line.connect, domain, *yes)
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("overbook-libvirt: {why}");
            ExitCode::FAILURE
        }
    }
}

/// libvirt's error, in its words.
fn said(error: &virt::error::Error) -> String {
    format!("libvirt: {}", error.message())
}
