//! Moves a guest: queries the two QEMUs about a migration, and commands them.
//!
//! [`policy::handover`] decides who does what, and when; this module only translates that to QMP.
//! One QEMU may see several migrations, and keeps reporting the last one. So each migration is
//! marked: before the source is told to migrate, it gets an object whose name contains the number
//! of the intent. That object is its TLS credentials or, without TLS, one that nothing uses.
//! Reports of a migration with another mark, or none, are ignored.

mod secured;

use model::{Bytes, Millis, words};
use policy::handover::{
    self, IntentView, SourceDeed, SourceQemu, SourceStep, TargetDeed, TargetQemu, TargetStep,
};
use serde_json::{Value, json};

use super::qmp::{Command, QmpClient, QmpError};
pub use secured::{AUTHORITY_CERTIFICATE, REVOCATION_LIST, Secured};

/// Prefix of the name of an object that marks a migration; the intent's number follows.
const MARK: &str = "overbook-intent-";

/// Limits of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Network bandwidth, in bytes a second.
    pub bandwidth: Bytes,
    /// How long the guest may be stopped.
    pub downtime: Millis,
    /// Longest time of precopy. After that the guest switches over at once, and its remaining
    /// pages follow on demand (postcopy).
    pub precopy: Millis,
}

/// Result of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Turn<Step> {
    /// This step must be written down now, before the next turn.
    Write(Step),
    /// An action was taken; there may be another one at once.
    Did,
    /// Others have to act first.
    Waits,
    /// A QEMU is to be started, with `-incoming defer -S`.
    Launch,
    /// Nothing remains to be done.
    Over,
}

/// Takes the source's next action for the intent of this `generation`. `client` is its QEMU.
/// `secured` has the TLS parameters; `None`: the migration is not encrypted.
///
/// # Errors
/// QEMU does not answer, or refuses: the next turn tries again.
pub async fn source_turn(
    client: &mut QmpClient,
    generation: u64,
    seen: IntentView<'_>,
    limits: Limits,
    secured: Option<&Secured>,
) -> Result<Turn<SourceStep>, QmpError> {
    let qemu = source_qemu(client, generation, limits.precopy).await?;
    match handover::source(seen, &qemu) {
        SourceDeed::Wait => return Ok(Turn::Waits),
        SourceDeed::Nothing => return Ok(Turn::Over),
        SourceDeed::Write(step) => return Ok(Turn::Write(step)),
        SourceDeed::Send(address) => {
            send(client, generation, &address, limits, secured).await?;
        }
        SourceDeed::Hasten => told(client, "migrate-start-postcopy").await?,
        SourceDeed::CallOff => told(client, "migrate_cancel").await?,
        SourceDeed::Resume => told(client, "cont").await?,
        SourceDeed::End => told(client, "quit").await?,
    }
    Ok(Turn::Did)
}

/// Takes the source's turn without a connection: its QEMU has ended, or was not found yet.
#[must_use]
pub fn source_turn_without(qemu: &SourceQemu, seen: IntentView<'_>) -> Turn<SourceStep> {
    match handover::source(seen, qemu) {
        SourceDeed::Write(step) => Turn::Write(step),
        SourceDeed::Nothing => Turn::Over,
        _ => Turn::Waits,
    }
}

/// Takes the target's next action. `client` is its QEMU. `is_ours`: the host has recorded that
/// this QEMU waits for the guest; any other QEMU that does not wait runs a guest that this
/// migration must not touch. `address` is the address to listen on; `secured` has the TLS
/// parameters.
///
/// # Errors
/// As of [`source_turn`].
pub async fn target_turn(
    client: &mut QmpClient,
    is_ours: bool,
    seen: IntentView<'_>,
    address: &str,
    secured: Option<&Secured>,
) -> Result<Turn<TargetStep>, QmpError> {
    let qemu = match target_qemu(client).await? {
        TargetQemu::Received if !is_ours => TargetQemu::Running,
        qemu => qemu,
    };
    match handover::target(seen, &qemu) {
        TargetDeed::Wait => return Ok(Turn::Waits),
        TargetDeed::Nothing => return Ok(Turn::Over),
        TargetDeed::Write(step) => return Ok(Turn::Write(step)),
        TargetDeed::Start => listen(client, address, secured).await?,
        TargetDeed::Run => told(client, "cont").await?,
        TargetDeed::End => told(client, "quit").await?,
    }
    Ok(Turn::Did)
}

/// Takes the target's turn without a connection: its QEMU has ended, or was not started yet.
#[must_use]
pub fn target_turn_without(qemu: &TargetQemu, seen: IntentView<'_>) -> Turn<TargetStep> {
    match handover::target(seen, qemu) {
        TargetDeed::Write(step) => Turn::Write(step),
        TargetDeed::Start => Turn::Launch,
        TargetDeed::Nothing => Turn::Over,
        TargetDeed::Wait | TargetDeed::Run | TargetDeed::End => Turn::Waits,
    }
}

/// Asks the source's QEMU about the migration of this intent.
async fn source_qemu(
    client: &mut QmpClient,
    generation: u64,
    precopy: Millis,
) -> Result<SourceQemu, QmpError> {
    let commands = [list_objects(), Command::new("query-migrate"), Command::new("query-status")];
    let [objects, migrate, status] = client.batch(commands).await?;
    Ok(source_in(&status?, &migrate?, &objects?, (generation, precopy)))
}

/// Asks the target's QEMU. A migration may end between two queries, so the run state is queried
/// last: a QEMU that waits then did so before, and has reported its address.
async fn target_qemu(client: &mut QmpClient) -> Result<TargetQemu, QmpError> {
    let commands = ["query-migrate", "query-status"].map(Command::new);
    let [migrate, status] = client.batch(commands).await?;
    Ok(target_in(&status?, &migrate?))
}

/// Makes a QEMU that was started with `-incoming defer -S` listen on `address` (`tcp:host:0` for
/// any port).
async fn listen(
    client: &mut QmpClient,
    address: &str,
    secured: Option<&Secured>,
) -> Result<(), QmpError> {
    // A target that does not run yet does not lock the disks, so the source can take them back.
    let capabilities = capabilities(&["postcopy-ram", "late-block-activate"]);
    told_with(client, "migrate-set-capabilities", capabilities).await?;
    let parameters = match secured {
        Some(secured) => secured.at_target(client).await?,
        None => secured::nothing(),
    };
    told_with(client, "migrate-set-parameters", parameters).await?;
    told_with(client, "migrate-incoming", json!({"uri": address})).await
}

/// Makes the source's QEMU send its guest.
async fn send(
    client: &mut QmpClient,
    generation: u64,
    address: &str,
    limits: Limits,
    secured: Option<&Secured>,
) -> Result<(), QmpError> {
    // The source only completes when the target has confirmed that it has everything.
    let capabilities = capabilities(&["return-path", "postcopy-ram"]);
    told_with(client, "migrate-set-capabilities", capabilities).await?;
    for earlier in marks(&client.execute(list_objects()).await?) {
        secured::forget(client, &earlier).await?;
    }
    let mark = mark(generation);
    let mut parameters = match secured {
        Some(secured) => secured.at_source(client, &mark).await?,
        None => {
            // This object admits no identity, and nothing uses it.
            let object = json!({"qom-type": "authz-simple", "id": mark, "identity": ""});
            told_with(client, "object-add", object).await?;
            secured::nothing()
        }
    };
    for (key, limit) in [
        ("max-bandwidth", limits.bandwidth.0),
        ("max-postcopy-bandwidth", limits.bandwidth.0),
        ("downtime-limit", limits.downtime.0),
    ] {
        parameters[key] = limit.into();
    }
    told_with(client, "migrate-set-parameters", parameters).await?;
    told_with(client, "migrate", json!({"uri": address})).await
}

async fn told(client: &mut QmpClient, command: &'static str) -> Result<(), QmpError> {
    client.execute(Command::new(command)).await.map(drop)
}

async fn told_with(
    client: &mut QmpClient,
    command: &'static str,
    arguments: Value,
) -> Result<(), QmpError> {
    client.execute(Command::with(command, arguments)).await.map(drop)
}

/// User-created objects in QEMU, by us and by others.
fn list_objects() -> Command {
    Command::with("qom-list", json!({"path": "/objects"}))
}

fn capabilities(names: &[&str]) -> Value {
    let all = names.iter().map(|name| json!({"capability": name, "state": true}));
    json!({"capabilities": all.collect::<Vec<_>>()})
}

fn mark(generation: u64) -> String {
    format!("{MARK}{generation}")
}

/// The marks among these objects.
fn marks(objects: &Value) -> Vec<String> {
    let names = objects.as_array().into_iter().flatten().map(|object| text(object, "name"));
    names.filter(|name| name.starts_with(MARK)).map(str::to_owned).collect()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn source_in(
    status: &Value,
    migrate: &Value,
    objects: &Value,
    (generation, precopy): (u64, Millis),
) -> SourceQemu {
    if !marks(objects).contains(&mark(generation)) {
        return SourceQemu::Untouched;
    }
    match text(migrate, "status") {
        "" | "none" => SourceQemu::Untouched,
        "completed" => match text(status, "status") {
            "postmigrate" => SourceQemu::Completed,
            // The migration is about to complete.
            "finish-migrate" => SourceQemu::Sending { is_slow: false },
            _ => SourceQemu::Failed("the guest was taken back".to_owned()),
        },
        "failed" => SourceQemu::Failed(match text(migrate, "error-desc") {
            "" => "QEMU does not say why".to_owned(),
            why => words::plain(why),
        }),
        "cancelled" => SourceQemu::Failed("it was called off".to_owned()),
        status if status.starts_with("postcopy") => SourceQemu::Serving,
        // An unknown status does not mean that the migration has ended.
        status => {
            let total = migrate.get("total-time").and_then(Value::as_u64).unwrap_or(0);
            SourceQemu::Sending { is_slow: status == "active" && total > precopy.0 }
        }
    }
}

fn target_in(status: &Value, migrate: &Value) -> TargetQemu {
    match text(status, "status") {
        "running" => TargetQemu::Running,
        "paused" => TargetQemu::Received,
        "inmigrate" => match address_in(migrate) {
            Some(address) => TargetQemu::Waiting { address },
            None => TargetQemu::Absent,
        },
        other => TargetQemu::Gone(format!("its QEMU says that it is {}", words::plain(other))),
    }
}

/// The address on which the target listens, according to `query-migrate`.
fn address_in(migrate: &Value) -> Option<String> {
    let at = migrate.get("socket-address")?.get(0)?;
    match text(at, "type") {
        "inet" => match (text(at, "host"), text(at, "port")) {
            (host, port) if host.contains(':') => Some(format!("tcp:[{host}]:{port}")),
            (host, port) => Some(format!("tcp:{host}:{port}")),
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The objects of a QEMU that was told to migrate by intent 7.
    fn marked() -> Value {
        json!([{"name": "type", "type": "string"}, {"name": "overbook-intent-7"}])
    }

    #[test]
    fn what_is_told_of_another_migration_is_history() {
        let marked = marked();
        let (running, failed) = (json!({"status": "running"}), json!({"status": "failed"}));
        let at = |objects: &Value, generation| {
            source_in(&running, &failed, objects, (generation, Millis(1000)))
        };
        assert_eq!(at(&marked, 8), SourceQemu::Untouched);
        assert_eq!(at(&json!([]), 7), SourceQemu::Untouched);
        assert!(matches!(at(&marked, 7), SourceQemu::Failed(_)));
    }

    #[test]
    fn a_guest_is_handed_over_when_its_qemu_has_stopped_for_good() {
        let marked = marked();
        let at = |run: &str, migration: &str| {
            let migrate = json!({"status": migration, "total-time": 1500});
            source_in(&json!({"status": run}), &migrate, &marked, (7, Millis(1000)))
        };
        assert_eq!(at("postmigrate", "completed"), SourceQemu::Completed);
        assert!(matches!(at("running", "completed"), SourceQemu::Failed(_)));
        assert_eq!(at("running", "active"), SourceQemu::Sending { is_slow: true });
        assert_eq!(at("finish-migrate", "device"), SourceQemu::Sending { is_slow: false });
        assert_eq!(at("finish-migrate", "completed"), SourceQemu::Sending { is_slow: false });
        assert_eq!(at("finish-migrate", "postcopy-paused"), SourceQemu::Serving);
        assert_eq!(at("running", "something-new"), SourceQemu::Sending { is_slow: false });
        assert_eq!(at("running", "none"), SourceQemu::Untouched);
    }

    #[test]
    fn a_target_says_where_it_listens() {
        let waits = json!({"status": "inmigrate"});
        let at = json!({"socket-address": [{"type": "inet", "host": "10.0.0.2", "port": "4444"}]});
        let address = "tcp:10.0.0.2:4444".to_owned();
        assert_eq!(target_in(&waits, &at), TargetQemu::Waiting { address });
        assert_eq!(target_in(&waits, &json!({})), TargetQemu::Absent);
        assert!(matches!(target_in(&json!(3), &json!(4)), TargetQemu::Gone(_)));
    }
}
