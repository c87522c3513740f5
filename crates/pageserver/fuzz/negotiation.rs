//! A hostile client negotiates with our server.
//!
//! This crate is not part of the workspace, because only it needs its dependencies. Each file is
//! a target. The code is in `tests/fuzzed/`, because `tests/fuzz_smoke.rs` runs it with random
//! bytes. `make fuzz` runs every target. To run one that is built:
//!
//! ```text
//! target/fuzz/x86_64-unknown-linux-gnu/release/negotiation target/fuzz/corpus/negotiation
//! ```
//!
//! A target ends when the protocol violates a guarantee, and saves the bytes that led there.

#![no_main]

#[allow(dead_code, unused_imports, reason = "each target does one of these")]
#[path = "../tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::negotiation(data));
