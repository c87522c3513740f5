//! The host daemon, its drivers and its command line.

mod api;
pub mod cli;
pub mod client;
pub mod config_files;
pub mod curve_chart;
pub mod daemon;
pub mod disks;
mod doctor;
pub mod drivers;
pub mod explain;
mod helper;
pub mod history;
pub mod http;
pub mod journal;
mod learned_file;
mod lines;
mod loan_news;
pub mod lock;
mod log;
mod matrix_chart;
pub mod moves;
mod pause_file;
pub mod pki;
pub mod pool;
mod preflight;
pub mod published;
pub mod release;
pub mod repository;
pub mod shown;
mod swap_meter;
pub mod top;
pub mod wire;

#[cfg(test)]
extern crate self as overbook;
#[cfg(test)]
#[path = "../tests/http_fixture/mod.rs"]
mod fixture;
#[cfg(test)]
mod test_process;
