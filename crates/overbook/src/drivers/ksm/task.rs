//! Where the loop leaves orders for KSM and finds what became of them: the kernel and the disk may
//! take their time, the loop does not wait.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use model::{KsmOrder, Reading};
use sys::clock::boot_now;
use sys::ksm::Counters;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{AbortHandle, spawn_blocking};
use tokio::time::sleep;

use super::{Hand, Outcome};

/// How often the order is carried out again, which is when others' changes are noticed.
const REPEAT: Duration = Duration::from_secs(1);

type Urgent = (KsmOrder, oneshot::Sender<Outcome>);

/// The loop's end of KSM. Dropping it leaves KSM as it is.
#[derive(Debug)]
pub struct KsmDriver {
    orders: watch::Sender<KsmOrder>,
    urgent: mpsc::Sender<Urgent>,
    known: Arc<Mutex<Known>>,
    task: AbortHandle,
}

/// What is known of KSM.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// What it has come to; `None`: not read yet, or there is none.
    pub counters: Option<Reading<Counters>>,
    /// Whether it was last told to merge, and does.
    pub is_driven: bool,
    /// Why the last order was not carried out.
    pub trouble: Option<String>,
}

impl KsmDriver {
    /// Starts with nothing ordered. Needs a tokio runtime.
    #[must_use]
    pub fn start(hand: Hand) -> Self {
        let (orders, inbox) = watch::channel(KsmOrder::Undecided);
        let (urgent, asked) = mpsc::channel(4);
        let known = Arc::<Mutex<Known>>::default();
        let task = tokio::spawn(run(hand, inbox, asked, Arc::clone(&known))).abort_handle();
        Self { orders, urgent, known, task }
    }

    /// What KSM is to do from now on.
    pub fn order(&self, order: KsmOrder) {
        self.orders.send_if_modified(|last| std::mem::replace(last, order) != order);
    }

    /// Has this done now, and waits for it at most `limit`; `None`: it takes longer, and goes on.
    /// What was ordered before stands.
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

    /// What is known now.
    #[must_use]
    pub fn known(&self) -> Known {
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
    known: Arc<Mutex<Known>>,
) {
    loop {
        let (order, reply) = tokio::select! {
            biased;
            Some((order, reply)) = asked.recv() => (order, Some(reply)),
            // An error means that the loop does not want it any more.
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
        // The runtime ends.
        let Ok((back, outcome, counters)) = step.await else { return };
        hand = back;
        let news = Known {
            counters: counters.map(|counters| Reading::new(counters, boot_now())),
            is_driven: matches!(order, KsmOrder::Drive(_)) && outcome.is_ok(),
            trouble: outcome.as_ref().err().map(ToString::to_string),
        };
        *known.lock().unwrap_or_else(PoisonError::into_inner) = news;
        if let Some(reply) = reply {
            // Whoever asked may have stopped waiting.
            let _ = reply.send(outcome);
        }
    }
}
