//! The settings and the outcome of a run.

use model::{Bytes, OverloadSpec};

/// The VMs of the paper's example (Williams 2011 §4.2): promised 1,024 MB, given 640, overloaded
/// for 16 % of the time. All experiments with these VMs take the numbers from here.
pub mod example {
    use model::Bytes;

    /// Memory that each was promised.
    pub const PROMISED: Bytes = Bytes::mib(1024);
    /// Memory that each is given.
    pub const GIVEN: Bytes = Bytes::mib(640);
    /// Mean share of time in which one is overloaded.
    pub const OVERLOADED: f64 = 0.16;
    /// Share of that in transient overloads, which last less than a minute.
    pub const TRANSIENT: f64 = 0.96;
}

/// The remedies for overloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Short overloads go to other hosts' memory, VMs with long ones are migrated.
    Both,
    /// Each overloaded VM is migrated at once.
    Migrate,
    /// All overloads go to other hosts' memory, however long they are.
    Swap,
}

/// The space for remedies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Excess {
    /// All memory that no VM was given without a remedy is free.
    Idle,
    /// Hosts have granted it to their VMs: nothing is free.
    Granted,
    /// Hosts keep the shares of [`policy::excess::share_out`], with this certainty.
    Kept(f64),
}

/// The settings of a pool.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Number of hosts.
    pub hosts: usize,
    /// VMs on each of them in the beginning.
    pub vms_per_host: usize,
    /// Memory of each host, without its reserve.
    pub memory: Bytes,
    /// Memory that each VM was promised.
    pub promised: Bytes,
    /// Memory that each VM is given without a remedy.
    pub given: Bytes,
    /// Mean share of time in which a VM is overloaded.
    pub overloaded: f64,
    /// Paging of each overloaded VM in pages a second, in and out together.
    pub pages_per_s: u64,
    /// The limits from which on an overload is sustained.
    pub overload: OverloadSpec,
    /// Whether these limits are learned from a VM's short overloads.
    pub learns: bool,
    /// Share of hosts that misbehave.
    pub misbehaving: f64,
    /// Time of calm after which a VM gives back the memory that it got for an overload, in seconds.
    pub calm_s: u64,
    /// The strategy against overloads.
    pub strategy: Strategy,
    /// The space for remedies.
    pub excess: Excess,
}

/// The outcome of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// VM seconds of overload.
    pub overloaded_s: u64,
    /// Those in which other hosts' memory took the paging, in overloads that were not sustained.
    pub short_s: u64,
    /// Those in which other hosts' memory took the paging of sustained overloads: too slow for too
    /// long.
    pub long_s: u64,
    /// Those in which a disk took the paging: other hosts had no room, or the strategy only
    /// migrates.
    pub disk_s: u64,
    /// VMs that changed hosts.
    pub moves: u64,
    /// Moves that failed: the target had less free memory than it reported, or no longer had it.
    pub failed: u64,
    /// Bytes sent over the network.
    pub traffic: Bytes,
    /// Most memory that lay in repositories at once.
    pub most_swapped: Bytes,
    /// Memory that remedies took at other hosts, in byte seconds.
    pub excess_byte_s: u64,
    /// The same, less the memory that moved VMs set free at the hosts that they left.
    pub net_byte_s: u64,
    /// Most memory that remedies took at once.
    pub excess_most: Bytes,
    /// Overloads that began while the VM had less memory than promised.
    pub overloads: u64,
    /// Those of two minutes or more.
    pub long_ones: u64,
    /// VM seconds that these paged, until they ended or the VM got its memory.
    pub long_wait_s: u64,
    /// Moves for an overload of less than two minutes.
    pub needless: u64,
    /// Moves for an overload for which there had been a move already.
    pub second_moves: u64,
    /// Intervals of the run.
    pub intervals: u64,
    /// Intervals in which an overload found no room in repositories.
    pub without_pages: u64,
    /// Intervals in which a VM in sustained overload found no host with room for a move.
    pub without_target: u64,
}
