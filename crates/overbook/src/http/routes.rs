//! The paths. Each handler selects its part of the latest tick.

use std::{ops::RangeInclusive, sync::Arc};

use api::explain;
use api::published::Lender;
use api::shown::TickView;
use api::wire::{
    CapacityStatus, Done, Explanation, Failure, GroupStatus, HistoryRow, HostStatus, LoanRow,
    MayHold, MissRatioCurve, PlanStatus, PoolStatus, StatusPage, VmStatus,
};
use axum::{
    Extension, Json, Router,
    extract::{Path, Query, Request, State, rejection::PathRejection, rejection::QueryRejection},
    http::{
        HeaderMap, StatusCode,
        header::{CONTENT_TYPE, VARY},
    },
    response::{IntoResponse, Response, Sse, sse::KeepAlive},
    routing::get,
};
use model::{Bytes, GroupName, Millis, VmName};
use policy::Case;
use serde::Deserialize;
use sys::log;
use utoipa::{IntoParams, OpenApi as _, openapi::OpenApi};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Api,
    asks::{self, MAX_ROWS, Question, Span},
    description,
    events::{self, Event},
    exposition::TextFormat,
    metrics, orders,
    places::ConnectionSlot,
    problem::Problem,
    ticks::DashboardTick,
};

/// A daemon whose last tick is older than this is unhealthy.
const TICK_LIMIT: Millis = Millis::secs(5);

/// The largest integer that every JSON client can write (RFC 8259 §6).
const MAX_EXACT: u64 = (1 << 53) - 1;

/// The head of the OpenAPI description; paths and objects come from the handlers.
#[derive(utoipa::OpenApi)]
#[openapi(
    info(
        title = "Overbook",
        description = "State, decisions and reasons of the host daemon. Sizes are bytes, times \
                       milliseconds; TCP needs the bearer token, the unix socket does not."
    ),
    components(schemas(Event, Failure, DashboardTick))
)]
struct Head;

fn paths() -> OpenApiRouter<Api> {
    OpenApiRouter::with_openapi(Head::openapi())
        .routes(routes!(host))
        .routes(routes!(status))
        .routes(routes!(groups))
        .routes(routes!(group))
        .routes(routes!(vms))
        .routes(routes!(vm))
        .routes(routes!(curve))
        .routes(routes!(plan))
        .routes(routes!(pool))
        .routes(routes!(capacity))
        .routes(routes!(case))
        .routes(routes!(explanation))
        .routes(routes!(history))
        .routes(routes!(loans))
        .routes(routes!(orders::pause))
        .routes(routes!(orders::resume))
        .routes(routes!(orders::release, orders::preview_release))
        .routes(routes!(reload))
        .routes(routes!(lender))
        .routes(routes!(event_stream))
        .routes(routes!(ticks))
        .routes(routes!(prometheus))
        .routes(routes!(healthz))
}

/// The OpenAPI description as JSON.
#[must_use]
pub fn openapi() -> String {
    described(paths().into_openapi()).to_json().unwrap_or_default()
}

fn described(mut paths: OpenApi) -> OpenApi {
    description::complete(&mut paths);
    paths
}

/// All routes.
pub(super) fn router(api: Api) -> Router {
    let (router, description) = paths().split_for_parts();
    let description: Arc<str> = described(description).to_json().unwrap_or_default().into();
    let describe = async move || ([(CONTENT_TYPE, "application/json")], description.to_string());
    router
        .route("/v1/openapi.json", get(describe))
        .fallback(no_such_path)
        .method_not_allowed_fallback(wrong_method)
        .with_state(api)
}

impl Api {
    pub(super) fn shown(&self) -> Arc<TickView> {
        Arc::clone(&self.shown.borrow())
    }
}

/// The connection of a request.
pub(super) type Asker = Extension<Arc<ConnectionSlot>>;
pub(super) type Answer<T> = Result<Json<T>, Problem>;
type Name = Result<Path<String>, PathRejection>;

fn name_in(path: Name) -> Result<String, Problem> {
    path.map(|Path(name)| name).map_err(|error| Problem::BadParameter(error.body_text()))
}

/// A VM on this host, or an error that lists the known VMs.
fn known_vm(shown: &TickView, path: Name) -> Result<VmName, Problem> {
    let name = name_in(path)?;
    let vms = &shown.published.view.vms;
    let vm = VmName::from(name.as_str());
    if vms.contains_key(&vm) {
        return Ok(vm);
    }
    Err(Problem::unknown("VM", &name, vms.keys().map(VmName::as_str)))
}

/// The host and the daemon.
#[utoipa::path(get, path = "/v1/host", responses((status = 200, body = HostStatus)))]
async fn host(State(api): State<Api>) -> Json<HostStatus> {
    Json(HostStatus::of(&api.shown()))
}

/// The host, its groups and its VMs, all of one tick.
#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = StatusPage)))]
async fn status(State(api): State<Api>) -> Json<StatusPage> {
    Json(StatusPage::of(&api.shown()))
}

/// Every group.
#[utoipa::path(get, path = "/v1/groups", responses((status = 200, body = Vec<GroupStatus>)))]
async fn groups(State(api): State<Api>) -> Json<Vec<GroupStatus>> {
    Json(GroupStatus::all(&api.shown()))
}

/// One group.
#[utoipa::path(
    get, path = "/v1/groups/{name}", params(("name" = String, Path, example = "web")),
    responses((status = 200, body = GroupStatus), (status = 404, body = Failure))
)]
async fn group(State(api): State<Api>, path: Name) -> Answer<GroupStatus> {
    let (shown, name) = (api.shown(), name_in(path)?);
    let known = shown.published.spec.groups.keys().map(GroupName::as_str);
    let found = GroupStatus::of(&shown, &name.as_str().into());
    found.map(Json).ok_or_else(|| Problem::unknown("group", &name, known))
}

/// Every VM.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = Vec<VmStatus>)))]
async fn vms(State(api): State<Api>) -> Json<Vec<VmStatus>> {
    Json(VmStatus::all(&api.shown()))
}

/// One VM.
#[utoipa::path(
    get, path = "/v1/vms/{name}", params(("name" = String, Path, example = "web-1")),
    responses((status = 200, body = VmStatus), (status = 404, body = Failure))
)]
async fn vm(State(api): State<Api>, path: Name) -> Answer<VmStatus> {
    let shown = api.shown();
    let name = known_vm(&shown, path)?;
    let found = VmStatus::of(&shown, &name);
    found.map(Json).ok_or_else(|| Problem::unknown("VM", name.as_str(), std::iter::empty()))
}

/// A VM's miss-ratio curve.
#[utoipa::path(
    get, path = "/v1/vms/{name}/curve", params(("name" = String, Path, example = "web-1")),
    responses((status = 200, body = MissRatioCurve), (status = 404, body = Failure))
)]
async fn curve(State(api): State<Api>, path: Name) -> Answer<MissRatioCurve> {
    let shown = api.shown();
    let name = known_vm(&shown, path)?;
    let found = MissRatioCurve::of(&shown, &name);
    found.map(Json).map_err(|why| Problem::NoCurve { vm: name.to_string(), why })
}

/// The latest plan.
#[utoipa::path(get, path = "/v1/plan", responses((status = 200, body = PlanStatus)))]
async fn plan(State(api): State<Api>) -> Json<PlanStatus> {
    Json(PlanStatus::of(&api.shown().published.plan))
}

/// The pool of hosts that this host is in.
#[utoipa::path(
    get, path = "/v1/pool",
    responses((status = 200, body = PoolStatus), (status = 404, body = Failure))
)]
async fn pool(State(api): State<Api>) -> Answer<PoolStatus> {
    PoolStatus::of(&api.shown()).map(Json).ok_or(Problem::NoPool)
}

/// Parameters of the capacity.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct CapacityParams {
    /// Probability that all overloads that come at once find room, 0.5 to 0.9999; 0.97 by default.
    #[param(minimum = 0.5, maximum = 0.9999)]
    certainty: Option<f64>,
    /// Share of its promised memory that each VM is given, 0.1 to 1; by default, as it is now.
    #[param(minimum = 0.1, maximum = 1)]
    given: Option<f64>,
}

/// How many VMs the host holds, and what it keeps free for their overloads.
#[utoipa::path(
    get, path = "/v1/capacity", params(CapacityParams),
    responses((status = 200, body = CapacityStatus), (status = 404, body = Failure))
)]
async fn capacity(
    State(api): State<Api>,
    asked: Result<Query<CapacityParams>, QueryRejection>,
) -> Answer<CapacityStatus> {
    let Query(asked) = asked.map_err(|error| Problem::BadParameter(error.body_text()))?;
    let certainty = within("certainty", asked.certainty.unwrap_or(0.97), 0.5..=0.9999)?;
    let given = asked.given.map(|given| within("given", given, 0.1..=1.0)).transpose()?;
    let found = CapacityStatus::of(&api.shown().published, certainty, given);
    found.map(Json).map_err(|why| Problem::NoCapacity(why.to_string()))
}

fn within(name: &str, value: f64, valid: RangeInclusive<f64>) -> Result<f64, Problem> {
    if valid.contains(&value) {
        return Ok(value);
    }
    let (low, high) = (valid.start(), valid.end());
    Err(Problem::BadParameter(format!("{name} is {value}; write {low} to {high}")))
}

/// Everything that the latest plan was made from, for `overbook plan --from`.
#[utoipa::path(get, path = "/v1/case", responses((status = 200, body = serde_json::Value)))]
async fn case(State(api): State<Api>) -> Json<Case> {
    Json(api.shown().published.case())
}

/// Why a VM has the memory that it has, in words.
#[utoipa::path(
    get, path = "/v1/explain/{vm}", params(("vm" = String, Path, example = "web-1")),
    responses((status = 200, body = Explanation), (status = 404, body = Failure))
)]
async fn explanation(State(api): State<Api>, path: Name) -> Answer<Explanation> {
    let shown = api.shown();
    let name = known_vm(&shown, path)?;
    let mut last = shown.last_changes.get(&name).cloned();
    if last.is_none() {
        // The daemon has not changed this VM since it started, but an earlier one may have. An
        // unreadable history shows in `/v1/host`; the rest of the explanation is useful without it.
        let row = asks::last_change(&api.asks, name.clone()).await.unwrap_or_default();
        last = row.and_then(HistoryRow::into_change);
    }
    let text = explain::explain(&shown.published, &name, last.as_ref());
    Ok(Json(Explanation { vm: name.to_string(), text }))
}

/// The span of the history.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct HistoryParams {
    /// Rows since this time, in milliseconds since the Unix epoch; all rows by default.
    #[param(maximum = 9_007_199_254_740_991_i64)]
    since_wall_ms: Option<u64>,
    /// Rows before this time, in milliseconds since the Unix epoch; all rows by default.
    #[param(maximum = 9_007_199_254_740_991_i64)]
    until_wall_ms: Option<u64>,
    /// The newest rows, at most this many; 1000 without it.
    #[param(maximum = 10_000)]
    limit: Option<usize>,
}

/// Readings and changes of a VM, oldest first.
#[utoipa::path(
    get, path = "/v1/history/{vm}", params(("vm" = String, Path, example = "web-1"), HistoryParams),
    responses(
        (status = 200, body = Vec<HistoryRow>), (status = 404, body = Failure),
        (status = 500, body = Failure), (status = 504, body = Failure)
    )
)]
async fn history(
    State(api): State<Api>,
    path: Name,
    span: Result<Query<HistoryParams>, QueryRejection>,
) -> Answer<Vec<HistoryRow>> {
    let span = bounds(span)?;
    // A VM that has ended still has a history.
    let name = VmName::from(name_in(path)?);
    let rows = asks::history(&api.asks, name.clone(), span).await?;
    let shown = api.shown();
    let vms = &shown.published.view.vms;
    match rows {
        Some(rows) => Ok(Json(rows)),
        None if vms.contains_key(&name) => Ok(Json(Vec::new())),
        None => Err(Problem::unknown("VM", name.as_str(), vms.keys().map(VmName::as_str))),
    }
}

/// Loans that a group gave and took, and why, oldest first.
#[utoipa::path(
    get, path = "/v1/loans/{group}", params(("group" = String, Path, example = "web"), HistoryParams),
    responses(
        (status = 200, body = Vec<LoanRow>), (status = 404, body = Failure),
        (status = 500, body = Failure), (status = 504, body = Failure)
    )
)]
async fn loans(
    State(api): State<Api>,
    path: Name,
    span: Result<Query<HistoryParams>, QueryRejection>,
) -> Answer<Vec<LoanRow>> {
    let span = bounds(span)?;
    let group = GroupName::from(name_in(path)?.as_str());
    let rows = asks::loans(&api.asks, group.clone(), span).await?;
    let shown = api.shown();
    let groups = &shown.published.spec.groups;
    match rows {
        Some(rows) => Ok(Json(rows)),
        None if groups.contains_key(&group) => Ok(Json(Vec::new())),
        None => {
            let known = groups.keys().map(GroupName::as_str);
            Err(Problem::unknown("group", group.as_str(), known))
        }
    }
}

/// A number that every client of JSON reads exactly.
fn exact(name: &str, value: u64) -> Result<u64, Problem> {
    if value > MAX_EXACT {
        let text = format!("{name} is {value}; write at most {MAX_EXACT}");
        return Err(Problem::BadParameter(text));
    }
    Ok(value)
}

/// The span, with defaults and limits.
fn bounds(span: Result<Query<HistoryParams>, QueryRejection>) -> Result<Span, Problem> {
    let Query(span) = span.map_err(|error| Problem::BadParameter(error.body_text()))?;
    let limit = span.limit.unwrap_or(1_000);
    if limit > MAX_ROWS {
        let text = format!("limit is {limit}; at most {MAX_ROWS} rows are answered at once");
        return Err(Problem::BadParameter(text));
    }
    let within =
        |name, value: Option<u64>, usual| value.map_or(Ok(usual), |value| exact(name, value));
    let since_wall_ms = within("since_wall_ms", span.since_wall_ms, 0)?;
    let until_wall_ms = within("until_wall_ms", span.until_wall_ms, u64::MAX)?;
    Ok(Span { since_wall_ms, until_wall_ms, limit })
}

/// Parameters of a reload.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct ReloadParams {
    /// Whether a configuration that takes much needs no second reload; false by default.
    yes: Option<bool>,
}

/// Read the configuration again.
#[utoipa::path(post, path = "/v1/reload", params(ReloadParams), responses((status = 200, body = Done)))]
async fn reload(
    State(api): State<Api>,
    asker: Asker,
    asked: Result<Query<ReloadParams>, QueryRejection>,
) -> Answer<Done> {
    let Query(asked) = asked.map_err(|error| Problem::BadParameter(error.body_text()))?;
    let is_sure = asked.yes.unwrap_or_default();
    change(&api, &asker, "reload", Question::Reload { is_sure }).await
}

/// The host's repository.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
struct LenderParams {
    /// Memory that it holds, lent or free.
    #[param(maximum = 9_007_199_254_740_991_i64)]
    holds_bytes: u64,
    /// The most that it may hold by its operator.
    #[param(maximum = 9_007_199_254_740_991_i64)]
    most_bytes: u64,
}

/// Tell of the host's repository: `overbook repository` does so. The answer is the memory that the
/// repository may hold now.
#[utoipa::path(
    post, path = "/v1/lender", params(LenderParams),
    responses(
        (status = 200, body = MayHold), (status = 500, body = Failure),
        (status = 504, body = Failure)
    )
)]
async fn lender(
    State(api): State<Api>,
    told: Result<Query<LenderParams>, QueryRejection>,
) -> Answer<MayHold> {
    let Query(told) = told.map_err(|error| Problem::BadParameter(error.body_text()))?;
    let (holds, most) =
        (exact("holds_bytes", told.holds_bytes)?, exact("most_bytes", told.most_bytes)?);
    let lender = Lender { holds: Bytes(holds), most: Bytes(most) };
    let may_hold = asks::lender(&api.asks, lender).await?;
    Ok(Json(MayHold { may_hold_bytes: may_hold.0 }))
}

/// Sends an order to the daemon, and logs the process that asked for it.
pub(super) async fn change(
    api: &Api,
    Extension(asker): &Asker,
    what: &str,
    question: Question,
) -> Answer<Done> {
    log::info(&format!("{what}: asked for by {}", asker.peer()));
    let message = asks::change(&api.asks, question).await?;
    Ok(Json(Done { message }))
}

/// Changes, refusals and links as server-sent events; the data of each is an `Event`.
#[utoipa::path(
    get, path = "/v1/events",
    responses((status = 200, content_type = "text/event-stream", body = String))
)]
async fn event_stream(State(api): State<Api>) -> Response {
    Sse::new(events::stream(api.events.subscribe()))
        .keep_alive(KeepAlive::default())
        .into_response()
}

/// Each tick as server-sent events named `tick`; the data of each is a `DashboardTick`.
#[utoipa::path(
    get, path = "/v1/ticks",
    responses((status = 200, content_type = "text/event-stream", body = String))
)]
async fn ticks(State(api): State<Api>) -> Response {
    Sse::new(api.ticks.stream()).keep_alive(KeepAlive::default()).into_response()
}

/// Metrics for Prometheus, in OpenMetrics for clients whose header `Accept` names it.
#[utoipa::path(
    get, path = "/metrics",
    responses((
        status = 200,
        content((String = "text/plain"), (String = "application/openmetrics-text"))
    ))
)]
async fn prometheus(State(api): State<Api>, headers: HeaderMap) -> Response {
    let format = TextFormat::accepted(&headers);
    let text = metrics::encode(&api.shown(), format);
    ([(CONTENT_TYPE, format.content_type()), (VARY, "accept")], text).into_response()
}

/// Whether the loop runs.
#[utoipa::path(
    get, path = "/healthz",
    responses(
        (status = 200, body = Done), (status = 500, body = Failure),
        (status = 503, body = Failure), (status = 504, body = Failure)
    )
)]
async fn healthz(State(api): State<Api>) -> Response {
    if let Err(problem) = asks::sign(&api.asks).await {
        return problem.into_response();
    }
    let age = api.shown().tick_age();
    if age > TICK_LIMIT {
        let error = format!("the last tick was {age} ago, more than {TICK_LIMIT}");
        return (StatusCode::SERVICE_UNAVAILABLE, Json(Failure { error })).into_response();
    }
    Json(Done { message: format!("the last tick was {age} ago") }).into_response()
}

async fn no_such_path(request: Request) -> Problem {
    Problem::NoSuchPath(request.uri().path().to_owned())
}

async fn wrong_method(request: Request) -> Problem {
    let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
    Problem::WrongMethod { method, path }
}
