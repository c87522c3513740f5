use super::*;
use crate::{Merged, Pages, Status, Taken, VERSION, VERSIONS};

const TRACKING: Tracking =
    Tracking { granule_pages: 32, hot_set: Some(64), sample: u32::MAX, max_traps_per_s: 500 };

const ZEROS: Merge = Merge { page: 7, pages: 1, content: Content::Zeros };
const LAST_RUN: Merge =
    Merge { page: u32::MAX - 1, pages: 1, content: Content::Slot(MAX_SLOTS - 1) };

fn requests() -> Vec<Request> {
    vec![
        Request::Hello { version: VERSION },
        Request::Track(TRACKING),
        Request::Track(Tracking { hot_set: None, granule_pages: 512, ..TRACKING }),
        Request::Revoke { granules: vec![u32::MAX; MAX_REVOKE] },
        Request::Recall { granules: vec![u32::MAX; MAX_REVOKE] },
        Request::Release,
        Request::Status,
        Request::Pool { slots: MAX_SLOTS },
        Request::Merge { runs: vec![LAST_RUN; MAX_MERGE] },
        Request::Merge { runs: vec![Merge { page: 0, pages: MAX_MERGE_PAGES, ..ZEROS }] },
        Request::Unshare { page: u32::MAX - MAX_UNSHARE, pages: MAX_UNSHARE },
        Request::HandOver { lazily: true },
        Request::Take { runs: vec![Pages { page: u32::MAX - 8, pages: 8 }; MAX_TAKE] },
        Request::Keep { runs: vec![Pages { page: 0, pages: MAX_TAKE_PAGES }] },
        Request::About,
    ]
}

fn region(first_page: u32, pages: u32) -> Region {
    Region { first_page, pages, address: u64::from(first_page) * PAGE_BYTES }
}

fn welcome(regions: Vec<Region>) -> Answer {
    Answer::Welcome { version: VERSION, regions, state: State::Off }
}

fn answers() -> Vec<Answer> {
    let many = (0..512).map(|i| region((u32::MAX >> 10) / 512 * 512 + i * 512, 512)).collect();
    vec![
        welcome(vec![region(0, 1000), region(1024, 512)]),
        welcome(many),
        Answer::Done { count: u32::MAX },
        Answer::Refused(Refusal::Version { shim: 2, worker: 1 }),
        Answer::Refused(Refusal::Kernel { call: "UFFDIO_MOVE".into(), errno: 22 }),
        Answer::Status(Status {
            state: State::On(TRACKING),
            generation: 1,
            staging: vec![u64::MAX; 2],
        }),
        Answer::Status(Status {
            state: State::Suspended { why: "fuse".into() },
            generation: 1,
            staging: Vec::new(),
        }),
        welcome(vec![]),
        Answer::Merged(Merged { shared: u32::MAX, no_room: 1, ..Merged::default() }),
        Answer::Taken(Taken { taken: 1, gone: 2, kept: u32::MAX }),
        Answer::About { release: "1.2.3".to_owned() },
    ]
}

/// A number that this answer may have.
fn number(answer: &Answer) -> u32 {
    if matches!(answer, Answer::Welcome { .. }) { HELLO } else { 300 }
}

#[test]
fn a_number_is_hellos_alone_or_missing() {
    let refused = |packet: Vec<u8>| Answer::decode(&packet).is_err();
    assert!(refused(Answer::Done { count: 1 }.encode(HELLO).unwrap()));
    assert!(refused(welcome(vec![]).encode(1).unwrap()));
    let mut packet = Request::Hello { version: VERSION }.encode(HELLO).unwrap();
    packet.push(1);
    assert!(matches!(Request::decode(&packet), (HELLO, Err(Refusal::Malformed { .. }))));
    let packet = Request::Status.encode(HELLO).unwrap();
    assert!(matches!(Request::decode(&packet), (HELLO, Err(Refusal::Malformed { .. }))));
    let refusal = Answer::Refused(Refusal::Busy { pid: 1 });
    assert_eq!(Answer::decode(&refusal.encode(HELLO).unwrap()), Ok((HELLO, refusal)));
}

#[test]
fn every_message_comes_back_as_it_went_even_the_longest() {
    for request in requests() {
        for id in [1, 200, u32::MAX] {
            let packet = request.encode(id).unwrap();
            assert_eq!(Request::decode(&packet), (request.numbered(id), Ok(request.clone())));
        }
    }
    for answer in answers() {
        let id = number(&answer);
        assert_eq!(Answer::decode(&answer.encode(id).unwrap()), Ok((id, answer)));
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// All requests, each with the bytes that it has in every version, and the version that added it.
#[test]
fn no_request_ever_changes_its_bytes() {
    let pages = || vec![Pages { page: 300, pages: 2 }];
    let run = |content| Merge { page: 300, pages: 2, content };
    let all = [
        (Request::Hello { version: 300 }, "00ac02", 9),
        (Request::Track(TRACKING), "01200140ffffffff0ff40309", 9),
        (Request::Track(Tracking { hot_set: None, ..TRACKING }), "012000ffffffff0ff40309", 9),
        (Request::Revoke { granules: vec![1, 300] }, "020201ac0209", 9),
        (Request::Recall { granules: vec![1, 300] }, "030201ac0209", 9),
        (Request::Release, "0409", 9),
        (Request::Status, "0509", 9),
        (Request::Pool { slots: 300 }, "06ac0209", 9),
        (
            Request::Merge { runs: vec![run(Content::Zeros), run(Content::Slot(7))] },
            "0702ac020200ac0202010709",
            9,
        ),
        (Request::Unshare { page: 300, pages: 2 }, "08ac020209", 9),
        (Request::HandOver { lazily: true }, "090109", 9),
        (Request::Take { runs: pages() }, "0a01ac020209", 9),
        (Request::Keep { runs: pages() }, "0b01ac020209", 9),
        (Request::About, "0c09", 10),
    ];
    for (request, bytes, since) in all {
        assert_eq!(hex(&request.encode(9).unwrap()), bytes, "{request:?}");
        assert_eq!(request.since(), since, "{request:?}");
    }
}

/// The same for all answers, refusals and states.
#[test]
fn no_answer_ever_changes_its_bytes() {
    let why = || "w".to_owned();
    let welcome = |state| Answer::Welcome { version: 9, regions: vec![region(512, 8)], state };
    let status = |state| Answer::Status(Status { state, generation: 3, staging: vec![4096] });
    let invalid = || Refusal::Invalid { field: why(), value: 300, valid: why() };
    let merged = Merged { shared: 1, dropped: 2, different: 3, kept: 4, no_room: 5 };
    let all = [
        (welcome(State::Off), "0009018004088080800100", 9),
        (welcome(State::On(TRACKING)), "0009018004088080800101200140ffffffff0ff403", 9),
        (welcome(State::Suspended { why: why() }), "00090180040880808001020177", 9),
        (welcome(State::Unsupported { why: why() }), "00090180040880808001030177", 9),
        (Answer::Done { count: 300 }, "01ac0209", 9),
        (Answer::Refused(Refusal::Version { shim: 1, worker: 300 }), "020001ac0209", 9),
        (Answer::Refused(Refusal::Malformed { length: 300 }), "0201ac0209", 9),
        (Answer::Refused(invalid()), "02020177ac02017709", 9),
        (Answer::Refused(Refusal::NotMerging { why: why() }), "0203017709", 9),
        (Answer::Refused(Refusal::NotTracking { why: why() }), "0204017709", 9),
        (Answer::Refused(Refusal::Busy { pid: 300 }), "0205ac0209", 9),
        (Answer::Refused(Refusal::NotPermitted { uid: 300 }), "0206ac0209", 9),
        (Answer::Refused(Refusal::Kernel { call: why(), errno: -1 }), "020701770109", 9),
        (Answer::Refused(Refusal::NotTaking { why: why() }), "0208017709", 9),
        (status(State::Off), "03000301802009", 9),
        (Answer::Merged(merged), "04010203040509", 9),
        (Answer::Taken(Taken { taken: 1, gone: 2, kept: 3 }), "0501020309", 9),
        (Answer::About { release: why() }, "06017709", 10),
    ];
    for (answer, bytes, since) in all {
        let id = if matches!(answer, Answer::Welcome { .. }) { HELLO } else { 9 };
        assert_eq!(hex(&answer.encode(id).unwrap()), bytes, "{answer:?}");
        assert_eq!(answer.since(), since, "{answer:?}");
    }
}

/// Of every pair of versions: what is sent is known to the other side, and nothing else is.
#[test]
fn a_message_goes_only_to_a_side_that_knows_it() {
    for version in VERSIONS.oldest..=VERSION {
        for request in requests() {
            let is_known = request.since() <= version;
            assert_eq!(request.encode_for(version, 7).is_ok(), is_known, "{request:?}");
        }
        for answer in answers() {
            let is_known = answer.since() <= version;
            let sent = answer.encode_for(version, number(&answer));
            assert_eq!(sent.is_ok(), is_known, "{answer:?}");
        }
    }
    let error = Request::About.encode_for(9, 7).unwrap_err().to_string();
    assert_eq!(error, "a message of version 10 of the protocol; the other side speaks 9");
}

#[test]
fn a_packet_cut_short_or_with_bytes_left_over_is_malformed() {
    for request in requests() {
        let mut packet = request.encode(300).unwrap();
        for length in (0..packet.len()).filter(|length| length % 64 < 8 || *length < 200) {
            let (_, decoded) = Request::decode(&packet[..length]);
            assert!(decoded.is_err(), "{request:?} of {length}");
        }
        packet.push(0);
        let length = u32::try_from(packet.len()).unwrap();
        assert_eq!(Request::decode(&packet), (HELLO, Err(Refusal::Malformed { length })));
    }
    for answer in answers() {
        let mut packet = answer.encode(number(&answer)).unwrap();
        for length in (0..packet.len()).filter(|length| length % 64 < 8 || *length < 200) {
            let decoded = Answer::decode(&packet[..length]);
            // Without its number a refusal belongs to no request.
            let is_refusal = matches!(decoded, Ok((HELLO, Answer::Refused(_))));
            assert!(is_refusal || decoded.is_err(), "{answer:?} of {length}");
        }
        packet.push(0);
        assert_eq!(Answer::decode(&packet), Err(WireError::Malformed { length: packet.len() }));
    }
}

#[test]
fn an_oversize_message_is_neither_sent_nor_read() {
    let request = Request::Revoke { granules: vec![u32::MAX; 4000] };
    let error = request.encode(1).unwrap_err();
    assert_eq!(error.to_string(), "a message of 20004 bytes; at most 16384 fit in a packet");
    let packet = postcard::to_stdvec(&request).unwrap();
    assert_eq!(Request::decode(&packet).1, Err(Refusal::Malformed { length: 20_003 }));
}

#[test]
fn a_packet_that_claims_a_huge_list_is_malformed_and_allocates_nothing_to_speak_of() {
    let packet = [2, 0xff, 0xff, 0xff, 0xff, 0x0f, 1, 2, 3];
    assert_eq!(Request::decode(&packet).1, Err(Refusal::Malformed { length: 9 }));
}

#[test]
fn random_packets_are_refused_or_hold_only_valid_values() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut samples: Vec<Vec<u8>> = requests().iter().map(|r| r.encode(7).unwrap()).collect();
    samples.extend(answers().iter().map(|a| a.encode(number(a)).unwrap()));
    for round in 0..50_000 {
        let packet: Vec<u8> = if round % 2 == 0 {
            let mut packet = random.choice(&samples).unwrap().clone();
            for _ in 0..random.usize(1..4) {
                let index = random.usize(..packet.len().min(24));
                packet[index] = random.u8(..);
            }
            packet
        } else {
            let first = random.u8(0..12);
            std::iter::once(first).chain((0..random.usize(0..40)).map(|_| random.u8(..))).collect()
        };
        match Request::decode(&packet).1 {
            Ok(Request::Track(tracking)) => assert_eq!(tracking.check(), Ok(())),
            Ok(Request::Revoke { granules } | Request::Recall { granules }) => {
                assert!((1..=MAX_REVOKE).contains(&granules.len()));
            }
            Ok(Request::Merge { runs }) => {
                assert!(runs.iter().map(|run| run.pages).sum::<u32>() <= MAX_MERGE_PAGES);
                assert!(runs.iter().all(|run| run.pages > 0));
            }
            Ok(Request::Take { runs } | Request::Keep { runs }) => {
                assert!(runs.iter().map(|run| run.pages).sum::<u32>() <= MAX_TAKE_PAGES);
                assert!(runs.iter().all(|run| run.pages > 0));
            }
            _ => {}
        }
        if let Ok((_, Answer::Welcome { regions, .. })) = Answer::decode(&packet) {
            assert_eq!(check_regions(&regions), Ok(()));
        }
    }
}

#[test]
fn a_tracking_out_of_range_names_field_value_and_what_would_do() {
    let refused = |tracking: Tracking| {
        let packet = Request::Track(tracking).encode(1).unwrap();
        Request::decode(&packet).1.unwrap_err().to_string()
    };
    for granule_pages in [0, 3, 33, 1024, 1 << 31] {
        let error = refused(Tracking { granule_pages, ..TRACKING });
        assert_eq!(error, format!("granule_pages: {granule_pages}: a power of two, 1 to 512"));
    }
    let error = refused(Tracking { hot_set: Some(63), ..TRACKING });
    assert_eq!(error, "hot_set: 63: at least 64 granules");
    let error = refused(Tracking { max_traps_per_s: 0, ..TRACKING });
    assert_eq!(error, "max_traps_per_s: 0: at least 1");
    let status = Status {
        state: State::On(Tracking { granule_pages: 3, ..TRACKING }),
        generation: 0,
        staging: Vec::new(),
    };
    let error = Answer::decode(&Answer::Status(status).encode(1).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "answer: granule_pages: 3: a power of two, 1 to 512");
}

#[test]
fn a_revocation_or_recall_of_none_or_too_many_granules_is_refused() {
    for granules in [vec![], vec![1; MAX_REVOKE + 1]] {
        let expected = format!("granules: {}: 1 to 2048 of them", granules.len());
        for request in
            [Request::Revoke { granules: granules.clone() }, Request::Recall { granules }]
        {
            let packet = request.encode(1).unwrap();
            assert_eq!(Request::decode(&packet).1.unwrap_err().to_string(), expected);
        }
    }
}

#[test]
fn regions_that_overlap_are_empty_unaligned_too_many_or_past_the_end_are_refused() {
    let refused = |regions| Answer::decode(&welcome(regions).encode(HELLO).unwrap()).is_err();
    assert!(refused(vec![region(0, 513), region(512, 512)]));
    assert!(refused(vec![region(512, 512), region(0, 512)]));
    assert!(refused(vec![region(0, 0)]));
    assert!(refused(vec![region(100, 512)]));
    assert!(refused(vec![region(512, u32::MAX)]));
    assert!(refused((0..513).map(|i| region(i * 512, 1)).collect()));
    assert!(!refused(vec![region(0, u32::MAX)]));
}

#[test]
fn regions_share_no_address_and_lie_where_memory_can() {
    let refused = |addresses: [u64; 2]| {
        let region = |(i, address)| Region { first_page: i * 512, pages: 512, address };
        let regions = (0_u32..).zip(addresses).map(region).collect();
        Answer::decode(&welcome(regions).encode(HELLO).unwrap()).is_err()
    };
    const LEN: u64 = 512 * PAGE_BYTES;
    assert!(!refused([LEN, 0]), "in any order");
    assert!(refused([0, LEN - PAGE_BYTES]) && refused([LEN, LEN]));
    assert!(refused([0, LEN + 1]), "no page begins there");
    assert!(refused([0, u64::MAX - LEN + 1]) && refused([0, u64::MAX - PAGE_BYTES + 1]));
    assert!(refused([0, (1 << 63) - LEN + PAGE_BYTES]) && !refused([0, (1 << 63) - LEN]));
}

#[test]
fn runs_that_are_empty_too_many_too_long_or_past_the_end_are_refused() {
    let refused = |runs: Vec<Merge>| {
        let packet = Request::Merge { runs }.encode(1).unwrap();
        Request::decode(&packet).1.unwrap_err().to_string()
    };
    assert_eq!(refused(vec![]), "runs: 0: 1 to 512 of them");
    assert_eq!(refused(vec![ZEROS; MAX_MERGE + 1]), "runs: 513: 1 to 512 of them");
    let pages = |pages| Merge { pages, ..ZEROS };
    assert_eq!(refused(vec![ZEROS, pages(0)]), "pages: 0: at least 1, and 4096 in all runs");
    assert!(refused(vec![pages(4000), pages(97)]).starts_with("pages: 97"));
    assert!(refused(vec![pages(u32::MAX), pages(u32::MAX)]).starts_with("pages: 4294967295"));
    assert!(refused(vec![Merge { page: u32::MAX, ..ZEROS }]).starts_with("page: 4294967295"));
    assert!(refused(vec![Merge { pages: 2, page: 0, ..LAST_RUN }]).starts_with("slot: 1073741823"));
}

#[test]
fn pages_to_be_unshared_are_few_and_end_before_the_numbers_do() {
    let refused = |page, pages| {
        let packet = Request::Unshare { page, pages }.encode(1).unwrap();
        Request::decode(&packet).1.unwrap_err().to_string()
    };
    assert_eq!(refused(0, 0), "pages: 0: 1 to 512");
    assert_eq!(refused(0, 513), "pages: 513: 1 to 512");
    assert!(refused(u32::MAX, 1).starts_with("page: 4294967295"));
}

#[test]
fn a_pool_without_slots_or_with_too_many_is_refused() {
    for slots in [0, MAX_SLOTS + 1, u32::MAX] {
        let packet = Request::Pool { slots }.encode(1).unwrap();
        let error = Request::decode(&packet).1.unwrap_err().to_string();
        assert_eq!(error, format!("slots: {slots}: 1 to 2^30"));
    }
}

#[test]
fn pages_to_be_taken_are_few_and_end_before_the_numbers_do() {
    let refused = |runs: Vec<(u32, u32)>| {
        let runs = runs.into_iter().map(|(page, pages)| Pages { page, pages }).collect();
        let packet = Request::Take { runs }.encode(1).unwrap();
        Request::decode(&packet).1.unwrap_err().to_string()
    };
    assert_eq!(refused(vec![]), "runs: 0: 1 to 512 of them");
    assert_eq!(refused(vec![(0, 1); MAX_TAKE + 1]), "runs: 513: 1 to 512 of them");
    assert_eq!(refused(vec![(7, 0)]), "pages: 0: at least 1, and 4096 in all runs");
    assert!(refused(vec![(0, 4096), (9, 1)]).starts_with("pages: 1: "));
    assert!(refused(vec![(u32::MAX, 1)]).starts_with("page: 4294967295"));
}
