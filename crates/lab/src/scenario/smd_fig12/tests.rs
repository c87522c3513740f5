//! Shares and comparisons of invented samples and pages, without guests.

use super::*;

fn course(looks: &[(f64, u64, u64)]) -> Course {
    looks.iter().map(|&(at, alike, shared)| ScanSample { at, alike, shared }).collect()
}

/// All code that runs is there from the first look.
fn courses() -> Vec<(&'static str, Course)> {
    vec![
        ("static", course(&[(1.0, 100, 95), (90.0, 100, 100)])),
        ("dynamic", course(&[(1.0, 100, 10), (90.0, 100, 95)])),
        ("ksm", course(&[(1.0, 100, 0), (90.0, 100, 90)])),
        (CHECKED, course(&[(1.0, 100, 95), (90.0, 400, 400)])),
    ]
}

fn shares(courses: Vec<(&'static str, Course)>) -> Figures {
    Figures::invented(SCENARIO.name, |figures| add_shares(figures, &Arms(vec![courses])))
}

#[test]
fn both_figures_are_of_what_can_be_shared_in_the_end() {
    shares(courses()).assert_near(&[
        ("code_shared_1s", 0.95),
        ("code_shared_1s_dynamic", 0.1),
        ("code_shared_1s_checked", 0.2375),
        ("code_shared_least", 0.95),
        ("shared_after_ksm", 90.0),
    ]);
}

#[test]
fn a_look_that_is_missing_or_saw_no_code_is_no_number() {
    for bad in [&[(1.0, 100, 95)][..], &[(1.0, 0, 0), (90.0, 0, 0)], &[]] {
        let mut of_table = courses();
        (of_table[0].1, of_table[3].1) = (course(bad), course(bad));
        let figures = shares(of_table);
        assert!(!figures.met("code_shared_1s"));
        assert!(figures.value("code_shared_1s_checked").is_nan());
    }
    assert!(shares(Vec::new()).value("code_shared_least").is_nan());
}

#[test]
fn an_index_reads_each_page_once_and_each_equal_pair_once_more() {
    let page = |fill: u8| GuestPage { address: 0, frame: 0, content: Box::new([fill; 4096]) };
    let pages = [page(1), page(2), page(1), page(1)];
    let counted = with_index(&pages);
    // The second equal page: with its twin, and both with their slot. The third: with the slot.
    assert_eq!((counted.all, counted.futile), (4, 0));
    assert_eq!(counted.bytes, (pages.len() as u64 + 4) * 4096);
}
