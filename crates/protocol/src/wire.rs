//! Encodes messages as packets, and decodes them.
//!
//! Problem: the writer of the packet may be of another release, broken or hostile; and a packet
//! of a few bytes can claim a list of millions.
//!
//! Idea: postcard (a compact, self-delimiting encoding) below a length limit, then every value is
//! checked against its range before it is used. A decoded [`Request`] or [`Answer`] needs no
//! further check of its own; the receiver checks values that depend on the VM (does granule 7
//! exist?).
//!
//! The number of a request follows the message, in its packet and in that of its answer;
//! [`HELLO`] is not written.
//!
//! Invariants: a packet decodes to one message and one number with no byte left over. No message
//! ever changes its bytes ([`crate::versions`]); a test pins them.
//!
//! Left out: streams. A `SEQPACKET` socket keeps packets separate and reports a truncated one.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{
    Answer, Content, HELLO, MAX_MERGE, MAX_MERGE_PAGES, MAX_PACKET, MAX_REGIONS, MAX_REVOKE,
    MAX_SLOTS, MAX_TAKE, MAX_TAKE_PAGES, MAX_UNSHARE, Merge, REGION_ALIGN_PAGES, Refusal, Region,
    Request, State, Tracking,
};

/// The most pages in a granule: those of one huge page.
pub const MAX_GRANULE_PAGES: u32 = 512;

/// The least granules in a hot set: with fewer, code and data of one instruction evict each
/// other.
pub const MIN_HOT_SET: u32 = 64;

/// The size of a page on both sides.
const PAGE_BYTES: u64 = 4096;

/// No process has memory beyond this address.
const END_OF_ADDRESSES: u64 = 1 << 63;

/// The reason why a message could not become a packet, or a packet an answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The message is too long to send.
    #[error("a message of {length} bytes; at most {MAX_PACKET} fit in a packet")]
    TooLong {
        /// Its length as a packet.
        length: usize,
    },
    /// The other side speaks an older version, in which there is no such message.
    #[error("a message of version {since} of the protocol; the other side speaks {version}")]
    TooNew {
        /// The version that added the message.
        since: u16,
        /// The version of the other side.
        version: u16,
    },
    /// The packet is not an answer of this version of the protocol.
    #[error("malformed answer of {length} bytes")]
    Malformed {
        /// The packet's length.
        length: usize,
    },
    /// A value of an answer is out of its range.
    #[error("answer: {field}: {value}: {valid}")]
    Invalid {
        /// The field.
        field: &'static str,
        /// The value received.
        value: u64,
        /// The valid range.
        valid: &'static str,
    },
}

impl Request {
    /// Encodes this request as a packet with the number `id`; [`Self::Hello`] has its own number.
    ///
    /// # Errors
    /// When it is longer than [`MAX_PACKET`]: more than [`MAX_REVOKE`] granules.
    pub fn encode(&self, id: u32) -> Result<Vec<u8>, WireError> {
        encode(self, self.numbered(id))
    }

    /// Encodes this request for a shim that speaks this version.
    ///
    /// # Errors
    /// As for [`Self::encode`]; or the request is newer than the version.
    pub fn encode_for(&self, version: u16, id: u32) -> Result<Vec<u8>, WireError> {
        is_known(self.since(), version)?;
        self.encode(id)
    }

    /// The number of this request when it is sent with `id`.
    #[must_use]
    pub const fn numbered(&self, id: u32) -> u32 {
        if matches!(self, Self::Hello { .. }) { HELLO } else { id }
    }

    /// Decodes a packet to the request's number and the request, with its values checked; or to
    /// the answer that the shim must send: [`Refusal::Invalid`], or [`Refusal::Malformed`] with
    /// the number [`HELLO`].
    pub fn decode(packet: &[u8]) -> (u32, Result<Self, Refusal>) {
        let length = u32::try_from(packet.len()).unwrap_or(u32::MAX);
        // Hello has no number, and all other requests have one.
        let is_whole = |(request, id): &(Self, u32)| request.numbered(1) == (*id).min(1);
        match decode(packet).filter(is_whole) {
            Some((request, id)) => (id, request.check().map(|()| request)),
            None => (HELLO, Err(Refusal::Malformed { length })),
        }
    }

    fn check(&self) -> Result<(), Refusal> {
        match self {
            Self::Track(tracking) => tracking.check()?,
            Self::Revoke { granules } | Self::Recall { granules }
                if granules.is_empty() || granules.len() > MAX_REVOKE =>
            {
                return Err(invalid("granules", granules.len() as u64, "1 to 2048 of them"));
            }
            Self::Pool { slots } if *slots == 0 || *slots > MAX_SLOTS => {
                return Err(invalid("slots", (*slots).into(), "1 to 2^30"));
            }
            Self::Merge { runs } => {
                check_runs(
                    runs.iter().map(|run| (run.page, run.pages)),
                    MAX_MERGE,
                    MAX_MERGE_PAGES,
                )?;
                check_slots(runs)?;
            }
            Self::Take { runs } | Self::Keep { runs } => {
                check_runs(runs.iter().map(|run| (run.page, run.pages)), MAX_TAKE, MAX_TAKE_PAGES)?;
            }
            Self::Unshare { pages, .. } if *pages == 0 || *pages > MAX_UNSHARE => {
                return Err(invalid("pages", (*pages).into(), "1 to 512"));
            }
            Self::Unshare { page, pages } if page.checked_add(*pages).is_none() => {
                return Err(invalid("page", (*page).into(), "a run that ends before page 2^32"));
            }
            Self::Hello { .. }
            | Self::Revoke { .. }
            | Self::Recall { .. }
            | Self::Pool { .. }
            | Self::Unshare { .. }
            | Self::HandOver { .. }
            | Self::Release
            | Self::Status
            | Self::About => {}
        }
        Ok(())
    }
}

impl Answer {
    /// Encodes this answer as a packet for the request with this number.
    ///
    /// # Errors
    /// When it is longer than [`MAX_PACKET`].
    pub fn encode(&self, id: u32) -> Result<Vec<u8>, WireError> {
        encode(self, id)
    }

    /// Encodes this answer for a worker that speaks this version.
    ///
    /// # Errors
    /// As for [`Self::encode`]; or the answer is newer than the version.
    pub fn encode_for(&self, version: u16, id: u32) -> Result<Vec<u8>, WireError> {
        is_known(self.since(), version)?;
        self.encode(id)
    }

    /// Decodes a packet to the number of the request that it answers, and the answer, with its
    /// values checked.
    ///
    /// # Errors
    /// When it is malformed, or a value is out of its range.
    pub fn decode(packet: &[u8]) -> Result<(u32, Self), WireError> {
        let malformed = WireError::Malformed { length: packet.len() };
        let (answer, id) = decode(packet).ok_or(malformed.clone())?;
        let state = match &answer {
            Self::Welcome { .. } if id != HELLO => return Err(malformed),
            Self::Welcome { regions, state, .. } => {
                check_regions(regions)?;
                state
            }
            Self::Refused(_) => return Ok((id, answer)),
            _ if id == HELLO => return Err(malformed),
            Self::Status(status) => &status.state,
            Self::Done { .. } | Self::Merged(_) | Self::Taken(_) | Self::About { .. } => {
                return Ok((id, answer));
            }
        };
        if let State::On(tracking) = state
            && let Err(fault) = tracking.fault()
        {
            return Err(fault.into());
        }
        Ok((id, answer))
    }
}

impl Tracking {
    /// Checks that every value is in its range.
    ///
    /// # Errors
    /// [`Refusal::Invalid`] for the first value that is not.
    pub fn check(&self) -> Result<(), Refusal> {
        self.fault().map_err(|fault| invalid(fault.field, fault.value, fault.valid))
    }

    fn fault(&self) -> Result<(), OutOfRange> {
        let fault =
            |field, value: u32, valid| Err(OutOfRange { field, value: value.into(), valid });
        if !self.granule_pages.is_power_of_two() || self.granule_pages > MAX_GRANULE_PAGES {
            return fault("granule_pages", self.granule_pages, "a power of two, 1 to 512");
        }
        if let Some(hot_set) = self.hot_set.filter(|&granules| granules < MIN_HOT_SET) {
            return fault("hot_set", hot_set, "at least 64 granules");
        }
        if self.max_traps_per_s == 0 {
            return fault("max_traps_per_s", 0, "at least 1");
        }
        Ok(())
    }
}

/// A value out of its range, for either side of the socket.
struct OutOfRange {
    field: &'static str,
    value: u64,
    valid: &'static str,
}

impl From<OutOfRange> for WireError {
    fn from(fault: OutOfRange) -> Self {
        Self::Invalid { field: fault.field, value: fault.value, valid: fault.valid }
    }
}

/// Regions must be few, not empty, in order, disjoint and aligned, in numbers as in addresses,
/// because the worker computes with them and must not count a page twice.
fn check_regions(regions: &[Region]) -> Result<(), WireError> {
    let invalid = |field, value, valid| Err(WireError::Invalid { field, value, valid });
    if regions.len() > MAX_REGIONS {
        return invalid("regions", regions.len() as u64, "at most 512 of them");
    }
    let mut free = 0;
    for region in regions {
        let first = u64::from(region.first_page);
        if first < free || !region.first_page.is_multiple_of(REGION_ALIGN_PAGES) {
            return invalid("first_page", first, "a multiple of 512 past the region before");
        }
        free = first + u64::from(region.pages);
        if region.pages == 0 || free > u64::from(u32::MAX) {
            return invalid("pages", region.pages.into(), "at least 1, and 2^32 in all regions");
        }
    }
    let mut by_address: Vec<&Region> = regions.iter().collect();
    by_address.sort_by_key(|region| region.address);
    let mut free = 0;
    for region in by_address {
        let end = region.address.checked_add(u64::from(region.pages) * PAGE_BYTES);
        let is_apart = region.address >= free && region.address.is_multiple_of(PAGE_BYTES);
        let Some(end) = end.filter(|end| is_apart && *end <= END_OF_ADDRESSES) else {
            let valid = "a multiple of 4096 below 2^63, apart from the other regions";
            return invalid("address", region.address, valid);
        };
        free = end;
    }
    Ok(())
}

/// Runs of pages must be few and not empty, and end before the numbers do.
fn check_runs(
    runs: impl ExactSizeIterator<Item = (u32, u32)>,
    most: usize,
    most_pages: u32,
) -> Result<(), Refusal> {
    if runs.len() == 0 || runs.len() > most {
        return Err(invalid("runs", runs.len() as u64, &format!("1 to {most} of them")));
    }
    let mut all = 0_u32;
    for (page, pages) in runs {
        all = all.saturating_add(pages);
        if pages == 0 || all > most_pages {
            let valid = format!("at least 1, and {most_pages} in all runs");
            return Err(invalid("pages", pages.into(), &valid));
        }
        if page.checked_add(pages).is_none() {
            return Err(invalid("page", page.into(), "a run that ends before page 2^32"));
        }
    }
    Ok(())
}

/// Runs of slots must also end before the numbers do.
fn check_slots(runs: &[Merge]) -> Result<(), Refusal> {
    let is_beyond =
        |run: &Merge, slot: u32| slot.checked_add(run.pages).is_none_or(|end| end > MAX_SLOTS);
    for run in runs {
        if let Content::Slot(slot) = run.content
            && is_beyond(run, slot)
        {
            return Err(invalid("slot", slot.into(), "a run that ends before slot 2^30"));
        }
    }
    Ok(())
}

fn invalid(field: &str, value: u64, valid: &str) -> Refusal {
    Refusal::Invalid { field: field.to_owned(), value, valid: valid.to_owned() }
}

fn is_known(since: u16, version: u16) -> Result<(), WireError> {
    if since > version { Err(WireError::TooNew { since, version }) } else { Ok(()) }
}

fn encode<M: Serialize>(message: &M, id: u32) -> Result<Vec<u8>, WireError> {
    let too_long = |_| WireError::TooLong { length: 0 };
    let mut packet = postcard::to_stdvec(message).map_err(too_long)?;
    if id != HELLO {
        packet = postcard::to_extend(&id, packet).map_err(too_long)?;
    }
    if packet.len() > MAX_PACKET {
        return Err(WireError::TooLong { length: packet.len() });
    }
    Ok(packet)
}

fn decode<M: DeserializeOwned>(packet: &[u8]) -> Option<(M, u32)> {
    if packet.len() > MAX_PACKET {
        return None;
    }
    let (message, rest) = postcard::take_from_bytes(packet).ok()?;
    if rest.is_empty() {
        return Some((message, HELLO));
    }
    let (id, rest) = postcard::take_from_bytes(rest).ok()?;
    (rest.is_empty() && id != HELLO).then_some((message, id))
}

#[cfg(test)]
mod tests;
