//! The merged content of all files, before values are compared with each other.
//!
//! Each value keeps its place, so that a fault between values of different files can name both
//! lines. A later file replaces single values; values that it does not mention stay.

use std::collections::{BTreeMap, BTreeSet};

use super::table::{Located, SourceLocation, TableReader};
use crate::{
    AttachSpec, Bytes, ColdSpec, DedupSpec, FreePagesSpec, KsmSpec, Mode, OverloadSpec, Policy,
    TrackingBudget,
    spec::{DiskSpec, HostSpec, LendSpec, PoolSpec, ShareSpec},
};

const ATTACH: [(&str, AttachSpec); 2] = [("on", AttachSpec::On), ("off", AttachSpec::Off)];

/// The merged content.
#[derive(Default)]
pub(super) struct Draft {
    pub(super) reserve: Option<Located<Bytes>>,
    pub(super) grace_s: Option<u32>,
    pub(super) qmp: Option<Located<Vec<Located<String>>>>,
    pub(super) state: Option<Located<String>>,
    pub(super) ksm: Option<KsmSpec>,
    pub(super) attach: Option<AttachSpec>,
    pub(super) balloon: Option<Mode>,
    pub(super) socket: Option<Located<String>>,
    pub(super) tcp: Option<Located<String>>,
    pub(super) token_file: Option<Located<String>>,
    pub(super) read_token_file: Option<Located<String>>,
    /// The places of `tcp` and the tokens' files, even if their values are faulty.
    pub(super) tcp_place: Option<SourceLocation>,
    pub(super) token_place: Option<SourceLocation>,
    pub(super) read_token_place: Option<SourceLocation>,
    pub(super) overload: OverloadDraft,
    pub(super) pool: Option<PoolDraft>,
    pub(super) groups: BTreeMap<String, GroupDraft>,
    pub(super) vms: BTreeMap<String, VmDraft>,
    pub(super) disks: BTreeMap<String, DiskDraft>,
}

/// `[overload]`.
#[derive(Default)]
pub(super) struct OverloadDraft {
    pub(super) interval_s: Option<u32>,
    pub(super) pages_per_s: Option<u32>,
    pub(super) window: Option<u32>,
    pub(super) sustained: Option<u32>,
    /// The place of `window` or `sustained`.
    pub(super) place: Option<SourceLocation>,
}

/// `[pool]`.
pub(super) struct PoolDraft {
    pub(super) place: SourceLocation,
    pub(super) name: Option<Located<String>>,
    pub(super) host: Option<Located<String>>,
    pub(super) etcd: Option<Located<Vec<Located<String>>>>,
    pub(super) tls: Option<Located<String>>,
    pub(super) insecure: Option<bool>,
    pub(super) address: Option<Located<String>>,
    pub(super) incoming: Option<Located<String>>,
    pub(super) movable: Option<Located<Vec<Located<String>>>>,
    pub(super) bandwidth: Option<Located<Bytes>>,
    pub(super) downtime_ms: Option<u32>,
    pub(super) precopy_s: Option<u32>,
    pub(super) rest_s: Option<u32>,
    pub(super) certainty_percent: Option<u32>,
    /// The required keys that are written, whether their values are right or not.
    pub(super) written: BTreeSet<&'static str>,
}

/// One `[group.*]`.
pub(super) struct GroupDraft {
    pub(super) place: SourceLocation,
    pub(super) policy: Option<Policy>,
    pub(super) vms: Option<Located<Vec<Located<String>>>>,
    pub(super) users: Option<Located<Vec<Located<String>>>>,
    pub(super) budget: Option<Located<Bytes>>,
    pub(super) tracking: Option<TrackingBudget>,
    pub(super) attach: Option<AttachSpec>,
    pub(super) dedup: Option<DedupSpec>,
    pub(super) tables: Option<Located<Vec<Located<String>>>>,
    pub(super) free_pages: Option<FreePagesSpec>,
    pub(super) cold: Option<ColdSpec>,
    pub(super) lend: Option<LendSpec>,
    pub(super) limits: LimitsDraft,
}

/// One `[vm.*]`.
pub(super) struct VmDraft {
    pub(super) place: SourceLocation,
    pub(super) limits: LimitsDraft,
    pub(super) swap: Option<bool>,
    pub(super) weight: Option<u32>,
    pub(super) priority: Option<u8>,
}

/// One `[disk.*]`.
pub(super) struct DiskDraft {
    pub(super) place: SourceLocation,
    pub(super) vm: Option<Located<String>>,
    pub(super) file: Option<Located<String>>,
    pub(super) size: Option<Located<Bytes>>,
    pub(super) repositories: Option<Located<Vec<Located<String>>>>,
    pub(super) tls: Option<Located<String>>,
    pub(super) cache: Option<bool>,
    pub(super) shared: Option<u32>,
    pub(super) read_delay_us: Option<u32>,
    /// The required keys that are written, whether their values are right or not.
    pub(super) written: BTreeSet<&'static str>,
}

/// `min`, `base` and `max`.
#[derive(Clone, Default)]
pub(super) struct LimitsDraft {
    pub(super) min: Option<Located<Bytes>>,
    pub(super) base: Option<Located<Bytes>>,
    pub(super) max: Option<Located<Bytes>>,
}

/// Replaces `old` where the file sets a value.
fn set<T>(old: &mut Option<T>, new: Option<T>) {
    if new.is_some() {
        *old = new;
    }
}

impl Draft {
    /// Adds one more file, which overrides those before it.
    pub(super) fn apply(&mut self, file: &TableReader<'_>) {
        if let Some(host) = file.table("host") {
            set(&mut self.reserve, host.size("reserve"));
            set(&mut self.qmp, host.texts("qmp"));
            set(&mut self.state, host.text("state"));
            let ksm = [("off", KsmSpec::Off), ("drive", KsmSpec::Drive)];
            set(&mut self.ksm, host.choice("ksm", &ksm));
            set(&mut self.attach, host.choice("attach", &ATTACH));
            set(&mut self.grace_s, host.count("grace_s", &HostSpec::GRACES_S));
            host.finish();
        }
        if let Some(mode) = file.table("mode") {
            let modes = Mode::ALL.map(|mode| (mode.name(), mode));
            set(&mut self.balloon, mode.choice("balloon", &modes));
            mode.finish();
        }
        if let Some(api) = file.table("api") {
            set(&mut self.socket, api.text("socket"));
            set(&mut self.tcp, api.text("tcp"));
            set(&mut self.token_file, api.text("token_file"));
            set(&mut self.read_token_file, api.text("read_token_file"));
            set(&mut self.tcp_place, api.place_of("tcp"));
            set(&mut self.token_place, api.place_of("token_file"));
            set(&mut self.read_token_place, api.place_of("read_token_file"));
            api.finish();
        }
        if let Some(overload) = file.table("overload") {
            self.overload.apply(&overload);
        }
        if let Some(pool) = file.table("pool") {
            self.pool.get_or_insert_with(|| PoolDraft::new(&pool)).apply(&pool);
        }
        for (name, table) in file.named_tables("group") {
            self.groups.entry(name).or_insert_with(|| GroupDraft::new(&table)).apply(&table);
        }
        for (name, table) in file.named_tables("vm") {
            self.vms.entry(name).or_insert_with(|| VmDraft::new(&table)).apply(&table);
        }
        for (name, table) in file.named_tables("disk") {
            self.disks.entry(name).or_insert_with(|| DiskDraft::new(&table)).apply(&table);
        }
        file.finish();
    }
}

impl OverloadDraft {
    fn apply(&mut self, table: &TableReader<'_>) {
        set(&mut self.interval_s, table.count("interval_s", &OverloadSpec::INTERVALS_S));
        set(&mut self.pages_per_s, table.count("pages_per_s", &OverloadSpec::RATES));
        set(&mut self.window, table.count("window", &OverloadSpec::WINDOWS));
        set(&mut self.sustained, table.count("sustained", &OverloadSpec::WINDOWS));
        set(&mut self.place, table.place_of("window"));
        set(&mut self.place, table.place_of("sustained"));
        table.finish();
    }
}

impl PoolDraft {
    /// The required keys: without them, a host is in no pool.
    pub(super) const NEEDED: [&'static str; 2] = ["host", "etcd"];

    fn new(table: &TableReader<'_>) -> Self {
        Self {
            place: table.place(),
            name: None,
            host: None,
            etcd: None,
            tls: None,
            insecure: None,
            address: None,
            incoming: None,
            movable: None,
            bandwidth: None,
            downtime_ms: None,
            precopy_s: None,
            rest_s: None,
            certainty_percent: None,
            written: BTreeSet::new(),
        }
    }

    fn apply(&mut self, table: &TableReader<'_>) {
        set(&mut self.name, table.text("name"));
        set(&mut self.host, table.text("host"));
        set(&mut self.etcd, table.texts("etcd"));
        set(&mut self.tls, table.text("tls"));
        set(&mut self.insecure, table.flag("insecure"));
        set(&mut self.address, table.text("address"));
        set(&mut self.incoming, table.text("incoming"));
        set(&mut self.movable, table.texts("movable"));
        set(&mut self.bandwidth, table.size("bandwidth"));
        set(&mut self.downtime_ms, table.count("downtime_ms", &PoolSpec::DOWNTIMES_MS));
        set(&mut self.precopy_s, table.count("precopy_s", &PoolSpec::PRECOPIES_S));
        set(&mut self.rest_s, table.count("rest_s", &PoolSpec::RESTS_S));
        let certainty = table.count("certainty_percent", &PoolSpec::CERTAINTIES);
        set(&mut self.certainty_percent, certainty);
        self.written.extend(Self::NEEDED.iter().filter(|key| table.place_of(key).is_some()));
        table.finish();
    }
}

impl GroupDraft {
    fn new(table: &TableReader<'_>) -> Self {
        Self {
            place: table.place(),
            policy: None,
            vms: None,
            users: None,
            budget: None,
            tracking: None,
            attach: None,
            dedup: None,
            tables: None,
            free_pages: None,
            cold: None,
            lend: None,
            limits: LimitsDraft::default(),
        }
    }

    fn apply(&mut self, table: &TableReader<'_>) {
        let policies = Policy::ALL.map(|policy| (policy.name(), policy));
        set(&mut self.policy, table.choice("policy", &policies));
        set(&mut self.vms, table.texts("vms"));
        set(&mut self.users, table.users("uid"));
        set(&mut self.budget, table.size("budget"));
        set(&mut self.tracking, table.tracking("tracking"));
        set(&mut self.attach, table.choice("attach", &ATTACH));
        set(&mut self.dedup, table.dedup("dedup"));
        set(&mut self.tables, table.texts("static"));
        let free_pages = [("off", FreePagesSpec::Off), ("lazy", FreePagesSpec::Lazy)];
        set(&mut self.free_pages, table.choice("free_pages", &free_pages));
        set(&mut self.cold, table.cold("cold"));
        set(&mut self.lend, table.lend("lend"));
        self.limits.apply(table);
        table.finish();
    }
}

impl VmDraft {
    fn new(table: &TableReader<'_>) -> Self {
        Self {
            place: table.place(),
            limits: LimitsDraft::default(),
            swap: None,
            weight: None,
            priority: None,
        }
    }

    fn apply(&mut self, table: &TableReader<'_>) {
        self.limits.apply(table);
        set(&mut self.swap, table.flag("swap"));
        set(&mut self.weight, table.count("weight", &ShareSpec::WEIGHTS));
        set(&mut self.priority, table.count("priority", &ShareSpec::PRIORITIES));
        table.finish();
    }
}

impl DiskDraft {
    /// The required keys: without them, there is no disk.
    pub(super) const NEEDED: [&'static str; 3] = ["vm", "file", "size"];

    fn new(table: &TableReader<'_>) -> Self {
        Self {
            place: table.place(),
            vm: None,
            file: None,
            size: None,
            repositories: None,
            tls: None,
            cache: None,
            shared: None,
            read_delay_us: None,
            written: BTreeSet::new(),
        }
    }

    fn apply(&mut self, table: &TableReader<'_>) {
        set(&mut self.vm, table.text("vm"));
        set(&mut self.file, table.text("file"));
        set(&mut self.size, table.size("size"));
        set(&mut self.repositories, table.texts("repositories"));
        set(&mut self.tls, table.text("tls"));
        set(&mut self.cache, table.flag("cache"));
        set(&mut self.shared, table.count("shared", &DiskSpec::SHARED));
        set(&mut self.read_delay_us, table.count("read_delay_us", &DiskSpec::READ_DELAYS_US));
        self.written.extend(Self::NEEDED.iter().filter(|key| table.place_of(key).is_some()));
        table.finish();
    }
}

impl LimitsDraft {
    fn apply(&mut self, table: &TableReader<'_>) {
        set(&mut self.min, table.size("min"));
        set(&mut self.base, table.size("base"));
        set(&mut self.max, table.size("max"));
    }
}
