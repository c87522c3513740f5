//! The position in a VM's memory of the search for identical pages.

use std::time::{Duration, Instant};

use super::window::Window;

/// The timeout for recalled pages.
const RECALL_PATIENCE: Duration = Duration::from_millis(100);

/// Passes over all pages of a VM, one after another.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// The next page to scan.
    cursor: u32,
    passes: u64,
    /// The window that is scanned again until its recalled pages are back, and since when.
    again: Option<(u32, Instant)>,
}

impl Scan {
    pub(super) fn cursor(&self) -> u32 {
        self.cursor
    }

    /// The number of complete passes.
    pub(super) fn passes(&self) -> u64 {
        self.passes
    }

    /// The number of this pass; it wraps.
    #[expect(clippy::cast_possible_truncation, reason = "its low bits are meant")]
    pub(super) fn pass(&self) -> u32 {
        self.passes as u32
    }

    /// Begins this pass anew.
    pub(super) fn restart(&mut self) {
        self.cursor = 0;
    }

    /// Goes on behind this window; without one the pass is complete (`true`).
    pub(super) fn goes_to(&mut self, window: Option<&Window>) -> bool {
        match window {
            Some(window) => self.cursor = window.first + window.count,
            None => {
                self.cursor = 0;
                self.again = None;
                self.passes += 1;
            }
        }
        window.is_none()
    }

    /// Goes back to the window that begins with this page, whose pages are being recalled;
    /// `false`: the timeout in this pass has expired.
    pub(super) fn again(&mut self, first: u32) -> bool {
        let since = self.again.filter(|(window, _)| *window == first);
        let since = since.map_or_else(Instant::now, |(_, since)| since);
        self.again = Some((first, since));
        let is_soon = since.elapsed() < RECALL_PATIENCE;
        if is_soon {
            self.cursor = first;
        }
        is_soon
    }
}
