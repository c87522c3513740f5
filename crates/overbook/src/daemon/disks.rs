//! Reports of the processes that serve VMs' disks, as the loop sees them.
//!
//! The processes run on their own, and may be dead or slow. So at the end of each tick, a task for
//! each group sends its process the order and asks for its status. The next tick shows the answers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use disks::{Order, Status};
use model::{Bytes, GroupName, HostView, Plan, Reading, Spec, VmName};
use sys::clock::boot_now;
use tokio::task::JoinHandle;

/// A status older than this is not shown.
const FRESH: model::Millis = model::Millis::secs(10);

/// The known state of the disks.
#[derive(Debug, Default)]
pub(super) struct Disks {
    told: Arc<Mutex<BTreeMap<GroupName, Reading<Status>>>>,
    asking: BTreeMap<GroupName, JoinHandle<()>>,
}

impl Disks {
    /// Copies the disks' latest reports into the view.
    pub(super) fn show(&mut self, spec: &Spec, view: &mut HostView) {
        let now = boot_now();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.retain(|group, status| spec.groups.contains_key(group) && status.age(now) <= FRESH);
        for (group, Reading { at, value }) in told.iter() {
            if let Some(cache) = &value.cache {
                view.caches.insert(group.clone(), Reading::new(cache.clone(), *at));
            }
            for (name, disk) in &value.disks {
                let vm = spec.disks.get(name).and_then(|disk| view.vms.get_mut(&disk.vm));
                if let Some(vm) = vm {
                    vm.disks.insert(name.clone(), Reading::new(disk.clone(), *at));
                }
            }
        }
    }

    /// Sends the plan's orders to the disks, and asks each for its status.
    pub(super) fn ask(&mut self, spec: &Spec, plan: &Plan) {
        self.asking.retain(|_, task| !task.is_finished());
        for group in spec.groups.keys().filter(|group| spec.disks_of(group).next().is_some()) {
            if !self.asking.contains_key(group) {
                let task = self.ask_one(spec, group, order(spec, plan, group));
                self.asking.insert(group.clone(), task);
            }
        }
    }

    fn ask_one(&self, spec: &Spec, group: &GroupName, order: Order) -> JoinHandle<()> {
        let (told, group) = (self.told.clone(), group.clone());
        let socket = disks::status_socket(spec, &group);
        tokio::spawn(async move {
            let asked = boot_now();
            if let Some(status) = disks::ask(&socket, &order).await {
                let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                told.insert(group, Reading::new(status, asked));
            }
        })
    }
}

/// The order for a group's disks.
fn order(spec: &Spec, plan: &Plan, group: &GroupName) -> Order {
    let quota = plan.caches.get(group).map_or(Bytes::ZERO, |quota| quota.amount);
    // The host need not hold the swapped pages of a VM at its `max` (Overdriver, footnote 5).
    let is_at_max = |vm: &VmName| plan.vms.get(vm).is_some_and(|decision| decision.is_at_max);
    let at_max = spec.disks_of(group).map(|(_, disk)| &disk.vm).filter(|vm| is_at_max(vm));
    Order { cache: Some(quota), at_max: Some(at_max.cloned().collect()) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use model::{Decision, DiskReading, Quota};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;

    use super::*;
    use crate::fixture;

    fn spec(dir: &std::path::Path) -> Spec {
        let text = format!(
            "[api]\nsocket = \"{}/s\"\n[group.web]\nvms = [\"web-*\"]\n[disk.d]\nvm = \"web-1\"\n\
             file = \"/srv/d\"\nsize = \"1GiB\"\n",
            dir.display()
        );
        model::config::parse(&[("overbook.toml".to_owned(), text)]).unwrap()
    }

    #[tokio::test]
    async fn a_disks_process_hears_what_is_wanted_and_says_how_it_does_and_nothing_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let spec = spec(dir.path());
        std::fs::create_dir(spec.disk_directory()).unwrap();
        let mut disks = Disks::default();
        let (mut view, vm) = (fixture::published().view, VmName::from("web-1"));
        // No disk process is listening yet.
        let quota = Quota { amount: Bytes::mib(7), reason: model::Reason::NothingSpare };
        let plan = Plan {
            caches: BTreeMap::from([("web".into(), quota)]),
            vms: BTreeMap::from([(
                vm.clone(),
                Decision { is_at_max: true, ..Decision::default() },
            )]),
            ..Plan::default()
        };
        disks.show(&spec, &mut view);
        disks.ask(&spec, &plan);
        disks.show(&spec, &mut view);
        assert!(!view.vms[&vm].disks.contains_key("d"));
        let listener = UnixListener::bind(disks::status_socket(&spec, &"web".into())).unwrap();
        let answer = tokio::spawn(async move {
            let of = DiskReading { reads: 7, ..DiskReading::default() };
            let status = Status { disks: [("d".to_owned(), of)].into(), cache: None };
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut order = String::new();
            BufReader::new(&mut stream).read_line(&mut order).await.unwrap();
            let at_max = Some(BTreeSet::from(["web-1".into()]));
            let wanted = Order { cache: Some(Bytes::mib(7)), at_max };
            assert_eq!(serde_json::from_str::<Order>(&order).unwrap(), wanted);
            stream.write_all(&serde_json::to_vec(&status).unwrap()).await.unwrap();
        });
        for _ in 0..3_000 {
            disks.ask(&spec, &plan);
            disks.show(&spec, &mut view);
            if let Some(disk) = view.vms[&vm].disks.get("d") {
                assert_eq!(disk.value.reads, 7);
                answer.await.unwrap();
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the disk was never shown");
    }
}
