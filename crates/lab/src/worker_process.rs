//! A group's worker as the daemon runs it: the real program, which reads orders as lines and can
//! be killed.

use std::io::{self, BufRead, BufReader, PipeWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use model::{Bytes, FreePages, PagesPerMs, TrackingBudget};
use sys::process::{Child, Identity, Signal, Spawn};
use worker::{FreedOrder, Order, Orders, Report};

use crate::inside;
use crate::lab::{Lab, LabError, Machine};

/// Timeout for it to restore everything and end.
const GRACE: Duration = Duration::from_secs(10);

/// The order for all guests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wanted {
    /// The budget of tracking.
    pub tracking: TrackingBudget,
    /// The rate of the search for identical pages; `None`: pages are unshared.
    pub scan_rate: Option<PagesPerMs>,
    /// The handling of memory that they free.
    pub freed: FreedOrder,
    /// The most memory that each may have resident.
    pub resident: Option<Bytes>,
    /// The memory of their QEMUs besides the guests; without it nothing is paged out.
    pub own: Option<Bytes>,
}

/// A worker; dropping it kills it.
#[derive(Debug)]
pub struct WorkerProcess {
    child: Child,
    orders: PipeWriter,
    tables: Vec<PathBuf>,
    latest: Arc<Mutex<Option<Report>>>,
}

impl WorkerProcess {
    pub fn start(group: &str) -> Result<Self, LabError> {
        let ((stdin, orders), (reports, stdout)) = (io::pipe()?, io::pipe()?);
        let spawn = Spawn::new(inside::built("overbook")?).args(["worker", group]);
        let child = spawn.stdin(stdin).stdout(stdout).die_with_parent().spawn()?;
        let latest = Arc::<Mutex<Option<Report>>>::default();
        let known = Arc::clone(&latest);
        // The thread ends when the worker closes its end of the pipe.
        std::thread::spawn(move || {
            for line in BufReader::new(reports).lines().map_while(Result::ok) {
                if let Ok(report) = serde_json::from_str(&line) {
                    *known.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
                }
            }
        });
        Ok(Self { child, orders, tables: Vec::new(), latest })
    }

    /// The same worker with a table of shared pages in each of its orders.
    pub fn knowing(mut self, table: &Path) -> Self {
        self.tables.push(table.to_owned());
        self
    }

    pub fn identity(&self) -> Identity {
        self.child.identity()
    }

    /// Sends it an order for all guests of the lab.
    pub fn order(&mut self, lab: &Lab, wanted: Wanted) -> Result<(), LabError> {
        let Wanted { tracking: budget, scan_rate, freed, resident, own } = wanted;
        let order = |machine: &Machine| Order {
            keeps_shares: false,
            incarnation: 1,
            pid: machine.process().pid,
            started: machine.process().start_ticks,
            swapped: Bytes::ZERO,
            memory: machine.spec().memory_max,
            own,
            spent: None,
            attach: (!machine.spec().shim).then_some(machine.spec().memory_max),
            budget,
            leaves: false,
            freed,
            resident,
        };
        let name = |machine: &Machine| machine.spec().name.as_str().into();
        let vms = lab.machines().iter().map(|machine| (name(machine), order(machine))).collect();
        let orders = Orders { vms, scan_rate, tables: self.tables.clone() };
        let mut line = serde_json::to_vec(&orders).map_err(io::Error::from)?;
        line.push(b'\n');
        Ok(self.orders.write_all(&line)?)
    }

    /// Has it only hand over memory that guests free, and take all but `keep` of it from each.
    /// `None`: it takes nothing.
    pub fn take(&mut self, lab: &Lab, keep: Option<Bytes>) -> Result<(), LabError> {
        let freed = FreedOrder { is_lazy: true, keep };
        let tracking = TrackingBudget::Off;
        self.order(lab, Wanted { tracking, freed, ..Wanted::default() })
    }

    /// Memory that all guests together have freed, by its last report.
    pub fn freed(&self) -> FreePages {
        let report = self.report().unwrap_or_default();
        let mut all = FreePages::default();
        for free in report.vms.values().filter_map(|vm| Some(vm.free_pages?.value)) {
            all.freed = all.freed.plus(free.freed);
            all.lazy = all.lazy.plus(free.lazy);
            all.handed_over = all.handed_over.plus(free.handed_over);
            all.taken = all.taken.plus(free.taken);
            all.dropped = all.dropped.plus(free.dropped);
            all.taken_back = all.taken_back.plus(free.taken_back);
            all.refaulted = all.refaulted.plus(free.refaulted);
        }
        all
    }

    /// Its last report; `None`: there is none yet.
    pub fn report(&self) -> Option<Report> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Kills it without warning.
    pub fn kill(mut self) -> Result<(), LabError> {
        self.child.signal(Signal::KILL)?;
        self.child.wait_for(GRACE)?;
        Ok(())
    }

    /// Has it end by itself.
    pub fn end(self) -> Result<(), LabError> {
        let Self { mut child, orders, .. } = self;
        drop(orders);
        child.wait_for(GRACE)?;
        child.end(GRACE)?;
        Ok(())
    }
}
