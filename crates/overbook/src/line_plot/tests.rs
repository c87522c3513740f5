//! Pictures by their parts.

use super::*;
use crate::markup::{channels, contrast};

fn plot(names: &[&str]) -> LinePlot {
    let points: Vec<(f64, f64)> =
        (0_u32..100).map(|at| (f64::from(at), f64::from(at % 10))).collect();
    let line = |name: &&str| PlotLine { name: (*name).to_owned(), points: points.clone() };
    LinePlot {
        title: "memory of <each> guest".to_owned(),
        x: PlotAxis::linear("seconds"),
        y: PlotAxis::logarithmic("operations/s"),
        lines: names.iter().map(line).collect(),
        marks: vec![(10.0, "observe".to_owned()), (12.0, "enforce".to_owned())],
    }
}

#[test]
fn a_picture_has_its_words_in_both_sizes() {
    for size in [PlotSize::Wide, PlotSize::Narrow] {
        let svg = plot(&["web-1", "web-2"]).svg(size);
        for words in [
            "memory of &lt;each&gt;",
            ">web-1</text>",
            ">web-2</text>",
            ">seconds</text>",
            ">operations/s (logarithmic)</text>",
            ">observe</text>",
            "prefers-color-scheme:dark",
        ] {
            assert!(svg.contains(words), "{words} is missing in\n{svg}");
        }
        assert!(!svg.contains("<each>"), "{svg}");
    }
}

#[test]
fn lines_that_lie_on_each_other_differ_in_dash_and_marks() {
    let svg = plot(&["a", "b", "c", "d", "e"]).svg(PlotSize::Wide);
    // Of each line one stands in the plot and one in the legend.
    let dashed = svg.matches("<polyline").count() - svg.matches("stroke-dasharray=\"").count();
    assert_eq!((svg.matches("<polyline").count(), dashed), (10, 2), "one line is solid");
    let marks: std::collections::BTreeSet<&str> = svg
        .lines()
        .filter(|line| line.contains("p-shape") && !line.contains("<style"))
        .filter_map(|line| line.split("d=\"M").nth(1)?.split(' ').next())
        .collect();
    assert_eq!(marks.len(), 5 * 8, "no mark lies on another one");
}

#[test]
fn a_single_line_needs_no_legend_and_none_at_all_no_line() {
    let svg = plot(&["web-1"]).svg(PlotSize::Wide);
    assert!(!svg.contains(">web-1</text>") && svg.contains("web-1\">"), "{svg}");
    assert!(plot(&[]).svg(PlotSize::Narrow).ends_with("</svg>\n"));
}

#[test]
fn names_of_marks_do_not_lie_on_each_other() {
    let marks = [(10.0, "observe".to_owned()), (12.0, "enforce".to_owned()), (99.0, "end".into())];
    let placed = staggered(&marks, |at| at * 8.0, 800.0);
    let levels: Vec<u32> = placed.iter().map(|mark| mark.level).collect();
    assert_eq!(levels, [0, 1, 0]);
    assert!(placed[2].from + 3.0 * LETTER <= 800.0, "it ends within the picture");
}

#[test]
fn every_line_can_be_seen_on_both_grounds() {
    for (light, dark) in COLOURS {
        let on_light = contrast(channels(light), channels(GROUNDS.0));
        let on_dark = contrast(channels(dark), channels(GROUNDS.1));
        assert!(on_light >= 4.5 && on_dark >= 4.5, "{light} {on_light}, {dark} {on_dark}");
    }
}
