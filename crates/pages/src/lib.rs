//! Page algorithms without a clock, files or threads: time and references are arguments.

pub mod budget;
pub mod curve;
pub mod dedup;
pub mod hot_set;
pub mod lru;
pub mod offline;
pub mod phase;
pub mod probe;
pub mod shards;
pub mod working_set;
