//! Records of invented rounds, in a tree of their own.

use super::*;

fn facts() -> RunFacts {
    RunFacts {
        commit: Some("0123456789abcdef".into()),
        changed: false,
        date: "2026-11-28T00:00:00Z".into(),
        seconds: 60,
        seed: 1,
        minutes: None,
        runs: 1,
        computer: Computer {
            cores: 2,
            ram_mib: 1024,
            cpu: "c".into(),
            kernel: "6.18".into(),
            qemu: "10.0".into(),
            accelerator: "tcg".into(),
        },
        load: HostLoad { before: 0.1, mean: 1.0, most: 2.0, other_qemus: 0 },
        sources: BTreeMap::new(),
    }
}

/// A record of the figure `f` with one value a round.
fn record(values: &[f64]) -> RunRecord {
    let mut figures = Figures::new("s", "m".into(), 1, 1);
    figures.tell_rounds("f", values.to_vec(), "ratio", "n");
    RunRecord::of("s", facts(), &figures).unwrap()
}

fn standing(values: &[f64], target: Target) -> Standing {
    record(values).standing(&Claim::of("f", "ratio", Some(target), "It holds", &[]))
}

#[test]
fn every_round_stands_in_the_record_and_six_have_an_interval() {
    let few = record(&[3.0, 1.0, 2.0]);
    assert_eq!(few.figures["f"].rounds, [3.0, 1.0, 2.0]);
    assert_eq!((few.figures["f"].median, few.figures["f"].interval), (2.0, None));
    let many = record(&[1.0, 2.0, 3.0, 4.0, 5.0, 9.0]);
    assert_eq!((many.figures["f"].median, many.figures["f"].interval), (3.5, Some([1.0, 9.0])));
}

#[test]
fn what_was_not_read_in_one_round_is_missing_and_no_number() {
    for unread in [f64::NAN, f64::INFINITY] {
        let record = record(&[1.0, unread]);
        assert!(record.figures.is_empty());
        assert_eq!(record.missing["f"], "no number in 1 of 2 rounds");
        let claim = Claim::of("f", "ratio", Some(Target::AtLeast(0.0)), "It holds", &[]);
        assert_eq!(record.standing(&claim), Standing::NotMeasured);
    }
    assert!(RunRecord::of("s", facts(), &Figures::new("s", "m".into(), 1, 1)).is_err());
}

#[test]
fn a_claim_holds_by_the_worse_end_of_its_interval() {
    let six = [1.0, 2.0, 2.0, 2.0, 2.0, 2.0];
    assert_eq!(standing(&six, Target::AtLeast(1.5)), Standing::NotMet);
    assert_eq!(standing(&six, Target::AtMost(2.0)), Standing::Met);
    assert_eq!(standing(&[1.0, 2.0, 2.0], Target::AtLeast(1.5)), Standing::Met);
    assert_eq!(standing(&[0.0, 0.0, 1.0], Target::Equals(0.0)), Standing::NotMet);
    assert_eq!(standing(&[0.0; 3], Target::Equals(0.0)), Standing::Met);
}

/// A tree with one source, and a scenario that measures it.
fn tree() -> (tempfile::TempDir, SourceTree, Scenario) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.rs"), "1").unwrap();
    let tree = SourceTree::at(dir.path().to_owned());
    let scenario = Scenario {
        name: "s",
        summary: "s",
        measures: &[&["a.rs"]],
        claims: &[],
        run: |_| unreachable!(),
    };
    (dir, tree, scenario)
}

#[test]
fn a_record_is_stale_once_a_source_changes_and_fresh_again_once_it_is_as_before() {
    let (dir, tree, scenario) = tree();
    let freshness = |record: Option<&RunRecord>| Freshness::of(&tree, &scenario, record).unwrap();
    assert_eq!(freshness(None), Freshness::None);
    let mut record = record(&[1.0]);
    record.run.as_mut().unwrap().sources = hashes(&tree, &scenario).unwrap();
    assert_eq!(freshness(Some(&record)), Freshness::Fresh);
    std::fs::write(dir.path().join("a.rs"), "2").unwrap();
    assert_eq!(freshness(Some(&record)), Freshness::Stale(vec!["a.rs".into()]));
    std::fs::write(dir.path().join("a.rs"), "1").unwrap();
    assert_eq!(freshness(Some(&record)), Freshness::Fresh);
    record.run = None;
    assert_eq!(freshness(Some(&record)), Freshness::CarriedOver);
}

#[test]
fn a_record_comes_back_as_it_was_written() {
    let (_dir, tree, _) = tree();
    assert_eq!(RunRecord::read(&tree, "s").unwrap(), None);
    let record = record(&[1.0, 2.5]);
    record.write(&tree).unwrap();
    assert_eq!(RunRecord::read(&tree, "s").unwrap(), Some(record));
}

#[test]
fn a_record_that_contradicts_itself_is_refused() {
    let (dir, tree, _) = tree();
    let refused = |change: &dyn Fn(&mut RunRecord), word: &str| {
        let mut record = record(&[1.0, 2.0]);
        change(&mut record);
        let text = serde_json::to_string(&record).unwrap();
        std::fs::create_dir_all(dir.path().join(DIRECTORY)).unwrap();
        std::fs::write(dir.path().join(DIRECTORY).join("s.json"), text).unwrap();
        let error = RunRecord::read(&tree, "s").unwrap_err().to_string();
        assert!(error.contains("s.json") && error.contains(word), "{error}");
    };
    refused(&|record| record.scenario = "t".into(), "record of t");
    refused(&|record| record.figures.get_mut("f").unwrap().median = 9.0, "not those");
    refused(&|record| record.figures.get_mut("f").unwrap().rounds.clear(), "no rounds");
    // JSON has no NaN: it becomes a null, which is no number.
    refused(&|record| record.figures.get_mut("f").unwrap().median = f64::NAN, "null");
}
