//! A hostile client negotiates with our server.
//!
//! This crate is no part of the workspace: what it needs, nothing else does. Each file is a target;
//! what they do stands in `tests/fuzzed/`, for `tests/fuzz_smoke.rs` does the same with random
//! bytes. With [cargo-fuzz](https://github.com/rust-fuzz/cargo-fuzz) and a nightly compiler:
//!
//! ```text
//! cd crates/pageserver && cargo +nightly fuzz run negotiation
//! ```
//!
//! Without them, on the workspace's own compiler:
//!
//! ```text
//! cd crates/pageserver/fuzz
//! RUSTFLAGS="--cfg fuzzing -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4 \
//!     -C llvm-args=-sanitizer-coverage-inline-8bit-counters -C llvm-args=-sanitizer-coverage-pc-table \
//!     -C llvm-args=-sanitizer-coverage-trace-compares" \
//!     cargo build --release --target x86_64-unknown-linux-gnu
//! mkdir -p corpus/negotiation
//! target/x86_64-unknown-linux-gnu/release/negotiation -max_total_time=600 corpus/negotiation
//! ```
//!
//! A target ends, and leaves the bytes that led there, when the protocol does what it never may.

#![no_main]

#[allow(dead_code, unused_imports, reason = "each target does one of these")]
#[path = "../tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::negotiation(data));
