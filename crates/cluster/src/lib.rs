//! The hosts of a pool: the data that they exchange.
//!
//! ```text
//! records         the values that each host and the controller have written
//! store           the stored values, the leases to write them, and notification of changes
//!   store::etcd      for many hosts, in etcd
//!   store::embedded  for a single host, in SQLite
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test that cannot go on has failed"))]

pub mod records;
pub mod store;
