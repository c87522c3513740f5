//! The sources that scenarios measure, by part of the product.
//!
//! A record is stale when one of its scenario's sources has changed. A part is named where it can
//! change a figure; the scenario's own file comes first.

pub(super) const API: &[&str] = &["crates/api/src", "crates/overbook/src/http"];
/// Rounds and their order.
pub(super) const ARMS: &[&str] = &["crates/lab/src/arms.rs"];
pub(super) const DAEMON: &[&str] =
    &["crates/drivers/src", "crates/overbook/src/daemon", "crates/overbook/src/daemon.rs"];
pub(super) const DISKS: &[&str] = &["crates/disks/src", "crates/pageserver/src"];
/// The instruments of the experiments on groups.
pub(super) const KIM: &[&str] = &["crates/lab/src/arms.rs", "crates/lab/src/kim"];
/// The instruments of the experiments on working sets and balance.
pub(super) const MEB: &[&str] = &["crates/lab/src/arms.rs", "crates/lab/src/meb"];
/// Merging by Overbook and by KSM, and the guests' content.
pub(super) const MERGER: &[&str] = &["crates/lab/src/merger.rs"];
pub(super) const PAGES: &[&str] = &["crates/pages/src"];
pub(super) const POLICY: &[&str] = &["crates/model/src", "crates/policy/src"];
pub(super) const POOL: &[&str] = &["crates/cluster/src", "crates/overbook/src/pool"];
pub(super) const SHIM: &[&str] = &["crates/protocol/src", "crates/shim/src"];
pub(super) const SIM: &[&str] = &["crates/sim/src"];
pub(super) const SYS: &[&str] = &["crates/sys/src"];
pub(super) const TABLES: &[&str] = &["crates/tables/src"];
/// The exact trace, and its reader.
pub(super) const TRACER: &[&str] = &["crates/lab/src/truth", "crates/tracer/src"];
pub(super) const WORKER: &[&str] = &["crates/worker/src"];

/// Policy, daemon, worker and shim.
pub(super) const MANAGED: &[&str] = &joined::<9>(&[POLICY, DAEMON, PAGES, WORKER, SHIM]);

const fn joined<const COUNT: usize>(lists: &[&[&'static str]]) -> [&'static str; COUNT] {
    let (mut all, mut count, mut list) = ([""; COUNT], 0, 0);
    while list < lists.len() {
        let mut at = 0;
        while at < lists[list].len() {
            all[count] = lists[list][at];
            (at, count) = (at + 1, count + 1);
        }
        list += 1;
    }
    assert!(count == COUNT);
    all
}
