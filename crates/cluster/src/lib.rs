//! Hosts as one pool: what they know of each other.
//!
//! ```text
//! records         what each host and the controller have written
//! store           what is kept, who may write it, and how it is heard that something has changed
//!   store::etcd      of many hosts, in etcd
//!   store::embedded  of one host alone, in SQLite
//! ```

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test that cannot go on has failed"))]

pub mod records;
pub mod store;
