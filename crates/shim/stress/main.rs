//! `overbook-stand-in`: stands in for QEMU in the shim's stress test, because it can tell what QEMU cannot:
//! for every byte of its RAM, at every moment, what that byte must be.
//!
//! **Problem.** A shim that loses one page in a billion moves is worthless, and a guest would rarely notice.
//!
//! **Idea.** A program that treats its RAM as QEMU does, only worse. It allocates by the same calls; many
//! threads read, write and compare ([`page`]); the kernel reads and writes on behalf of others ([`disk`]);
//! pages are discarded, pieces of RAM come and go, children are forked, and RAM is registered with a second
//! userfaultfd ([`qemu`]). It knows nothing of the shim, and runs without it too: somebody else, at the same
//! time, asks the shim preloaded into it to do its worst.
//!
//! **Use.** `overbook-stand-in <directory> <seed> <MiB>`; works until its standard input closes, then looks
//! at every page once more. Prints a line of JSON twice a second, and a last one with `"final":true`. Exit
//! status 0: no byte was wrong and every thread came to its end.
//!
//! **Leaves out.** Running a guest: the same is done with real ones.

mod aio;
mod crew;
mod disk;
mod page;
mod qemu;
mod ram;
mod rng;
mod vcpu;
mod watch;

use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crew::{Hand, Shared};
use disk::Disk;
use page::PAGE;
use ram::Slot;
use rng::Rng;

const MIB_PAGES: usize = (1 << 20) / PAGE;
/// Pieces of RAM that come and go: one that huge pages fit, one of an odd size, and one that is too small
/// for the shim to care.
const PLUGGED: [usize; 3] = [40 * MIB_PAGES, 33 * MIB_PAGES + 17, MIB_PAGES];
const VCPUS: usize = 6;
const READERS: usize = 2;
const DIRECT_DISKS: usize = 2;
/// One thread each: buffered disk, batches, discards, hot-plug, forks, own registrations.
const OTHERS: usize = 6;
const THREADS: usize = VCPUS + READERS + DIRECT_DISKS + OTHERS;
const REPORT: Duration = Duration::from_millis(500);
/// A thread that has not come to its end by then hangs.
const END_LIMIT: Duration = Duration::from_secs(20);

struct Options {
    dir: PathBuf,
    seed: u64,
    mib: usize,
}

fn options() -> Option<Options> {
    let mut words = std::env::args_os().skip(1);
    let dir = PathBuf::from(words.next()?);
    let mut number = || words.next()?.to_str()?.parse::<u64>().ok();
    let (seed, mib) = (number()?, usize::try_from(number()?).ok()?);
    (words.next().is_none() && (8..=65_536).contains(&mib)).then_some(Options { dir, seed, mib })
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("usage: overbook-stand-in <directory> <seed> <MiB of RAM, 8 to 65536>");
        return ExitCode::from(2);
    };
    match run(&options) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("overbook-stand-in: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Works until standard input closes; answers how many bytes were wrong.
fn run(options: &Options) -> io::Result<usize> {
    let slots: Vec<Slot> =
        [options.mib * MIB_PAGES].into_iter().chain(PLUGGED).map(Slot::new).collect();
    slots.iter().try_for_each(Slot::replug)?;
    // Threads that hang are left behind with it.
    let shared: &'static Shared = Box::leak(Box::new(Shared::new(slots, THREADS)));
    let hands = start(options, shared)?;
    std::thread::spawn(|| {
        // Whatever comes, its end is what counts.
        let _ = io::stdin().read_to_end(&mut Vec::new());
        shared.stop();
    });
    while !shared.is_stopping() {
        report(shared, false)?;
        std::thread::sleep(REPORT);
    }
    let ended = Instant::now();
    while hands.iter().any(|hand| !hand.is_finished()) {
        if ended.elapsed() > END_LIMIT {
            let (stuck, _) = shared.watch.most_stuck();
            return Err(io::Error::other(format!("a thread hangs in {stuck}")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for hand in hands {
        hand.join().map_err(|_| io::Error::other("a thread panicked"))??;
    }
    shared.check_all();
    report(shared, true)?;
    Ok(shared.watch.bad_bytes())
}

type Work = Box<dyn FnOnce(&mut Hand<'_>) -> io::Result<()> + Send>;

fn works(options: &Options) -> io::Result<Vec<Work>> {
    let disk = |number: usize, is_direct| {
        let name = format!("stand-in-{}-{number}.disk", std::process::id());
        Disk::new(&options.dir.join(name), is_direct)
    };
    let mut works: Vec<Work> = Vec::new();
    for _ in 0..VCPUS {
        works.push(Box::new(vcpu::work));
    }
    for _ in 0..READERS {
        works.push(Box::new(vcpu::look));
    }
    for number in 0..DIRECT_DISKS {
        let disk = disk(number, true)?;
        works.push(Box::new(|hand| disk::work(hand, disk)));
    }
    let (buffered, batches) = (disk(DIRECT_DISKS, false)?, disk(DIRECT_DISKS + 1, true)?);
    works.push(Box::new(|hand| disk::work(hand, buffered)));
    works.push(Box::new(|hand| disk::work_in_batches(hand, batches)));
    works.push(Box::new(qemu::discard));
    works.push(Box::new(qemu::plug));
    works.push(Box::new(qemu::fork));
    works.push(Box::new(qemu::register));
    Ok(works)
}

/// Starts all threads; one that fails asks the others to end.
fn start(
    options: &Options,
    shared: &'static Shared,
) -> io::Result<Vec<JoinHandle<io::Result<()>>>> {
    let hands = works(options)?.into_iter().enumerate().map(|(seat, work)| {
        let rng = Rng::new(options.seed.wrapping_mul(1000).wrapping_add(seat as u64));
        std::thread::spawn(move || {
            let result = work(&mut Hand { shared, seat, rng });
            if result.is_err() {
                shared.stop();
            }
            result
        })
    });
    Ok(hands.collect())
}

/// One line for whoever started this.
fn report(shared: &Shared, is_last: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{{\"final\":{is_last},{}}}", shared.watch.to_json())?;
    out.flush()
}
