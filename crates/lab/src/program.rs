//! A program that treats its memory as QEMU does, with the real shim and the real kernel. It
//! obeys commands, to show effects that a guest's own pace would hide.

use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write};
use std::os::fd::OwnedFd;

use sys::process::{Child, Identity, Spawn};

use crate::inside::{SHIM, built};
use crate::lab::LabError;

/// The program while it runs; dropping this ends it.
pub(crate) struct Program {
    child: Child,
    commands: PipeWriter,
    answers: BufReader<PipeReader>,
}

impl Program {
    pub(crate) fn start() -> Result<Self, LabError> {
        let ((stdin, commands), (answers, stdout)) = (std::io::pipe()?, std::io::pipe()?);
        let child = Spawn::new(built("overbook-shim-stand-in")?)
            .env("LD_PRELOAD", built(SHIM)?)
            .stdin(OwnedFd::from(stdin))
            .stdout(OwnedFd::from(stdout))
            .die_with_parent()
            .spawn()?;
        Ok(Self { child, commands, answers: BufReader::new(answers) })
    }

    pub(crate) fn identity(&self) -> Identity {
        self.child.identity()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.identity().pid
    }

    /// Sends it a command; returns its answer.
    pub(crate) fn tell(&mut self, command: &str) -> Result<String, LabError> {
        writeln!(self.commands, "{command}")?;
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        match line.trim_end().split_once(' ') {
            Some(("ok", answer)) => Ok(answer.to_owned()),
            _ if line.trim_end() == "ok" => Ok(String::new()),
            _ => Err(std::io::Error::other(format!("{command}: {line}")).into()),
        }
    }
}
