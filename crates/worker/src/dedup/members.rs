//! Manages the members of the group: admits VMs, processes their shims' answers, removes those
//! that are gone, and numbers the pages of all.

use std::ops::Range;
use std::os::fd::AsFd;

use pages::dedup::{ContentLocation, Index};
use sys::clock::boot_now;
use sys::pool_maps;
use sys::process::Identity;

use super::super::tracked::Tracked;
use super::Dedup;
use super::guest_memory::page_count;
use super::store::{SLOTS, Store};
use super::vm::Vm;

impl Dedup {
    /// Removes VMs that have ended or are no longer in the orders, processes outcomes, and
    /// handles new connections.
    pub(super) fn meet(&mut self, vms: &mut [&mut Tracked]) {
        let is_told_of = |pid: u32| vms.iter().any(|tracked| tracked.pid() == pid);
        let is_gone =
            |(pid, vm): (&u32, &Vm)| (!is_told_of(*pid) || vm.has_ended()).then_some(*pid);
        let gone: Vec<u32> = self.vms.iter().filter_map(is_gone).collect();
        for pid in gone {
            let Some(vm) = self.vms.remove(&pid) else { continue };
            self.index.forget(vm.numbers());
            if let Some(store) = &mut self.store {
                let (process, slots) = vm.into_holder();
                store.hold(pid, process, slots);
            }
        }
        let ended = self.store.as_mut().map(Store::ended);
        self.leave_all(ended.unwrap_or_default());
        for vm in self.vms.values_mut() {
            vm.is_here = false;
        }
        for tracked in vms {
            self.meet_one(tracked);
        }
    }

    fn meet_one(&mut self, tracked: &mut Tracked) {
        let (pid, process) = (tracked.pid(), tracked.process());
        if !self.vms.contains_key(&pid) {
            let new = tracked.with_shim(|linked, _| {
                let regions = linked.link().regions();
                let has_numbers = self.free_numbers(page_count(regions)).is_some();
                Ok(if has_numbers { Vm::open(process, regions) } else { None })
            });
            let Some(Some(new)) = new else { return };
            // Its shim has answered, so no request is in flight, and its present sharing is final.
            let Some(new) = self.with_shares(process, new) else { return };
            self.number(pid, new);
        }
        let (Some(vm), Some(store)) = (self.vms.get_mut(&pid), &self.store) else { return };
        let known = vm.numbers();
        let file = &store.file;
        let mut left = Vec::new();
        let met = tracked.with_shim(|linked, session| {
            if vm.session != Some(session) && !vm.requests.is_paused() {
                left.extend(vm.meet_again(session, linked.link())?);
                if let Ok(reader) = file.reader() {
                    vm.requests.use_pool(linked.link(), reader.as_fd(), SLOTS)?;
                }
            }
            left.extend(vm.settle(linked)?);
            Ok(())
        });
        let is_paused = self.paused.contains(&pid);
        vm.is_here = met.is_some() && vm.requests.is_ready() && !is_paused;
        if met.is_some() {
            vm.met = boot_now();
        }
        let is_other = vm.numbers() != known;
        self.leave_all(left);
        if is_other {
            self.renumber(pid, known);
        }
    }

    /// Adds the references of the pages that the VM already shares with the pool.
    fn with_shares(&mut self, process: Identity, mut vm: Vm) -> Option<Vm> {
        let store = self.store.as_mut()?;
        let sharers = pool_maps::sharers(process.pid, store.id, &vm.memory.ranges()).ok()?;
        let sharers = process.still(sharers).ok()?;
        vm.adopt(&sharers, &mut store.slots);
        let left = store.met(process.pid);
        self.leave_all(left);
        Some(vm)
    }

    /// Guest RAM was plugged or unplugged: the VM's pages get new numbers in the group.
    fn renumber(&mut self, pid: u32, known: Range<u32>) {
        self.index.forget(known);
        if let Some(vm) = self.vms.remove(&pid) {
            self.number(pid, vm);
        }
    }

    /// Admits a VM. Without free numbers for its pages, only its references are kept.
    fn number(&mut self, pid: u32, mut vm: Vm) {
        if let Some(first) = self.free_numbers(vm.book.pages()) {
            self.grow(vm.book.pages());
            vm.first = first;
            self.vms.insert(pid, vm);
        } else if let Some(store) = &mut self.store {
            let (process, slots) = vm.into_holder();
            store.hold(pid, process, slots);
        }
    }

    /// The lowest free numbers for this many pages; `None`: the group has more pages than
    /// numbers.
    fn free_numbers(&self, pages: u32) -> Option<u32> {
        let mut taken: Vec<_> = self.vms.values().map(Vm::numbers).collect();
        taken.sort_by_key(|numbers| numbers.start);
        let mut first = 0;
        for numbers in taken {
            if numbers.start - first >= pages {
                break;
            }
            first = numbers.end;
        }
        first.checked_add(pages).filter(|end| *end <= Index::MOST_PAGES).map(|_| first)
    }

    /// Enlarges the index for another VM: the pool's contents stay in it, all others are found
    /// again.
    fn grow(&mut self, more: u32) {
        let pages = self.vms.values().fold(more, |pages, vm| pages.saturating_add(vm.book.pages()));
        if pages > self.capacity {
            self.capacity = pages;
            self.index = Index::new(pages);
            let slots = self.store.iter().flat_map(|store| store.slots.hashes());
            for (slot, hash) in slots {
                self.index.set(hash, ContentLocation::Pool(slot));
            }
        }
    }
}
