//! Runs the fuzz target of `fuzz/` for the short time that a test may take: with random bytes,
//! and with the corpus by which a fuzzer has reached every branch (`fuzzed/corpus/tables/`).

mod fuzzed;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_table_that_is_read_holds_what_it_says(data in bytes()) {
        fuzzed::tables(&data);
    }
}

#[test]
fn what_a_fuzzer_has_found_is_read_as_well() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fuzzed/corpus/tables");
    let files = std::fs::read_dir(corpus).expect("it is in the tree");
    let read = files.map(|file| std::fs::read(file.expect("it is there").path()));
    let read = read.map(|data| fuzzed::tables(&data.expect("it can be read"))).count();
    assert!(read > 30, "{read}");
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..600)
}
