//! Proxmox's files about its VMs: `/etc/pve/qemu-server/VMID.conf`, and the pools of
//! `/etc/pve/user.cfg`.
//!
//! A VM's file has lines `key: value`. Lines with `#` are its description. Sections follow, each
//! below a heading `[name]`: the values of snapshots, and under `[PENDING]` those that the VM gets
//! at its next start. Only what stands before all sections is in force now. A line that is not
//! understood counts as absent: a newer Proxmox may have written it, or a person.
//!
//! Source: qm.conf(5), "Pools" in pveum(1), and pvestatd's rule for automatic ballooning. It moves
//! the balloon of each VM with a `balloon` other than 0, unless its `shares` are 0.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::libvirt::DomainSettings;
use crate::spec::{LimitsSpec, ShareSpec};
use crate::view::ManagerRecord;
use crate::{Bytes, VmName, words};

/// The glob of the sockets that `overbook proxmox manage` gives to VMs. Each node of a Proxmox
/// cluster has the directory, with Overbook or without: a VM starts on all of them.
pub const SOCKETS: &str = "/run/qemu-server/*.overbook";
/// The memory of a VM without `memory`, in MiB.
const DEFAULT_MEMORY: u64 = 512;
/// Maximum memory of a VM in MiB: 64 TiB.
const MOST_MEMORY: u64 = 64 << 20;
/// Maximum length of a pool or tag in bytes.
const LONGEST_LABEL: usize = 100;
/// The default of `shares`.
const DEFAULT_SHARES: u64 = 1000;
/// Maximum number of tags of a VM; further ones are ignored.
const MOST_TAGS: usize = 64;

/// All VMs of this node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxmoxReport {
    /// The VMs, whether they run or not.
    pub vms: Vec<ProxmoxVm>,
    /// Why some of them are missing here.
    pub fault: Option<String>,
}

/// A VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxmoxVm {
    /// Its number.
    pub vmid: u32,
    /// PID and start time of its QEMU; `None`: it does not run.
    pub process: Option<(u32, u64)>,
    /// The pool that it is in.
    pub pool: Option<String>,
    /// Its file.
    pub conf: ProxmoxConf,
}

/// The values of a VM's file that Overbook needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProxmoxConf {
    /// The VM's name.
    pub name: Option<String>,
    /// The guest's memory in MiB.
    pub memory: Option<u64>,
    /// The least memory of the guest in MiB; 0: it has no balloon device.
    pub balloon: Option<u64>,
    /// The VM's part where pvestatd shares out memory; 0: pvestatd leaves it alone.
    pub shares: Option<u64>,
    /// Its tags.
    pub tags: Vec<String>,
    /// Further options of its QEMU.
    pub args: Option<String>,
    /// `args` from its next start on, if they change then: the new ones, or none.
    pub pending_args: Option<Option<String>>,
}

/// The section of a VM's file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Section {
    Present,
    Pending,
    Other,
}

impl ProxmoxConf {
    /// Reads a VM's file. Of two lines with the same key the later one counts, as in Proxmox.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let mut conf = Self::default();
        let mut section = Section::Present;
        for line in text.lines() {
            if line.starts_with('[') {
                let is_pending = line.trim_end().eq_ignore_ascii_case("[PENDING]");
                section = if is_pending { Section::Pending } else { Section::Other };
                continue;
            }
            let Some((key, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            if value.is_empty() || key.starts_with('#') {
                continue;
            }
            match section {
                Section::Present => conf.note(key, value),
                Section::Pending => conf.note_pending(key, value),
                Section::Other => {}
            }
        }
        conf
    }

    fn note(&mut self, key: &str, value: &str) {
        match key {
            "name" => self.name = Some(words::plain(value)).filter(|name| !name.is_empty()),
            // `memory` may be a list of properties.
            "memory" => {
                let current = value.strip_prefix("current=").unwrap_or(value);
                self.memory = current.split(',').next().and_then(mib);
            }
            "balloon" => self.balloon = mib(value),
            "shares" => self.shares = value.parse().ok(),
            "tags" => {
                let tags = list(value).filter(|tag| is_label(tag));
                self.tags = tags.take(MOST_TAGS).map(str::to_owned).collect();
            }
            "args" => self.args = Some(value.to_owned()),
            _ => {}
        }
    }

    fn note_pending(&mut self, key: &str, value: &str) {
        match key {
            "args" => self.pending_args = Some(Some(value.to_owned())),
            // A `!` before a key forces its deletion.
            "delete" if list(value).any(|key| key.trim_start_matches('!') == "args") => {
                self.pending_args = Some(None);
            }
            _ => {}
        }
    }

    /// `args` from the VM's next start on.
    #[must_use]
    pub fn next_args(&self) -> Option<&str> {
        self.pending_args.as_ref().unwrap_or(&self.args).as_deref()
    }

    /// Whether pvestatd moves the VM's balloon by itself.
    #[must_use]
    pub fn is_balanced(&self) -> bool {
        self.balloon.is_some_and(|size| size > 0) && self.shares != Some(0)
    }
}

impl ProxmoxVm {
    /// Its name, as its QEMU is called.
    #[must_use]
    pub fn name(&self) -> VmName {
        let unnamed = || format!("vm{}", self.vmid);
        VmName::from(self.conf.name.clone().unwrap_or_else(unnamed))
    }

    /// Labels, limits and weight. `balloon` is the memory that Proxmox guarantees to a guest.
    #[must_use]
    pub fn settings(&self) -> DomainSettings {
        let conf = &self.conf;
        let memory = conf.memory.unwrap_or(DEFAULT_MEMORY);
        let least = conf.balloon.filter(|size| (1..=memory).contains(size));
        let limits = LimitsSpec { base: least.map(Bytes::mib), ..LimitsSpec::default() };
        let weight = conf.shares.filter(|shares| *shares > 0).map(|shares| {
            let weight = shares.saturating_add(DEFAULT_SHARES / 2) / DEFAULT_SHARES;
            u32::try_from(weight).unwrap_or(u32::MAX)
        });
        let weight = weight.map(|it| it.clamp(1, *ShareSpec::WEIGHTS.end()));
        DomainSettings { limits, weight, labels: self.labels(), ..DomainSettings::default() }
    }

    fn labels(&self) -> Vec<String> {
        let vmid = [format!("vmid:{}", self.vmid)];
        let pool = self.pool.iter().map(|pool| format!("pool:{pool}"));
        let tags = self.conf.tags.iter().map(|tag| format!("tag:{tag}"));
        vmid.into_iter().chain(pool).chain(tags).collect()
    }

    /// The record for the VM's view.
    #[must_use]
    pub fn record(&self) -> ManagerRecord {
        let is_balanced = self.conf.is_balanced();
        ManagerRecord {
            title: None,
            labels: self.labels(),
            balances: is_balanced.then(|| format!("qm set {} --shares 0", self.vmid)),
        }
    }
}

/// The pool of each VM, from `user.cfg`: lines `pool:NAME:comment:VMIDs:storages:`. The first pool
/// that names a VM has it.
#[must_use]
pub fn pools_in(text: &str) -> BTreeMap<u32, String> {
    let mut pools = BTreeMap::new();
    for line in text.lines() {
        let mut fields = line.split(':');
        let (Some("pool"), Some(name), _, Some(vms)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if !is_label(name) {
            continue;
        }
        for vmid in list(vms).filter_map(|vmid| vmid.parse().ok()) {
            pools.entry(vmid).or_insert_with(|| name.to_owned());
        }
    }
    pools
}

/// A size in MiB that a VM can have.
fn mib(text: &str) -> Option<u64> {
    text.parse().ok().filter(|size| *size <= MOST_MEMORY)
}

/// Whether a pool or tag can be shown as a label.
fn is_label(text: &str) -> bool {
    !text.is_empty() && text.len() <= LONGEST_LABEL && words::is_plain(text)
}

/// The words of a list, which Proxmox separates in several ways.
fn list(text: &str) -> impl Iterator<Item = &str> {
    let is_between = |c: char| c == ',' || c == ';' || c.is_whitespace() || c == '\0';
    text.split(is_between).filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests;
