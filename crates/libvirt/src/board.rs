//! The latest news about the domains, for all clients.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use model::libvirt::FromLibvirt;

/// The latest message, which each client gets once.
#[derive(Debug, Default)]
pub(crate) struct Board {
    latest: Mutex<Latest>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Latest {
    number: u64,
    line: Arc<Vec<u8>>,
}

impl Board {
    /// Replaces the latest message.
    pub(crate) fn publish(&self, message: &FromLibvirt) {
        let mut latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        *latest = Latest { number: latest.number + 1, line: Arc::new(line(message)) };
        self.news.notify_all();
    }

    /// Waits for a message after that with the number `seen`: its number and line.
    pub(crate) fn after(&self, seen: u64) -> (u64, Arc<Vec<u8>>) {
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        let is_old = |latest: &mut Latest| latest.number <= seen;
        let latest = self.news.wait_while(latest, is_old).unwrap_or_else(PoisonError::into_inner);
        (latest.number, Arc::clone(&latest.line))
    }
}

/// The line of a message.
pub(crate) fn line(message: &FromLibvirt) -> Vec<u8> {
    // A message has no map whose keys are not strings, the only thing that cannot be written.
    let mut line = serde_json::to_vec(message).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_client_gets_the_latest_message() {
        let board = Board::default();
        for why in ["a", "b"] {
            board.publish(&FromLibvirt::Lost { why: why.to_owned() });
        }
        let (number, line) = board.after(0);
        assert_eq!(number, 2);
        assert_eq!(line.as_slice(), b"{\"message\":\"lost\",\"why\":\"b\"}\n");
    }
}
