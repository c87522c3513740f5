//! `overbook proxmox manage` and `unmanage`: a QMP socket for Overbook in a VM's `args`.
//!
//! Proxmox's own tools use the VM's QMP socket, which serves one client at a time. So Overbook gets
//! another one. It lies in Proxmox's own directory, which every node has: the VM also starts on
//! nodes without Overbook. Proxmox's `qm` writes the change, with Proxmox's locks and checks. All
//! other options in `args` stay as they are, and `unmanage` restores the value exactly.

use std::fmt::Write as _;
use std::io::{self, BufRead, IsTerminal, Write as _};
use std::process::Command;

use clap::{Args, Subcommand};
use model::proxmox::ProxmoxVm;

use super::{error::CliError, output::Output};
use crate::proxmox::NodePaths;

#[derive(Debug, Subcommand)]
pub(super) enum ProxmoxCommand {
    /// Give a VM a QMP socket for Overbook, from its next start on
    ///
    /// Shows the difference first, and asks. `unmanage` undoes it exactly.
    Manage(Edit),
    /// Undo `manage`, and keep all other options of the VM
    Unmanage(Edit),
    /// Read Proxmox's files; started by the daemon, which reads the reports
    #[command(hide = true)]
    Watch(NodePaths),
}

#[derive(Debug, Args)]
pub(super) struct Edit {
    /// The VM's number
    vmid: u32,
    /// Write it without asking
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    node: NodePaths,
}

pub(super) fn run(command: &ProxmoxCommand) -> Result<Output, CliError> {
    let text = match command {
        ProxmoxCommand::Manage(edit) => edit.write(|args| {
            let new = with(args, edit.vmid);
            (new != args).then_some(new).ok_or("it is managed already")
        }),
        ProxmoxCommand::Unmanage(edit) => edit.write(|args| {
            let new = without(args);
            (new != args).then_some(new).ok_or("`overbook proxmox manage` has not changed it")
        }),
        ProxmoxCommand::Watch(node) => {
            node.watch().map(|()| String::new()).map_err(|error| error.to_string())
        }
    };
    text.map(|text| Output::text(&text)).map_err(CliError::Said)
}

impl Edit {
    fn write(
        &self,
        change: impl Fn(&str) -> Result<String, &'static str>,
    ) -> Result<String, String> {
        let vmid = self.vmid;
        let vm = self.read()?;
        let now = vm.conf.next_args().unwrap_or_default().to_owned();
        let new = change(&now).map_err(|why| format!("VM {vmid}: {why}"))?;
        let mut text = difference(&self.node.conf(vmid).display().to_string(), &now, &new);
        if !self.yes {
            agrees(&text)?;
            text.clear();
        }
        if self.read()?.conf.next_args().unwrap_or_default() != now {
            return Err(format!("VM {vmid} was changed meanwhile: this command changed nothing"));
        }
        set(vmid, &new)?;
        if self.read()?.conf.next_args().unwrap_or_default() != new {
            return Err(format!(
                "VM {vmid}: `qm` has written something else; see qm config {vmid}"
            ));
        }
        let _ = writeln!(text, "VM {vmid}: written; it takes effect when the VM is next started");
        if let Some(remedy) = vm.record().balances {
            let _ = writeln!(
                text,
                "pvestatd moves the balloon of this VM by itself, and Overbook leaves it alone \
                 until:\n  {remedy}"
            );
        }
        Ok(text)
    }

    fn read(&self) -> Result<ProxmoxVm, String> {
        let report = self.node.report()?;
        let found = report.vms.into_iter().find(|vm| vm.vmid == self.vmid);
        let none = || format!("there is no {}", self.node.conf(self.vmid).display());
        found.ok_or_else(|| report.fault.unwrap_or_else(none))
    }
}

/// Has Proxmox set `args`.
fn set(vmid: u32, args: &str) -> Result<(), String> {
    let mut command = Command::new("qm");
    command.arg("set").arg(vmid.to_string());
    match args {
        "" => command.args(["--delete", "args"]),
        args => command.arg("--args").arg(args),
    };
    let output = command.output().map_err(|error| format!("qm: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("`qm set {vmid}` ended with {}: {}", output.status, said.trim()))
}

/// Shows the difference and asks at the terminal; without one nothing is agreed to.
fn agrees(difference: &str) -> Result<(), String> {
    if !io::stdin().is_terminal() {
        return Err(format!("nothing was changed: say --yes to write this\n{difference}"));
    }
    let mut answer = String::new();
    let asked = write!(io::stderr(), "{difference}Write this? [y/N] ");
    asked.and_then(|()| io::stdin().lock().read_line(&mut answer)).map_err(|e| e.to_string())?;
    match answer.trim() {
        "y" | "yes" => Ok(()),
        _ => Err("nothing was changed".to_owned()),
    }
}

fn difference(path: &str, now: &str, new: &str) -> String {
    let line = |sign: char, args: &str| match args {
        "" => String::new(),
        args => format!("{sign}args: {args}\n"),
    };
    format!("{path}\n{}{}", line('-', now), line('+', new))
}

const BEGIN: &str = "-chardev socket,id=overbook,path=/run/qemu-server/";
const END: &str = ".overbook,server=on,wait=off -mon chardev=overbook,mode=control";

/// `args` with the socket of this VM. The socket of another one goes: a clone has its original's
/// options.
fn with(args: &str, vmid: u32) -> String {
    let own = format!("{BEGIN}{vmid}{END}");
    match without(args) {
        _ if pieces(args).eq([own.as_str()]) => args.to_owned(),
        rest if rest.is_empty() => own,
        rest => format!("{rest} {own}"),
    }
}

/// `args` without any socket of Overbook's.
fn without(args: &str) -> String {
    let mut rest = args.to_owned();
    loop {
        let piece = pieces(&rest).next().map(str::to_owned);
        let Some(piece) = piece else { return rest };
        let at = rest.find(&piece).unwrap_or_default();
        let before = rest[..at].strip_suffix(' ').unwrap_or(&rest[..at]);
        let after = &rest[at + piece.len()..];
        let after = if before.is_empty() { after.trim_start() } else { after };
        rest = format!("{before}{after}");
    }
}

/// The options in `args` that give a VM a socket for Overbook.
fn pieces(args: &str) -> impl Iterator<Item = &str> {
    args.match_indices(BEGIN).filter_map(move |(at, _)| {
        let rest = &args[at + BEGIN.len()..];
        let digits = rest.find(|c: char| !c.is_ascii_digit())?;
        let is_it = digits > 0 && rest[digits..].starts_with(END);
        is_it.then(|| &args[at..at + BEGIN.len() + digits + END.len()])
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OWN: &str = "-chardev socket,id=overbook,path=/run/qemu-server/101.overbook,server=on,\
        wait=off -mon chardev=overbook,mode=control";

    #[test]
    fn the_socket_is_added_once_and_the_other_options_stay() {
        assert_eq!(with("", 101), OWN);
        assert_eq!(with("-cpu host", 101), format!("-cpu host {OWN}"));
        let managed = with("-cpu host", 101);
        assert_eq!(with(&managed, 101), managed);
        let later = format!("{managed} -no-reboot");
        assert_eq!(with(&later, 101), later, "it may stand anywhere");
        assert_eq!(without(&later), "-cpu host -no-reboot");
    }

    #[test]
    fn a_clone_gets_a_socket_of_its_own() {
        let original = with("-cpu host", 101);
        let clone = with(&original, 102);
        assert_eq!(clone, original.replace("/101.", "/102."));
        assert_eq!(without(&clone), "-cpu host");
    }

    #[test]
    fn the_difference_has_only_lines_that_are_there() {
        let shown = difference("/etc/pve/qemu-server/101.conf", "", "-S");
        assert_eq!(shown, "/etc/pve/qemu-server/101.conf\n+args: -S\n");
        let shown = difference("f", "-S", "");
        assert_eq!(shown, "f\n-args: -S\n");
    }

    proptest! {
        #[test]
        fn the_undo_is_exact(
            args in "(-[a-z]+ '?[a-z=, /0-9]{0,20}'? ?){0,4}", vmid in 100_u32..1_000_000_000,
        ) {
            let args = args.trim();
            prop_assert_eq!(without(&with(args, vmid)), args);
        }

        #[test]
        fn odd_options_upset_nothing(args in ".{0,80}", n in 0_u32..3) {
            let odd = format!("{args}{BEGIN}{n}{args}{BEGIN}{END} {OWN}{OWN}");
            prop_assert_eq!(pieces(&without(&odd)).count(), 0);
        }
    }
}
