//! The host daemon, its drivers and its command line.

pub mod published;
