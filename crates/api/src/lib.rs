//! The API as its users see it: its objects, the tick that they show, their words, and a client.
//!
//! Nothing here serves, stores or moves anything: the daemon publishes a tick ([`published`]), one
//! function makes each object of it ([`wire`]), and the same types are read back by the client
//! ([`client`]). So a program that only asks needs neither HTTP server nor database.

pub mod client;
pub mod explain;
pub mod moves;
pub mod published;
pub mod shown;
pub mod swap_meter;
pub mod verdict;
pub mod wire;

#[cfg(test)]
extern crate self as api;
#[cfg(test)]
#[path = "../tests/fixture/mod.rs"]
mod fixture;
