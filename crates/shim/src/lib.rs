//! Preloaded into QEMU (`LD_PRELOAD=liboverbook_shim.so qemu-system-x86_64 …`): revokes granules
//! of guest RAM, sees their next touch, and moves them back; also maps shared pages in place of
//! equal ones. Mechanism only.
//!
//! **Problem.** The value of memory to a VM depends on when the VM touches which part of it.
//! Neither the kernel nor QEMU reports that. **Idea.** A granule is moved to a staging region
//! (`UFFDIO_MOVE`: no copy, atomic, refused for pages that I/O has pinned). Its next touch is a
//! fault, which a thread in QEMU itself resolves at once, so no guest ever waits for another
//! process. The shim interposes a few functions of the C library to see guest RAM come, change
//! and go. A worker tells it everything else over a socket (`protocol`).
//!
//! # Where a page is
//!
//! Each page of guest RAM is plain, staged, in the buffer, merged or freed.
//! [`transitions`] has the table of these states and of every step between them. The table says
//! which thread may take a step, and how the page tables are asked afterwards whether it was
//! taken. A model with two actors and two pages is run through every interleaving there. The
//! rules below state what must hold around the steps.
//!
//! # The rules that make staging safe
//!
//! While a page is staged, guest RAM has a hole there. Without a handler the kernel would fill
//! the hole with zeros, and the guest would lose the page. So:
//!
//! 1. userfaultfd and handler are inside QEMU. The descriptor is close-on-exec, duplicated, and
//!    guarded against `close`, `close_range` and `dup2` (`descriptors`). The shim's threads block
//!    all signals (`threads`). A forked child has neither guest RAM nor staging (`MADV_DONTFORK`)
//!    and does nothing.
//! 2. Everything is moved back before a range is unregistered, unmapped, locked, or registered by
//!    QEMU itself (`engine::give_back`, called from `holds`). Staging is unmapped only after the
//!    page tables say that it is empty.
//! 3. One lock covers page states, moves, zeros and discards (`engine`). While a guest is
//!    tracked, no thread holds it for longer than a turn, or one system call. Starting and ending
//!    take as long as registering all of RAM. The longest hold is recorded. "Staged" is set
//!    before a page moves out and cleared when it is back.
//! 4. The handler touches no guest RAM that could trap, allocates nothing and logs nothing
//!    (`fault_thread`, `tracker::serve`).
//! 5. Staging has guest RAM's protection, and its advice about forks and huge pages (`ram`). No
//!    core dump of QEMU contains staging, even if one contains guest RAM.
//! 6. A watchdog gives everything back when the worker is gone or silent for 2 s, the fuse blows,
//!    or a fault is older than 100 ms. It serves faults itself if the handler has stopped, and
//!    begins nothing while it cannot get the lock (`watchdog`).
//! 7. A page that cannot be moved back is retried by each touch and by the watchdog, then copied.
//!    After 10 s QEMU is ended: zeros never take the page's place. Zeros are mapped only where
//!    staging holds nothing.
//! 8. A discard drops the staged copy too, under the same lock (`freed`).
//!
//! # The rules that make sharing safe
//!
//! While a page is merged, its place is mapped copy-on-write from the group's pool. If the worker
//! or another VM dies, the kernel keeps this right without the shim. The shim must keep these
//! rules:
//!
//! 9. A page is compared while it is in the buffer, where no thread can write to it. The buffer
//!    was empty before. Pages that differ are moved back before the next turn (`PageOps::settle`).
//!    Nothing is merged while a disk may read into pages without pinning them: QEMU gets a file
//!    for direct I/O only after the current turn (`disks`).
//! 10. A discard of a merged page would show the pool's content again: fresh memory is mapped
//!     there, under the same lock (`freed`).
//! 11. A merged page is never filled with zeros, moved out or merged again: to `UFFDIO_ZEROPAGE`
//!     it may look like a hole (`Engine::serve`). The record of merged pages outlives trackers,
//!     workers and plugged RAM (`channel`).
//! 12. A merged page is replaced only if it has not been written, and while it cannot be written:
//!     then its content is known, and I/O that has it pinned only reads. The memory that takes
//!     its place traps from the first moment (`unshare::Replacement`).
//! 13. A write to a merged page waits for the fault thread, which replaces the page
//!     (`Cuts::break_sharing`); the watchdog serves if that thread has stopped. QEMU's own
//!     userfaultfd, `mlockall` and VFIO may not wait, or need guest RAM for themselves: for them
//!     the kernel makes the copies from the beginning (`cuts::let_all_write`). The shim neither
//!     protects nor lets write the ranges that QEMU has registered itself (`inhibitors`). No thread of
//!     the shim writes to a merged page while it holds the lock.
//!
//! # The rules that make it safe to hand over freed memory
//!
//! 14. Memory is handed over only at the moment when QEMU discards it. QEMU's discard is carried
//!     out as it is during an incoming migration, and in a QEMU without a worker. The same holds
//!     for memory that QEMU watches, locks or passes through (`inhibitors`), and for a balloon's page
//!     (`interpose::madvise`).
//! 15. Freed pages are not moved, because moved pages count as written. A freed page becomes
//!     plain again when it is taken, discarded, or found missing at a touch (`freed`,
//!     `Holes::take_back`).
//!
//! **Off means off**: before `Track` and after `Release` nothing is registered and no fault is
//! taken, except by the first write to a page that is still merged. When in doubt, the shim lets
//! QEMU run as if it were not there.
//!
//! **Cost**: with tracking off, a few comparisons per interposed call. A trap costs some 20 to 50
//! µs, measured while tracking (`bench`). Staging needs page tables, and no other memory of its
//! own.
//!
//! **Leaves out.** Shared, file-backed and huge-page RAM, locked memory, VFIO: refused with the
//! reason. A QEMU that remaps guest RAM by `mremap` or by system calls of its own (none does).
//! The choice of granules to revoke, and when: the worker makes it.
//!
//! | look here | for |
//! |---|---|
//! | `interpose`, `next` | the C functions that the shim interposes |
//! | `ram` | which of QEMU's mappings are guest RAM |
//! | `engine` | the state behind the lock; serving a fault, giving everything back |
//! | `requests` | a worker's requests, turn by turn |
//! | `page_ops` | guest RAM, where its pages are, and the turns that move them |
//! | `inhibitors`, `qemu` | operations of QEMU that forbid moving pages |
//! | `holds` | giving back before such an operation |
//! | `disks` | disks whose reads cannot be seen, which exclude merging |
//! | `turns`, `retries` | the lock, its order of precedence, and the wait for a late page |
//! | `freed` | memory that QEMU discards: handed over to the kernel, and taken |
//! | `merge`, `buffer` | equal pages: moved to the buffer, compared, replaced |
//! | `cuts` | merged pages that become plain again, at a write or all together; joining mappings |
//! | `unshare` | how a page is replaced without the guest's notice |
//! | `transitions` | where a page is, and every step from one place to another |
//! | `tracker`, `granules` | granules: out, back, where they are |
//! | `holes`, `nursery` | holes in guest RAM, filled at a touch |
//! | `hot_set` | the paper's hot set, for experiments only |
//! | `fault_thread`, `remapping`, `watchdog`, `control` | the shim's four threads |
//! | `waiters`, `alerts` | threads that wait for a page; the watchdog's reasons to act |
//! | `bench` | the cost of a trap |
//! | `thread_locals` | thread-locals without a TLS segment, which would cost the guest |
//! | `channel` | the memory that the worker reads |

mod alerts;
mod bench;
mod buffer;
mod channel;
mod control;
mod cuts;
mod descriptors;
mod disks;
mod engine;
mod errno;
mod fault_thread;
mod freed;
mod granules;
mod holds;
mod holes;
mod hot_set;
mod inhibitors;
pub mod interpose;
mod merge;
mod next;
mod nursery;
mod page_ops;
mod process;
mod qemu;
mod ram;
mod remapping;
mod requests;
mod retries;
mod thread_locals;
mod threads;
mod time;
mod tracker;
mod transitions;
mod turns;
mod unshare;
mod waiters;
mod watchdog;
