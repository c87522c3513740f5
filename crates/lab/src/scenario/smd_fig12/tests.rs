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
    let mut figures = Figures::new(SCENARIO.name, "m".into(), 1, 1);
    add_shares(&mut figures, courses, checked);
    figures
}

fn value(figures: &Figures, name: &str) -> f64 {
    figures.get(name).unwrap().value
}

#[test]
fn both_figures_are_of_what_can_be_shared_in_the_end() {
    let checked = course(&[(1.0, 100, 95), (90.0, 400, 400)]);
    let figures = shares(&courses(), &checked);
    assert!((value(&figures, "code_shared_1s") - 0.95).abs() < 1e-9);
    assert!((value(&figures, "code_shared_1s_dynamic") - 0.1).abs() < 1e-9);
    assert!((value(&figures, "code_shared_1s_checked") - 0.2375).abs() < 1e-9);
    assert!((value(&figures, "code_shared_least") - 0.95).abs() < 1e-9);
    assert!((value(&figures, "shared_after_ksm") - 90.0).abs() < 1e-9);
}

#[test]
fn a_look_that_is_missing_or_saw_no_code_is_no_number() {
    for bad in [course(&[(1.0, 100, 95)]), course(&[(1.0, 0, 0), (90.0, 0, 0)]), Course::new()] {
        let mut of_table = courses();
        of_table[0] = bad;
        let figures = shares(&of_table, &of_table[0]);
        assert!(!figures.get("code_shared_1s").unwrap().met());
        assert!(value(&figures, "code_shared_1s_checked").is_nan());
    }
    assert!(value(&shares(&[], &[]), "code_shared_least").is_nan());
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
