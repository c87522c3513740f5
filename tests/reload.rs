//! A configuration that takes much is announced, confirmed, and waits for its time of grace.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::{MachineSpec, fleet};
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage};

#[test]
fn a_reload_that_takes_much_is_shown_first_confirmed_and_waits() {
    let guest = MachineSpec::new("guest", "shop", MAX, MAX, "verify --mb 150")
        .with_swap(Bytes::mib(128), None);
    let Some(stage) = Stage::start(Mode::Enforce, &[guest]) else { return };
    fleet::wait_until_filled(&stage.lab, 120).unwrap();
    let error = |stage: &Stage| stage.host()["config_error"].as_str().unwrap_or("").to_owned();
    let before = std::fs::read_to_string(stage.config()).unwrap();

    // The guest has all of its memory, and its group pays for half of it from now on.
    stage.configure(&[
        ("grace_s = 0", "grace_s = 60"),
        ("base = \"262144KiB\"", "base = \"131072KiB\""),
        ("policy = \"demand\"\n", "policy = \"demand\"\nbudget = \"128MiB\"\n"),
    ]);
    stage.until("the reload waits", |stage| error(stage).contains("more than a tenth"));
    assert!(error(&stage).contains("from guest within"), "{}", error(&stage));
    let shown = stage.says(&["check", "--diff"]);
    assert!(shown.contains("would take") && shown.contains("from guest within"), "{shown}");
    assert_eq!(stage.balloon("guest"), MAX);

    let said = stage.says(&["reload", "--yes"]);
    assert!(said.contains("the configuration is in force: changed: [host]"), "{said}");
    assert_eq!(error(&stage), "");
    stage.until("it is said why nothing is taken yet", |stage| {
        stage.says(&["explain", "guest"]).contains("nothing is taken for another")
    });
    assert_eq!(stage.balloon("guest"), MAX);

    // Back, and the same once more: a second reload confirms it, and without grace it is done.
    let wanted = std::fs::read_to_string(stage.config()).unwrap();
    std::fs::write(stage.config(), before).unwrap();
    let said = stage.says(&["reload"]);
    assert!(said.contains("[group.shop]"), "{said}");
    std::fs::write(stage.config(), wanted).unwrap();
    let held = stage.overbook(&["reload"]);
    assert_eq!(held.status.code(), Some(1), "{}", overbook_tests::text(&held));
    assert!(overbook_tests::text(&held).contains("confirm it by a second reload"));
    let said = stage.says(&["reload"]);
    assert!(said.contains("the configuration is in force"), "{said}");
    stage.configure(&[("grace_s = 60", "grace_s = 0")]);
    stage.until("it is taken", |stage| stage.balloon("guest") < MAX);
}
