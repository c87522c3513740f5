//! A hostile client and our server, over a stream in memory.
//! How to run it: `negotiation.rs`.

#![no_main]

#[allow(dead_code, unused_imports, reason = "each target does one of these")]
#[path = "../tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::serving(data));
