//! Prometheus metrics: one snapshot per scrape; nothing is kept between scrapes.
//!
//! The labels are the VMs and groups of the last tick. So the series of a VM end with it, and no
//! client can add series. An unknown value has no sample, because a zero would be wrong.

use std::{collections::BTreeSet, sync::Arc};

use model::{Bytes, Link, Mode, Reason};

use super::exposition::{Labels, MetricsWriter, Samples, TextFormat};
use api::shown::TickView;
use api::wire::Words;

/// All metrics as text.
pub(super) fn encode(shown: &Arc<TickView>, format: TextFormat) -> String {
    let mut page = MetricsWriter::new(format);
    let metrics = HostMetrics { shown: Arc::clone(shown) };
    metrics.daemon(&mut page);
    metrics.host(&mut page);
    metrics.groups(&mut page);
    metrics.workers(&mut page);
    metrics.caches(&mut page);
    metrics.vms(&mut page);
    metrics.overloads(&mut page);
    metrics.disks(&mut page);
    metrics.pool(&mut page);
    page.finish()
}

struct HostMetrics {
    shown: Arc<TickView>,
}

/// Picks an amount of a group's ledger.
type Column = fn(&model::Ledger) -> Bytes;

impl HostMetrics {
    fn daemon(&self, page: &mut MetricsWriter) {
        let tick = &self.shown.published;
        let version: Labels<'_> = vec![("version", env!("CARGO_PKG_VERSION"))];
        page.gauges("build_info", "The version of the daemon; always 1.", vec![(version, 1.0)]);
        let count = seconds(tick.ticks.count, 1.0);
        page.counters("ticks_total", "Ticks run.", vec![(Vec::new(), count)]);
        let spent = seconds(tick.ticks.micros, 1e6);
        let help = "Time spent in ticks.";
        page.counters("tick_duration_seconds_total", help, vec![(Vec::new(), spent)]);
        let age = seconds(self.shown.tick_age().0, 1e3);
        page.gauge("tick_age_seconds", "Age of the last tick.", age);
        page.gauge("paused", "Whether the operator has paused Overbook.", flag(tick.paused));
        let enforcing = flag(tick.plan.mode == Mode::Enforce);
        page.gauge("enforcing", "Whether plans are carried out.", enforcing);
        let faulty = flag(tick.config_error.is_some());
        page.gauge("config_faulty", "Whether the newest configuration is faulty.", faulty);
        let waits = flag(tick.waits_for_restart.is_some());
        let help = "Whether a part of the newest configuration waits for a restart.";
        page.gauge("config_waits_for_restart", help, waits);
        let failing = flag(tick.history_error.is_some());
        page.gauge("history_failing", "Whether history is not being kept.", failing);
    }

    fn host(&self, page: &mut MetricsWriter) {
        if let Some(ksm) = &self.shown.published.view.ksm {
            let help = "Memory that the kernel's KSM saves, also where another program drives it.";
            page.gauge("host_ksm_saved_bytes", help, number(ksm.value.saved));
        }
        let Some(host) = self.shown.published.view.host.map(|reading| reading.value) else {
            return;
        };
        let reserve = policy::host_reserve(self.shown.published.spec.host.reserve, host.total);
        let sizes = [
            ("host_memory_total_bytes", "`MemTotal` of the kernel.", host.total),
            ("host_memory_available_bytes", "`MemAvailable` of the kernel.", host.available),
            ("host_reserve_bytes", "Memory that is never granted to VMs.", reserve),
            ("host_swap_total_bytes", "`SwapTotal` of the kernel.", host.swap_total),
            ("host_swap_free_bytes", "`SwapFree` of the kernel.", host.swap_free),
        ];
        for (name, help, size) in sizes {
            page.gauge(name, help, number(size));
        }
        let notices = &self.shown.published.plan.host;
        let is_short = notices.iter().any(|it| matches!(it, Reason::HostShort { .. }));
        let help = "Whether the host has less than its reserve, caches of disks not counted.";
        page.gauge("host_short", help, flag(is_short));
        let help = "Memory that one swapped-out byte takes.";
        page.gauge("host_swap_cost_ratio", help, host.swap_cost.into());
        let pressure = [("some", host.psi_some_avg10), ("full", host.psi_full_avg10)];
        let samples = pressure.into_iter().filter_map(|(kind, percent)| {
            Some((vec![("kind", kind)], f64::from(percent?) / 100.0))
        });
        let help = "Share of the last 10 s spent waiting for memory.";
        page.gauges("host_memory_pressure_ratio", help, samples.collect());
    }

    fn groups(&self, page: &mut MetricsWriter) {
        let groups = &self.shown.published.plan.groups;
        let columns: [(&str, &str, Column); 8] = [
            ("group_budget_bytes", "Memory that the tenant pays for.", |l| l.budget),
            ("group_used_bytes", "Memory that the group's VMs occupy on the host.", |l| l.used),
            (
                "group_promised_bytes",
                "Memory that was granted above base and not touched yet.",
                |l| l.promised,
            ),
            ("group_reserve_bytes", "Memory that is kept back for bursts.", |l| l.reserve),
            ("group_lent_bytes", "Part of the budget that other groups may use.", |l| l.lent),
            (
                "group_borrowed_bytes",
                "Memory of other groups' budgets that the group may use.",
                |l| l.borrowed,
            ),
            ("group_surplus_bytes", "Memory that can be granted.", |l| l.surplus),
            ("group_deficit_bytes", "Memory that must be given back.", |l| l.deficit),
        ];
        for (name, help, column) in columns {
            let samples = groups
                .iter()
                .map(|(group, ledger)| (vec![("group", group.as_str())], number(column(ledger))));
            page.gauges(name, help, samples.collect());
        }
    }

    fn vms(&self, page: &mut MetricsWriter) {
        let column = |of: &dyn Fn(&Vm<'_>) -> Option<f64>| self.column(of);
        let ram = column(&|vm| Some(number(vm.view.ram)));
        page.gauges("vm_ram_bytes", "RAM that the VM's balloon reaches.", ram);
        let balloon = column(&|vm| vm.view.balloon.map(|reading| number(reading.value)));
        page.gauges("vm_balloon_bytes", "Memory that the balloon leaves to the guest.", balloon);
        let target = column(&|vm| vm.decision?.target.map(number));
        page.gauges("vm_target_bytes", "Memory that the guest is to have.", target);
        let used = column(&|vm| policy::used(vm.view).map(|reading| number(reading.value)));
        page.gauges("vm_used_bytes", "Memory that the guest occupies on the host.", used);
        self.tracking(page);
        self.dedup(page);
        self.free_pages(page);
        self.cold(page);
        let available = column(&|vm| vm.view.stats?.value.available.map(number));
        let help = "Memory that the guest reports as available.";
        page.gauges("vm_guest_available_bytes", help, available);
        let swap = |direction, of: fn(&model::GuestStats) -> Option<Bytes>| {
            column(&|vm| of(&vm.view.stats?.value).map(number)).into_iter().map(
                move |(mut labels, value)| {
                    labels.push(("direction", direction));
                    (labels, value)
                },
            )
        };
        let swap = swap("in", |s| s.swap_in).chain(swap("out", |s| s.swap_out)).collect();
        let help = "Swapped by the guest since its boot, by its own count.";
        page.counters("vm_guest_swap_bytes_total", help, swap);
        let kills = column(&|vm| Some(seconds(vm.view.stats?.value.oom_kills?, 1.0)));
        let help = "Programs that the guest's kernel has killed for want of memory since its boot.";
        page.counters("vm_guest_oom_kills_total", help, kills);
        let cpu = column(&|vm| vm.view.cgroup_cpu_us.map(|reading| seconds(reading.value, 1e6)));
        let help = "CPU time of the cgroup that QEMU runs in; where each VM has its own, the VM's.";
        page.counters("vm_cgroup_cpu_seconds_total", help, cpu);
        let now = self.shown.published.at;
        let age = column(&|vm| vm.view.stats.map(|reading| seconds(reading.age(now).0, 1e3)));
        let help = "Age of the guest's statistics.";
        page.gauges("vm_stats_age_seconds", help, age);
        let up = column(&|vm| Some(flag(vm.view.link == Link::Up)));
        page.gauges("vm_up", "Whether QEMU answers.", up);
        let stuck = column(&|vm| Some(flag(vm.is_uncooperative())));
        page.gauges(
            "vm_uncooperative",
            "Whether the VM's balloon does not follow its target.",
            stuck,
        );
        let reasons: Vec<(Labels<'_>, String)> = self.every_vm().flat_map(Vm::refusals).collect();
        let refusals = reasons.iter().map(|(labels, code)| {
            ([labels.as_slice(), &[("reason", code.as_str())]].concat(), 1.0)
        });
        let help = "A reason why nothing, or not more, was taken from the VM or given to it.";
        page.gauges("vm_refusal", help, refusals.collect());
    }

    fn column(&self, of: &dyn Fn(&Vm<'_>) -> Option<f64>) -> Samples<'_> {
        self.every_vm().filter_map(|vm| Some((vm.labels(), of(&vm)?))).collect()
    }

    fn every_vm(&self) -> impl Iterator<Item = Vm<'_>> {
        self.shown.published.view.vms.keys().map(|name| self.vm(name))
    }

    fn tracking(&self, page: &mut MetricsWriter) {
        let column = |of: fn(&model::Tracking) -> Option<f64>| {
            self.column(&|vm| of(&vm.view.tracking.as_ref()?.value))
        };
        let set = column(|t| t.working_set.map(number));
        let help = "Least memory with which few references miss, swap in use included.";
        page.gauges("vm_working_set_bytes", help, set);
        let cost = column(|t| Some(t.cost.vcpu_share));
        let help = "Share of one vCPU that tracking took in the last half minute, as measured.";
        page.gauges("vm_tracking_cost_ratio", help, cost);
        let traps = column(|t| Some(seconds(t.cost.traps, 1.0)));
        page.counters("vm_tracking_traps_total", "Accesses trapped by tracking.", traps);
        let rate = column(|t| Some(t.references_per_s));
        let help = "Pieces of memory touched per second, each counted once in 0.1 s.";
        page.gauges("vm_reference_rate", help, rate);
        let now = self.shown.published.at;
        let age = self.column(&|vm| Some(seconds(vm.view.tracking.as_ref()?.age(now).0, 1e3)));
        let help = "Age of the working set and the references.";
        page.gauges("vm_tracking_age_seconds", help, age);
    }

    fn free_pages(&self, page: &mut MetricsWriter) {
        let column = |of: fn(&model::FreePages) -> Bytes| {
            self.column(&|vm| Some(number(of(&vm.view.free_pages.as_ref()?.value))))
        };
        let help =
            "Memory that the guest has freed and that was not taken; it may be in use again.";
        page.gauges("vm_free_pages_freed_bytes", help, column(|f| f.freed));
        let help = "Part of the freed memory that the host can take at once.";
        page.gauges("vm_free_pages_lazy_bytes", help, column(|f| f.lazy));
        let help = "Memory that the guest has freed and handed over; each time counts.";
        page.counters("vm_free_pages_handed_over_bytes_total", help, column(|f| f.handed_over));
        let help = "Freed memory that was taken for the host.";
        page.counters("vm_free_pages_taken_bytes_total", help, column(|f| f.taken));
        let help = "Freed memory that the kernel had dropped itself.";
        page.counters("vm_free_pages_dropped_bytes_total", help, column(|f| f.dropped));
        let help = "Freed memory that was found in use again when it was to be taken.";
        page.counters("vm_free_pages_taken_back_bytes_total", help, column(|f| f.taken_back));
        let help = "Freed memory that was taken and that the guest has touched since.";
        page.counters("vm_free_pages_refaulted_bytes_total", help, column(|f| f.refaulted));
    }

    fn cold(&self, page: &mut MetricsWriter) {
        let column = |of: fn(&model::Cold) -> Bytes| {
            self.column(&|vm| Some(number(of(&vm.view.cold.as_ref()?.value))))
        };
        let help = "Resident memory of a VM whose cold memory is paged out.";
        page.gauges("vm_resident_bytes", help, column(|c| c.resident));
        let help = "Memory of the VM in the host's swap.";
        page.gauges("vm_paged_out_bytes", help, column(|c| c.out));
        let help = "Memory that the VM has not touched for a minute, resident or paged out.";
        page.gauges("vm_untouched_bytes", help, column(|c| c.untouched[1]));
        let help = "Memory that was paged out; each time counts.";
        page.counters("vm_paging_out_bytes_total", help, column(|c| c.paged_out));
        let help = "Memory that was paged out and touched again, or read back.";
        page.counters("vm_paging_in_bytes_total", help, column(|c| c.returned));
        let rate = self.column(&|vm| Some(vm.view.cold.as_ref()?.value.refaults_per_s));
        let stall = self.column(&|vm| Some(policy::waits(&vm.view.cold.as_ref()?.value)));
        let help = "Share of one vCPU's time for which the VM waits for memory that is out.";
        page.gauges("vm_stall_ratio", help, stall);
        let help = "Waits of the VM for memory that is out, per second.";
        page.gauges("vm_refault_rate", help, rate);
    }

    fn dedup(&self, page: &mut MetricsWriter) {
        let column = |of: fn(&model::Dedup) -> Bytes| {
            self.column(&|vm| Some(number(of(&vm.view.dedup.as_ref()?.value))))
        };
        let help = "Memory that the VM shares with others of its group.";
        page.gauges("vm_dedup_shared_bytes", help, column(|d| d.shared));
        let help = "Memory that the VM saves by shared pages.";
        page.gauges("vm_dedup_saved_bytes", help, column(|d| d.saved));
        let help = "Merged memory that the guest has written since, so that it is shared no more.";
        page.counters("vm_dedup_broken_bytes_total", help, column(|d| d.broken));
        let scans = self.shown.published.plan.scans.iter();
        let rates = scans.map(|(group, scan)| {
            (vec![("group", group.as_str())], scan.rate.map_or(0.0, |rate| 1e3 * f64::from(rate.0)))
        });
        let help = "Pages per second that are searched for identical ones; 0: none.";
        page.gauges("group_scan_rate", help, rates.collect());
    }

    fn workers(&self, page: &mut MetricsWriter) {
        let column = |of: fn(&model::WorkerReading) -> f64| -> Samples<'_> {
            let workers = self.shown.published.view.workers.iter();
            workers.map(|(group, r)| (vec![("group", group.as_str())], of(&r.value))).collect()
        };
        let up = column(|w| flag(w.pid.is_some()));
        page.gauges(
            "group_worker_up",
            "Whether the group's worker runs, while its VMs need one.",
            up,
        );
        let cpu = column(|w| seconds(w.cpu_us, 1e6));
        let help = "CPU time of the group's worker.";
        page.counters("group_worker_cpu_seconds_total", help, cpu);
        let resident = column(|w| number(w.resident));
        let help = "Memory that the group's worker occupies.";
        page.gauges("group_worker_resident_bytes", help, resident);
        let pool = column(|w| number(w.pool));
        let help = "Memory that the group's pool of shared pages takes.";
        page.gauges("group_pool_bytes", help, pool);
        let restarts = column(|w| seconds(w.restarts, 1.0));
        page.counters("group_worker_restarts_total", "Workers started again.", restarts);
    }

    fn caches(&self, page: &mut MetricsWriter) {
        let column = |of: fn(&model::CacheReading) -> f64| -> Samples<'_> {
            let caches = self.shown.published.view.caches.iter();
            caches.map(|(group, r)| (vec![("group", group.as_str())], of(&r.value))).collect()
        };
        let quotas = self.shown.published.plan.caches.iter();
        let quotas = quotas
            .map(|(group, quota)| (vec![("group", group.as_str())], number(quota.amount)))
            .collect();
        let help = "Memory that the group's cache of its disks may hold.";
        page.gauges("group_cache_quota_bytes", help, quotas);
        let help = "Memory that the group's cache of its disks holds.";
        page.gauges("group_cache_held_bytes", help, column(|c| number(c.held)));
        let help = "Pages that were read from the group's cache.";
        page.counters("group_cache_hits_total", help, column(|c| seconds(c.hits, 1.0)));
        let help = "Pages of cached disks that were read from the disk.";
        page.counters("group_cache_misses_total", help, column(|c| seconds(c.misses, 1.0)));
    }

    fn overloads(&self, page: &mut MetricsWriter) {
        let tick = &self.shown.published;
        let found = |of: fn(&model::Overload) -> f64| -> Samples<'_> {
            let vms = tick.plan.overloads.iter();
            vms.map(|(name, overload)| (self.vm(name).labels(), of(overload))).collect()
        };
        let help = "Pages a second that the VM paged in the latest interval, in and out.";
        page.gauges("vm_paging_rate", help, found(|o| seconds(o.pages_per_s, 1.0)));
        let help = "Whether the VM is overloaded: 0 no, 1 transiently, 2 sustained.";
        page.gauges("vm_overload", help, found(|o| f64::from(o.severity as u8)));
        let mut overloads = Samples::new();
        for name in tick.plan.overloads.keys() {
            let Some(profile) = tick.memory.learned.profiles.get(name) else { continue };
            let transient = profile.lengths.iter().map(|n| u64::from(*n)).sum();
            for (kind, n) in
                [("transient", transient), ("sustained", profile.sustained_overloads.into())]
            {
                let labels = [self.vm(name).labels(), vec![("severity", kind)]].concat();
                overloads.push((labels, seconds(n, 1.0)));
            }
        }
        page.counters("vm_overloads_total", "Overloads of the VM.", overloads);
    }

    fn disks(&self, page: &mut MetricsWriter) {
        let column = |of: &dyn Fn(&model::DiskReading) -> Option<f64>| -> Samples<'_> {
            let mut samples = Samples::new();
            for vm in self.every_vm() {
                for (disk, reading) in &vm.view.disks {
                    let labels = [vm.labels(), vec![("disk", disk.as_str())]].concat();
                    samples.extend(of(&reading.value).map(|value| (labels, value)));
                }
            }
            samples
        };
        let count = |of: fn(&model::DiskReading) -> u64| column(&|d| Some(seconds(of(d), 1.0)));
        let micros = |of: fn(&model::DiskReading) -> u64| column(&|d| Some(seconds(of(d), 1e6)));
        let far = |of: fn(&model::RepositoriesReading) -> u64| {
            column(&|d| Some(seconds(of(d.repositories.as_ref()?), 1.0)))
        };
        page.counters("disk_reads_total", "Reads of the disk.", count(|d| d.reads));
        page.counters("disk_writes_total", "Writes to the disk.", count(|d| d.writes));
        page.counters("disk_read_bytes_total", "Bytes read from the disk.", count(|d| d.read.0));
        page.counters(
            "disk_written_bytes_total",
            "Bytes written to the disk.",
            count(|d| d.written.0),
        );
        page.counters(
            "disk_errors_total",
            "Operations of the disk that failed.",
            count(|d| d.errors),
        );
        let help = "Median time of a read.";
        page.gauges("disk_read_latency_median_seconds", help, micros(|d| d.read_us_median));
        let help = "Time that 99 % of the reads stay below.";
        page.gauges("disk_read_latency_p99_seconds", help, micros(|d| d.read_us_p99));
        let help = "Repositories that the disk is to be connected to.";
        page.gauges("disk_repositories_configured", help, self.configured_repositories());
        let help = "Repositories that the disk is connected to.";
        page.gauges("disk_repositories", help, far(|far| far.connected));
        let help = "Part of the disk that lies in repositories.";
        page.gauges("disk_repositories_held_bytes", help, far(|far| far.held.0));
        let help = "Reads that a repository answered.";
        page.counters("disk_repositories_reads_total", help, far(|far| far.reads));
        let help = "Reads of pages that no repository has.";
        page.counters("disk_repositories_misses_total", help, far(|far| far.misses));
        let help = "Reads that no repository answered in time.";
        page.counters("disk_repositories_late_total", help, far(|far| far.late));
        let help = "Pages that came back from a repository changed, old or from elsewhere.";
        page.counters("disk_repositories_forged_total", help, far(|far| far.forged));
    }

    /// Only disks whose process answers.
    fn configured_repositories(&self) -> Samples<'_> {
        let tick = &self.shown.published;
        let mut samples = Samples::new();
        for vm in self.every_vm() {
            for disk in vm.view.disks.keys() {
                let Some(spec) = tick.spec.disks.get(disk) else { continue };
                if spec.repositories.is_empty() {
                    continue;
                }
                let labels = [vm.labels(), vec![("disk", disk.as_str())]].concat();
                samples.push((labels, seconds(spec.repositories.len() as u64, 1.0)));
            }
        }
        samples
    }

    fn pool(&self, page: &mut MetricsWriter) {
        let Some(pool) = &self.shown.published.pool else { return };
        let help = "Whether the other hosts of the pool know that this one is there.";
        page.gauge("pool_seated", help, flag(pool.is_seated));
        let kept = [("vms", pool.share.targets), ("pages", pool.share.repositories)];
        let kept = kept.map(|(purpose, size)| (vec![("purpose", purpose)], number(size)));
        page.gauges("pool_kept_bytes", "Memory kept for overloads in the pool.", kept.into());
        let moves = &pool.moves;
        let under_way = seconds(moves.under_way.len() as u64, 1.0);
        let help = "VMs that come from other hosts, or go there.";
        page.gauge("pool_migrations", help, under_way);
        let ended = [
            ("left", moves.left),
            ("stayed", moves.stayed),
            ("arrived", moves.arrived),
            ("refused", moves.refused),
        ];
        let ended = ended.map(|(outcome, n)| (vec![("outcome", outcome)], seconds(n, 1.0)));
        let help = "Migrations that have ended, by their outcome on this host.";
        page.counters("pool_migrations_ended_total", help, ended.into());
    }

    fn vm<'a>(&'a self, name: &'a model::VmName) -> Vm<'a> {
        let tick = &self.shown.published;
        let decision = tick.plan.vms.get(name);
        Vm { name, view: &tick.view.vms[name], decision }
    }
}

/// One VM's readings together.
struct Vm<'a> {
    name: &'a model::VmName,
    view: &'a model::VmView,
    decision: Option<&'a model::Decision>,
}

impl<'a> Vm<'a> {
    fn labels(&self) -> Labels<'a> {
        let group = self.decision.and_then(|d| d.group.as_ref()).map_or("", |g| g.as_str());
        vec![("vm", self.name.as_str()), ("group", group)]
    }

    /// The reasons' codes, each once.
    fn refusals(self) -> Vec<(Labels<'a>, String)> {
        let refusals = self.decision.map(|d| d.refusals.as_slice()).unwrap_or_default();
        let codes: BTreeSet<String> = Words::all(refusals).into_iter().map(|w| w.code).collect();
        codes.into_iter().map(|code| (self.labels(), code)).collect()
    }

    fn is_uncooperative(&self) -> bool {
        let refusals = self.decision.map(|d| d.refusals.as_slice()).unwrap_or_default();
        refusals.iter().any(|reason| matches!(reason, Reason::Uncooperative { .. }))
    }
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

#[expect(clippy::cast_precision_loss, reason = "exact up to 8 PiB, and Prometheus knows no other")]
fn number(size: Bytes) -> f64 {
    size.0 as f64
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus knows no other numbers")]
fn seconds(count: u64, per_second: f64) -> f64 {
    count as f64 / per_second
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fixture;
    use api::moves::{Moves, Progress};
    use api::published::{MemberState, Published};

    fn page(mut tick: Published) -> String {
        tick.ticks.record(Duration::from_millis(2));
        encode(&Arc::new(TickView::first(Arc::new(tick))), TextFormat::OpenMetrics)
    }

    #[test]
    fn metrics_have_one_prefix_base_units_and_build_info() {
        let page = page(fixture::published());
        for line in [
            "overbook_build_info{version=",
            "overbook_ticks_total 1",
            "overbook_tick_duration_seconds_total 0.002",
            "overbook_host_memory_available_bytes 6442450944",
            "overbook_host_ksm_saved_bytes 209715200",
            "overbook_group_surplus_bytes{group=\"web\"} 104857600",
            "overbook_vm_balloon_bytes{vm=\"web-1\",group=\"web\"} 201326592",
            "overbook_vm_stats_age_seconds{vm=\"web-1\",group=\"web\"} 0.8",
            "overbook_vm_guest_swap_bytes_total{vm=\"web-1\",group=\"web\",direction=\"in\"} 41943040",
            "overbook_vm_working_set_bytes{vm=\"web-1\",group=\"web\"} 157286400",
            "overbook_vm_tracking_cost_ratio{vm=\"web-1\",group=\"web\"} 0.0095",
            "overbook_vm_tracking_traps_total{vm=\"web-1\",group=\"web\"} 42000",
            "overbook_vm_dedup_shared_bytes{vm=\"web-1\",group=\"web\"} 41943040",
            "overbook_vm_dedup_saved_bytes{vm=\"web-1\",group=\"web\"} 31457280",
            "overbook_vm_dedup_broken_bytes_total{vm=\"web-1\",group=\"web\"} 5242880",
            "overbook_vm_free_pages_lazy_bytes{vm=\"web-1\",group=\"web\"} 52428800",
            "overbook_vm_free_pages_taken_bytes_total{vm=\"web-1\",group=\"web\"} 209715200",
            "overbook_group_pool_bytes{group=\"web\"} 10485760",
            "overbook_group_scan_rate{group=\"web\"} 25000",
            "overbook_group_worker_cpu_seconds_total{group=\"web\"} 1.5",
            "overbook_group_worker_restarts_total{group=\"web\"} 1",
            "overbook_group_cache_quota_bytes{group=\"web\"} 73400320",
            "overbook_group_cache_hits_total{group=\"web\"} 300",
            "overbook_disk_read_bytes_total{vm=\"web-1\",group=\"web\",disk=\"swap\"} 8192",
            "overbook_disk_read_latency_p99_seconds{vm=\"web-1\",group=\"web\",disk=\"swap\"} 0.000512",
            "overbook_disk_repositories{vm=\"web-1\",group=\"web\",disk=\"swap\"} 2",
            "overbook_vm_up{vm=\"db-1\",group=\"\"} 0",
            "overbook_vm_refusal{vm=\"db-1\",group=\"\",reason=\"no_group\"} 1",
            "overbook_host_reserve_bytes 2147483648",
            "overbook_vm_uncooperative{vm=\"web-2\",group=\"web\"} 1",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
        let families = page.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        assert!(families.clone().count() > 20);
        assert!(families.into_iter().all(|family| family.starts_with("overbook_")));
    }

    #[test]
    fn what_is_unknown_has_no_sample() {
        let page = page(fixture::published());
        assert!(!page.contains("overbook_vm_balloon_bytes{vm=\"db-1\""), "{page}");
    }

    #[test]
    fn a_host_in_a_pool_tells_of_its_migrations_and_another_has_none() {
        let mut tick = fixture::published();
        assert!(!page(tick.clone()).contains("overbook_pool_"));
        let mut moves = Moves::default();
        moves.under_way.insert("web-1".into());
        for _ in 0..3 {
            moves.add("web-1".into(), Progress::Left { to: "b".into() });
        }
        moves.add("web-2".into(), Progress::Refused { from: "b".into(), why: "full".to_owned() });
        tick.pool = Some(MemberState { is_seated: true, moves, ..MemberState::default() });
        let page = page(tick);
        for line in [
            "overbook_pool_seated 1",
            "overbook_pool_migrations 1",
            "overbook_pool_migrations_ended_total{outcome=\"left\"} 3",
            "overbook_pool_migrations_ended_total{outcome=\"stayed\"} 0",
            "overbook_pool_migrations_ended_total{outcome=\"arrived\"} 0",
            "overbook_pool_migrations_ended_total{outcome=\"refused\"} 1",
        ] {
            assert!(page.contains(line), "{line} is missing in\n{page}");
        }
    }

    #[test]
    fn a_hostile_name_cannot_forge_a_sample() {
        let mut tick = fixture::published();
        let vm = tick.view.vms.remove(&"db-1".into()).unwrap();
        tick.view.vms.insert("x\"} 1\noverbook_paused 1".into(), vm);
        let page = page(tick);
        assert!(page.contains(r#"vm_up{vm="x\"} 1\noverbook_paused 1",group=""} 0"#), "{page}");
        assert_eq!(page.lines().filter(|l| l.starts_with("overbook_paused")).count(), 1);
    }
}
