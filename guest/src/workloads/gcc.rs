//! `gcc`: compiles the same program again and again, one file after the other, with the compiler of
//! the system that the guest runs in.
//!
//! Each object file must be byte for byte the one of the first time.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use clap::Args;

use crate::error::WorkError;
use crate::intact;
use crate::program::{self, difference};
use crate::rng::Rng;
use crate::run::Worker;

const DIRECTORY: &str = "/tmp/gcc";
const FILES: usize = 8;
const FUNCTIONS: usize = 3;
const STATEMENTS: usize = 4;
const CHECKED: [&str; 7] =
    ["binutils", "cpp-", "gcc-", "libbinutils", "libgmp", "libmpc", "libmpfr"];

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    checks: intact::Checks,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let directory = Path::new(DIRECTORY);
    fs::create_dir_all(directory).map_err(WorkError::file("make", directory))?;
    let mut rng = Rng::new(worker.seed);
    for file in 0..FILES {
        let path = directory.join(format!("part{file}.c"));
        fs::write(&path, source(file, &mut rng)).map_err(WorkError::file("write", &path))?;
    }
    intact::watch(&options.checks, &CHECKED, &worker.shared)?;
    let mut first: Vec<Vec<u8>> = Vec::new();
    let mut file = 0;
    while worker.proceed(1) {
        let start = worker.shared.now();
        let mut gcc = program::command("gcc");
        gcc.current_dir(directory).args(["-O1", "-c", &format!("part{file}.c"), "-o", "part.o"]);
        program::output("gcc", &mut gcc)?;
        worker.shared.latency.record(worker.shared.now() - start);
        let path = directory.join("part.o");
        let object = fs::read(&path).map_err(WorkError::file("read", &path))?;
        match first.get(file) {
            Some(expected) => worker.shared.bad_bytes.add(difference(&object, expected)),
            None => first.push(object),
        }
        file = (file + 1) % FILES;
        worker.done(1);
    }
    Ok(())
}

/// Arithmetic that a compiler cannot do in advance.
fn source(file: usize, rng: &mut Rng) -> String {
    let mut text = String::from("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n");
    for function in 0..FUNCTIONS {
        // Writing to a string does not fail.
        let _ = writeln!(text, "unsigned f{file}_{function}(unsigned a, unsigned b) {{");
        for _ in 0..STATEMENTS {
            let (by, times, modulus) = (rng.below(30) + 1, rng.below(9) + 2, rng.below(99) + 2);
            let _ = writeln!(text, "    for (unsigned i = 0; i < {times}; i++)");
            let _ = writeln!(text, "        a ^= (a << {by}) + b * {} + i;", rng.below(9999));
            let _ = writeln!(text, "    b += a % {modulus};");
        }
        text += "    return a + b;\n}\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_the_same_each_time_and_differ_among_files() {
        let both = |seed| {
            let mut rng = Rng::new(seed);
            [0, 1].map(|file| source(file, &mut rng))
        };
        assert_eq!(both(1), both(1));
        assert_ne!(both(1)[0], both(1)[1]);
        assert_ne!(both(1), both(2));
    }
}
