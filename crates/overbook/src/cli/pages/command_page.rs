//! The man page of a command, in section 8: from the command table and the page of examples.

use std::io;

use clap::{Arg, ArgAction, Command};
use clap_mangen::Man;
use roff::{Inline, Roff, bold, italic, roman};

use super::examples::{self, Example};

const SECTION: &str = "8";
/// Exit statuses of every command but `status --exit-code`.
const STATUSES: [(&str, &str); 4] = [
    ("0", "The command is done."),
    ("1", "It failed, or is not complete."),
    ("2", "The command line is wrong."),
    ("3", "No daemon answers."),
];
const PLUGIN_STATUSES: [(&str, &str); 4] = [
    ("0", "The verdict is OK."),
    ("1", "It is WARNING."),
    ("2", "It is CRITICAL, or no daemon answers."),
    ("3", "It is UNKNOWN: the daemon may not be asked, or its answer makes no sense."),
];
const FILES: [(&str, &str); 8] = [
    ("/etc/overbook/overbook.toml", "The configuration: overbook.toml(5)."),
    ("/etc/overbook/overbook.d/*.toml", "Read after it, in the order of their names."),
    ("/run/overbook/overbook.sock", "The daemon's API."),
    ("/run/overbook/qmp/", "QMP sockets of VMs."),
    ("/run/overbook/disks/", "Sockets of disks that `overbook disks` serves."),
    ("/var/lib/overbook/", "The history, and the record of all that `overbook release` undoes."),
    ("/usr/share/doc/overbook/guide/", "The guide; SUMMARY.md is its table of contents."),
    ("/usr/share/overbook/", "Alerts for Prometheus, boards for Grafana, additions to the units."),
];
/// Commands that never ask a daemon, and need no configuration.
const APART: [&str; 6] = ["completions", "lab", "libvirt", "man", "mrc", "pki"];

/// The command and all below it that are not hidden.
pub(super) fn all(command: &Command) -> Vec<&Command> {
    let below = command.get_subcommands().filter(|command| !command.is_hide_set());
    [command].into_iter().chain(below.flat_map(all)).collect()
}

/// Its name in titles and file names, as `overbook-cluster-explain`.
pub(super) fn title(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

/// The page of a command of a built table.
pub(super) fn page(command: &Command) -> io::Result<Vec<u8>> {
    let man = Man::new(command.clone())
        .title(title(command).to_uppercase())
        .section(SECTION)
        .source(format!("overbook {}", version::VERSION))
        .manual("Overbook");
    let name = title(command).strip_prefix("overbook-").unwrap_or_default();
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    let mut roff = Roff::new();
    roff.control("SH", ["SYNOPSIS"]).text(synopsis(command));
    roff.to_writer(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut roff = Roff::new();
    statuses(&mut roff, name);
    let (shown, others) = examples::of(name);
    examples(&mut roff, shown);
    files(&mut roff, name);
    see_also(&mut roff, name, others);
    roff.to_writer(&mut page)?;
    Ok(page)
}

/// The command with every option of its own, each with its value.
fn synopsis(command: &Command) -> Vec<Inline> {
    let whole = title(command).replace('-', " ");
    let mut line = vec![bold(command.get_bin_name().unwrap_or(&whole))];
    let is_own = |arg: &&Arg| {
        let is_common = matches!(arg.get_action(), ArgAction::Help | ArgAction::Version);
        let is_mains = arg.is_global_set() && title(command) != "overbook";
        !arg.is_hide_set() && !is_common && !is_mains
    };
    let (positionals, options): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(is_own).partition(|arg| arg.is_positional());
    for arg in options.into_iter().chain(positionals) {
        let is_required = arg.is_required_set();
        line.push(roman(if is_required { " " } else { " [" }));
        match (arg.get_long(), arg.get_short()) {
            (Some(long), _) => line.push(bold(format!("--{long}"))),
            (None, Some(short)) => line.push(bold(format!("-{short}"))),
            (None, None) => {}
        }
        line.extend(value(arg));
        if !is_required {
            line.push(roman("]"));
        }
    }
    if command.has_subcommands() {
        line.extend([roman(" "), italic("COMMAND")]);
    }
    line
}

/// The value of an argument, as its page shows it.
fn value(arg: &Arg) -> Vec<Inline> {
    let range = arg.get_num_args().unwrap_or_default();
    if !range.takes_values() {
        return Vec::new();
    }
    let name = arg.get_value_names().map(|names| names.join(" ")).unwrap_or_default();
    let name = if name.is_empty() { arg.get_id().as_str().to_uppercase() } else { name };
    let is_repeated = range.max_values() > 1 || matches!(arg.get_action(), ArgAction::Append);
    let dots = if is_repeated && arg.get_value_delimiter().is_none() { " ..." } else { "" };
    let space = if arg.is_positional() { "" } else { " " };
    match range.min_values() {
        0 if !arg.is_positional() => vec![roman(" ["), italic(name), roman("]")],
        _ => vec![roman(space), italic(name), roman(dots)],
    }
}

fn list(roff: &mut Roff, rows: &[(&str, &str)]) {
    for (word, meaning) in rows {
        roff.control("TP", []).text([bold(*word)]).text([roman(*meaning)]);
    }
}

fn statuses(roff: &mut Roff, name: &str) {
    roff.control("SH", ["EXIT STATUS"]);
    list(roff, &STATUSES);
    if name == "status" {
        roff.control("PP", []).text([roman("With "), bold("--exit-code"), roman(":")]);
        list(roff, &PLUGIN_STATUSES);
    }
}

fn examples(roff: &mut Roff, examples: &[Example]) {
    roff.control("SH", ["EXAMPLES"]);
    for (line, meaning) in examples {
        roff.control("TP", []).text([bold(*line)]).text([roman(*meaning)]);
    }
}

fn files(roff: &mut Roff, name: &str) {
    let first = name.split('-').next().unwrap_or_default();
    let shown = match first {
        "" => &FILES[..],
        _ if APART.contains(&first) => &[],
        _ => &FILES[..3],
    };
    if !shown.is_empty() {
        roff.control("SH", ["FILES"]);
        list(roff, shown);
    }
}

fn see_also(roff: &mut Roff, name: &str, others: &[&str]) {
    roff.control("SH", ["SEE ALSO"]);
    let main = (!name.is_empty()).then(|| "overbook".to_owned());
    let others = others.iter().map(|other| format!("overbook-{other}"));
    let mut line = Vec::new();
    for page in main.into_iter().chain(others) {
        line.extend([bold(page), roman(format!("({SECTION}), "))]);
    }
    line.extend([bold("overbook.toml"), roman("(5)")]);
    roff.text(line);
}
