//! What the fuzz target of `fuzz/` does, for as long as a test may take: with random bytes, and
//! without what a fuzzer has learned.

mod fuzzed;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_table_that_is_read_holds_what_it_says(data in bytes()) {
        fuzzed::tables(&data);
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..600)
}
