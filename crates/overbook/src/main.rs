//! The `overbook` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    overbook::cli::main()
}
