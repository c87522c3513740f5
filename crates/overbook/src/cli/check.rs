//! `overbook check`: checks the configuration, and with `--diff` shows what it would change.
//! `overbook check --host`: tries this kernel's features.
//!
//! The kernel's features are tried, not guessed from its version ([`sys::features`]); this file
//! tells the purpose of each. Exit code 1 means one of: a fault in the configuration; something
//! that would keep the daemon from starting or from doing anything ([`preflight`]); a
//! world-writable directory of QMP sockets; a disk's file that cannot be used or has no room;
//! certificates that are unusable or another host's; a command that does not exist; with
//! `--host`, a missing feature without which no VM here can be managed. In these cases no line
//! says `ok`. A fault that only makes a part less good leaves the code at 0: a repository that
//! does not lend, an unusable table of shared pages, or a pool whose etcd does not answer,
//! because disks, groups and VMs work without them.

use model::{Bytes, HostName, Spec, config::Faults};
use policy::Case;
use serde::Serialize;
use sys::features::{self, Feature, Finding};

use super::{
    context::Context,
    error::CliError,
    output::Output,
    table::{Column, table},
};
use tables::offline::trial as tables;

use api::wire::VmStatus;
use disks::trial::{Tried, TriedFile, try_files, try_repositories};
use drivers::discovery;

use crate::{
    config_files,
    foreseen::Foreseen,
    pool::trial::{self, Trial},
    preflight::{self, Remark},
};

/// Arguments of `overbook check`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Try what this host's kernel can do, instead of reading the configuration
    #[arg(long)]
    host: bool,
    /// Also show what the running daemon would change with this configuration
    #[arg(long, conflicts_with = "host")]
    diff: bool,
    #[command(flatten)]
    format: super::Format,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    match (arguments.host, arguments.format.json) {
        (true, json) => host(json),
        (false, true) => configuration_as_json(context, arguments.diff),
        (false, false) => configuration(context, arguments.diff),
    }
}

/// The running daemon's latest case under this configuration.
fn case_under(context: &Context, spec: &Spec) -> Result<Case, CliError> {
    let case: Case = context.client()?.get("/v1/case")?;
    Ok(Case { spec: spec.clone(), ..case })
}

fn configuration(context: &Context, with_diff: bool) -> Result<Output, CliError> {
    let mut report = Vec::new();
    let (spec, summary) = match config_files::load_with_summary(&context.config) {
        Ok(loaded) => loaded,
        Err(faults) => return Ok(Output::text(&format!("{faults}\n")).with_code(1)),
    };
    let all = All::of(context, &spec);
    if !all.is_fatal() {
        report.extend_from_slice(format!("ok: {summary}\n").as_bytes());
    }
    for Remark { what, is_fatal } in &all.findings {
        let kind = if *is_fatal { "fault" } else { "note" };
        report.extend_from_slice(format!("{kind}: {what}\n").as_bytes());
    }
    report.extend(all.files.iter().flat_map(|tried| of_file(tried).into_bytes()));
    for Tried { repository, disks, problem, lends_bytes, .. } in &all.repositories {
        let fine = || format!("fine, it would lend {}", Bytes(*lends_bytes));
        let how = problem.clone().unwrap_or_else(fine);
        let line = format!("repository {repository} of {}: {how}\n", disks.join(", "));
        report.extend_from_slice(line.as_bytes());
    }
    report.extend(all.directories.iter().flat_map(|fault| format!("qmp: {fault}\n").into_bytes()));
    report.extend(all.tables.iter().flat_map(|tried| of_table(tried).into_bytes()));
    report.extend(all.pool.iter().flat_map(|trial| of_pool(trial).into_bytes()));
    report.extend(all.too_tight.iter().flat_map(|line| format!("{line}\n").into_bytes()));
    let mut code = u8::from(all.is_fatal());
    if with_diff && code == 0 {
        match case_under(context, &spec) {
            Ok(case) => report.extend(Foreseen::of(&case).text().into_bytes()),
            Err(why) => {
                code = 1;
                report.extend(format!("diff: {why}\n").into_bytes());
            }
        }
    }
    Ok(Output::text(&String::from_utf8_lossy(&report)).with_code(code))
}

fn configuration_as_json(context: &Context, with_diff: bool) -> Result<Output, CliError> {
    let loaded = config_files::load(&context.config);
    let all = loaded.as_ref().map(|spec| All::of(context, spec)).unwrap_or_default();
    let faults = loaded.as_ref().err().map_or(&[][..], Faults::as_slice);
    let mut code = u8::from(!faults.is_empty() || all.is_fatal());
    let changes = match &loaded {
        Ok(spec) if with_diff && code == 0 => Some(case_under(context, spec)),
        _ => None,
    };
    let (changes, no_changes) = match changes.transpose() {
        Ok(case) => (case.map(|case| Foreseen::of(&case).rows()), None),
        Err(why) => (None, Some(why.to_string())),
    };
    code |= u8::from(no_changes.is_some());
    let All { findings, directories, files, repositories, tables, pool, too_tight } = all;
    let report = serde_json::json!({
        "faults": faults,
        "findings": findings,
        "directories": directories,
        "files": files,
        "repositories": repositories,
        "tables": tables,
        "pool": pool,
        "memory_limits": too_tight,
        "changes": changes,
        "why_no_changes": no_changes,
    });
    Ok(Output::json(&report)?.with_code(code))
}

/// The results of trying what the configuration names; empty if that has faults.
#[derive(Default)]
struct All {
    findings: Vec<Remark>,
    files: Vec<TriedFile>,
    /// Faults of the QMP sockets' directories.
    directories: Vec<String>,
    repositories: Vec<Tried>,
    tables: Vec<tables::Tried>,
    pool: Option<Trial>,
    /// VMs whose `max` exceeds a limit of their cgroup; empty unless a daemon runs.
    too_tight: Vec<String>,
}

impl All {
    fn of(context: &Context, spec: &Spec) -> Self {
        let vms = vms_of_the_daemon(context);
        Self {
            findings: preflight::try_host(spec, vms.as_deref()),
            directories: discovery::faults_of_directories(&spec.host.qmp),
            files: try_files(spec),
            repositories: try_repositories(spec),
            tables: tables::try_tables(spec),
            pool: spec.pool.as_ref().map(trial::try_pool),
            too_tight: too_tight(vms.as_deref().unwrap_or_default()),
        }
    }

    fn is_fatal(&self) -> bool {
        if !self.directories.is_empty() {
            return true;
        }
        let mut findings = self.pool.iter().flat_map(|trial| &trial.findings);
        self.findings.iter().any(|one| one.is_fatal)
            || self.files.iter().any(|tried| tried.is_fatal)
            || self.repositories.iter().any(|tried| tried.is_fatal)
            || findings.any(|one| one.is_fatal)
    }
}

/// The VMs on this host now. `None`: no daemon answers.
fn vms_of_the_daemon(context: &Context) -> Option<Vec<VmStatus>> {
    context.client().ok()?.get("/v1/vms").ok()
}

/// VMs whose `max` exceeds a limit of their cgroup.
fn too_tight(vms: &[VmStatus]) -> Vec<String> {
    let of = |vm: &VmStatus| {
        let max = Bytes(vm.max_bytes?);
        let limit = vm.memory_limits.iter().find(|limit| limit.is_below(max))?;
        let (name, words) = (&vm.name, limit.words());
        Some(format!("{name}: its max of {max} does not fit: its QEMU's cgroup {words}"))
    };
    vms.iter().filter_map(of).collect()
}

/// The line of a disk's file; empty if the file is in order.
fn of_file(tried: &TriedFile) -> String {
    let Some(problem) = &tried.problem else { return String::new() };
    let outcome = if tried.is_fatal { "it cannot be served" } else { "writes to it may fail" };
    format!("disk {}: {problem}; {outcome}\n", tried.disk)
}

fn of_table(tried: &tables::Tried) -> String {
    let (table, group) = (tried.table.display(), &tried.group);
    match &tried.problem {
        None => {
            format!("table {table} of {group}: fine, {} distinct pages\n", tried.distinct_pages)
        }
        Some(problem) => {
            format!("table {table} of {group}: {problem}; {group} uses none of its tables\n")
        }
    }
}

fn of_pool(trial: &Trial) -> String {
    let mut lines: Vec<_> =
        trial.findings.iter().map(|one| format!("pool: {}: {}\n", one.what, one.said)).collect();
    if let Some(others) = &trial.others {
        let names: Vec<_> = others.iter().map(HostName::as_str).collect();
        lines.push(match names.as_slice() {
            [] => "pool: no other host is there\n".to_owned(),
            names => format!("pool: other hosts that are there: {}\n", names.join(", ")),
        });
    }
    lines.concat()
}

const COLUMNS: [Column; 3] = [("WORKS", false), ("FEATURE", false), ("HOW, OR WHY NOT", false)];

/// The findings about the host.
#[derive(Debug, Serialize)]
struct HostSupport {
    /// Whether VMs that were started with the shim can be managed here.
    managed: bool,
    features: Vec<FeatureRow>,
}

#[derive(Debug, Serialize)]
struct FeatureRow {
    feature: &'static str,
    works: bool,
    detail: String,
    /// The effect of its absence.
    cost: Option<&'static str>,
}

fn host(json: bool) -> Result<Output, CliError> {
    let report = HostSupport::new(features::ALL.map(|feature| (feature, features::probe(feature))));
    let output = if json { Output::json(&report)? } else { Output::text(&report.text()) };
    Ok(output.with_code(u8::from(!report.managed)))
}

impl HostSupport {
    fn new(findings: impl IntoIterator<Item = (Feature, Finding)>) -> Self {
        let mut report = Self { managed: true, features: Vec::new() };
        for (feature, finding) in findings {
            let (name, cost) = meaning(feature);
            report.managed &= finding.works() || !is_needed(feature);
            report.features.push(FeatureRow {
                feature: name,
                works: finding.works(),
                detail: finding.detail().to_owned(),
                cost: (!finding.works()).then_some(cost),
            });
        }
        report
    }

    fn text(&self) -> String {
        let cells = |row: &FeatureRow| {
            let works = if row.works { "yes" } else { "NO" };
            vec![works.to_owned(), row.feature.to_owned(), row.detail.clone()]
        };
        let mut text = table(&COLUMNS, &self.features.iter().map(cells).collect::<Vec<_>>());
        text.push('\n');
        for row in &self.features {
            if let Some(cost) = row.cost {
                text += &format!("Without {}: {cost}.\n", row.feature);
            }
        }
        if self.features.iter().any(|row| row.cost.is_some()) {
            text += "`overbook doctor` has the line that mends each of them, where one does.\n";
        }
        text += if self.managed {
            "VMs that are started with the shim can be managed on this host.\n"
        } else {
            "VMs that are started with the shim run on this host, but can only be observed.\n"
        };
        text
    }
}

/// Whether no VM can be managed without this feature.
fn is_needed(feature: Feature) -> bool {
    matches!(feature, Feature::Userfaultfd | Feature::UffdioMove | Feature::PagemapScan)
}

/// A feature's name, and the effect of its absence.
fn meaning(feature: Feature) -> (&'static str, &'static str) {
    match feature {
        Feature::Userfaultfd => {
            ("userfaultfd", "no VM with the shim can be tracked; run this as root to be sure")
        }
        Feature::UffdioMove => ("UFFDIO_MOVE", "no VM with the shim can be tracked"),
        Feature::PagemapScan => ("PAGEMAP_SCAN", "no VM with the shim can be tracked"),
        Feature::UserfaultfdForUsers => (
            "userfaultfd for other users",
            "a VM whose QEMU does not run as root cannot be tracked",
        ),
        Feature::MadvFree => {
            ("MADV_FREE", "what guests report free is dropped at once, not lazily")
        }
        Feature::MadvPageout => ("MADV_PAGEOUT", "memory cannot be taken from a chosen VM at once"),
        Feature::Pressure => ("memory pressure", "the host's distress is seen only in free memory"),
        Feature::CgroupCpu => ("CPU time per cgroup", "what a VM or a worker costs is not shown"),
        Feature::CgroupMemory => {
            ("memory per cgroup", "the memory of a group's worker cannot be limited")
        }
        Feature::Ksm => ("KSM", "the kernel cannot merge identical pages of observed VMs"),
        Feature::TlbMisses => (
            "dTLB miss counter",
            "a change of phase is noticed by a few granules that are always tracked",
        ),
        Feature::HugePages => {
            ("transparent huge pages", "guests run slower, with or without Overbook")
        }
        Feature::Swap => (
            "swap",
            "when every VM claims at once what it was promised, the kernel can only kill; cold memory stays",
        ),
        Feature::MovesSwapped => {
            ("moving what is being swapped", "no memory of a VM with the shim is paged out")
        }
        Feature::PagesOutside => (
            "paging out VMs as they run",
            "VMs without the shim have no working set and keep what they do not touch",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(missing: &[Feature]) -> HostSupport {
        HostSupport::new(features::ALL.map(|feature| {
            let finding = if missing.contains(&feature) {
                Finding::Missing("tried without success".to_owned())
            } else {
                Finding::Works("tried".to_owned())
            };
            (feature, finding)
        }))
    }

    #[test]
    fn a_host_that_can_do_everything_is_told_no_cost() {
        let report = report(&[]);
        assert!(report.managed);
        let text = report.text();
        assert!(!text.contains("Without") && !text.contains("doctor"), "{text}");
    }

    #[test]
    fn what_is_missing_is_named_with_its_reason_and_its_cost() {
        let text = report(&[Feature::Swap]).text();
        assert!(
            text.contains("NO     swap                          tried without success\n"),
            "{text}"
        );
        assert!(text.contains("Without swap: when every VM claims"), "{text}");
        assert!(text.contains("\n`overbook doctor` has the line that mends"), "{text}");
        assert!(text.ends_with("can be managed on this host.\n"), "{text}");
    }

    #[test]
    fn without_one_of_three_features_no_vm_can_be_managed() {
        for needed in [Feature::Userfaultfd, Feature::UffdioMove, Feature::PagemapScan] {
            let report = report(&[needed]);
            assert!(!report.managed, "{needed:?}");
            assert!(report.text().ends_with("can only be observed.\n"));
        }
    }

    #[test]
    fn only_what_is_missing_on_this_host_has_a_cost() {
        let report = HostSupport::new(features::ALL.map(|f| (f, features::probe(f))));
        assert_eq!(report.features.len(), features::ALL.len());
        assert!(report.features.iter().all(|row| row.works == row.cost.is_none()));
    }
}
