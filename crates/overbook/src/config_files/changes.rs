//! The changes in a new configuration, by the names of its tables, for the log.

use std::collections::BTreeMap;
use std::fmt::Display;

use model::Spec;

/// The tables that differ, and how; "nothing has changed" if none does.
pub(super) fn between(old: &Spec, new: &Spec) -> String {
    let mut changes = Vec::new();
    let single = [
        ("[host]", old.host != new.host),
        ("[api]", old.api != new.api),
        ("[overload]", old.overload != new.overload),
        ("[pool]", old.pool != new.pool),
    ];
    if old.modes != new.modes {
        let (before, now) = (old.modes.balloon, new.modes.balloon);
        changes.push(format!("[mode] balloon is \"{now}\" (it was \"{before}\")"));
    }
    changes.extend(single.iter().filter(|(_, is_new)| *is_new).map(|(name, _)| (*name).to_owned()));
    named("group", &old.groups, &new.groups, &mut changes);
    named("vm", &old.vms, &new.vms, &mut changes);
    named("disk", &old.disks, &new.disks, &mut changes);
    if changes.is_empty() {
        return "nothing has changed".to_owned();
    }
    format!("changed: {}", changes.join(", "))
}

fn named<K: Ord + Display, V: PartialEq>(
    kind: &str,
    old: &BTreeMap<K, V>,
    new: &BTreeMap<K, V>,
    changes: &mut Vec<String>,
) {
    for (name, value) in new {
        match old.get(name) {
            None => changes.push(format!("[{kind}.{name}] (new)")),
            Some(before) if before != value => changes.push(format!("[{kind}.{name}]")),
            Some(_) => {}
        }
    }
    let gone = old.keys().filter(|name| !new.contains_key(name));
    changes.extend(gone.map(|name| format!("[{kind}.{name}] (gone)")));
}
