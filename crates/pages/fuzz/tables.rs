//! A hostile file is read as a table of shared pages.
//! How to run it: `negotiation.rs` of `crates/pageserver/fuzz`.

#![no_main]

#[path = "../tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::tables(data));
