//! Work on files that needs no daemon: tables of pages that guests are likely to share
//! ([`offline`]), and curves of recorded traces ([`trace`]).

pub mod offline;
pub mod trace;
