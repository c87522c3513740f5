//! The jobs of the guests of a mix.
//!
//! | job | stands for | memory |
//! |-|-|-|
//! | `sort`, `wordcount`, `records` | MapReduce: SORT, WC, and one more | more than the guest has: it swaps |
//! | `later` | NPB BT, then DT: bound by the CPU first, short of memory later | like `cg`, then like `records` |
//! | `master` | the master VM of a MapReduce job | little |
//! | `cg`, `pi` | NPB CG and MapReduce PI: bound by the CPU | much that other guests have as well, and no need of more |
//!
//! A guest of 128 MiB has some 76 MiB for its programs. Guests that are bound by the CPU fill
//! theirs, so that nearly all memory given to the others was found by merging.

use model::Bytes;

use crate::fleet::{BASE, HARD_DISK_IOPS};
use crate::machine::MachineSpec;

const MAX: Bytes = Bytes::mib(384);
const SWAP: Bytes = Bytes::mib(512);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// Its name in figures; the names of its guests add a number.
    pub name: &'static str,
    pub command: &'static str,
}

const fn job(name: &'static str, command: &'static str) -> Job {
    Job { name, command }
}

/// Sorts text that is built anew each time.
pub const SORT: Job = job("sort", "sort --mb 80 --repeat");
/// Counts words of text that is built anew each time.
pub const WORDCOUNT: Job = job("wordcount", "wordcount --mb 90 --repeat");
/// Changes records at random.
pub const RECORDS: Job = job("records", "random-array --mb 110 --record-kb 64");
/// Hands out work: a little of everything, at intervals.
pub const MASTER: Job = job("master", "idle --common-mb 60");
/// Multiplies matrices.
pub const CG: Job = job("cg", "matrix --mb 12 --common-mb 54");
/// Computes digits of pi.
pub const PI: Job = job("pi", "pi --common-mb 66");

/// Computes in little memory for a while, then changes records at random in more memory than it
/// has.
pub const LATER: Job =
    job("later", "random-array --phases 12:110+110:86400 --record-kb 64 --common-mb 54");

/// A group's guests, one for each job, with a swap disk as slow as a hard disk. A guest's seed
/// depends only on its place in the list of jobs, in every mix and setting.
pub fn group(name: &str, jobs: &[Job], seed: u64) -> Vec<MachineSpec> {
    let guest = |(place, job): (usize, &Job)| {
        let number = jobs[..=place].iter().filter(|other| *other == job).count();
        let name_of_guest = format!("{}-{number}", job.name);
        MachineSpec {
            seed: seed + place as u64,
            shim: true,
            ..MachineSpec::new(&name_of_guest, name, BASE, MAX, job.command)
                .with_swap(SWAP, Some(HARD_DISK_IOPS))
        }
    };
    jobs.iter().enumerate().map(guest).collect()
}

/// Two groups' guests, each group on a CPU of its own where there are two. The work that one
/// group gets done then depends on the other one's memory, and not on its CPU time.
pub fn side_by_side(groups: [Vec<MachineSpec>; 2]) -> Vec<MachineSpec> {
    let has_two = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() >= 2);
    let on = |(cpu, guests): (usize, Vec<MachineSpec>)| {
        let cpus = if has_two { vec![cpu] } else { Vec::new() };
        guests.into_iter().map(move |guest| MachineSpec { cpus: cpus.clone(), ..guest })
    };
    groups.into_iter().enumerate().flat_map(on).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_of_one_job_are_numbered_and_all_seeds_are_different() {
        let guests = group("g", &[SORT, CG, SORT], 7);
        let names: Vec<&str> = guests.iter().map(|guest| guest.name.as_str()).collect();
        assert_eq!(names, ["sort-1", "cg-1", "sort-2"]);
        assert_eq!(guests.iter().map(|guest| guest.seed).collect::<Vec<_>>(), [7, 8, 9]);
    }
}
