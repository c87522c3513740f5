//! A hostile client negotiates with our server.
//!
//! This crate is not part of the workspace, because only it needs its dependencies. Each file is
//! a target. The code is in `tests/fuzzed/`, because `tests/fuzz_smoke.rs` runs it with random
//! bytes. With [cargo-fuzz](https://github.com/rust-fuzz/cargo-fuzz) and a nightly compiler:
//!
//! ```text
//! cd crates/pageserver && cargo +nightly fuzz run negotiation
//! ```
//!
//! Without them, with the workspace's own compiler:
//!
//! ```text
//! cd crates/pageserver/fuzz
//! RUSTFLAGS="--cfg fuzzing -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4 \
//!     -C llvm-args=-sanitizer-coverage-inline-8bit-counters \
//!     -C llvm-args=-sanitizer-coverage-pc-table \
//!     -C llvm-args=-sanitizer-coverage-trace-compares" \
//!     cargo build --release --target x86_64-unknown-linux-gnu
//! mkdir -p corpus/negotiation
//! target/x86_64-unknown-linux-gnu/release/negotiation -max_total_time=600 corpus/negotiation
//! ```
//!
//! A target ends when the protocol violates a guarantee, and saves the bytes that led there.

#![no_main]

#[allow(dead_code, unused_imports, reason = "each target does one of these")]
#[path = "../tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzzed::negotiation(data));
