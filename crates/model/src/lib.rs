//! The data types of Overbook, without behaviour.
//!
//! All crates share these types: the drivers fill a [`HostView`], the policy turns it into a
//! [`Plan`], the drivers carry the plan out, and the user reads the same [`Reason`]s that the
//! tests assert. Units are types ([`Bytes`], [`Time`], [`Millis`]), names are types ([`VmName`],
//! [`GroupName`]), and configuration is validated once, into a [`Spec`] that cannot be wrong.
//!
//! Architecture invariant: this crate needs no other crate of the workspace and touches neither
//! clock, file, socket nor thread. A crate that needs one of those implements a port ([`ports`]).

pub mod cluster;
pub mod cold;
pub mod config;
pub mod date;
pub mod dedup;
mod disk;
pub mod free_pages;
pub mod ksm;
pub mod libvirt;
pub mod names;
mod overload;
mod pauses;
pub mod plan;
pub mod ports;
pub mod proxmox;
pub mod reason;
mod shim;
pub mod spec;
pub mod tracking;
pub mod units;
pub mod view;
pub mod words;

pub use cold::{Cold, ColdSpec};
pub use dedup::{Dedup, DedupSpec, PagesPerMs};
pub use disk::{CacheReading, DiskReading, RepositoriesReading};
pub use free_pages::{FreePages, FreePagesSpec};
pub use ksm::{KsmOrder, KsmReading, KsmRefusal, KsmSpec, Mergeable};
pub use names::{GroupName, HostName, NamePattern, VmName};
pub use overload::{Learned, Overload, OverloadSpec, Profile, Severity, Together};
pub use pauses::{Hold, Pauses, Scope};
pub use plan::{Action, Decision, Ledger, Loan, Means, Plan, Quota, Scan, Take};
pub use reason::Reason;
pub use shim::ShimVersion;
pub use spec::{GroupSpec, Mode, Policy, Spec, VmLimits};
pub use tracking::{AttachSpec, Tracking, TrackingBudget, WorkerReading};
pub use units::{Bytes, Millis, Time};
pub use view::{GuestStats, HostReading, HostView, Link, Migration, Reading, VmView};
