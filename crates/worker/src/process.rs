//! The worker's process: it reads orders, takes steps and writes reports, until the daemon is gone.
//!
//! It has one thread with one loop. It reads standard input only when there is input, so a slow
//! daemon does not delay the VMs. If the daemon does not read the reports, the worker blocks at a
//! full pipe. The shims then get no messages, and give everything back.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use model::{Bytes, VmName};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::clock::boot_now;
use sys::heap;

use super::dedup::{Dedup, Task, unguessable};
use super::messages::{Order, Orders, Report, VmReport};
use super::mode::{Mode, Settings};
use super::tables::Tables;
use super::tracked::{STEP, State, Tracked};

const REPORT_EVERY: Duration = Duration::from_secs(1);
/// The time slice of the search for identical pages, between other work.
const SLICE: Duration = Duration::from_millis(5);
/// How often a step is due while freed memory is taken: each requests some milliseconds of work.
const TAKING_STEP: Duration = Duration::from_millis(2);
/// The longest time for which it reads back memory before it ends: the daemon waits two seconds.
const LEAVE: Duration = Duration::from_millis(1_500);
/// The longest line of orders: enough for thousands of VMs.
const MOST_LINE: usize = 4 << 20;

/// The reason why a worker ends before its daemon.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Orders cannot be read, or reports cannot be written.
    #[error("the daemon cannot be talked to: {0}")]
    Io(#[from] io::Error),
    /// A line is longer than any orders.
    #[error("orders of more than {MOST_LINE} bytes")]
    TooLong,
    /// A line does not parse as orders.
    #[error("orders that make no sense: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Works for the group of this name until standard input ends.
///
/// # Errors
/// When standard input or output fails, or orders do not parse.
pub fn run(group: &str) -> Result<(), WorkerError> {
    // Indexes are copied as they grow, and buffers shrink: the allocator must return that memory.
    heap::give_back_large();
    let stdin = io::stdin();
    let mut stdout = io::stdout().lock();
    let mut inbox = Inbox::default();
    let mut members = Members::new(group);
    let (mut next_step, mut next_report) = (Instant::now(), Instant::now() + REPORT_EVERY);
    let mut idle = Duration::ZERO;
    loop {
        let to_step = next_step.saturating_duration_since(Instant::now());
        if is_readable(stdin.as_fd(), to_step.min(idle))? {
            let has_ended = !inbox.read(stdin.as_fd())?;
            // Only the newest orders count.
            if let Some(orders) = inbox.latest()? {
                members.obey(&orders);
            }
            if has_ended {
                members.take_leave();
                return Ok(());
            }
        }
        let now = Instant::now();
        if now >= next_step {
            members.step();
            next_step = now + if members.are_busy() { TAKING_STEP } else { STEP };
        }
        idle = members.dedup(Instant::now() + SLICE);
        if now >= next_report {
            next_report = now + REPORT_EVERY;
            heap::give_back();
            let mut line = serde_json::to_vec(&members.report())?;
            line.push(b'\n');
            stdout.write_all(&line)?;
            stdout.flush()?;
        }
    }
}

fn is_readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
    match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The input that was read and not yet parsed.
#[derive(Debug, Default)]
struct Inbox {
    bytes: Vec<u8>,
}

impl Inbox {
    /// Reads the available input; `false`: the input has ended.
    fn read(&mut self, from: BorrowedFd<'_>) -> Result<bool, WorkerError> {
        let mut buffer = [0; 64 << 10];
        let length = rustix::io::read(from, &mut buffer).map_err(io::Error::from)?;
        self.bytes.extend_from_slice(&buffer[..length]);
        if self.bytes.len() > MOST_LINE {
            return Err(WorkerError::TooLong);
        }
        Ok(length > 0)
    }

    /// Parses the last whole line, and drops those before it.
    fn latest(&mut self) -> Result<Option<Orders>, WorkerError> {
        let Some(end) = self.bytes.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(None);
        };
        let rest = self.bytes.split_off(end + 1);
        let lines = std::mem::replace(&mut self.bytes, rest);
        let line = lines[..end].rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
        Ok(Some(serde_json::from_slice(line)?))
    }
}

/// The VMs of the group, and their shared memory.
#[derive(Debug)]
struct Members {
    vms: BTreeMap<VmName, GroupVm>,
    /// VMs that were let go, and whose memory is still being read back.
    leaving: Vec<Tracked>,
    dedup: Dedup,
    tables: Tables,
}

#[derive(Debug)]
struct GroupVm {
    order: Order,
    tracked: Tracked,
}

impl Members {
    fn new(group: &str) -> Self {
        let (vms, leaving) = (BTreeMap::new(), Vec::new());
        Self { vms, leaving, dedup: Dedup::new(group), tables: Tables::default() }
    }

    fn obey(&mut self, orders: &Orders) {
        let is_same = |old: &Order, new: &Order| {
            (old.incarnation, old.process(), old.budget, old.attach.is_some())
                == (new.incarnation, new.process(), new.budget, new.attach.is_some())
        };
        let leaves: Vec<VmName> = self
            .vms
            .iter()
            .filter(|(name, member)| {
                !orders.vms.get(*name).is_some_and(|order| is_same(&member.order, order))
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in leaves {
            if let Some(mut member) = self.vms.remove(&name) {
                member.tracked.begin_release();
                self.leaving.push(member.tracked);
            }
        }
        for (name, order) in &orders.vms {
            let budget = order.budget.vcpu_share();
            let mode = budget.map_or(Mode::Untracked, |budget| Mode::Probes { budget });
            // No guest can guess which of its pages are probed.
            let settings = Settings { seed: unguessable(), ..Settings::new(mode) };
            let member = self.vms.entry(name.clone()).or_insert_with(|| GroupVm {
                order: order.clone(),
                tracked: match order.attach {
                    None => Tracked::new(order.process(), settings),
                    Some(ram) => Tracked::attached(order.process(), ram, settings),
                }
                .after(order.spent),
            });
            member.order = order.clone();
            member.tracked.set_swapped(order.swapped);
            member.tracked.set_memory(order.memory);
            member.tracked.set_own(order.own);
            member.tracked.set_freed(order.freed);
            member.tracked.set_resident(order.resident);
            if let Some(ram) = order.attach {
                member.tracked.set_ram(ram);
            }
        }
        self.tables.want(&orders.tables);
        let merge = |rate| Task::Merge(Some(rate));
        self.dedup.set_task(orders.scan_rate.map_or(Task::Unshare, merge));
        let leaving = orders.vms.values().filter(|order| order.leaves);
        self.dedup.set_leaving(leaving.map(|order| order.pid).collect());
        let paused = orders.vms.values().filter(|order| order.keeps_shares);
        self.dedup.set_paused(paused.map(|order| order.pid).collect());
    }

    /// Looks for identical pages, until `until` at most; returns how long there is no work then.
    fn dedup(&mut self, until: Instant) -> Duration {
        let mut vms: Vec<_> = self.vms.values_mut().map(|member| &mut member.tracked).collect();
        self.dedup.work(&mut vms, until)
    }

    fn step(&mut self) {
        if let Some(known) = self.tables.changed() {
            self.dedup.set_known(known);
        }
        for member in self.vms.values_mut() {
            member.tracked.step();
        }
        self.see_off();
    }

    /// Continues to read back the memory of the VMs that were let go.
    fn see_off(&mut self) {
        self.leaving.iter_mut().for_each(Tracked::step);
        self.leaving.retain(Tracked::is_releasing);
    }

    /// Waits until the memory of the VMs that were let go is read back, but no longer than the
    /// daemon waits. Memory that is still out then comes back at a touch.
    fn take_leave(&mut self) {
        let until = Instant::now() + LEAVE;
        while !self.leaving.is_empty() && Instant::now() < until {
            self.see_off();
            sleep(TAKING_STEP);
        }
    }

    /// Whether any VM needs its next step soon.
    fn are_busy(&self) -> bool {
        !self.leaving.is_empty() || self.vms.values().any(|member| member.tracked.is_busy())
    }

    fn report(&self) -> Report {
        let report = |member: &GroupVm| {
            let (tracked, pid) = (&member.tracked, member.order.pid);
            let why_not = match tracked.state() {
                State::Tracking => None,
                State::Connecting if member.order.attach.is_some() => {
                    Some("it was not looked at yet".to_owned())
                }
                State::Connecting => Some("the shim has not answered yet".to_owned()),
                State::Waiting { why } | State::Unsupported { why } => Some(why.clone()),
            };
            let dedup = self.dedup.reading(pid);
            VmReport {
                incarnation: member.order.incarnation,
                shim: tracked.shim(),
                tracking: tracked.reading(),
                why_not_merged: match dedup {
                    Some(_) => self.dedup.why_not(pid),
                    None => why_not.clone(),
                },
                why_not,
                dedup,
                free_pages: tracked.freed(),
                why_not_taken: tracked.why_not_taken().map(str::to_owned),
                cold: tracked.cold(),
                why_not_paged_out: tracked.why_not_paged_out().map(str::to_owned),
            }
        };
        let vms = self.vms.iter().map(|(name, m)| (name.clone(), report(m))).collect();
        Report {
            at: boot_now(),
            vms,
            pool: Bytes(self.dedup.pool_bytes()),
            known_pages: self.tables.pages,
            why_not_known: self.tables.trouble.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::freed::FreedOrder;
    use super::*;

    fn order(pid: u32) -> Order {
        let (swapped, memory) = (model::Bytes::ZERO, model::Bytes::mib(64));
        let budget = model::TrackingBudget::default();
        let freed = FreedOrder::default();
        let (started, own, spent, leaves, resident) = (1, None, None, false, None);
        let (attach, keeps_shares) = (None, false);
        Order {
            incarnation: 1,
            pid,
            started,
            swapped,
            memory,
            own,
            spent,
            budget,
            attach,
            leaves,
            freed,
            resident,
            keeps_shares,
        }
    }

    fn orders(names: &[&str]) -> Orders {
        // No process has this number, so no connection is made.
        let vms = names.iter().map(|name| (VmName::from(*name), order(u32::MAX)));
        Orders { vms: vms.collect(), ..Orders::default() }
    }

    #[test]
    fn only_the_newest_whole_line_counts() {
        let line = |names: &[&str]| serde_json::to_vec(&orders(names)).unwrap();
        let bytes = [line(&["a"]), b"\n".to_vec(), line(&["b"]), b"\n{\"vm".to_vec()].concat();
        let mut inbox = Inbox { bytes };
        assert_eq!(inbox.latest().unwrap(), Some(orders(&["b"])));
        assert_eq!(inbox.latest().unwrap(), None);
        assert_eq!(inbox.bytes, b"{\"vm");
        inbox.bytes.extend(b"}\n");
        assert!(inbox.latest().is_err());
    }

    #[test]
    fn vms_come_and_go_with_the_orders_and_say_why_they_are_not_tracked() {
        let mut members = Members::new("test");
        members.obey(&orders(&["a", "b"]));
        members.step();
        members.obey(&orders(&["b", "c"]));
        let report = members.report();
        let names: Vec<&str> = report.vms.keys().map(VmName::as_str).collect();
        assert_eq!(names, ["b", "c"]);
        let why = |name: &str| report.vms[&name.into()].why_not.clone().unwrap();
        assert!(why("b").contains("No such"), "{}", why("b"));
        assert!(why("c").contains("not answered yet"), "{}", why("c"));
    }
}
