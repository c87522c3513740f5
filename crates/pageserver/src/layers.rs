//! The layers that an export can be made of.

pub mod cache;
pub mod count;
pub mod fault;
pub mod file;
pub mod memory;
pub mod remote;
pub mod seal;
pub mod write_through;
