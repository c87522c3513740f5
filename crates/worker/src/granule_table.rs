//! The granules of a VM that has the shim: one owner of their states, changed by one function.
//!
//! The shim's page states tell where the content of a page is. The strategy follows touches, and
//! knows which granules are revoked. Search for identical pages recalls revoked granules to read
//! them. [`GranuleTable::apply`] keeps the three in agreement: once no message is under way, the
//! strategy holds a granule for revoked exactly if the shim does, or if it was recalled.
//!
//! **Revoked granules.** Only the shim knows to which granules access is revoked: I/O may pin a
//! page. The page states show it after each answer to a revocation. A granule that is still
//! accessible was touched before the answer came (its trap tells), or could not be revoked.
//!
//! **Recalled granules.** A recalled granule is accessible for a second, until its identical pages
//! are merged. A recall is no touch and causes no trap, so the strategy is not told.

use std::collections::BTreeMap;
use std::ops::Range;

use model::{Millis, Time};
use protocol::MAX_REVOKE;
use protocol::layout::PageState;

use super::granules::Granules;
use super::link::{Link, LinkError};
use super::strategy::Strategy;

/// How long a recalled granule stays accessible.
const RECALLED: Millis = Millis::secs(1);

/// The states of a VM's pages.
pub(super) trait PageStates {
    /// The states of these pages, by number.
    fn page_states(&self, pages: Range<u32>) -> Result<Vec<PageState>, LinkError>;
    /// Whether a page of this granule, by number, is revoked.
    fn is_staged(&self, granule: u32, granule_pages: u32) -> Result<bool, LinkError>;
}

impl PageStates for Link {
    fn page_states(&self, pages: Range<u32>) -> Result<Vec<PageState>, LinkError> {
        Self::page_states(self, pages)
    }

    fn is_staged(&self, granule: u32, granule_pages: u32) -> Result<bool, LinkError> {
        Self::is_staged(self, granule, granule_pages)
    }
}

/// An event that changes the states of granules.
#[derive(Clone, Debug)]
pub(super) enum GranuleEvent {
    /// The shim has begun to track.
    Started,
    /// The guest has touched the granule with this number.
    Touched { number: u32, at: Time },
    /// Touches were lost.
    TouchesLost { now: Time },
    /// The shim has answered the request, made at `at`, to revoke these granules, by index.
    RevokeAnswered { granules: Vec<u32>, at: Time },
    /// The shim has given everything back.
    GivenBack { now: Time },
}

#[derive(Clone, Copy, Debug)]
struct Recall {
    until: Time,
    /// The shim is asked to revoke the granule again.
    is_ending: bool,
}

/// The granules of one VM.
#[derive(Debug)]
pub(super) struct GranuleTable {
    granules: Granules,
    strategy: Box<dyn Strategy>,
    is_on: bool,
    /// Granules that were recalled, by index.
    recalled: BTreeMap<u32, Recall>,
    /// The indexes of the recalled granules of which the shim was not told yet.
    to_recall: Vec<u32>,
}

impl GranuleTable {
    pub(super) fn new(granules: Granules, strategy: Box<dyn Strategy>) -> Self {
        Self { granules, strategy, is_on: false, recalled: BTreeMap::new(), to_recall: Vec::new() }
    }

    pub(super) fn granules(&self) -> &Granules {
        &self.granules
    }

    pub(super) fn strategy(&self) -> &dyn Strategy {
        &*self.strategy
    }

    /// The strategy, for the readings of costs.
    pub(super) fn strategy_mut(&mut self) -> &mut dyn Strategy {
        &mut *self.strategy
    }

    /// Whether the shim tracks.
    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Changes the states of granules. While the shim does not track, no event but a start does.
    pub(super) fn apply(
        &mut self,
        event: GranuleEvent,
        states: &impl PageStates,
    ) -> Result<(), LinkError> {
        match event {
            GranuleEvent::Started => self.is_on = true,
            _ if !self.is_on => {}
            GranuleEvent::Touched { number, at } => {
                if let Some(index) = self.granules.index(number) {
                    self.end_recall(index);
                    self.strategy.touched(index, at);
                }
            }
            GranuleEvent::TouchesLost { now } => return self.resync(now, states),
            GranuleEvent::RevokeAnswered { granules, at } => {
                for index in granules {
                    self.revoke_answered(index, at, states)?;
                }
            }
            GranuleEvent::GivenBack { now } => {
                self.strategy.given_back(now);
                self.is_on = false;
                self.recalled.clear();
                self.to_recall.clear();
            }
        }
        Ok(())
    }

    fn resync(&mut self, now: Time, states: &impl PageStates) -> Result<(), LinkError> {
        let Self { granules, strategy, recalled, .. } = self;
        let mut failed = None;
        strategy.resync(now, &mut |index| {
            let staged = states.is_staged(granules.number(index), granules.granule_pages());
            recalled.contains_key(&index)
                || staged.unwrap_or_else(|error| {
                    failed = Some(error);
                    false
                })
        });
        failed.map_or(Ok(()), Err)
    }

    fn revoke_answered(
        &mut self,
        index: u32,
        at: Time,
        states: &impl PageStates,
    ) -> Result<(), LinkError> {
        let granule_pages = self.granules.granule_pages();
        let number = self.granules.number(index);
        let is_staged = states.is_staged(number, granule_pages)?;
        let is_again = self.recalled.get(&index).is_some_and(|recall| recall.is_ending);
        if is_again {
            self.end_recall(index);
        }
        // A recall may overtake the answer.
        let is_revoked = is_staged || self.recalled.contains_key(&index);
        match (is_again, is_revoked) {
            // Also of a granule that is to be recalled: a recall is no touch.
            (false, true) => self.strategy.revoked(index, at),
            (false, false) => {
                let first = number.saturating_mul(granule_pages);
                let states = states.page_states(first..first.saturating_add(granule_pages))?;
                // A plain page was touched, which its trap tells, or I/O pins it for a moment.
                if !states.contains(&PageState::Plain) {
                    let is_given_up = states.contains(&PageState::Freed);
                    self.strategy.cannot_be_revoked(index, at, is_given_up);
                }
            }
            // The strategy holds it for revoked, and it is again.
            (true, true) => {}
            // All of its pages were merged, or it was touched.
            (true, false) => self.strategy.called_back(index, at),
        }
        Ok(())
    }

    /// Ends the recall of a granule, also one of which the shim was not told: it would make a
    /// granule accessible that was revoked since.
    fn end_recall(&mut self, index: u32) {
        self.to_recall.retain(|waiting| *waiting != index);
        self.recalled.remove(&index);
    }

    /// Whether access to this page is revoked. If so, its granule is noted for a recall.
    pub(super) fn note_recall(
        &mut self,
        page: u32,
        now: Time,
        states: &impl PageStates,
    ) -> Result<bool, LinkError> {
        let is_staged = states.page_states(page..page.saturating_add(1))?;
        let is_staged = is_staged.first() == Some(&PageState::Staged);
        let number = page / self.granules.granule_pages();
        if is_staged
            && self.is_on
            && let Some(index) = self.granules.index(number)
            && self.to_recall.len() < MAX_REVOKE
            && !self.recalled.contains_key(&index)
        {
            let until = now.after(RECALLED);
            self.recalled.insert(index, Recall { until, is_ending: false });
            self.to_recall.push(index);
        }
        Ok(is_staged)
    }

    /// The numbers of the granules that the shim is to recall now.
    pub(super) fn take_recalls(&mut self) -> Vec<u32> {
        let Self { granules, to_recall, .. } = self;
        to_recall.drain(..).map(|index| granules.number(index)).collect()
    }

    /// The indexes of the granules that the shim is to revoke now: those of the strategy, and
    /// recalled ones whose time has ended.
    pub(super) fn due_revocations(&mut self, now: Time) -> Vec<u32> {
        if !self.is_on {
            return Vec::new();
        }
        let mut indexes = self.strategy.revoke(now);
        indexes.truncate(MAX_REVOKE);
        let room = MAX_REVOKE - indexes.len();
        let ended = self.recalled.iter_mut().filter(|(_, recall)| recall.until <= now);
        indexes.extend(ended.take(room).map(|(index, recall)| {
            recall.is_ending = true;
            *index
        }));
        indexes
    }

    /// The tracked granules by number, each with the tenths of a second since its last touch if it
    /// is revoked.
    pub(super) fn ages(&mut self, now: Time) -> Vec<(u32, Option<u32>)> {
        let Self { strategy, granules, .. } = self;
        let ages = strategy.ages(now).into_iter();
        ages.map(|(index, age)| (granules.number(index), age)).collect()
    }
}

#[cfg(test)]
mod tests;
