//! A full disk stops the history and all changes of VMs, but not the daemon.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use model::Mode;
use overbook_tests::{BASE, Requirement, Stage, ensure, hungry, idle, requires};
use sys::process::Spawn;

/// Restarts the daemon with its state on a full file system in its own mount namespace, which
/// ends with it. Returns the path of the file that fills it, as seen from here. `None`: mounting
/// is not allowed.
fn restart_on_full_disk(stage: &mut Stage) -> Option<PathBuf> {
    stage.lab.end_helper("daemon", false).unwrap();
    let said = stage.overbook(&["release"]);
    assert!(said.status.success(), "{said:?}");
    let script = "mount -t tmpfs -o size=256k,mode=0700 tmpfs \"$1\" || exit 77
        head -c 1M /dev/zero > \"$1/filler\" 2> /dev/null
        exec \"$2\" --config \"$3\" daemon";
    let program = lab::command::own_program("overbook").unwrap();
    let spawn = Spawn::new("unshare").args(["--mount", "sh", "-c", script, "sh"]);
    let spawn = spawn.arg(stage.state()).arg(program).arg(stage.config());
    let process = stage.lab.spawn("daemon", spawn).unwrap();
    let answers = |stage: &Stage| stage.overbook(&["status"]).status.success();
    stage.until("the daemon answers, or has failed", |s| answers(s) || !process.is_alive());
    let root = Path::new("/proc").join(process.pid.to_string()).join("root");
    let filler = root.join(stage.state().strip_prefix("/").unwrap()).join("filler");
    let found = ensure(filler.exists(), format!("no {}", filler.display()));
    requires(Requirement::MountNamespace, found).map(|()| filler)
}

#[test]
fn on_a_full_disk_the_daemon_goes_on_and_touches_nothing_that_it_cannot_put_on_record() {
    let Some(mut stage) = Stage::start(Mode::Observe, &[hungry(), idle("calm")]) else { return };
    let enforcing = std::fs::read_to_string(stage.config()).unwrap().replace("observe", "enforce");
    std::fs::write(stage.config(), enforcing).unwrap();
    let Some(filler) = restart_on_full_disk(&mut stage) else { return };
    // Another program has switched statistics on, so there is demand, and a surplus to grant.
    for guest in ["hungry", "calm"] {
        assert_eq!(stage.polling_s(guest), 0, "touched without a record");
        stage.set_polling_s(guest, 1);
    }
    stage.until("the daemon wants to grant and says why it does not", |stage| {
        let error = stage.vm("hungry")["last_error"].take();
        let has = |words| error.as_str().is_some_and(|error| error.contains(words));
        has("balloon to") && has("could not be recorded")
    });
    stage.until("the history says so too", |stage| !stage.host()["history_error"].is_null());
    stage.throughout(Duration::from_secs(5), "no balloon moves", |stage| {
        stage.balloon("hungry") == BASE && stage.balloon("calm") == BASE
    });

    std::fs::remove_file(filler).unwrap();
    stage.until("it acts once there is room", |stage| stage.balloon("hungry") > BASE);
    stage.until("and the history is kept again", |stage| stage.host()["history_error"].is_null());
}
