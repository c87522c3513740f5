//! The kernel boundary: a safe API over raw system calls and the files of `/proc` and `/sys`.
//!
//! The output of the kernel is parsed strictly and never assumed to exist: a process may vanish
//! between two reads, an older kernel lacks a field, a container hides a file. Each of these is a
//! typed error that names the file.

pub mod cgroup;
pub mod clock;
pub mod confine;
pub mod cpu_time;
pub mod faults;
pub mod features;
pub mod file_lock;
pub mod frames;
pub mod heap;
pub mod kernel_version;
pub mod ksm;
pub mod log;
pub mod mappings;
pub mod meminfo;
pub mod memory_limits;
pub mod memory_map;
pub mod memory_of;
pub mod mergeable;
pub mod no_links;
pub mod outside;
pub mod pagemap;
pub mod peer;
pub mod pool_file;
pub mod pool_maps;
pub mod pressure;
pub mod process;
pub mod procfs;
pub mod random;
pub mod remote_memory;
pub mod seqpacket;
pub mod shared_memory;
pub mod slab;
pub mod swap;
pub mod threads;
pub mod trusted_path;
pub mod tsc;
pub mod userfaultfd;
pub mod users;
