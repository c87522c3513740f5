//! Preloaded into QEMU (`LD_PRELOAD=liboverbook_shim.so qemu-system-x86_64 …`): takes granules of
//! guest RAM out of the guest's reach, sees their next touch, gives them back; and puts shared
//! pages in the place of equal ones. Mechanism only.
//!
//! **Problem.** What memory is worth to a VM shows in when it touches what, and neither kernel nor
//! QEMU tells. **Idea.** A granule is moved to a staging region (`UFFDIO_MOVE`: no copy, atomic,
//! refused for pages that I/O has pinned); its next touch is a fault that a thread in QEMU itself
//! resolves at once, so no guest ever waits for another process. The shim stands before a few
//! functions of the C library to see guest RAM come, change and go; everything else it is told by a
//! worker over a socket (`protocol`).
//!
//! # Where a page is
//!
//! Each page of guest RAM is home, staged, out, aside, shared or freed. [`transitions`] has the
//! table of these states and of every step between them: who may take it, and how the page tables
//! are asked afterwards whether it was taken. A model of two actors over two pages is run through
//! every interleaving of them there. The rules below say what must hold around the steps.
//!
//! # The rules that make staging safe
//!
//! While a page is staged, guest RAM has a hole there: without a handler the kernel would fill it
//! with zeros, and the guest would have lost it. So:
//!
//! 1. userfaultfd and handler live in QEMU. The descriptor is close-on-exec, doubled, and guarded
//!    against `close`, `close_range` and `dup2` (`descriptors`); our threads block all signals
//!    (`threads`); a forked child has neither guest RAM nor staging (`MADV_DONTFORK`) and does
//!    nothing.
//! 2. Everything is back before a range is unregistered, unmapped, locked, or registered by QEMU
//!    itself (`engine::give_back`, called from `interpose`), and the page tables say so before
//!    staging is unmapped.
//! 3. One lock for page states, moves, zeros and discards (`engine`). While a guest is tracked
//!    nobody holds it for longer than a turn, or one call of the kernel's; to begin and to end
//!    takes as long as to register all of RAM. For how long it is held is counted. "Staged" is
//!    set before a page moves out and cleared when it is back.
//! 4. The handler touches no guest RAM that could trap, allocates nothing and logs nothing
//!    (`fault_thread`, `tracker::serve`).
//! 5. Staging has guest RAM's protection, and its advice about forks and huge pages (`ram`). No
//!    core dump of QEMU holds it, whatever QEMU wants of guest RAM.
//! 6. A watchdog gives everything back when the worker is gone or silent for 2 s, the fuse blows,
//!    or a fault is older than 100 ms; it serves faults itself if the handler has stopped, and
//!    begins nothing while the lock is not to be had (`watchdog`).
//! 7. A page that will not move back is tried again by each touch and by the watchdog, then copied,
//!    and after 10 s QEMU is ended: never zeros in its place. Zeros are put only where staging
//!    holds nothing.
//! 8. A discard drops the staged copy too, under the same lock (`freed`).
//!
//! # The rules that make sharing safe
//!
//! While a page is merged, its place is mapped from the group's pool, copy-on-write: whoever dies,
//! the kernel keeps it right without us. What remains is ours:
//!
//! 9. A page is compared while it is aside, where nobody can write to it, in a buffer that was
//!    empty before; what is not equal goes back before the next turn (`engine::settle`). Nothing is
//!    merged while a disk may read into pages without pinning them: QEMU gets a file for direct I/O
//!    only after the turn that is under way (`disks`).
//! 10. A discard of a merged page would show the pool's content again: fresh memory is mapped
//!     there, under the same lock (`freed`).
//! 11. A merged page is never filled with zeros, moved out or merged again: to `UFFDIO_ZEROPAGE` it
//!     may look like a hole (`engine::serve`). Which pages are merged outlives trackers, workers
//!     and plugged RAM (`channel`).
//! 12. A merged page is replaced only if nobody has written it, and while nobody can: then its
//!     content is known, and whoever has it pinned only reads. What takes its place traps from the
//!     first moment (`unshare::Replacement`).
//! 13. A write to a merged page waits for the fault thread, which replaces it
//!     (`cuts::break_sharing`); the watchdog serves if that has stopped. Who may not wait, or wants
//!     guest RAM for himself, has it as the kernel keeps it before he begins
//!     (`cuts::let_all_write`): QEMU's own userfaultfd, `mlockall`, VFIO. What QEMU has registered
//!     itself is not ours to protect or let write (`holds`). None of us writes to a merged page
//!     while holding the lock.
//!
//! # The rules that make it safe to hand over what the guest frees
//!
//! 14. Only what QEMU discards at that moment is handed over, and where its discard must be one it
//!     is: an incoming migration, memory that QEMU watches, locks or passes through (`holds`), a
//!     balloon's page (`interpose::madvise`), a QEMU without a worker.
//! 15. What is freed is not moved: it would count as written. It is plain again when it is taken,
//!     discarded, or found missing at a touch (`freed`, `tracker::take_back`).
//!
//! # The rule that makes it safe to page out
//!
//! 16. Only what is staged is paged out, while nobody holds the lock: to the kernel it is memory as
//!     any other, and whoever moves it home meanwhile moves it, in memory or in swap. Nobody waits
//!     for a disk with the lock held (`cold`).
//!
//! **Off means off**: before `Track` and after `Release` nothing is registered and no fault is
//! taken but by the first write to a page that is still merged. If anything is in doubt, QEMU runs
//! as if the shim were not there.
//!
//! **Cost**: tracking off, a few comparisons per interposed call; a trap some 20 to 50 µs, measured
//! while tracking (`bench`); staging takes no memory of its own but page tables.
//!
//! **Leaves out.** Shared, file-backed and huge-page RAM, locked memory, VFIO: refused with the
//! reason. A QEMU that remaps guest RAM by `mremap` or by system calls of its own (none does). What
//! to revoke and when: the worker's.
//!
//! | look here | for |
//! |---|---|
//! | `interpose`, `next` | the C functions that we stand before |
//! | `ram` | what of QEMU's memory is guest RAM |
//! | `engine` | what the lock guards; track, revoke, give back |
//! | `holds`, `qemu` | what forbids that: what QEMU does with its memory |
//! | `disks` | what forbids merging: disks whose reads cannot be seen |
//! | `turns` | the lock, and who goes first |
//! | `cold` | what nobody touches: to the host's swap, and back |
//! | `freed` | what QEMU discards: handed over to the kernel, and taken |
//! | `merge` | equal pages: aside, compared, replaced |
//! | `cuts` | merged pages that become plain again: at a write, or all; mappings that meet again |
//! | `unshare` | how a page is replaced so that nobody notices |
//! | `transitions` | where a page is, and every step from one place to another |
//! | `tracker`, `granules`, `nursery` | granules: out, back, where they are, holes |
//! | `hot_set` | what only experiments have |
//! | `fault_thread`, `remapping`, `watchdog`, `control` | our four threads |
//! | `bench` | what a trap costs |
//! | `thread_locals` | thread-locals without a TLS segment, which would cost the guest |
//! | `channel` | the memory that the worker reads |

mod bench;
mod channel;
mod cold;
mod control;
mod cuts;
mod descriptors;
mod disks;
mod engine;
mod fault_thread;
mod freed;
mod granules;
mod holds;
mod hot_set;
pub mod interpose;
mod merge;
mod next;
mod nursery;
mod qemu;
mod ram;
mod remapping;
mod thread_locals;
mod threads;
mod time;
mod tracker;
mod transitions;
mod turns;
mod unshare;
mod watchdog;
