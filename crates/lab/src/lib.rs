//! The lab: real QEMU guests on this machine, with real workloads, for repeatable experiments.
//!
//! **Problem.** The benefit of memory overbooking, and its safety, show only on real kernels
//! under real pressure. Such an experiment should need no cluster, no installed package and no
//! root.
//!
//! **Idea.** `overbook lab run <scenario>` gets all it needs from the distribution once (a QEMU
//! if the system's is too old, a guest kernel, a busybox), boots guests of 128 MB in two seconds
//! each, runs an experiment and prints figures next to their targets.
//!
//! ```text
//! cache  packages  sources      the distribution's packages, unpacked privately, made once
//! debian                        a root file system with real programs
//! census  alike                 the use of guests' pages, and pages that are the same
//! qemu   image  cpio  accel     an emulator, a bootable guest, and its accelerator
//! machine  qmp  metrics         one guest: its command line, its monitor, its reports
//! meb                           common parts of the experiments of MEB (working sets, curves)
//! kim                           common parts of the experiments of Kim 2014 (group dedup)
//! smd                           common parts of the experiments of SMD (code known before)
//! truth                         pages that a guest really touched: its exact working set
//! state  lab  keeper  status    many guests: one directory, one parent, one end
//! daemon                        Overbook itself, as a process that can be killed
//! etcd                          the store of a pool of hosts, whose members can be killed
//! pool  takeover  own_memory    several hosts on one machine: directories with real daemons
//! nbd_load  nbd_servers         page servers, ours and others, under the same load
//! attack                        neighbours that try to break the isolation of tenants
//! virtual_host                  an emulated machine with a kernel that has KVM, for the lab
//! fleet  scenario  recording    guests, experiments, and their record second by second
//! arms                          an experiment under several set-ups, round after round
//! figures  report  chart        numbers with their targets, tables and plots
//! evidence                      claims, their records, and CLAIMS.md
//! ```
//!
//! **Invariants.** Everything that the lab starts ends with it: on Ctrl-C, on failure, on
//! SIGKILL. The user's system is not changed. State lies in one directory, downloads in one
//! cache.
//!
//! **Leaves out.** Machines other than x86_64, distributions other than Debian.

#![expect(unreachable_pub, reason = "in a private module it says the same as `pub(crate)`")]

pub mod accel;
pub mod alike;
mod arms;
pub mod attack;
mod autoballoon;
mod background;
pub mod cache;
mod census;
mod chart;
pub mod cli;
pub mod command;
mod cpio;
pub mod daemon;
pub mod debian;
pub mod etcd;
mod evidence;
mod figures;
pub mod fleet;
mod hosts;
pub mod image;
mod inside;
mod interrupt;
mod keeper;
mod kim;
pub mod ksm;
mod ksm_trees;
pub mod lab;
mod lives;
pub mod machine;
mod meb;
pub mod memory_group;
pub mod merger;
mod metrics;
mod nbd_load;
mod nbd_servers;
mod overload;
mod own_memory;
pub mod packages;
mod page;
mod pinning;
mod pool;
mod program;
pub mod qemu;
pub mod qmp;
mod random;
mod recording;
pub mod remote_swap;
mod report;
pub mod scenario;
mod slab;
mod slow_disk;
mod small_host;
mod smd;
mod soak;
mod sources;
mod state;
mod status;
pub mod steps;
pub mod stress;
mod swap_file;
pub mod takeover;
mod threads;
pub mod truth;
pub mod virtual_host;
mod worker_process;
pub mod zram;
mod zswap;

pub use lab::{Lab, LabError, Machine, Provisions};
pub use machine::MachineSpec;
pub use nbd_servers::certificates;
