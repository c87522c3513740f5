//! `overbook plan`: the latest plan, its input as a file, or the plan that the policy makes of
//! such a file.
//!
//! A puzzling host becomes a test: `plan --export > case.json` on the host, then `plan --from
//! case.json` on any machine. The outcome is the same, because the policy is a pure function.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use api::shown::change_words;
use api::wire::PlanStatus;
use api::wire::PlannedVm;
use clap::Args;
use policy::Case;

use super::{
    Format,
    context::Context,
    error::CliError,
    output::Output,
    table::{Column, size, table},
};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Write what the latest plan was made from to standard output
    #[arg(long, conflicts_with_all = ["from", "json"])]
    export: bool,
    /// Decide this exported file instead of asking the daemon; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

const COLUMNS: [Column; 4] = [("VM", false), ("GROUP", false), ("TARGET", true), ("WHY", false)];

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    if arguments.export {
        let mut text = context.client()?.get_text("/v1/case")?;
        text.push('\n');
        return Ok(Output::raw(text.into_bytes()));
    }
    let plan = match &arguments.from {
        Some(path) => PlanStatus::of(&read(path)?.decide()),
        None => context.client()?.get("/v1/plan")?,
    };
    if arguments.format.json { Output::json(&plan) } else { Ok(Output::text(&text(&plan))) }
}

fn read(path: &Path) -> Result<Case, CliError> {
    let file = |error| CliError::File { path: path.into(), error };
    let text = if path == Path::new("-") {
        io::read_to_string(io::stdin()).map_err(file)?
    } else {
        fs::read_to_string(path).map_err(file)?
    };
    // Some editors put a byte-order mark there.
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    if text.trim().is_empty() {
        let what = "it is empty; valid: what `overbook plan --export` writes";
        return Err(file(io::Error::other(what)));
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let case = serde_path_to_error::deserialize(&mut json).map_err(|error| CliError::Case {
        path: path.into(),
        field: error.path().to_string(),
        error: error.into_inner(),
    })?;
    let rest = |error| CliError::Case { path: path.into(), field: "after the end".into(), error };
    json.end().map_err(rest)?;
    Ok(case)
}

fn text(plan: &PlanStatus) -> String {
    let carried_out = match plan.mode.as_str() {
        "enforce" => "mode enforce: it is carried out",
        "recommend" => "mode recommend: it is shown, not carried out",
        _ => "mode observe: nothing is planned",
    };
    let mut text = format!("{carried_out}\n");
    for reason in &plan.host {
        text += &format!("host: {}\n", reason.text);
    }
    for loan in &plan.loans {
        text += &format!("{}\n", loan.words());
    }
    for (group, scan) in plan.scans.iter().filter(|(_, scan)| scan.pages_per_ms.is_some()) {
        text += &format!("group {group}: {}\n", scan.words());
    }
    if !plan.order.is_empty() {
        text += &format!("in this order: {}\n", plan.order.join(", "));
    }
    let rows: Vec<Vec<String>> = plan.vms.iter().flat_map(rows_of).collect();
    text + "\n" + &table(&COLUMNS, &rows)
}

/// One row per reason; only the first row names the VM.
fn rows_of(vm: &PlannedVm) -> Vec<Vec<String>> {
    let change = vm.change.as_ref().map(|change| {
        change_words(change.is_take, model::Bytes(change.target_bytes), &change.reason.text)
    });
    let refusals = vm.refusals.iter().map(|words| words.text.clone());
    let mut whys: Vec<String> = change.into_iter().chain(refusals).collect();
    if whys.is_empty() {
        whys.push("-".to_owned());
    }
    let group = vm.group.clone().unwrap_or_else(|| "-".to_owned());
    let first = [vm.name.clone(), group, size(vm.target_bytes)];
    let row = |(index, why)| {
        let named = if index == 0 { first.to_vec() } else { vec![String::new(); 3] };
        named.into_iter().chain([why]).collect()
    };
    whys.into_iter().enumerate().map(row).collect()
}
