//! A KVM virtual machine. Its memory is guest RAM as QEMU maps it, and its vCPUs run [`guest`].
//!
//! **Problem.** On users' hosts a guest's touch comes through KVM. KVM has its own memory slots
//! and its own page tables in addition to the process's. The kernel notifies it about pages that
//! move (MMU notifiers), and it takes faults on a vCPU's behalf. A thread that touches memory has
//! none of this.
//!
//! **Idea.** The guest has no kernel. It runs at user level from the first instruction (64 bits,
//! CPL 3). Its page tables map every address to itself, in huge pages, readable, writable and
//! executable. A KVM that emulates guests' kernels runs that, too. Page tables, code and
//! mailboxes are in a slot of their own that is not guest RAM. There are no descriptor tables: an
//! unexpected event ends the guest (a triple fault), and is reported.
//!
//! Each piece of guest RAM ([`Slot`](crate::ram::Slot)) is a memory slot while it is plugged.

use std::fmt;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_sregs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use crate::guest::{self, MAILBOX_PAGES, Mailbox, Wrong};
use crate::page::{PAGE, Words};
use crate::ram;

/// The guest-physical address where guest RAM begins; everything below is private.
pub(crate) const RAM_BEGINS: u64 = GIB;

const GIB: u64 = 1 << 30;
const HUGE_PAGE: u64 = 2 << 20;
/// Bytes of the private slot, which is not guest RAM.
const PRIVATE: u64 = HUGE_PAGE;
/// The first address behind the private slot, without memory: a store there exits the guest.
const LEAVE: u64 = PRIVATE;

// Pages of the private slot: the two upper levels of page tables, a directory for each GiB, the
// code, the mailboxes.
const DIRECTORIES: u64 = 2;
const ENTRIES: u64 = 512;

// Bits of page table entries: present, writable, user, accessed; dirty, huge.
const TABLE: u64 = 0x27;
const LEAF: u64 = TABLE | 0x40 | 0x80;

// Control registers: protection and paging on, write protection as usual; PAE and SSE; long mode,
// active.
const CR0: u64 = 0x8005_0033;
const CR4: u64 = 0x620;
const EFER: u64 = 0x500;
/// Interrupts are enabled, but there are none.
const FLAGS: u64 = 0x202;

/// One virtual machine. Its vCPUs run in other threads.
pub(crate) struct Machine {
    vm: VmFd,
    private: Arc<Private>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Machine").finish_non_exhaustive()
    }
}

impl Machine {
    /// Makes a machine with `vcpus` vCPUs, whose memory ends at `end`; guest RAM is plugged
    /// later.
    ///
    /// # Errors
    /// When there is no KVM, or it refuses.
    pub(crate) fn new(vcpus: usize, end: u64) -> io::Result<(Self, Vec<Vcpu>)> {
        let kvm = Kvm::new()?;
        let vm = kvm.create_vm()?;
        let directories = end.div_ceil(GIB);
        let code = DIRECTORIES + directories;
        let first_mailbox = code + 1;
        let pages = first_mailbox + (vcpus * MAILBOX_PAGES) as u64;
        if pages > PRIVATE / PAGE as u64 {
            return Err(io::Error::other("a guest of more RAM than there are page tables for"));
        }
        let private = Arc::new(Private::new()?);
        private.map_to_itself(directories);
        private.write(code, guest::code());
        let machine = Self { vm, private };
        machine.tell(0, 0, machine.private.start.as_ptr(), PRIVATE)?;
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        let vcpu = |number: usize| {
            let fd = machine.vm.create_vcpu(number as u64)?;
            fd.set_cpuid2(&cpuid)?;
            fd.set_sregs(&at_user_level(fd.get_sregs()?))?;
            let mailbox = first_mailbox + (number * MAILBOX_PAGES) as u64;
            fd.set_regs(&kvm_regs {
                rip: code * PAGE as u64,
                rdi: mailbox * PAGE as u64,
                r15: LEAVE,
                rflags: FLAGS,
                ..kvm_regs::default()
            })?;
            Ok(Vcpu { fd, private: Arc::clone(&machine.private), mailbox })
        };
        let vcpus = (0..vcpus).map(vcpu).collect::<io::Result<_>>()?;
        Ok((machine, vcpus))
    }

    /// Adds a piece of RAM.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn plug(
        &self,
        slot: u32,
        guest: u64,
        start: *mut u8,
        bytes: usize,
    ) -> io::Result<()> {
        self.tell(slot + 1, guest, start, bytes as u64)
    }

    /// Removes a piece of RAM.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn unplug(&self, slot: u32) -> io::Result<()> {
        self.tell(slot + 1, 0, std::ptr::null_mut(), 0)
    }

    fn tell(&self, slot: u32, guest: u64, start: *mut u8, bytes: u64) -> io::Result<()> {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: guest,
            memory_size: bytes,
            userspace_addr: start.expose_provenance() as u64,
        };
        // SAFETY: the memory is RAM that is plugged, and is removed here before it is unmapped.
        // The guest writes only to pages that the thread running it owns.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(io::Error::from)
    }
}

/// One of the machine's processors.
pub(crate) struct Vcpu {
    fd: VcpuFd,
    private: Arc<Private>,
    /// The first page of its mailbox.
    mailbox: u64,
}

impl Vcpu {
    /// The mailbox for its jobs.
    pub(crate) fn mailbox(&self) -> Mailbox<'_> {
        Mailbox::new([self.private.page(self.mailbox), self.private.page(self.mailbox + 1)])
    }

    /// Has the guest do the jobs with these numbers. Returns the job at which it has stopped, and
    /// the wrong word there.
    ///
    /// # Errors
    /// When the guest does anything but exit at the end, or the kernel cannot run it.
    pub(crate) fn run(&mut self, jobs: Range<usize>) -> io::Result<(usize, Option<Wrong>)> {
        self.mailbox().ask(jobs);
        loop {
            match self.fd.run() {
                Ok(VcpuExit::MmioWrite(LEAVE, _)) => return Ok(self.mailbox().answer()),
                // A signal, like those with which QEMU makes its vCPUs exit.
                Ok(VcpuExit::Intr) => {}
                Err(error) if error.errno() == libc::EINTR => {}
                Ok(exit) => {
                    let exit = format!("{exit:?}");
                    return Err(io::Error::other(format!("a vCPU {} with {exit}", self.place())));
                }
                Err(error) => {
                    return Err(io::Error::other(format!("a vCPU {}: {error}", self.place())));
                }
            }
        }
    }

    fn place(&self) -> String {
        self.fd.get_regs().map_or_else(
            |error| format!("left from an unknown place ({error})"),
            |regs| format!("left at {:#x} (its page {:#x})", regs.rip, regs.r8),
        )
    }
}

/// Memory of the guest that is not guest RAM.
struct Private {
    start: NonNull<u8>,
}

// SAFETY: the mapping belongs to no thread, and its content is reached through atomics once a guest
// can run.
unsafe impl Send for Private {}
// SAFETY: as above.
unsafe impl Sync for Private {}

impl Private {
    /// Makes shared memory, which a forked child does not unshare.
    fn new() -> io::Result<Self> {
        let bytes = usize::try_from(PRIVATE).map_err(io::Error::other)?;
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        let start = ram::map(std::ptr::null_mut(), bytes, access, flags)?;
        Ok(Self { start: NonNull::new(start).ok_or(io::ErrorKind::InvalidData)? })
    }

    fn page(&self, number: u64) -> &Words {
        assert!(number < PRIVATE / PAGE as u64, "page {number} of the private slot");
        let offset = usize::try_from(number).unwrap_or(0) * PAGE;
        // SAFETY: in the mapping, as was just checked; aligned; every bit pattern is a word;
        // other code accesses it through atomics.
        unsafe { &*self.start.as_ptr().wrapping_add(offset).cast::<Words>() }
    }

    /// Maps `directories` GiB, each address to itself.
    fn map_to_itself(&self, directories: u64) {
        use std::sync::atomic::Ordering::Relaxed;
        let address = |page: u64| page * PAGE as u64;
        self.page(0)[0].store(address(1) | TABLE, Relaxed);
        for (gib, entry) in (0..directories).zip(self.page(1)) {
            entry.store(address(DIRECTORIES + gib) | TABLE, Relaxed);
            for (number, entry) in (0..ENTRIES).zip(self.page(DIRECTORIES + gib)) {
                entry.store((gib * GIB + number * HUGE_PAGE) | LEAF, Relaxed);
            }
        }
    }

    fn write(&self, page: u64, bytes: &[u8]) {
        use std::sync::atomic::Ordering::Relaxed;
        assert!(bytes.len() <= PAGE, "the guest's code is {} bytes long", bytes.len());
        for (word, bytes) in self.page(page).iter().zip(bytes.chunks(size_of::<u64>())) {
            let mut whole = [0; size_of::<u64>()];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(whole), Relaxed);
        }
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        // The memory is no longer in use; a failure only leaks it.
        let _ = ram::unmap(self.start.as_ptr(), usize::try_from(PRIVATE).unwrap_or(0));
    }
}

/// 64-bit mode, CPL 3, paging on.
fn at_user_level(reset: kvm_sregs) -> kvm_sregs {
    let data = kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: 0x2b,
        // Data, readable and writable, accessed.
        type_: 3,
        present: 1,
        dpl: 3,
        db: 1,
        s: 1,
        g: 1,
        ..kvm_segment::default()
    };
    // Code, readable, accessed, of 64 bits.
    let code = kvm_segment { selector: 0x33, type_: 11, db: 0, l: 1, ..data };
    // A processor in this mode has a task segment, marked busy.
    let task = kvm_segment { limit: 0x67, type_: 11, present: 1, ..kvm_segment::default() };
    let none = kvm_segment { unusable: 1, ..kvm_segment::default() };
    kvm_sregs {
        cs: code,
        ds: data,
        es: data,
        fs: data,
        gs: data,
        ss: data,
        tr: task,
        ldt: none,
        cr0: CR0,
        cr3: 0,
        cr4: CR4,
        efer: EFER,
        ..reset
    }
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;
    use crate::guest::{GuestOrder, Job, MOST_JOBS};
    use crate::kvm;
    use crate::page::Content;
    use crate::ram::Slot;

    /// A machine over one small piece of RAM. `None`, with a message, where KVM does not run it.
    fn machine() -> Option<(Slot, Vcpu, [Machine; 1])> {
        requires(Requirement::Kvm, kvm::probe())?;
        let slot = Slot::row([256]).remove(0);
        let (machine, mut vcpus) = Machine::new(1, slot.guest_end()).unwrap();
        let machines = [machine];
        slot.replug(&machines).unwrap();
        Some((slot, vcpus.remove(0), machines))
    }

    fn run(
        slot: &Slot,
        vcpu: &mut Vcpu,
        jobs: &[(usize, Content, GuestOrder)],
    ) -> (usize, Option<Wrong>) {
        for (number, (page, content, order)) in jobs.iter().enumerate() {
            let (address, content, order) = (slot.guest_address(*page), *content, *order);
            vcpu.mailbox().put(number, &Job { address, content, order });
        }
        vcpu.run(0..jobs.len()).unwrap()
    }

    const CONTENT: Content = Content { id: 7, count: 3, is_freed: false };

    #[test]
    fn a_guest_finds_and_leaves_what_the_host_finds_and_leaves() {
        let Some((slot, mut vcpu, _machines)) = machine() else { return };
        let held = slot.hold().unwrap();
        CONTENT.fill(held.words(1));
        let other = Content { id: 1 << 40, ..Content::ZERO };
        let jobs = [
            (0, Content::ZERO, GuestOrder::Check),
            (1, CONTENT, GuestOrder::Check),
            (1, CONTENT, GuestOrder::Modify),
            (2, Content::ZERO, GuestOrder::Rewrite(other)),
            (2, other, GuestOrder::Check),
        ];
        assert_eq!(run(&slot, &mut vcpu, &jobs), (jobs.len(), None));
        assert_eq!(Content { count: 4, ..CONTENT }.compare(held.words(1)), None);
        assert_eq!(other.compare(held.words(2)), None);
    }

    #[test]
    fn a_guest_stops_at_a_wrong_word_and_shows_the_page() {
        let Some((slot, mut vcpu, _machines)) = machine() else { return };
        let held = slot.hold().unwrap();
        for wrong in [0, 1, 2, 300, 511] {
            CONTENT.fill(held.words(1));
            held.words(1)[wrong].store(99, std::sync::atomic::Ordering::Relaxed);
            let jobs = [(0, Content::ZERO, GuestOrder::Check), (1, CONTENT, GuestOrder::Check)];
            let stopped = (1, Some(Wrong { index: wrong, found: 99 }));
            assert_eq!(run(&slot, &mut vcpu, &jobs), stopped);
            let harm = CONTENT.compare(vcpu.mailbox().copy());
            assert!(harm.is_some() && harm == CONTENT.compare(held.words(1)));
        }
    }

    #[test]
    fn zeros_will_do_in_a_freed_page_only() {
        let Some((slot, mut vcpu, _machines)) = machine() else { return };
        let freed = [(3, CONTENT.freed(), GuestOrder::Check)];
        assert_eq!(run(&slot, &mut vcpu, &freed), (1, None));
        let plain = [(3, CONTENT, GuestOrder::Check)];
        assert_eq!(run(&slot, &mut vcpu, &plain).0, 0);
    }

    #[test]
    fn a_slot_comes_and_goes_under_a_vcpu() {
        let Some((slot, mut vcpu, machines)) = machine() else { return };
        for _ in 0..3 {
            let jobs: Vec<_> = (0..MOST_JOBS)
                .map(|page| (page, Content::ZERO, GuestOrder::Rewrite(CONTENT)))
                .collect();
            let rewritten = Content { count: 0, ..CONTENT };
            assert_eq!(run(&slot, &mut vcpu, &jobs), (MOST_JOBS, None));
            assert_eq!(rewritten.compare(slot.hold().unwrap().words(MOST_JOBS - 1)), None);
            slot.replug(&machines).unwrap();
            slot.replug(&machines).unwrap();
        }
        slot.replug(&machines).unwrap();
        vcpu.mailbox().put(
            0,
            &Job {
                address: slot.guest_address(0),
                content: Content::ZERO,
                order: GuestOrder::Check,
            },
        );
        // Nothing is there: the guest exits in another way.
        assert!(vcpu.run(0..1).is_err());
    }
}
