//! The queries to QEMU, and the parsing of its answers. One function per query; no state.

use model::{Bytes, Migration, words};
use serde_json::{Value, json};

use super::qmp::{Command, QmpClient, QmpError};

/// No QEMU has more disks or RAM blocks; further items in an answer are ignored.
const MAX_ITEMS: usize = 256;

/// No VM has a longer name than this.
const MAX_NAME: usize = 128;

/// QEMU's `-name`; `None`: it was started without, or the name cannot be shown.
pub(super) async fn name(client: &mut QmpClient) -> Result<Option<String>, QmpError> {
    let answer = client.execute(Command::new("query-name")).await?;
    let name = answer.get("name").and_then(Value::as_str).unwrap_or_default();
    let is_usable = !name.is_empty() && name.len() <= MAX_NAME && words::is_plain(name);
    Ok(is_usable.then(|| name.to_owned()))
}

/// Sizes of the guest's RAM blocks: the machine's present memory, hot-plugged memory included.
pub(super) async fn ram_sizes(client: &mut QmpClient) -> Result<Vec<Bytes>, QmpError> {
    let command = "query-memdev";
    let answer = client.execute(Command::new(command)).await?;
    let nonsense = |what: &str| QmpError::Nonsense { command, what: what.to_owned() };
    let devices = answer.as_array().ok_or_else(|| nonsense("not a list"))?;
    let sizes: Vec<Bytes> = devices
        .iter()
        .take(MAX_ITEMS)
        .filter_map(|device| device.get("size").and_then(Value::as_u64))
        .filter(|&size| size > 0)
        .map(Bytes)
        .collect();
    if sizes.is_empty() {
        return Err(nonsense("no memory at all"));
    }
    Ok(sizes)
}

/// Path of the balloon device in QEMU's object tree; `None`: there is none.
pub(super) async fn find_balloon(client: &mut QmpClient) -> Result<Option<String>, QmpError> {
    for parent in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let list = client.execute(Command::with("qom-list", json!({"path": parent}))).await?;
        let device = list.as_array().into_iter().flatten().find_map(|item| {
            let kind = item.get("type")?.as_str()?;
            let name = item.get("name")?.as_str()?;
            kind.starts_with("child<virtio-balloon").then(|| format!("{parent}/{name}"))
        });
        if device.is_some() {
            return Ok(device);
        }
    }
    Ok(None)
}

/// Reads one property of a device.
pub(super) fn property(device: &str, property: &str) -> Command {
    Command::with("qom-get", json!({"path": device, "property": property}))
}

/// Sets how often QEMU asks the guest for statistics; 0 for never.
pub(super) fn set_polling(device: &str, seconds: u64) -> Command {
    let property = "guest-stats-polling-interval";
    Command::with("qom-set", json!({"path": device, "property": property, "value": seconds}))
}

/// How often QEMU asks the guest for statistics now, in seconds.
pub(super) async fn polling(client: &mut QmpClient, device: &str) -> Result<u64, QmpError> {
    let answer = client.execute(property(device, "guest-stats-polling-interval")).await?;
    answer.as_u64().ok_or_else(|| QmpError::Nonsense {
        command: "qom-get",
        what: "guest-stats-polling-interval is no number of seconds".to_owned(),
    })
}

/// Sets the balloon so that `size` remains for the guest; `None`: the balloon becomes empty.
pub(super) fn set_balloon(size: Option<Bytes>) -> Command {
    // QEMU reduces a size beyond the VM's RAM to the RAM's size.
    let size = size.map_or(i64::MAX.unsigned_abs(), |size| size.0);
    Command::with("balloon", json!({"value": size}))
}

/// The balloon's size in QEMU's answer.
pub(super) fn balloon_in(answer: &Value) -> Result<Bytes, QmpError> {
    answer.get("actual").and_then(Value::as_u64).map(Bytes).ok_or_else(|| QmpError::Nonsense {
        command: "query-balloon",
        what: "`actual` is no number of bytes".to_owned(),
    })
}

/// Whether a migration is active now.
pub(super) async fn migration(client: &mut QmpClient) -> Result<Migration, QmpError> {
    let commands = [Command::new("query-migrate"), Command::new("query-status")];
    let [migrate, status] = client.batch(commands).await?;
    Ok(migration_in(&migrate?, &status?))
}

/// Whether a migration is active. An unknown status counts as active, and so does a QEMU that
/// waits for an incoming guest, or has handed over its own.
pub(super) fn migration_in(migrate: &Value, status: &Value) -> Migration {
    let text = |value: &Value| value.get("status").and_then(Value::as_str).map(str::to_owned);
    match text(status).as_deref() {
        None => return Migration::Unknown,
        Some("inmigrate" | "finish-migrate" | "postmigrate") => return Migration::Active,
        Some(_) => {}
    }
    match (migrate.is_object(), text(migrate).as_deref()) {
        (false, _) => Migration::Unknown,
        (true, None | Some("none" | "completed" | "failed" | "cancelled")) => Migration::None,
        (true, Some(_)) => Migration::Active,
    }
}

/// Whether the vCPUs are stopped: by a user, by the guest, or by an error of a disk.
pub(super) fn is_suspended(status: &Value) -> bool {
    let status = status.get("status").and_then(Value::as_str);
    matches!(status, Some("paused" | "suspended" | "io-error"))
}

/// Why QEMU refuses to migrate this VM (VFIO devices, for example).
pub(super) fn immovable_in(migrate: &Value) -> Option<String> {
    let why = migrate.get("blocked-reasons")?.get(0)?.as_str()?;
    Some(words::plain(why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn migration_at(migrate: Value, status: &str) -> Migration {
        migration_in(&migrate, &json!({"status": status}))
    }

    #[test]
    fn every_step_of_a_migration_counts_and_an_unknown_one_too() {
        for status in ["setup", "active", "postcopy-paused", "device", "something-new"] {
            assert_eq!(migration_at(json!({"status": status}), "running"), Migration::Active);
        }
        for status in ["none", "completed", "failed", "cancelled"] {
            assert_eq!(migration_at(json!({"status": status}), "running"), Migration::None);
        }
        assert_eq!(migration_at(json!({}), "running"), Migration::None);
        assert_eq!(migration_at(json!({}), "inmigrate"), Migration::Active);
        assert_eq!(migration_at(json!("x"), "running"), Migration::Unknown);
        assert_eq!(migration_in(&json!({}), &json!(3)), Migration::Unknown);
    }
}
