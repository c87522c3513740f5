//! Shares and comparisons of invented samples and pages, without guests.

use super::*;

fn course(looks: &[(f64, u64, u64)]) -> Course {
    looks.iter().map(|&(at, alike, shared)| ScanSample { at, alike, shared }).collect()
}

/// By [`WAYS`]; all code that runs is there from the first look.
fn courses() -> Vec<Course> {
    vec![
        course(&[(1.0, 100, 95), (90.0, 100, 100)]),
        course(&[(1.0, 100, 10), (90.0, 100, 95)]),
        course(&[(1.0, 100, 0), (90.0, 100, 90)]),
    ]
}

fn shares(courses: &[Course], checked: &[ScanSample]) -> Figures {
    Figures::invented(SCENARIO.name, |figures| add_shares(figures, courses, checked))
}

#[test]
fn both_figures_are_of_what_can_be_shared_in_the_end() {
    let checked = course(&[(1.0, 100, 95), (90.0, 400, 400)]);
    let figures = shares(&courses(), &checked);
    figures.assert_near(&[
        ("code_shared_1s", 0.95),
        ("code_shared_1s_dynamic", 0.1),
        ("code_shared_1s_checked", 0.2375),
        ("code_shared_least", 0.95),
        ("shared_after_ksm", 90.0),
    ]);
}

#[test]
fn a_look_that_is_missing_or_saw_no_code_is_no_number() {
    for bad in [course(&[(1.0, 100, 95)]), course(&[(1.0, 0, 0), (90.0, 0, 0)]), Course::new()] {
        let mut of_table = courses();
        of_table[0] = bad;
        let figures = shares(&of_table, &of_table[0]);
        assert!(!figures.met("code_shared_1s"));
        assert!(figures.value("code_shared_1s_checked").is_nan());
    }
    assert!(shares(&[], &[]).value("code_shared_least").is_nan());
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
