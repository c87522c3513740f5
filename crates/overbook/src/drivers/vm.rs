//! One VM's task: connects, asks once in a period, carries out wishes, and starts over when QEMU
//! dies.
//!
//! Each VM has its own task and its own connection, so a stopped QEMU costs its own task's time and
//! nobody else's. What the task learns goes into its [`Slot`]; readings of a QEMU that does not
//! answer stay there and grow old. After a missed deadline the connection is kept (QEMU may only be
//! stopped); after anything worse it is made anew, with pauses that double from [`FIRST_PAUSE`] to
//! [`LONGEST_PAUSE`].
//!
//! **Invariant.** The balloon moves only in the life of the VM that the wish was made for, never
//! during a migration, and only after its original size was recorded.
//!
//! **Cost.** Per period one batch of commands, two small files of `/proc`, and one or three of each
//! level of its cgroups.

use std::sync::Arc;
use std::time::Duration;

use model::view::Mechanism;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::qmp::QmpError;
use super::session::{Session, SessionError};
use super::shared::Shared;
use super::slot::{Order, Restore, Slot};
use super::undo::{self, RestoreError};

/// The pause after the first failure to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// The pause after many.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Keeps one VM's slot up to date until the task is aborted.
pub(super) async fn run(shared: Arc<Shared>, slot: Arc<Slot>, mut orders: mpsc::Receiver<Order>) {
    let mut pause = FIRST_PAUSE;
    loop {
        let started = Instant::now();
        let error = match Session::open(&shared, &slot).await {
            Ok(mut session) => session.run(&mut orders).await,
            Err(error) => error,
        };
        // A connection that breaks again and again is no better than none.
        if started.elapsed() > LONGEST_PAUSE {
            pause = FIRST_PAUSE;
        }
        if matches!(error, SessionError::TwoNames(_)) {
            slot.disown();
        }
        let is_end = is_end(&slot, &error);
        slot.down(error.to_string(), is_end);
        // What was wished of the QEMU that is gone is not for the next one.
        slot.take_wish();
        while let Ok(order) = orders.try_recv() {
            // Who moves it finds that nobody answers.
            if let Order::Restore(order) = order {
                refuse(order, is_end, &shared, &slot).await;
            }
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Whether there is no QEMU any more, rather than one that does not answer us.
fn is_end(slot: &Slot, error: &SessionError) -> bool {
    match error {
        SessionError::Qmp(error) if error.is_dead_socket() => true,
        // It may be back before the next try; the socket then tells.
        SessionError::Qmp(QmpError::Closed) => slot.state().ended.is_some(),
        _ => false,
    }
}

/// Answers an order that came while there is no connection.
async fn refuse(order: Restore, is_end: bool, shared: &Shared, slot: &Slot) {
    let outcome = match shared.records.at(&slot.path).await {
        None => None,
        Some(record) if is_end => {
            Some(undo::strike_out(&shared.records, record, Ok(undo::GONE.to_owned())).await)
        }
        Some(_) => Some(Err(RestoreError::Unreachable)),
    };
    // Whoever asked may have stopped waiting.
    drop(order.reply.send(outcome));
}

/// The mechanisms that only a VM of a group has.
pub(super) const OF_A_GROUP: [Mechanism; 3] =
    [Mechanism::Dedup, Mechanism::FreePages, Mechanism::Cold];

/// The mechanisms that need the balloon device.
pub(super) const OF_THE_BALLOON: [Mechanism; 3] =
    [Mechanism::Balloon, Mechanism::Statistics, Mechanism::FreePageReporting];
