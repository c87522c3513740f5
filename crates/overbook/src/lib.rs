//! The host daemon and its command line.

mod api_process;
pub mod cli;
pub mod config_files;
pub mod curve_chart;
pub mod daemon;
mod doctor;
mod foreseen;
mod helper;
pub mod history;
pub mod http;
mod learned_file;
pub mod line_plot;
mod loan_news;
pub mod lock;
pub mod markup;
mod matrix_chart;
mod pause_file;
pub mod pki;
pub mod pool;
mod preflight;
mod proxmox;
pub mod release;
pub mod top;

#[cfg(test)]
#[path = "../../api/tests/fixture/mod.rs"]
mod fixture;
#[cfg(test)]
mod test_process;
