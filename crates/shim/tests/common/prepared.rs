//! A stand-in with pages that can be merged.

use protocol::Answer;
use sys::pool_file::PoolFile;

use super::{StandIn, TestWorker};

pub(crate) const MIB: u32 = 64;
pub(crate) const SLOTS: u32 = 4096;

/// A stand-in, and a pool that holds the content of its first `pages` pages, from slot 100 on.
pub(crate) struct Prepared {
    pub(crate) stand_in: StandIn,
    pub(crate) worker: TestWorker,
    pub(crate) pool: PoolFile,
}

pub(crate) fn prepared(pages: u32) -> Prepared {
    prepared_in(StandIn::new(), pages)
}

/// The same for a stand-in that has no memory yet.
pub(crate) fn prepared_in(mut stand_in: StandIn, pages: u32) -> Prepared {
    stand_in.expect(&format!("plug {MIB}"));
    stand_in.expect("fill 0 1");
    let worker = TestWorker::meet(&stand_in);
    let pool = PoolFile::create("overbook-test", SLOTS).unwrap();
    for page in 0..pages {
        pool.write(100 + page, &stand_in.page(&worker, page)).unwrap();
    }
    assert_eq!(worker.use_pool(&pool, SLOTS), Answer::Done { count: 0 });
    Prepared { stand_in, worker, pool }
}
