//! The operator's orders to pause, to go on and to release: the whole host, a group or a VM.

use std::sync::Arc;

use api::wire::ReleasePreview;
use drivers::Undo;
use model::{Hold, Scope, VmName};
use policy::Memory;
use sys::clock::boot_now;
use tokio::sync::oneshot;
use worker::StillShares;

use super::{Daemon, log};
use crate::{
    http::{LoopAnswer, Outcome},
    release,
};

impl Daemon {
    /// Pauses this part of the host. A VM that is `Released` is not measured either.
    pub(super) fn pause(&mut self, scope: &Scope, hold: Hold) -> Result<String, String> {
        let now = match scope {
            Scope::Host => {
                self.set_host_paused(true);
                "paused: nothing is changed until `overbook resume`".to_owned()
            }
            _ => {
                self.memory.pauses.add(scope, hold);
                format!(
                    "{} paused: nothing is changed until `overbook resume {}`",
                    words(scope),
                    name(scope)
                )
            }
        };
        self.paused(scope, now)
    }

    /// Ends a pause. Nothing is taken for the time of grace, as from a VM that was just found.
    pub(super) fn resume(&mut self, scope: &Scope) -> Result<String, String> {
        let now = match scope {
            Scope::Host => {
                if self.memory.paused {
                    self.memory.begin_grace(self.reloader.spec().host.grace, boot_now());
                }
                self.set_host_paused(false);
                let alone = &self.memory.pauses;
                let groups = alone.groups.keys().map(|group| format!("group {group}"));
                let left: Vec<_> = groups.chain(alone.vms.keys().map(VmName::to_string)).collect();
                match left.as_slice() {
                    [] => "resumed".to_owned(),
                    left => format!("resumed, except {}, paused by name", left.join(", ")),
                }
            }
            _ if self.memory.pauses.remove(scope) => {
                self.forget(scope);
                format!("{} resumed", words(scope))
            }
            _ => return Err(format!("{} is not paused", words(scope))),
        };
        self.paused(scope, now)
    }

    fn set_host_paused(&mut self, paused: bool) {
        self.memory.paused = paused;
        self.workers.set_paused(paused);
        self.ksm.set_paused(paused);
        if paused {
            self.drivers.keep_hands_off();
        } else {
            self.drivers.take_up();
        }
    }

    /// Passes the pauses on, and keeps them for the next start.
    fn paused(&mut self, scope: &Scope, now: String) -> Result<String, String> {
        let pauses = &self.memory.pauses;
        self.drivers.set_pauses(pauses.clone());
        self.workers.set_pauses(pauses.clone());
        log::info(&now);
        let kept = match scope {
            Scope::Host => self.pause.set(self.memory.paused),
            _ => self.pause.set_pauses(pauses),
        };
        kept.map(|()| now.clone()).map_err(|error| format!("{now}; but {error}"))
    }

    /// Whether a VM is in this part of the host, by the configuration in force.
    fn members(&self, scope: &Scope) -> impl Fn(&VmName) -> bool + Send + Sync + 'static + use<> {
        let (scope, spec) = (scope.clone(), self.in_force());
        move |vm: &VmName| scope.has(vm, spec.group_of(vm).map(|(group, _)| group))
    }

    /// From now on these VMs count as just found.
    fn forget(&mut self, scope: &Scope) {
        let is_meant = self.members(scope);
        self.memory.forget(&is_meant);
        self.workers.forget(&is_meant);
    }

    /// Releases in a task of its own, because a stuck QEMU takes time.
    pub(super) fn release(&mut self, scope: &Scope, reply: oneshot::Sender<Outcome>) {
        if *scope == Scope::Host {
            let (pauses, learned) =
                (self.memory.pauses.clone(), std::mem::take(&mut self.memory.learned));
            self.memory = Memory::fresh(true, pauses, learned);
        } else {
            self.forget(scope);
        }
        let paused = self.pause(scope, Hold::Released);
        let released = self.drivers.release(self.members(scope), Undo::Now);
        let whole = (*scope == Scope::Host)
            .then(|| (self.workers.ended(), self.workers.ours(), self.ksm.release()));
        let is_meant = self.members(scope);
        let mut names = self.workers.ours();
        names.retain(|_, name| is_meant(&VmName::from(name.as_str())));
        tokio::spawn(async move {
            let summary = match whole {
                None => {
                    let released = released.await;
                    let coming = tokio::task::spawn_blocking(move || release::coming(&names));
                    let coming = coming.await.unwrap_or_default();
                    release::summary(released, Vec::new(), Ok(None)).with(coming)
                }
                Some((ended, names, ksm)) => {
                    let (released, (), ksm) = tokio::join!(released, ended, ksm);
                    let unshare = tokio::task::spawn_blocking(move || release::unshare(&names));
                    let failed = |error: tokio::task::JoinError| {
                        let why = StillShares::Because(error.to_string());
                        vec![("shared pages".to_owned(), Err(why))]
                    };
                    let unshared = unshare.await.unwrap_or_else(failed);
                    release::summary(released, unshared, ksm)
                }
            };
            log::info(&summary.text);
            let outcome = match paused {
                Ok(_) if summary.is_complete => Ok(summary.text),
                Ok(_) => Err(summary.text),
                Err(error) => Err(format!("{}; {error}", summary.text)),
            };
            // The client may have disconnected.
            let _ = reply.send(outcome.map(LoopAnswer::Done));
        });
    }

    /// Finds out what a release of the whole host would give back.
    pub(super) fn preview(&self, reply: oneshot::Sender<Outcome>) {
        let spec = self.in_force();
        let asked = self.drivers.release(|_: &VmName| true, Undo::DryRun);
        let (processes, drives_ksm) = (self.workers.ours(), self.ksm.is_driven());
        tokio::spawn(async move {
            let outcomes = asked.await;
            let preview = tokio::task::spawn_blocking(move || {
                release::preview(outcomes, &processes, Some(&spec), drives_ksm)
            });
            let preview: Result<ReleasePreview, _> = preview.await;
            let answer = preview.map(|preview| LoopAnswer::Preview(Box::new(preview)));
            // The client may have disconnected.
            let _ = reply.send(answer.map_err(|error| error.to_string()));
        });
    }

    fn in_force(&self) -> Arc<model::Spec> {
        self.drivers.spec_in_force().unwrap_or_else(|| self.reloader.spec())
    }
}

fn words(scope: &Scope) -> String {
    match scope {
        Scope::Host => "the host".to_owned(),
        Scope::Group(name) => format!("group {name}"),
        Scope::Vm(name) => name.to_string(),
    }
}

fn name(scope: &Scope) -> &str {
    match scope {
        Scope::Host => "",
        Scope::Group(name) => name.as_str(),
        Scope::Vm(name) => name.as_str(),
    }
}
