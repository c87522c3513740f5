//! Takes the loop's orders for KSM and keeps their results. The kernel and the disk may be slow;
//! the loop does not wait for them.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use model::{KsmOrder, Reading};
use sys::clock::boot_now;
use sys::ksm::Counters;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, spawn_blocking};
use tokio::time::sleep;

use super::{Hand, Outcome};

/// Interval at which the order is repeated; changes by other writers are noticed then.
const REPEAT: Duration = Duration::from_secs(1);

type Urgent = (KsmOrder, oneshot::Sender<Outcome>);

/// The loop's handle of KSM. Dropping it leaves KSM as it is.
#[derive(Debug)]
pub struct KsmDriver {
    orders: watch::Sender<KsmOrder>,
    urgent: mpsc::Sender<Urgent>,
    known: Arc<Mutex<KsmStatus>>,
    task: AbortHandle,
}

/// State of KSM.
#[derive(Clone, Debug, Default)]
pub struct KsmStatus {
    /// Its counters; `None`: not read yet, or the kernel has no KSM.
    pub counters: Option<Reading<Counters>>,
    /// Whether the last order was to merge, and was carried out.
    pub is_driven: bool,
    /// Why the last order was not carried out.
    pub trouble: Option<String>,
}

impl KsmDriver {
    /// Starts without an order. Needs a tokio runtime.
    #[must_use]
    pub fn start(hand: Hand) -> Self {
        let (orders, inbox) = watch::channel(KsmOrder::Undecided);
        let (urgent, asked) = mpsc::channel(4);
        let known = Arc::<Mutex<KsmStatus>>::default();
        let task = tokio::spawn(run(hand, inbox, asked, Arc::clone(&known))).abort_handle();
        Self { orders, urgent, known, task }
    }

    /// Sets the order from now on.
    pub fn order(&self, order: KsmOrder) {
        self.orders.send_if_modified(|last| std::mem::replace(last, order) != order);
    }

    /// Carries out an order now, and waits for it at most `limit`; `None`: it takes longer, and
    /// continues. The standing order does not change.
    pub fn ask(
        &self,
        order: KsmOrder,
        limit: Duration,
    ) -> impl Future<Output = Option<Outcome>> + Send + use<> {
        let urgent = self.urgent.clone();
        async move {
            let (reply, answer) = oneshot::channel();
            let asked = async {
                urgent.send((order, reply)).await.ok()?;
                answer.await.ok()
            };
            tokio::time::timeout(limit, asked).await.ok().flatten()
        }
    }

    /// The latest state of KSM.
    #[must_use]
    pub fn known(&self) -> KsmStatus {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for KsmDriver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    mut hand: Hand,
    mut orders: watch::Receiver<KsmOrder>,
    mut asked: mpsc::Receiver<Urgent>,
    known: Arc<Mutex<KsmStatus>>,
) {
    loop {
        let (order, reply) = tokio::select! {
            biased;
            Some((order, reply)) = asked.recv() => (order, Some(reply)),
            // An error means that the loop has dropped its handle.
            changed = orders.changed() => match changed {
                Ok(()) => (*orders.borrow_and_update(), None),
                Err(_) => return,
            },
            () = sleep(REPEAT) => (*orders.borrow(), None),
        };
        let step = spawn_blocking(move || {
            let outcome = hand.obey(order);
            let counters = hand.counters();
            (hand, outcome, counters)
        });
        // An error means that the runtime is shutting down.
        let Ok((back, outcome, counters)) = step.await else { return };
        hand = back;
        let news = KsmStatus {
            counters: counters.map(|counters| Reading::new(counters, boot_now())),
            is_driven: matches!(order, KsmOrder::Drive(_)) && outcome.is_ok(),
            trouble: outcome.as_ref().err().map(ToString::to_string),
        };
        *known.lock().unwrap_or_else(PoisonError::into_inner) = news;
        if let Some(reply) = reply {
            // The caller may have stopped waiting.
            let _ = reply.send(outcome);
        }
    }
}
