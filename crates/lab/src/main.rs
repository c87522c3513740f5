//! `overbook-lab`: what `overbook lab` runs; apart, so that the production binary holds no lab
//! code.

use std::process::ExitCode;

fn main() -> ExitCode {
    lab::cli::main()
}
