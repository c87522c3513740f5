//! The steps during which a kernel call fails. A worker, QEMU or the guest may take each of them.

use crate::bed::{Bed, FULL, PAGES, ZEROS};

pub(crate) type Step = (&'static str, fn(&mut Bed));

pub(crate) struct FaultScenario {
    pub(crate) name: &'static str,
    /// Whether it needs a process in which nothing was done yet.
    pub(crate) is_fresh: bool,
    pub(crate) steps: &'static [Step],
}

const fn scenario(name: &'static str, steps: &'static [Step]) -> FaultScenario {
    FaultScenario { name, is_fresh: false, steps }
}

/// Granules of 32 pages.
const GRANULES: std::ops::Range<u32> = 0..8;

pub(crate) const ALL: &[FaultScenario] = &[
    FaultScenario {
        name: "beginning",
        is_fresh: true,
        steps: &[
            ("plug", |bed| {
                bed.plug();
                bed.fill();
            }),
            ("meet", Bed::meet),
            ("pool", |bed| {
                bed.fill_pool();
                bed.use_pool();
            }),
            ("merge", |bed| {
                bed.merge(256..288);
            }),
            ("track", |bed| bed.track()),
            ("revoke", |bed| bed.revoke(GRANULES)),
            ("write", |bed| bed.stamp(260..261, 2)),
            ("read", |bed| bed.check(0..64)),
        ],
    },
    scenario(
        "tracking",
        &[
            ("track", |bed| bed.track()),
            ("revoke", |bed| bed.revoke(GRANULES)),
            ("read", |bed| bed.check(0..64)),
            ("write", |bed| bed.stamp(64..66, 3)),
            ("recall", |bed| bed.recall(3..4)),
            ("discard staged", |bed| bed.discard(130..162)),
            ("read a hole", |bed| bed.check(120..170)),
            ("read an empty block", |bed| bed.check(600..601)),
            ("revoke again", |bed| bed.revoke(0..3)),
            ("release", |bed| bed.release()),
        ],
    ),
    scenario(
        "recalling",
        &[
            ("track", |bed| bed.track()),
            ("revoke", |bed| bed.revoke(0..4)),
            ("recall", |bed| bed.recall(3..4)),
            ("release", |bed| bed.release()),
        ],
    ),
    scenario(
        "merging",
        &[
            ("merge", |bed| {
                let merged = bed.merge(ZEROS.start..192);
                assert!(!bed.strict || merged == 192 - ZEROS.start, "{merged} merged");
            }),
            ("write", |bed| bed.stamp(150..151, 2)),
            ("merge more", |bed| {
                bed.merge(200..232);
            }),
            ("write near", |bed| bed.stamp(151..153, 2)),
            ("discard merged", |bed| bed.discard(204..208)),
            ("read", |bed| bed.check(ZEROS.start..256)),
            ("unshare", |bed| bed.unshare(0, FULL)),
        ],
    ),
    scenario(
        "merging and tracking",
        &[
            ("track", |bed| bed.track()),
            ("merge", |bed| {
                bed.merge(ZEROS.start..176);
            }),
            ("revoke", |bed| bed.revoke(5..7)),
            ("write beside staged", |bed| bed.stamp(170..171, 2)),
            ("discard merged", |bed| bed.discard(140..144)),
            ("revoke again", |bed| bed.revoke(5..6)),
            ("unshare", |bed| bed.unshare(0, FULL)),
            ("read", |bed| bed.check(ZEROS.start..200)),
            ("release", |bed| bed.release()),
        ],
    ),
    scenario(
        "freeing",
        &[
            ("hand over", |bed| bed.hand_over(true)),
            ("free", |bed| bed.free(32..96)),
            ("take", |bed| bed.take(32..64)),
            ("track", |bed| bed.track()),
            ("take tracked", |bed| bed.take(64..80)),
            ("read", |bed| bed.check(32..70)),
            ("write", |bed| bed.stamp(70..82, 2)),
            ("fill a block", |bed| bed.stamp(FULL..PAGES, 2)),
            ("free a block", |bed| bed.free(FULL..PAGES)),
            ("take a block", |bed| bed.take(FULL..PAGES)),
            ("write to the block", |bed| bed.stamp(FULL + 10..FULL + 12, 4)),
            ("release", |bed| bed.release()),
        ],
    ),
    scenario(
        "the worker's end",
        &[
            ("merge", |bed| {
                bed.merge(128..160);
            }),
            ("track", |bed| bed.track()),
            ("revoke", |bed| bed.revoke(0..3)),
            ("end", Bed::lose_worker),
            ("write", |bed| bed.stamp(130..134, 2)),
            ("pool", |bed| bed.use_pool()),
        ],
    ),
    scenario(
        "QEMU's own userfaultfd",
        &[
            ("merge", |bed| {
                bed.merge(128..160);
            }),
            ("track", |bed| bed.track()),
            ("revoke", |bed| bed.revoke(0..3)),
            ("register", |bed| {
                bed.stand_in.expect("register 0");
            }),
            ("read", |bed| bed.check(0..FULL)),
            ("write", |bed| bed.stamp(130..134, 2)),
            ("unregister", |bed| {
                bed.stand_in.expect("unregister 0");
            }),
        ],
    ),
];
