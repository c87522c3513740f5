//! One VM's task: connects, queries once in a period, carries out requests, and starts over when
//! QEMU dies.
//!
//! Each VM has its own task and its own connection, so a stopped QEMU only costs its own task
//! time. The task puts its readings into its [`Slot`]; if QEMU does not answer, the old ones stay
//! there and age. After a missed deadline the connection is kept (QEMU may only be stopped).
//! After any worse error it is closed and opened again, with pauses that double from
//! [`FIRST_PAUSE`] to [`LONGEST_PAUSE`].
//!
//! **Invariant.** The balloon changes only in the incarnation of the VM for which the request was
//! made, never during a migration, and only after its original size was recorded.
//!
//! **Cost.** One batch of commands, two small files of `/proc`, and one or three files of each
//! level of its cgroups per period.

use std::sync::Arc;
use std::time::Duration;

use model::view::Mechanism;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::identity;
use super::qmp::QmpError;
use super::session::{Session, SessionError};
use super::shared::DriverState;
use super::slot::{Restore, Slot, VmOrder};
use super::undo::{self, RestoreError, Undone};

/// Pause after the first failure to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause, after many failures.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Keeps one VM's slot up to date until the task is aborted.
pub(super) async fn run(
    shared: Arc<DriverState>,
    slot: Arc<Slot>,
    mut orders: mpsc::Receiver<VmOrder>,
) {
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        let error = match Session::open(&shared, &slot).await {
            Ok(mut session) => session.run(&mut orders).await,
            Err(error) => error,
        };
        // A connection that breaks repeatedly is no better than none.
        if started.elapsed() > LONGEST_PAUSE {
            pause = FIRST_PAUSE;
        }
        if matches!(error, SessionError::TwoNames(_)) {
            slot.disown();
        }
        let is_end = is_end(&slot, &error);
        slot.down(error.to_string(), is_end);
        // A request to the previous QEMU does not apply to the next one.
        slot.take_wish();
        while let Ok(order) = orders.try_recv() {
            // The dropped reply of a move tells its sender that there is no answer.
            if let VmOrder::Restore(order) = order {
                refuse(order, is_end, &shared, &slot).await;
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether QEMU has ended, as opposed to a QEMU that does not answer.
fn is_end(slot: &Slot, error: &SessionError) -> bool {
    match error {
        SessionError::Qmp(error) if error.is_dead_socket() => true,
        // QEMU may be back before the next try, which shows whether its socket is dead.
        SessionError::Qmp(QmpError::Closed) => slot.state().ended.is_some(),
        _ => false,
    }
}

/// Answers an order that arrives while there is no connection.
async fn refuse(order: Restore, is_end: bool, shared: &DriverState, slot: &Slot) {
    let life = slot.state().view.incarnation;
    let outcome = match shared.records.of(&slot.path, life).await {
        None => None,
        Some(record) if is_end && identity::has_ended(record.incarnation) => {
            let gone = Ok(Undone::nothing(undo::GONE));
            Some(undo::strike_out(&shared.records, record, gone, order.undo).await)
        }
        Some(_) => Some(Err(RestoreError::Unreachable)),
    };
    // The caller may have stopped waiting.
    drop(order.reply.send(outcome));
}

/// The mechanisms that only VMs of a group have.
pub(super) const OF_A_GROUP: [Mechanism; 3] =
    [Mechanism::Dedup, Mechanism::FreePages, Mechanism::Cold];

/// The mechanisms that need the balloon device.
pub(super) const OF_THE_BALLOON: [Mechanism; 3] =
    [Mechanism::Balloon, Mechanism::Statistics, Mechanism::FreePageReporting];
