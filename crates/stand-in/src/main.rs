//! `overbook-stand-in` stands in for QEMU in the shim's stress test, because it knows what QEMU
//! cannot: the expected value of every byte of its RAM, at every moment.
//!
//! **Problem.** A shim that loses one page in a billion moves is worthless, and a guest would
//! rarely notice.
//!
//! **Idea.** A program that treats its RAM as QEMU does, only worse. It allocates by the same
//! calls. Many threads read, write and compare ([`page`]), and so do guests that KVM runs
//! ([`kvm`]). The kernel reads and writes on behalf of others ([`disk`]) and pages out
//! ([`host`]). Pages are discarded, pieces of RAM come and go, children are forked, and RAM is
//! registered with a second userfaultfd ([`qemu`]). The program knows nothing of the shim, and
//! runs without it too. At the same time, the test asks the shim preloaded into it to do its
//! worst.
//!
//! **Use.** `overbook-stand-in <directory> <seed> <MiB>` works until its standard input closes,
//! then checks every page once more. It prints a line of JSON twice a second, and a last one with
//! `"final":true`. Exit status 0: no byte was wrong and every thread came to its end. Where KVM
//! cannot run such a guest the program reports that, and goes on without.
//!
//! **Leaves out.** An operating system in the guest. Other tests use real ones, but without KVM
//! on hosts where KVM is slow.

mod aio;
mod crew;
mod disk;
mod guest;
mod host;
mod kvm;
mod machine;
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

use crew::{CrewState, Hand};
use disk::RamDisk;
use machine::Vcpu;
use page::PAGE;
use ram::Slot;
use rng::Rng;

const MIB_PAGES: usize = (1 << 20) / PAGE;
/// Pieces of RAM that come and go: one that huge pages fit, one of an odd size, and one that is
/// too small for the shim to track.
const PLUGGED: [usize; 3] = [40 * MIB_PAGES, 33 * MIB_PAGES + 17, MIB_PAGES];
const VCPUS: usize = 6;
const READERS: usize = 2;
const DIRECT_DISKS: usize = 2;
const REPORT: Duration = Duration::from_millis(500);
/// A thread that has not ended by then hangs.
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

/// Works until standard input closes; returns the number of wrong bytes.
fn run(options: &Options) -> io::Result<usize> {
    let slots = Slot::row([options.mib * MIB_PAGES].into_iter().chain(PLUGGED));
    let obstacle = kvm::probe().err().map(|error| error.to_string());
    let (machines, vcpus) = match &obstacle {
        None => kvm::machines(slots.last().map_or(0, Slot::guest_end))?,
        Some(why) => {
            eprintln!("overbook-stand-in: skipped: vCPUs under KVM: {why}");
            Default::default()
        }
    };
    slots.iter().try_for_each(|slot| slot.replug(&machines))?;
    let works = works(options, vcpus)?;
    // Shared state is leaked, because threads that hang are left behind with it.
    let shared: &'static CrewState =
        Box::leak(Box::new(CrewState::new(slots, machines, works.len())));
    let hands = start(options, shared, works);
    std::thread::spawn(|| {
        // The content of standard input does not matter, only its end.
        let _ = io::stdin().read_to_end(&mut Vec::new());
        shared.stop();
    });
    while !shared.is_stopping() {
        report(shared, obstacle.as_deref(), false)?;
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
    report(shared, obstacle.as_deref(), true)?;
    Ok(shared.watch.bad_bytes())
}

type Work = Box<dyn FnOnce(&mut Hand<'_>) -> io::Result<()> + Send>;

fn works(options: &Options, vcpus: Vec<Vcpu>) -> io::Result<Vec<Work>> {
    let disk = |number: usize, is_direct| {
        let name = format!("stand-in-{}-{number}.disk", std::process::id());
        RamDisk::new(&options.dir.join(name), is_direct)
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
    works.push(Box::new(host::page_out));
    if !vcpus.is_empty() {
        works.push(Box::new(kvm::kick));
    }
    for vcpu in vcpus {
        works.push(Box::new(|hand| kvm::work(hand, vcpu)));
    }
    Ok(works)
}

/// Starts all threads; one that fails asks the others to end.
fn start(
    options: &Options,
    shared: &'static CrewState,
    works: Vec<Work>,
) -> Vec<JoinHandle<io::Result<()>>> {
    let hands = works.into_iter().enumerate().map(|(seat, work)| {
        let rng = Rng::new(options.seed.wrapping_mul(1000).wrapping_add(seat as u64));
        std::thread::spawn(move || {
            let result = work(&mut Hand { shared, seat, rng });
            if result.is_err() {
                shared.stop();
            }
            result
        })
    });
    hands.collect()
}

/// Prints one line of statistics; `obstacle` is why KVM runs no vCPUs.
fn report(shared: &CrewState, obstacle: Option<&str>, is_last: bool) -> io::Result<()> {
    let kvm = match obstacle {
        Some(why) => format!("\"{}\"", why.replace(['"', '\\'], "'")),
        None => "null".to_owned(),
    };
    let mut out = io::stdout().lock();
    let figures = shared.watch.to_json();
    writeln!(out, "{{\"final\":{is_last},\"kvm_obstacle\":{kvm},{figures}}}")?;
    out.flush()
}
