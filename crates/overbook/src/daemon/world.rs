//! The policy's view of the world: drivers, workers, disks and the kernel's KSM together.

use drivers::Drivers;
use model::{
    Action, HostView, Plan, Spec,
    ports::{Act, Sense},
};

use super::{disks::Disks, ksm::HostKsm, workers::Workers};

/// Everything that a tick can read and act on.
pub(super) struct World<'a> {
    pub(super) drivers: &'a mut Drivers,
    pub(super) workers: &'a mut Workers,
    pub(super) ksm: &'a mut HostKsm,
    pub(super) disks: &'a mut Disks,
    pub(super) spec: &'a Spec,
}

impl Sense for World<'_> {
    fn view(&mut self) -> HostView {
        let mut view = self.drivers.view();
        self.workers.look(self.spec, &mut view);
        self.ksm.tick(self.spec, self.workers.with_shim(), &mut view);
        self.disks.show(self.spec, &mut view);
        view
    }
}

impl Act for World<'_> {
    fn act(&mut self, action: &Action) {
        self.drivers.act(action);
        self.workers.act(action);
    }

    fn finish(&mut self, plan: &Plan) {
        self.workers.send(self.spec, plan);
        for (group, scan) in &plan.scans {
            self.ksm.scan(group, scan.rate);
        }
        self.disks.ask(self.spec, plan);
    }
}
