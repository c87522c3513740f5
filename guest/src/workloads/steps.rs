//! `steps`: carries out one order of the host after the other, and reports the time of each.
//!
//! **Problem.** Experiments need an order among guests, and between a guest and its host: which
//! guest takes memory, and what the host does before the guest has it back. Clocks cannot ensure
//! that. **Idea.** The host writes its next order into the file that is the guest's data disk,
//! and the guest reads it past its page cache a few times a second. An order is a number, which
//! grows, and steps joined by `+`:
//!
//! ```text
//! 3 write+free
//! ```
//!
//! `write` takes all memory that is missing and fills all with random words, `same` with the same
//! words in every MB, `touch` writes one word to each page, `sort` sorts all words, `free` gives
//! all back. `phase` is the last order that was carried out, `step_us` the time of its last step
//! other than `free`. Memory is in small pages: each is a fault of its own.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use memmap2::{Advice, MmapMut};

use crate::args::megabytes;
use crate::error::WorkError;
use crate::memory::{MB, PAGE, fill_random, page};
use crate::rng::Rng;
use crate::run::Worker;

/// `O_DIRECT` on x86-64.
const DIRECT: i32 = 0x4000;
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How much memory to take
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// The file or block device that begins with the host's order
    #[arg(long, value_name = "PATH")]
    orders: PathBuf,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut orders = Orders::open(&options.orders)?;
    let (mut held, mut rng, mut carried_out) = (None, Rng::new(worker.seed), 0);
    worker.shared.phase.set(0);
    loop {
        if !worker.shared.sleep_until(worker.shared.now().saturating_add(LOOK_EVERY)) {
            return Ok(());
        }
        let Some((number, steps)) = orders.read()?.filter(|order| order.0 > carried_out) else {
            continue;
        };
        for step in steps.split('+') {
            carry_out(step, options.mb, &mut held, &mut rng, worker)?;
        }
        carried_out = number;
        worker.shared.mb.set(held.as_ref().map_or(0, |held: &MmapMut| held.len() / MB));
        worker.shared.phase.set(number);
    }
}

/// Does one step; an unknown step does nothing to the memory.
fn carry_out(
    step: &str,
    mb: usize,
    held: &mut Option<MmapMut>,
    rng: &mut Rng,
    worker: &Worker,
) -> Result<(), WorkError> {
    if step == "free" {
        *held = None;
        return Ok(());
    }
    let began = worker.shared.now();
    let memory = match held {
        Some(memory) => memory,
        None => held.insert(take(mb)?),
    };
    for chunk in memory.chunks_mut(MB) {
        match step {
            "write" => fill_random(chunk, rng),
            "same" => fill_random(chunk, &mut Rng::new(worker.seed)),
            "touch" => chunk.iter_mut().step_by(PAGE).for_each(|byte| *byte = byte.wrapping_add(1)),
            _ => {}
        }
        worker.done(1);
        if worker.shared.stopping() {
            return Ok(());
        }
    }
    if step == "sort" {
        memory.as_chunks_mut::<8>().0.sort_unstable_by_key(|word| u64::from_le_bytes(*word));
    }
    let took = worker.shared.now() - began;
    worker.shared.step_us.set(usize::try_from(took.as_micros()).unwrap_or(usize::MAX));
    Ok(())
}

fn take(mb: usize) -> Result<MmapMut, WorkError> {
    let failed = |source| WorkError::Memory { mb, source };
    let memory = MmapMut::map_anon(mb * MB).map_err(failed)?;
    // Kernels without huge pages refuse this, and do not need it.
    let _ = memory.advise(Advice::NoHugePage);
    Ok(memory)
}

/// Source of orders.
struct Orders {
    file: File,
    path: PathBuf,
    /// Buffer for direct reads of a disk.
    buffer: MmapMut,
}

impl Orders {
    fn open(path: &Path) -> Result<Self, WorkError> {
        let failed = || WorkError::file("open", path);
        let metadata = std::fs::metadata(path).map_err(failed())?;
        let flags = if metadata.file_type().is_block_device() { DIRECT } else { 0 };
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed())?;
        Ok(Self { file, path: path.to_owned(), buffer: page(0)? })
    }

    /// The newest order; `None`: there is none yet.
    fn read(&mut self) -> Result<Option<(usize, String)>, WorkError> {
        let length = self.file.read_at(&mut self.buffer, 0);
        let length = length.map_err(WorkError::file("read", &self.path))?;
        let text = String::from_utf8_lossy(&self.buffer[..length]);
        let order = text.split_once('\n').and_then(|(line, _)| line.split_once(' '));
        Ok(order.and_then(|(number, steps)| Some((number.parse().ok()?, steps.to_owned()))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(orders: &[&str]) -> (Option<u64>, Option<u64>, Option<u64>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let options = Options { mb: 2, orders: file.path().to_owned() };
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        std::thread::scope(|scope| {
            let work = scope.spawn(|| run(&options, &mut worker).unwrap());
            for (number, order) in (1..).zip(orders) {
                std::fs::write(file.path(), format!("{number} {order}\n")).unwrap();
                while shared.phase.get() != Some(number) {
                    assert!(!work.is_finished());
                    std::thread::yield_now();
                }
            }
            shared.stop();
        });
        (shared.phase.get(), shared.mb.get(), shared.step_us.get())
    }

    #[test]
    fn each_order_is_carried_out_once_and_timed() {
        let (phase, mb, step_us) = told(&["write", "sort+touch"]);
        assert_eq!((phase, mb), (Some(2), Some(2)));
        assert!(step_us.is_some());
    }

    #[test]
    fn freed_is_all() {
        assert_eq!(told(&["same+free"]).1, Some(0));
    }

    #[test]
    fn sorting_sorts_all_of_it() {
        let (mut held, mut rng, worker) = (None, Rng::new(1), Worker::for_test());
        for step in ["write", "sort"] {
            carry_out(step, 2, &mut held, &mut rng, &worker).unwrap();
        }
        assert!(
            held.unwrap().as_chunks::<8>().0.is_sorted_by_key(|word| u64::from_le_bytes(*word))
        );
    }

    #[test]
    fn what_is_no_order_is_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut orders = Orders::open(file.path()).unwrap();
        for text in ["", "\0\0", "1 write", "x write\n"] {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(orders.read().unwrap(), None, "{text}");
        }
    }
}
