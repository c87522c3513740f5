//! The fault thread. It serves every touch of a revoked page and every first write to a merged
//! page; the guest's thread waits meanwhile.
//!
//! The thread reads faults, takes the lock and has the faults served. It allocates nothing, logs
//! nothing, touches no guest RAM and makes no call that could wait for QEMU. It never ends. The
//! watchdog sees from [`waiters::waiting_since`] for how long a fault has been in hand, and serves
//! faults itself ([`serve_pending`]) if this thread has stopped.

use std::panic::{AssertUnwindSafe, catch_unwind};

use sys::userfaultfd::{MAX_FAULTS, PageFault, Userfaultfd};

use crate::alerts;
use crate::engine::ENGINE;
use crate::process::userfaultfd;
use crate::ram::page_of;
use crate::time::now;
use crate::tracker::Served;
use crate::waiters::{self, Reader};

/// The thread's body.
pub(crate) fn run() {
    let Ok(uffd) = userfaultfd() else { return };
    loop {
        if !serve_pending(uffd, Reader::Server) {
            uffd.wait(None);
        }
    }
}

/// Serves the faults that have arrived; returns whether there were any. A panic costs the fault's
/// log entry; the guest's thread continues, or traps again.
pub(crate) fn serve_pending(uffd: &'static Userfaultfd, reader: Reader) -> bool {
    let mut faults = [PageFault::default(); MAX_FAULTS];
    let Ok(count) = uffd.read_faults(&mut faults) else { return false };
    if count == 0 {
        return false;
    }
    let received = now();
    waiters::has_read(reader, count);
    for &fault in &faults[..count] {
        let served =
            catch_unwind(AssertUnwindSafe(|| ENGINE.lock_for_fault().serve(uffd, fault, received)));
        match served {
            Ok(Served::Yes) => {}
            Ok(Served::FuseBlown) => alerts::blow_fuse(),
            Err(_) => {
                ENGINE.lock_for_fault().let_go_on(uffd, page_of(fault.address));
                alerts::give_up();
            }
        }
    }
    waiters::has_none(reader);
    ENGINE.make_way();
    true
}
