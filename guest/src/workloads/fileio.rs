//! `fileio`: random 16 KiB reads on a data disk through the page cache; a service whose cache is
//! the guest's memory.
//!
//! Reads are aligned and uniform over the first `--mb` MB. Latency is that of the read itself,
//! also with `--rate`.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use clap::Args;

use crate::args::megabytes;
use crate::disk::BlockDevice;
use crate::error::WorkError;
use crate::memory::MB;
use crate::rng::Rng;
use crate::run::Worker;

const READ_BYTES: usize = 16 * 1024;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Block device or file to read; a file that does not exist is created
    #[arg(long, value_name = "PATH")]
    path: PathBuf,
    /// How much of it to use
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    worker.shared.mb.set(options.mb);
    let disk = BlockDevice::for_reading(&options.path, options.mb, worker.seed, &worker.shared)?;
    let mut rng = Rng::new(worker.seed);
    let mut buffer = vec![0; READ_BYTES];
    while worker.proceed(1) {
        let at = rng.below(options.mb * MB / READ_BYTES) * READ_BYTES;
        let start = worker.shared.now();
        disk.file.read_exact_at(&mut buffer, at as u64).map_err(disk.failed("read"))?;
        worker.shared.latency.record(worker.shared.now() - start);
        worker.done(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_until_the_stop_and_records_each_latency() {
        let dir = tempfile::tempdir().unwrap();
        let mut worker = Worker::for_test();
        let stopper = worker.stop_after(1);
        run(&Options { path: dir.path().join("data"), mb: 1 }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() > 0);
        assert!(worker.shared.latency.snapshot().percentile_us(5_000).is_some());
    }
}
