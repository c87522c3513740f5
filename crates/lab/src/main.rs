//! `overbook-lab`: the program behind `overbook lab`. It is separate, so that the production
//! binary holds no lab code.

use std::process::ExitCode;

fn main() -> ExitCode {
    lab::cli::main()
}
