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
//! cache  packages  sources      what the distribution has, unpacked privately, made once
//! debian                        a root file system with real programs
//! census  alike                 what guests have their pages for, and which are the same
//! qemu   image  cpio  accel     an emulator, a bootable guest, and what it runs on
//! machine  qmp  metrics        inside one guest: its monitor, its reports, what QEMU loads
//! meb                           what the experiments of MEB (working sets, curves) share
//! kim                           what the experiments of Kim 2014 (group dedup) share
//! smd                           what the experiments of SMD (code that is known before) share
//! truth                         which pages a guest really touched: its exact working set
//! state  lab  keeper  status    many guests: one directory, one parent, one end
//! daemon                        Overbook itself, as a process that can be killed
//! etcd                          the store of a pool of hosts, members of which can be killed
//! nbd_load  nbd_servers         page servers, ours and others, under the same load
//! attack                        neighbours that try to break the walls between tenants
//! virtual_host                  a kernel with KVM of its own, and the lab in it
//! fleet  scenario  recording    which guests, which experiments, what happened second by second
//! figures  report  chart        numbers beside their targets, tables and plots
//! ```
//!
//! **Invariants.** Everything that the lab starts ends with it: on Ctrl-C, on failure, on
//! SIGKILL. The user's system is not changed. State lies in one directory, downloads in one
//! cache.
//!
//! **Leaves out.** Machines other than x86_64, distributions other than Debian.

pub mod accel;
pub mod alike;
pub mod attack;
pub mod autoballoon;
pub mod cache;
pub mod census;
pub mod chart;
pub mod cli;
pub mod command;
pub mod cpio;
pub mod daemon;
pub mod debian;
pub mod etcd;
pub mod figures;
pub mod fleet;
pub mod hosts;
pub mod image;
pub mod inside;
pub mod interrupt;
pub mod keeper;
pub mod kim;
pub mod ksm;
pub mod ksm_trees;
pub mod lab;
pub mod lives;
pub mod machine;
pub mod meb;
pub mod memory_group;
pub mod merger;
pub mod metrics;
mod nbd_load;
mod nbd_servers;
pub mod overload;
pub mod packages;
pub mod pinning;
pub mod pool;
mod program;
pub mod qemu;
pub mod qmp;
pub mod random;
pub mod recording;
pub mod remote_swap;
pub mod report;
pub mod scenario;
pub mod slab;
pub mod slow_disk;
pub mod small_host;
pub mod smd;
pub mod soak;
pub mod sources;
pub mod state;
pub mod status;
pub mod steps;
pub mod stress;
pub mod swap_file;
pub mod takeover;
pub mod threads;
pub mod truth;
pub mod virtual_host;
pub mod worker_process;
pub mod zram;
pub mod zswap;

pub use lab::{Lab, LabError, Machine, Provisions};
pub use machine::MachineSpec;
pub use nbd_servers::certificates;
