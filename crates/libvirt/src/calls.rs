//! Changes that libvirt has not answered yet: at most one for each domain.
//!
//! A call about a domain whose QEMU is stopped does not come back. Each such call occupies one of
//! libvirtd's workers, of which it has 20 for all its clients.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The domains about which a call is under way.
#[derive(Debug)]
pub(crate) struct DomainCalls {
    under_way: Arc<Mutex<BTreeSet<String>>>,
    most: usize,
}

/// A call about a domain, under way until this is dropped.
#[derive(Debug)]
pub(crate) struct DomainCall {
    uuid: String,
    under_way: Arc<Mutex<BTreeSet<String>>>,
}

impl DomainCalls {
    /// No calls; `most`: the limit for all domains together.
    pub(crate) fn new(most: usize) -> Self {
        Self { under_way: Arc::default(), most }
    }

    /// Begins a call about this domain.
    ///
    /// # Errors
    /// An earlier one has not come back, or too many have not.
    pub(crate) fn begin(&self, uuid: &str) -> Result<DomainCall, String> {
        let mut under_way = lock(&self.under_way);
        if under_way.contains(uuid) {
            return Err("an earlier call of libvirt about it has not come back".to_owned());
        }
        if under_way.len() >= self.most {
            return Err(format!("{} calls of libvirt do not come back", self.most));
        }
        under_way.insert(uuid.to_owned());
        Ok(DomainCall { uuid: uuid.to_owned(), under_way: Arc::clone(&self.under_way) })
    }
}

impl Drop for DomainCall {
    fn drop(&mut self) {
        lock(&self.under_way).remove(&self.uuid);
    }
}

fn lock(calls: &Mutex<BTreeSet<String>>) -> MutexGuard<'_, BTreeSet<String>> {
    calls.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_hangs_refuses_its_own_domain_and_no_other() {
        let calls = DomainCalls::new(2);
        let hangs = calls.begin("a").unwrap();
        let why = calls.begin("a").unwrap_err();
        assert_eq!(why, "an earlier call of libvirt about it has not come back");
        let other = calls.begin("b").unwrap();
        assert_eq!(calls.begin("c").unwrap_err(), "2 calls of libvirt do not come back");
        drop((hangs, other));
        assert!(calls.begin("a").is_ok() && calls.begin("c").is_ok());
    }
}
