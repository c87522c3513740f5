//! Follows the loop's ticks, and tells events between them.
//!
//! A missed tick (on a busy machine) costs an event.

use std::sync::Arc;

use api::published::Latest;
use api::shown::TickView;
use tokio::sync::{broadcast, watch};

use super::events::{Event, Events, between};

/// Follows the loop until it ends.
pub(super) async fn follow(
    mut latest: Latest,
    shown: watch::Sender<Arc<TickView>>,
    events: Events,
) {
    let mut next_id = 1;
    while latest.changed().await.is_ok() {
        let published = Arc::clone(&latest.borrow_and_update());
        let before = Arc::clone(&shown.borrow());
        for event in between(&before.published, &published, &mut next_id) {
            // An error means that no client listens, which is the usual case.
            let _: Result<usize, broadcast::error::SendError<Arc<Event>>> =
                events.send(Arc::new(event));
        }
        shown.send_replace(Arc::new(before.next(published)));
    }
}
