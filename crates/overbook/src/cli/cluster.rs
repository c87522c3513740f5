//! `overbook cluster`: the state of a pool's hosts, and the VMs that move between them.
//!
//! The command reads the store itself, so it shows a host's report even while its daemon is down.

use cluster::records::Records;
use model::cluster::{ExcessPlan, ExcessSpace};
use model::{Bytes, GroupName, Severity, VmName};
use serde_json::{Value, json};

use super::controller::pool_of;
use super::table::{Column, table};
use super::{Format, Name, context::Context, error::CliError, output::Output};
use crate::pool::{self, placement};

#[derive(Debug, clap::Subcommand)]
pub(super) enum Question {
    /// The pool in a few lines
    Status(Format),
    /// Its hosts: memory, VMs, overloads
    Hosts(Format),
    /// VMs that are overloaded
    Overloads(Format),
    /// VMs that change hosts, and how far that is
    Migrations(Format),
    /// Where a VM is, whether it can be moved, and why not
    Explain(Name),
    /// The host on which one more VM of a group shares the most memory
    Place(PlaceQuestion),
}

/// Arguments of `overbook cluster place`.
#[derive(Debug, clap::Args)]
pub(super) struct PlaceQuestion {
    /// The VM's group
    #[arg(add = super::names::groups())]
    group: String,
    /// Memory that the VM is promised, for example 2GiB; by default, the mean of its group
    #[arg(long, value_name = "SIZE")]
    memory: Option<Bytes>,
    #[command(flatten)]
    format: Format,
}

pub(super) fn run(context: &Context, question: &Question) -> Result<Output, CliError> {
    let spec = pool_of(context)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CliError::Said(error.to_string()))?;
    let records = runtime.block_on(async {
        let said = |error: &dyn std::fmt::Display| CliError::Said(format!("the pool: {error}"));
        let store = pool::store(&spec).await.map_err(|error| said(&error))?;
        let snapshot = store.read("").await.map_err(|error| said(&error))?;
        Ok::<_, CliError>(Records::of(&snapshot))
    })?;
    match question {
        Question::Status(format) => shown(format.json, &status(&records), words),
        Question::Hosts(format) => rows(format.json, &hosts(&records), &HOSTS),
        Question::Overloads(format) => rows(format.json, &overloads(&records), &OVERLOADS),
        Question::Migrations(format) => rows(format.json, &migrations(&records), &MIGRATIONS),
        Question::Explain(vm) => {
            let name = VmName::from(vm.name.as_str());
            let page = explain(&records, &name).ok_or_else(|| {
                CliError::Said(format!("no host of the pool reports a VM {}", vm.name))
            })?;
            shown(vm.format.json, &page, words)
        }
        Question::Place(asked) => place(&records, asked),
    }
}

fn place(records: &Records, asked: &PlaceQuestion) -> Result<Output, CliError> {
    let group = GroupName::from(asked.group.as_str());
    let memory = asked.memory.or_else(|| placement::usual_memory(records, &group));
    let memory = memory.ok_or_else(|| {
        let why =
            "no host of the pool reports a VM of this group, so name its memory: --memory 2GiB";
        CliError::Said(format!("{group}: {why}"))
    })?;
    let places = placement::places(records, &group, memory);
    let all: Vec<Value> = places.iter().map(|place| json!(place)).collect();
    if asked.format.json {
        return Output::json(&all);
    }
    let advice = advice(&places, &group, memory);
    Ok(Output::text(&format!("{advice}\n{}", lines(&all, &PLACES))))
}

/// The best place in a sentence.
fn advice(places: &[placement::RankedHost], group: &GroupName, memory: Bytes) -> String {
    match places.first() {
        None => "no host of the pool is there".to_owned(),
        Some(best) if !best.fits => format!("no host has room for {memory}"),
        Some(best) if best.saves.is_zero() => {
            format!("{}: it has the most room; a VM of {group} shares nothing yet", best.host)
        }
        Some(best) => {
            format!("{}: a VM of {group} would share some {} there", best.host, best.saves)
        }
    }
}

/// The fields of each table, and their titles.
const HOSTS: [(&str, &str); 8] = [
    ("host", "HOST"),
    ("is_there", "THERE"),
    ("vms", "VMS"),
    ("memory", "MEMORY"),
    ("given", "GIVEN"),
    ("overloaded", "OVERLOADED"),
    ("for_vms", "FOR VMS"),
    ("for_pages", "FOR PAGES"),
];
const OVERLOADS: [(&str, &str); 5] = [
    ("vm", "VM"),
    ("host", "HOST"),
    ("severity", "OVERLOAD"),
    ("given", "GIVEN"),
    ("promised", "PROMISED"),
];
const MIGRATIONS: [(&str, &str); 6] = [
    ("vm", "VM"),
    ("from", "FROM"),
    ("to", "TO"),
    ("is_withdrawn", "WITHDRAWN"),
    ("source", "SOURCE"),
    ("target", "TARGET"),
];
const PLACES: [(&str, &str); 5] = [
    ("host", "HOST"),
    ("fits", "FITS"),
    ("vms", "VMS OF IT"),
    ("saves", "SHARES"),
    ("free", "FREE"),
];

fn status(records: &Records) -> Value {
    let vms: usize = records.reports.values().map(|report| report.vms.len()).sum();
    let excess = |of: fn(&ExcessSpace) -> Bytes| {
        let ExcessPlan { need, missing, .. } = &records.excess;
        let (need, missing) = (of(need), of(missing));
        if missing.is_zero() {
            return need.to_string();
        }
        format!("{} of {need}: no host has room for more", need.minus(missing))
    };
    let missing: Vec<_> = records.reports.keys().filter(|h| !records.seated.contains(*h)).collect();
    json!({
        "controller": records.controller.as_deref().unwrap_or("none: nothing is decided"),
        "hosts": records.seated.len(),
        "missing": missing,
        "vms": vms,
        "overloaded": overloads(records).len(),
        "migrations": records.intents.len(),
        "kept_for_vms": excess(|space| space.targets),
        "kept_for_pages": excess(|space| space.repositories),
    })
}

fn hosts(records: &Records) -> Vec<Value> {
    let all = pool::view::of(records).hosts.into_iter();
    all.map(|of| {
        json!({
            "host": of.host,
            "is_there": of.is_there,
            "vms": of.vms,
            "memory": of.memory_bytes,
            "given": of.given_bytes,
            "overloaded": of.transient_overloads + of.sustained_overloads,
            "for_vms": Bytes(of.kept_for_vms_bytes),
            "for_pages": Bytes(of.kept_for_pages_bytes),
        })
    })
    .collect()
}

fn overloads(records: &Records) -> Vec<Value> {
    let hosts = records.reports.iter().filter(|(host, _)| records.seated.contains(*host));
    let vms = hosts.flat_map(|(host, report)| report.vms.iter().map(move |(n, vm)| (host, n, vm)));
    vms.filter(|(_, _, vm)| vm.severity != Severity::None)
        .map(|(host, name, vm)| {
            json!({
                "vm": name, "host": host, "severity": vm.severity,
                "given": vm.given, "promised": vm.promised,
            })
        })
        .collect()
}

fn migrations(records: &Records) -> Vec<Value> {
    let all = pool::view::of(records).moves.into_iter();
    all.map(|of| {
        json!({
            "vm": of.vm, "from": of.from, "to": of.to, "source": of.source, "target": of.target,
            "is_withdrawn": of.is_withdrawn,
        })
    })
    .collect()
}

/// The answer about a VM. `None`: no host has the VM.
fn explain(records: &Records, vm: &VmName) -> Option<Value> {
    let hosts: Vec<_> =
        records.reports.iter().filter(|(_, report)| report.vms.contains_key(vm)).collect();
    let (host, report) =
        hosts.iter().find(|(h, _)| records.seated.contains(*h)).or(hosts.first())?;
    let found = &report.vms[vm];
    let no = |why: &str| format!("no: {why}");
    let has_other = records.seated.iter().any(|seated| seated != *host);
    let alone = (!has_other).then(|| "no other host is there".to_owned());
    let why_not = found.immovable.clone().or(alone);
    let migration = migrations(records).into_iter().find(|row| row["vm"] == vm.as_str());
    Some(json!({
        "vm": vm,
        "host": host,
        "given": found.given,
        "promised": found.promised,
        "overload": found.severity,
        "can_move": why_not.as_deref().map_or("yes".to_owned(), no),
        "migration": migration.unwrap_or_default(),
    }))
}

fn shown(
    is_json: bool,
    page: &Value,
    words: impl Fn(&Value) -> String,
) -> Result<Output, CliError> {
    if is_json { Output::json(page) } else { Ok(Output::text(&words(page))) }
}

/// One line for each field that is not null.
fn words(page: &Value) -> String {
    let fields = page.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    fields
        .map(|(key, value)| format!("{:<12}{}\n", key.replace('_', " "), cell(key, value)))
        .collect()
}

fn rows(
    is_json: bool,
    rows: &[Value],
    columns: &[(&'static str, &'static str)],
) -> Result<Output, CliError> {
    if is_json {
        return Output::json(&rows);
    }
    Ok(Output::text(&lines(rows, columns)))
}

fn lines(rows: &[Value], columns: &[(&'static str, &'static str)]) -> String {
    let titles: Vec<Column> = columns.iter().map(|(_, title)| (*title, false)).collect();
    let cells = |row: &Value| columns.iter().map(|(key, _)| cell(key, &row[*key])).collect();
    table(&titles, &rows.iter().map(cells).collect::<Vec<_>>())
}

/// The columns of sizes in bytes.
const SIZES: [&str; 7] = ["memory", "given", "promised", "for_vms", "for_pages", "saves", "free"];

fn cell(key: &str, value: &Value) -> String {
    match value {
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(n) if SIZES.contains(&key) => {
            Bytes(n.as_u64().unwrap_or_default()).to_string()
        }
        Value::Array(items) if items.is_empty() => "none".to_owned(),
        Value::Array(items) => items.iter().map(|i| cell("", i)).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let parts = ["from", "to", "source", "target"].iter().filter_map(|k| fields.get(*k));
            parts.map(|part| cell("", part)).collect::<Vec<_>>().join(", ")
        }
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use model::cluster::{HostReport, VmReport};

    use super::*;

    #[test]
    fn sizes_have_units() {
        for (key, _) in HOSTS.iter().filter(|(key, _)| key.starts_with("for_")) {
            assert_eq!(cell(key, &json!(1_u64 << 30)), "1 GiB", "{key}");
        }
        assert_eq!(cell("generation", &json!(7)), "7");
    }

    #[test]
    fn the_best_place_is_told_in_a_sentence() {
        let place = |fits, saves| placement::RankedHost {
            host: "a".into(),
            fits,
            vms: 2,
            saves: Bytes::mib(saves),
            free: Bytes::mib(900),
        };
        let says =
            |places: &[placement::RankedHost]| advice(places, &"web".into(), Bytes::mib(512));
        assert_eq!(says(&[]), "no host of the pool is there");
        assert_eq!(says(&[place(false, 9)]), "no host has room for 512 MiB");
        assert_eq!(says(&[place(true, 9)]), "a: a VM of web would share some 9 MiB there");
        let none = says(&[place(true, 0)]);
        assert_eq!(none, "a: it has the most room; a VM of web shares nothing yet");
    }

    #[test]
    fn a_vm_can_move_only_where_there_is_another_host() {
        let mut records = Records::default();
        let vm = |immovable: Option<&str>| VmReport {
            group: "web".into(),
            promised: Bytes::mib(512),
            given: Bytes::mib(256),
            severity: Severity::None,
            paged: 0,
            rates: None,
            immovable: immovable.map(str::to_owned),
            saved: Bytes::ZERO,
        };
        let vms = [("web-1".into(), vm(None)), ("web-3".into(), vm(Some("started by libvirt")))];
        records.reports.insert("a".into(), HostReport { vms: vms.into(), ..HostReport::default() });
        records.reports.insert("b".into(), HostReport::default());
        records.seated.insert("a".into());
        let can = |records: &Records, vm: &str| {
            explain(records, &vm.into()).unwrap()["can_move"].as_str().unwrap().to_owned()
        };
        assert_eq!(can(&records, "web-1"), "no: no other host is there");
        assert_eq!(can(&records, "web-3"), "no: started by libvirt");
        records.seated.insert("b".into());
        assert_eq!(can(&records, "web-1"), "yes");
        assert_eq!(can(&records, "web-3"), "no: started by libvirt");
    }
}
