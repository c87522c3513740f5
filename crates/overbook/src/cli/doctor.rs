//! `overbook doctor`: each VM of the host, what it can have, and the line that mends what it lacks.
//!
//! Exit code 0: nothing is to be mended; 1: something is. A remedy is one line of any
//! length, to be copied; all else fits 80 columns.

use super::{context::Context, error::CliError, output::Output, table::table};
use crate::doctor::{self, Availability, Capability, Diagnosis, Examination, ExaminedVm};

/// Columns of a terminal.
const WIDTH: usize = 80;
/// The longest name in the table.
const LONGEST_NAME: usize = 18;

/// Arguments of `overbook doctor`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Only this VM, and the host
    #[arg(add = super::names::vms())]
    name: Option<String>,
    /// Also things that work as they are, and could be had in addition
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    format: super::Format,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let socket = context.socket().unwrap_or_else(|_| super::DEFAULT_SOCKET.into());
    let mut found = doctor::examine(&context.config, &socket);
    if let Some(name) = &arguments.name {
        found.vms.retain(|vm| vm.name == *name || vm.pid.to_string() == *name);
        if found.vms.is_empty() {
            return Err(CliError::Said(format!("no process of this host runs a VM named {name}")));
        }
    }
    let code = u8::from(found.is_fault());
    let output = match arguments.format.json {
        true => Output::json(&found)?,
        false => Output::text(&text(&found, arguments.all)),
    };
    Ok(output.with_code(code))
}

fn text(found: &Examination, all: bool) -> String {
    let mut text = overview(&found.vms);
    let shown = |it: &&Diagnosis| all || it.is_fault;
    let of_host: Vec<_> = found.host.iter().filter(shown).collect();
    text += &part("Host", &of_host);
    for vm in &found.vms {
        // A diagnosis of the host is shown there.
        let own: Vec<_> = vm.diagnoses.iter().filter(|it| !it.is_hosts).filter(shown).collect();
        let title = format!("{} (process {}, started {})", vm.name, vm.pid, by(vm.started_by));
        text += &part(&title, &own);
    }
    let diagnoses = || found.vms.iter().flat_map(|vm| &vm.diagnoses).chain(&found.host);
    let notes = diagnoses().filter(|it| !it.is_fault && !it.is_hosts).count()
        + found.host.iter().filter(|it| !it.is_fault).count();
    text.push('\n');
    if !found.is_fault() {
        text += "Nothing is to be mended.\n";
    }
    if notes > 0 && !all {
        text += &format!("{notes} notes on things that could be had in addition: --all\n");
    }
    text
}

fn by(started_by: &str) -> String {
    if started_by == "by hand" { started_by.to_owned() } else { format!("by {started_by}") }
}

/// A row for each VM.
fn overview(vms: &[ExaminedVm]) -> String {
    if vms.is_empty() {
        return "No process of this host runs a VM.\n".to_owned();
    }
    let columns = [
        ("VM", false),
        ("PID", true),
        ("SEE", false),
        ("BALLOON", false),
        ("STATS", false),
        ("FREE", false),
        ("TRACK", false),
        ("PAGE", false),
        ("SHARE", false),
        ("MOVE", false),
    ];
    let word = |it: &Availability| match it {
        Availability::Yes => "yes",
        Availability::Off => "-",
        Availability::No => "NO",
    };
    let row = |vm: &ExaminedVm| {
        let begin = [cut(&vm.name), vm.pid.to_string()];
        begin.into_iter().chain(vm.capabilities.values().map(|it| word(it).to_owned())).collect()
    };
    table(&columns, &vms.iter().map(row).collect::<Vec<_>>())
}

/// A name that leaves the table its 80 columns.
fn cut(name: &str) -> String {
    match name.char_indices().nth(LONGEST_NAME) {
        None => name.to_owned(),
        Some(_) => format!("{}…", name.chars().take(LONGEST_NAME - 1).collect::<String>()),
    }
}

/// A heading and its diagnoses; empty if there are none.
fn part(title: &str, diagnoses: &[&Diagnosis]) -> String {
    if diagnoses.is_empty() {
        return String::new();
    }
    let mut text = format!("\n{title}\n");
    for it in diagnoses {
        let lacks: Vec<_> = it.lacks.iter().map(|it| it.words()).collect();
        let lacks = match lacks.as_slice() {
            [] => String::new(),
            all if all.len() == Capability::ALL.len() => "everything: ".to_owned(),
            some => format!("{}: ", some.join(", ")),
        };
        let mark = if it.is_fault { "  * " } else { "  - " };
        text += &wrapped(&format!("{lacks}{}", it.reason), mark, "    ");
        if let Some(remedy) = &it.remedy {
            if !remedy.place.is_empty() {
                text += &wrapped(&format!("{}:", remedy.place), "    ", "    ");
            }
            text += &format!("      {}\n", remedy.line);
        }
    }
    text
}

/// The text in lines of at most [`WIDTH`] columns, unless a word is longer.
fn wrapped(text: &str, first: &str, next: &str) -> String {
    let (mut lines, mut line) = (String::new(), first.to_owned());
    let mut is_new = true;
    for word in text.split_whitespace() {
        if !is_new && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines += &format!("{line}\n");
            (line, is_new) = (next.to_owned(), true);
        }
        if !is_new {
            line.push(' ');
        }
        line += word;
        is_new = false;
    }
    lines + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::{Cause, Remedy};

    fn diagnosis(is_fault: bool) -> Diagnosis {
        Diagnosis {
            cause: Cause::NoBalloon,
            lacks: vec![Capability::Balloon, Capability::Statistics],
            reason: "a reason that is long enough to need more than the eighty columns of a line \
                     on a terminal"
                .to_owned(),
            remedy: Some(Remedy { line: "x".repeat(100), place: "there".to_owned() }),
            is_fault,
            is_hosts: false,
        }
    }

    fn examined(diagnoses: Vec<Diagnosis>) -> Examination {
        let vm = ExaminedVm {
            name: "a-name-of-more-than-twenty-letters".to_owned(),
            pid: 4_194_304,
            started_by: "libvirt",
            group: None,
            capabilities: Capability::ALL.map(|it| (it, Availability::No)).into(),
            diagnoses,
        };
        Examination { has_daemon: false, host: Vec::new(), vms: vec![vm] }
    }

    #[test]
    fn all_but_a_remedy_fits_eighty_columns() {
        let text = text(&examined(vec![diagnosis(true)]), false);
        let remedy = format!("      {}", "x".repeat(100));
        assert!(text.lines().any(|line| line == remedy), "{text}");
        let fits = |line: &str| line.chars().count() <= WIDTH || line == remedy;
        assert!(text.lines().all(fits), "{text}");
        assert!(text.contains("  * balloon, statistics: a reason"), "{text}");
    }

    #[test]
    fn a_note_is_nothing_to_mend() {
        let found = examined(vec![diagnosis(false)]);
        assert!(!found.is_fault());
        let short = text(&found, false);
        assert!(short.contains("Nothing is to be mended.\n1 notes on"), "{short}");
        assert!(text(&found, true).contains("  - balloon"));
        assert!(examined(vec![diagnosis(true)]).is_fault());
    }
}
