//! Runs the fuzz targets of `fuzz/` for as long as a test may take, with random bytes and without
//! a fuzzer's corpus.

mod fuzzed;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_negotiation_never_gives_what_it_may_not(data in bytes()) {
        fuzzed::negotiation(&data);
    }

    #[test]
    fn a_request_that_is_allowed_makes_sense(data in bytes()) {
        fuzzed::requests(&data);
    }

    #[test]
    fn a_client_asks_nothing_without_tls(data in bytes()) {
        fuzzed::dialogue(&data);
    }

    #[test]
    fn a_client_takes_what_it_has_asked_for_alone(data in bytes()) {
        fuzzed::in_flight(&data);
    }

    #[test]
    fn a_server_answers_each_request_once_and_rightly(data in bytes()) {
        fuzzed::serving(&data);
    }
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..600)
}
