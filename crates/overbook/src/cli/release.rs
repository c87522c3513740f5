//! `overbook release`: must work in every state, even when the daemon is dead: then the journal
//! says what to undo. A daemon that cannot be asked is ended first, where the whole host is to be
//! released.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use api::client::{ApiClient, ClientError, order_path};
use api::wire::{Done, ReleasePreview, ReleasedVm};
use model::{Bytes, GroupName, Scope, Spec, VmName, config::Faults};

use super::steer::{each, shown};
use super::{context::Context, error::CliError, output::Output, scope::KnownNames};
use crate::{
    config_files,
    lock::{self, Holder, LockError},
    release::{self, ReleaseError, eviction::evict},
};

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
    /// VMs and groups; the whole host without one
    #[arg(
        value_name = "VM|GROUP",
        conflicts_with = "unless_restarting",
        add = super::names::vms_and_groups()
    )]
    names: Vec<String>,
    /// Tell what would be given back, and in which order; change nothing
    #[arg(long)]
    dry_run: bool,
    /// For the unit's `ExecStopPost=`: only if systemd does not start this unit again at once
    #[arg(long, hide = true, value_name = "UNIT")]
    unless_restarting: Option<String>,
    #[command(flatten)]
    format: super::Format,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    if arguments.dry_run {
        dry_run(context, arguments)
    } else if arguments.names.is_empty() {
        release_host(context, arguments)
    } else {
        release_named(context, arguments)
    }
}

/// Releases through the daemon that holds the state; a daemon that cannot be asked is ended first.
fn release_host(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
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
        let asked = living(context, &state)
            .and_then(|client| Ok(client.post(&order_path("release", &Scope::Host))?));
        let is_hung = match asked {
            Ok(done) => return shown(&after(evicted, done.message), json),
            Err(
                error @ CliError::Client(ClientError::Refused(_) | ClientError::NotPermitted(_)),
            ) => {
                return Err(error);
            }
            Err(CliError::Client(ClientError::Silent { .. })) => true,
            Err(_) => false,
        };
        let holder = match release::offline(&state, &qmp, None) {
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

/// Releases these VMs and groups. A daemon that cannot be asked is left alone.
fn release_named(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let (state, qmp) = release::own_places(&context.config);
    let client = match living(context, &state) {
        Err(CliError::Client(ClientError::NoDaemon(_))) => {
            return release_offline(context, &state, &qmp, arguments);
        }
        asked => asked?,
    };
    each(&client, "release", &arguments.names, arguments.format.json)
}

/// Releases these VMs and groups without a daemon; the configuration tells a group's VMs.
fn release_offline(
    context: &Context,
    state: &Path,
    qmp: &[String],
    arguments: &Arguments,
) -> Result<Output, CliError> {
    let said = |error: &dyn ToString| CliError::Said(error.to_string());
    let spec = config_files::load(&context.config);
    let preview = release::offline_preview(state, qmp, spec.as_ref().ok());
    let preview = preview.map_err(|error| said(&error))?;
    let scopes = offline_scopes(&preview, &spec, &arguments.names)?;
    let is_meant = |vm: &VmName| {
        let group = spec.as_ref().ok().and_then(|spec| spec.group_of(vm));
        scopes.iter().any(|scope| scope.has(vm, group.map(|(group, _)| group)))
    };
    let summary = release::offline(state, qmp, Some(&is_meant)).map_err(|error| said(&error))?;
    let done = Done { message: summary.text };
    Ok(shown(&done, arguments.format.json)?.with_code(u8::from(!summary.is_complete)))
}

/// The VMs and groups that the names mean where no daemon tells of any.
fn offline_scopes(
    preview: &ReleasePreview,
    spec: &Result<Spec, Faults>,
    names: &[String],
) -> Result<Vec<Scope>, CliError> {
    let vms = preview.vms.iter().map(|vm| vm.vm.clone()).collect();
    let groups = spec.iter().flat_map(|spec| spec.groups.keys().map(ToString::to_string));
    let known = KnownNames { vms, groups: groups.collect() };
    let scopes: Result<Vec<_>, _> = names.iter().map(|name| known.scope(name)).collect();
    let scopes = scopes.map_err(|error| match spec {
        Ok(_) => error,
        Err(_) => CliError::Said(format!(
            "{error}; the configuration has faults, so it names no groups: `overbook check`"
        )),
    })?;
    match scopes.iter().find_map(|scope| of_unknown_vms(scope, preview, spec.as_ref().ok()?)) {
        Some(group) => Err(CliError::Said(format!(
            "only a running daemon knows all VMs of group {group}, because VMs may belong to it by \
             label or metadata: name the VMs"
        ))),
        None => Ok(scopes),
    }
}

/// The group, if VMs that the configuration does not name may belong to it.
fn of_unknown_vms<'a>(
    scope: &'a Scope,
    preview: &ReleasePreview,
    spec: &Spec,
) -> Option<&'a GroupName> {
    let Scope::Group(group) = scope else { return None };
    let has_labels =
        spec.groups.get(group).is_some_and(|group| group.vms.iter().any(|it| it.is_of_labels()));
    let is_of_none = |vm: &ReleasedVm| spec.group_of(&VmName::from(vm.vm.as_str())).is_none();
    (has_labels || preview.vms.iter().any(is_of_none)).then_some(group)
}

/// Tells what a release would give back.
fn dry_run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    let (state, qmp) = release::own_places(&context.config);
    let names = &arguments.names;
    let (preview, scopes) = match living(context, &state) {
        Ok(client) => {
            let known =
                if names.is_empty() { KnownNames::default() } else { KnownNames::ask(&client)? };
            let scopes: Result<Vec<_>, _> = names.iter().map(|name| known.scope(name)).collect();
            (client.release_preview()?, scopes?)
        }
        Err(CliError::Client(ClientError::NoDaemon(_))) => {
            let spec = config_files::load(&context.config);
            let preview = release::offline_preview(&state, &qmp, spec.as_ref().ok());
            let preview = preview.map_err(|error| CliError::Said(error.to_string()))?;
            let scopes = offline_scopes(&preview, &spec, names)?;
            (preview, scopes)
        }
        Err(error) => return Err(error),
    };
    let preview: ReleasePreview = match scopes.as_slice() {
        [] => preview,
        scopes => preview.of(|vm| {
            let group = vm.group.as_deref().map(GroupName::from);
            let name = VmName::from(vm.vm.as_str());
            scopes.iter().any(|scope| scope.has(&name, group.as_ref()))
        }),
    };
    if arguments.format.json {
        return Output::json(&preview);
    }
    Ok(Output::text(&told(&preview)))
}

/// A preview in words.
fn told(preview: &ReleasePreview) -> String {
    let mut lines: Vec<String> = preview.vms.iter().map(of_vm).collect();
    lines.extend(preview.ksm.then(|| "KSM: would get its settings back".to_owned()));
    if lines.is_empty() {
        return "nothing to release\n".to_owned();
    }
    let all = Bytes(preview.vms.iter().map(ReleasedVm::total_bytes).sum());
    let room = Bytes(preview.room_bytes);
    lines.push(match preview.vms.iter().find(|vm| !vm.fits) {
        None => format!("in this order; the host has {room} beyond its reserve, enough for {all}"),
        Some(first) => format!(
            "in this order; the host has {room} beyond its reserve, and all is {all}: from {} on \
             it would swap as guests use what their balloons give back, and what is shared or \
             paged out would stay so until there is room",
            first.vm
        ),
    });
    lines.join("\n") + "\n"
}

fn of_vm(vm: &ReleasedVm) -> String {
    let name = &vm.vm;
    if let Some(error) = &vm.error {
        return format!("{name}: would not be released: {error}");
    }
    let mut parts = vec![match vm.total_bytes() {
        0 => "would get no memory back".to_owned(),
        total => format!("would get {} back", Bytes(total)),
    }];
    parts.extend((!vm.text.is_empty()).then(|| vm.text.clone()));
    for (bytes, what) in
        [(vm.shared_bytes, "that it shares"), (vm.paged_out_bytes, "that are paged out")]
    {
        parts.extend((bytes > 0).then(|| format!("{} {what}", Bytes(bytes))));
    }
    format!("{name}: {}", parts.join(", "))
}

/// The daemon, if it lives: a hung daemon gets a shorter timeout than a working one. Unless the
/// user names a socket, it must be the socket of the daemon that holds this state.
fn living(context: &Context, state: &Path) -> Result<ApiClient, CliError> {
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
    Ok(client)
}

fn after(evicted: Option<String>, message: String) -> Done {
    let lines: Vec<String> = evicted.into_iter().chain([message]).collect();
    Done { message: lines.join("\n") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_daemon_no_group_is_released_in_part() {
        let text = "[group.shop]\nvms = [\"pool:shop\"]\n[group.web]\nvms = [\"web-*\"]\n";
        let spec = model::config::parse(&[("test".to_owned(), text.to_owned())]);
        let vm = |vm: &str| ReleasedVm { vm: vm.to_owned(), ..ReleasedVm::default() };
        let preview =
            |vms: &[&str]| ReleasePreview::in_order(vms.iter().map(|name| vm(name)), 0, false);
        let scopes = |vms: &[&str], name: &str| {
            let scopes = offline_scopes(&preview(vms), &spec, &[name.to_owned()]);
            scopes.map_err(|error| error.to_string())
        };
        assert_eq!(scopes(&["web-1"], "web"), Ok(vec![Scope::Group("web".into())]));
        assert_eq!(scopes(&["db-1"], "db-1"), Ok(vec![Scope::Vm("db-1".into())]));
        for (vms, group) in [(&["web-1"][..], "shop"), (&["web-1", "db-1"][..], "web")] {
            let why = scopes(vms, group).unwrap_err();
            assert!(why.contains("only a running daemon knows all VMs of group"), "{why}");
        }
    }
}
