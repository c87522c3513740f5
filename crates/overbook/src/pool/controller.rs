//! A pool's controller: it reads the hosts' reports, decides, and writes intents to move VMs.
//!
//! Any number of controllers may run; the one that holds the lease is active. All state is in the
//! store, except for the moves of the last minutes. So a new controller waits for that time
//! before it moves a VM.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cluster::records::{self, Records};
use cluster::store::{Change, Store, StoreError, WriterLease};
use model::cluster::{ClusterView, ExcessPlan, ExcessSpace, Intent};
use model::spec::PoolSpec;
use model::{Millis, Time, VmName};
use policy::cluster::{ClusterMemory, decide};
use policy::excess;
use policy::handover::{SourceStep, TargetStep};
use sys::clock::boot_now;
use tokio::time::{Instant, sleep};

/// Interval between decisions.
const PERIOD: Duration = Duration::from_secs(1);
/// Interval at which the memory for overloads is shared out anew. A new controller waits as long:
/// then it has the reports of all hosts.
const SHARE: Duration = Duration::from_secs(60);
/// Interval at which the lease is renewed.
const STAY: Duration = Duration::from_secs(3);

/// A controller.
pub struct Controller {
    store: Arc<dyn Store>,
    who: String,
    seat: Option<(WriterLease, Instant)>,
    rest: Millis,
    /// Certainty with which the memory for overloads suffices, 0 to 1.
    certainty: f64,
    /// The last time at which that memory was shared out.
    shared_at: Instant,
    memory: ClusterMemory,
    /// The time at which each intent was first seen, by VM and generation.
    since: BTreeMap<VmName, (u64, Time)>,
    trouble: Option<String>,
}

impl Controller {
    /// The controller of this pool, with this name.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, who: String, pool: &PoolSpec) -> Self {
        let memory = ClusterMemory::resting(pool.rest);
        Self {
            store,
            who,
            seat: None,
            rest: pool.rest,
            certainty: f64::from(pool.certainty_percent) / 100.0,
            shared_at: Instant::now(),
            memory,
            since: BTreeMap::new(),
            trouble: None,
        }
    }

    /// Decides for as long as it is polled. `say` gets its actions and its troubles.
    pub async fn run(mut self, say: impl Fn(&str)) {
        loop {
            let trouble = match self.turn(&say).await {
                Ok(()) => None,
                Err(error) => {
                    if matches!(error, StoreError::Unseated(_)) {
                        self.seat = None;
                    }
                    Some(error.to_string())
                }
            };
            if trouble != self.trouble {
                say(trouble.as_deref().unwrap_or("the store answers again"));
                self.trouble = trouble;
            }
            sleep(PERIOD).await;
        }
    }

    async fn turn(&mut self, say: &impl Fn(&str)) -> Result<(), StoreError> {
        let Some(seat) = self.sit(say).await? else { return Ok(()) };
        let now = boot_now();
        let snapshot = self.store.read("").await?;
        let records = Records::of(&snapshot);
        self.since.retain(|vm, (generation, _)| {
            records.intents.get(vm).is_some_and(|intent| intent.generation == *generation)
        });
        for (vm, intent) in &records.intents {
            self.since.entry(vm.clone()).or_insert((intent.generation, now));
        }
        let mut changes = self.ended(&records, now, say);
        let view = records.view(now, &self.since);
        changes.extend(self.share_out(&view, &records.excess, say));
        let plan = decide(&view, &mut self.memory, now);
        // A VM whose intent cannot be read still counts as moving.
        let is_known = |vm: &VmName| !records.unreadable.contains(vm);
        for (vm, chosen) in plan.moves.iter().filter(|(vm, _)| is_known(vm)) {
            let (from, to) = (chosen.from.clone(), chosen.to.clone());
            say(&format!("{vm} is to go from {from} to {to}, for {}", chosen.for_whom));
            // Each write increases the revision, so no two intents of a VM have the same
            // generation.
            let generation = snapshot.revision.unsigned_abs();
            let Some(group) = records.group_of(vm, &from) else { continue };
            let intent = Intent { generation, from, to, group, is_withdrawn: false };
            changes.push(Change::put(records::intent(vm), &intent));
        }
        for vm in &plan.withdrawn {
            if let Some(intent) = records.intents.get(vm) {
                say(&format!("{vm} is to stay on {}, if it has not left", intent.from));
                let intent = Intent { is_withdrawn: true, ..intent.clone() };
                changes.push(Change::put(records::intent(vm), &intent));
            }
        }
        if changes.is_empty() {
            return Ok(());
        }
        self.store.write(&seat, Vec::new(), changes).await
    }

    /// The lease, if this controller holds it.
    async fn sit(&mut self, say: &impl Fn(&str)) -> Result<Option<WriterLease>, StoreError> {
        if let Some((seat, stayed)) = &mut self.seat {
            if stayed.elapsed() >= STAY {
                self.store.stay(seat).await?;
                *stayed = Instant::now();
            }
            return Ok(Some(seat.clone()));
        }
        if let Some(seat) = self.store.sit(records::CONTROLLER_SEAT, &self.who).await? {
            say(&format!("{} decides", self.who));
            (self.memory, self.since) = (ClusterMemory::resting(self.rest), BTreeMap::new());
            self.seat = Some((seat.clone(), Instant::now()));
            self.shared_at = Instant::now();
            return Ok(Some(seat));
        }
        Ok(None)
    }

    /// Shares out the memory for overloads, and counts those of now, if that is due. `None` also
    /// if nothing is kept, as before.
    fn share_out(
        &mut self,
        view: &ClusterView,
        before: &ExcessPlan,
        say: &impl Fn(&str),
    ) -> Option<Change> {
        if self.shared_at.elapsed() < SHARE {
            return None;
        }
        self.shared_at = Instant::now();
        let is_off = self.certainty <= 0.0;
        let plan = excess::share_out(view, self.certainty, before);
        if plan == *before || (is_off && before.shares.is_empty()) {
            return None;
        }
        let ExcessSpace { targets, repositories } = plan.missing;
        if plan.missing != before.missing && plan.missing != ExcessSpace::default() {
            say(&format!(
                "for overloads, room for {targets} of VMs that move and for {repositories} of \
                 pages is missing"
            ));
        }
        Some(Change::put(records::EXCESS.to_owned(), &plan))
    }

    /// Removes intents that have ended.
    fn ended(&mut self, records: &Records, now: Time, say: &impl Fn(&str)) -> Vec<Change> {
        let mut changes = Vec::new();
        for (vm, intent) in &records.intents {
            let (source, target) = (records.source_of(vm, intent), records.target_of(vm, intent));
            let Some(source) = source.filter(|written| written.is_over) else { continue };
            // If the guest has stayed, a host that is permanently gone is not waited for.
            let is_lost = !records.seated.contains(&intent.to);
            let stayed = matches!(source.step, SourceStep::Stayed { .. });
            let is_over = target.is_some_and(|written| written.is_over) || (is_lost && stayed);
            if !is_over {
                continue;
            }
            let outcome = match (&source.step, target.map(|written| &written.step)) {
                (SourceStep::Left, _) => {
                    self.memory.accepted(&intent.to);
                    format!("{vm} has gone from {} to {}", intent.from, intent.to)
                }
                (SourceStep::Stayed { why }, step) => {
                    if matches!(step, Some(TargetStep::Refused { .. })) {
                        self.memory.refused(&intent.to, now);
                    }
                    format!("{vm} has stayed on {}: {why}", intent.from)
                }
                (step, _) => format!("{vm}: {step:?}"),
            };
            say(&outcome);
            changes.push(Change::Delete { key: records::intent(vm) });
        }
        changes
    }
}
