//! The workloads of the experiments' guests: ten that stand for the paper's SPEC, DaCapo and
//! CloudSuite programs, one for each pattern of memory use.
//!
//! | name | pattern | stands for |
//! |-|-|-|
//! | `random` | uniformly random words of a large set: the worst case for any trap | 429.mcf, 471.omnetpp |
//! | `records` | random records of 64 KiB | 433.milc |
//! | `kv` | Zipf popularity, keys scattered | Data Serving |
//! | `graph` | a scan and a skewed random pattern, then a search | Graph Analytics |
//! | `matrix` | blocks used over and over | 410.bwaves, 416.gamess |
//! | `scan` | sweep after sweep: the enemy of every LRU | 462.libquantum |
//! | `phases` | one part of its memory at a time, then the next | 459.GemsFDTD, DaCapo |
//! | `sort` | builds text, sorts runs, merges, frees, begins again | 401.bzip2, Data Analytics |
//! | `wordcount` | reads text once, keeps a table, begins again | Data Analytics |
//! | `web` | random pages by request, with bursts | Web Serving |

use model::Bytes;

use crate::machine::MachineSpec;

/// Memory of each guest.
pub const MEMORY: Bytes = Bytes::mib(256);

/// A workload and its command line in the guest.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// Its name in figures.
    pub name: &'static str,
    pub command: &'static str,
}

/// All workloads. Two neighbours in the list run side by side, so a busy one is next to a calm
/// one where possible.
pub const ALL: [Workload; 10] = [
    Workload { name: "random", command: "random-array --mb 160" },
    Workload { name: "kv", command: "kv --mb 120" },
    Workload { name: "records", command: "random-array --mb 100 --record-kb 64" },
    Workload { name: "phases", command: "phases --mb 160 --parts 4 --length 20" },
    Workload { name: "graph", command: "graph --mb 120" },
    Workload { name: "matrix", command: "matrix --mb 60" },
    Workload { name: "scan", command: "scan --mb 120" },
    Workload { name: "sort", command: "sort --mb 60 --repeat" },
    Workload { name: "wordcount", command: "wordcount --mb 100 --repeat" },
    Workload { name: "web", command: "web --mb 140" },
];

impl Workload {
    /// The guest that runs it, with the shim, on the CPU for its place among the guests that run
    /// side by side.
    pub fn guest(&self, place: usize, seed: u64) -> MachineSpec {
        let spec = MachineSpec::new(self.name, "meb", MEMORY, MEMORY, self.command);
        MachineSpec { seed, shim: true, cpus: cpu_of(place), ..spec }
    }
}

/// The CPU for this place among guests that run side by side; any CPU where there is only one.
pub fn cpu_of(place: usize) -> Vec<usize> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus > 1 { vec![place % cpus] } else { Vec::new() }
}

/// Number of guests that run side by side.
pub const SIDE_BY_SIDE: usize = 2;
