//! The requirements that kinds of machines cannot meet, each with the reason.

use std::path::Path;

use crate::Requirement;

/// A requirement that is not met on one kind of machine.
#[derive(Clone, Copy, Debug)]
pub struct Expected {
    /// The requirement.
    pub need: Requirement,
    /// The reason why that kind of machine cannot meet it.
    pub why: &'static str,
    /// Whether this machine is of that kind, by another sign than the test's own attempt.
    pub is_such_a_machine: fn() -> bool,
}

/// All skips that CI accepts.
pub const EXPECTED: &[Expected] = &[
    Expected {
        need: Requirement::Nbd,
        why: "its kernel has no driver for NBD",
        is_such_a_machine: || !Path::new("/sys/block/nbd0").exists(),
    },
    Expected {
        need: Requirement::Kvm,
        why: "its CPU cannot run virtual machines",
        is_such_a_machine: || {
            let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            !cpus.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
        },
    },
];
