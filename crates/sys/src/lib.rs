//! The kernel boundary: a safe API over raw system calls.

pub mod process;
