//! Wakes the watcher before its second is over.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The watcher's alarm, which events ring.
pub(crate) static WAKE: Wake = Wake { news: Mutex::new(News::None), rings: Condvar::new() };

/// An alarm that may ring while nothing waits for it.
#[derive(Debug)]
pub(crate) struct Wake {
    news: Mutex<News>,
    rings: Condvar,
}

/// The reason of an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    None,
    Sizes,
    Descriptions,
}

impl Wake {
    /// Rings; `of_descriptions`: the domains' descriptions may have changed.
    pub(crate) fn wake(&self, of_descriptions: bool) {
        let mut news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        let new = if of_descriptions { News::Descriptions } else { News::Sizes };
        *news = new.max(*news);
        self.rings.notify_all();
    }

    /// Waits for the alarm, but at most this long. Returns whether descriptions may have changed.
    pub(crate) fn wait(&self, most: Duration) -> bool {
        let news = self.news.lock().unwrap_or_else(PoisonError::into_inner);
        let is_quiet = |news: &mut News| *news == News::None;
        let waited = self.rings.wait_timeout_while(news, most, is_quiet);
        let (mut news, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *news, News::None) == News::Descriptions
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_before_the_wait_is_not_lost_and_rings_once() {
        let wake = Wake { news: Mutex::new(News::None), rings: Condvar::new() };
        wake.wake(true);
        wake.wake(false);
        assert!(wake.wait(Duration::from_secs(60)));
        assert!(!wake.wait(Duration::ZERO));
    }
}
