//! Orders to pause, to go on and to release: for the whole host, a group or a VM.

use api::published::Published;
use api::wire::{Done, Failure, ReleasePreview};
use axum::{
    Json,
    extract::{Query, State, rejection::QueryRejection},
};
use model::{GroupName, Scope, VmName};
use serde::Deserialize;
use utoipa::IntoParams;

use super::{
    Api,
    asks::{self, Question},
    problem::Problem,
    routes::{Answer, Asker, change},
};

/// The part of the host that an order is for; without parameters all of it.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(super) struct ScopeParams {
    /// One VM; with a group, only if it is in that group.
    vm: Option<String>,
    /// One group, with the VMs that it gets later.
    group: Option<String>,
}

pub(super) type AskedScope = Result<Query<ScopeParams>, QueryRejection>;

/// The part of the host, which exists, or is paused where `may_be_gone`.
fn scope(api: &Api, asked: AskedScope, may_be_gone: bool) -> Result<Scope, Problem> {
    let Query(asked) = asked.map_err(|error| Problem::BadParameter(error.body_text()))?;
    let shown = api.shown();
    let Published { spec, view, memory, .. } = shown.published.as_ref();
    match (asked.vm, asked.group) {
        (None, None) => Ok(Scope::Host),
        (Some(name), Some(group)) => {
            let is_in = |vm: &&VmName| {
                spec.group_of(vm).is_some_and(|(own, _)| own.as_str() == group.as_str())
            };
            let known: Vec<_> = view.vms.keys().filter(is_in).map(VmName::as_str).collect();
            if known.contains(&name.as_str()) {
                return Ok(Scope::Vm(name.as_str().into()));
            }
            Err(Problem::unknown("VM of this group", &name, known.into_iter()))
        }
        (Some(name), None) => {
            let vm = VmName::from(name.as_str());
            let is_paused = may_be_gone && memory.pauses.vms.contains_key(&vm);
            if view.vms.contains_key(&vm) || is_paused {
                return Ok(Scope::Vm(vm));
            }
            Err(Problem::unknown("VM", &name, view.vms.keys().map(VmName::as_str)))
        }
        (None, Some(name)) => {
            let group = GroupName::from(name.as_str());
            let is_paused = may_be_gone && memory.pauses.groups.contains_key(&group);
            if spec.groups.contains_key(&group) || is_paused {
                return Ok(Scope::Group(group));
            }
            Err(Problem::unknown("group", &name, spec.groups.keys().map(GroupName::as_str)))
        }
    }
}

/// Stop all changes, on the whole host, a group or a VM.
#[utoipa::path(
    post, path = "/v1/pause", params(ScopeParams),
    responses(
        (status = 200, body = Done), (status = 404, body = Failure),
        (status = 500, body = Failure), (status = 504, body = Failure)
    )
)]
pub(super) async fn pause(State(api): State<Api>, asker: Asker, asked: AskedScope) -> Answer<Done> {
    let scope = scope(&api, asked, false)?;
    change(&api, &asker, "pause", Question::Pause(scope)).await
}

/// End the pause of the whole host, a group or a VM.
#[utoipa::path(
    post, path = "/v1/resume", params(ScopeParams),
    responses(
        (status = 200, body = Done), (status = 404, body = Failure),
        (status = 500, body = Failure), (status = 504, body = Failure)
    )
)]
pub(super) async fn resume(
    State(api): State<Api>,
    asker: Asker,
    asked: AskedScope,
) -> Answer<Done> {
    let scope = scope(&api, asked, true)?;
    change(&api, &asker, "resume", Question::Resume(scope)).await
}

/// Give VMs back what they had before Overbook touched them, and pause there.
#[utoipa::path(
    post, path = "/v1/release", params(ScopeParams),
    responses(
        (status = 200, body = Done), (status = 404, body = Failure),
        (status = 500, body = Failure), (status = 504, body = Failure)
    )
)]
pub(super) async fn release(
    State(api): State<Api>,
    asker: Asker,
    asked: AskedScope,
) -> Answer<Done> {
    let scope = scope(&api, asked, true)?;
    change(&api, &asker, "release", Question::Release(scope)).await
}

/// Tell what a release of the whole host would give back; nothing is changed.
#[utoipa::path(
    get, path = "/v1/release",
    responses(
        (status = 200, body = ReleasePreview), (status = 500, body = Failure),
        (status = 504, body = Failure)
    )
)]
pub(super) async fn preview_release(State(api): State<Api>) -> Answer<ReleasePreview> {
    asks::preview(&api.asks).await.map(Json)
}
