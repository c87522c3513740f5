//! Tests with real files in a real directory.

use model::Mode;

use super::*;

const GROUP: &str = "[group.a]\nvms = [\"a-*\"]\n";

fn main_file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("overbook.toml");
    fs::write(&path, text).unwrap();
    fs::create_dir(dir.path().join("overbook.d")).unwrap();
    (dir, path)
}

fn drop_in(path: &Path, name: &str) -> PathBuf {
    path.with_extension("d").join(name)
}

fn checked(path: &Path) -> (u8, String) {
    match load_with_summary(path) {
        Ok((_, summary)) => (0, summary),
        Err(faults) => (1, faults.to_string()),
    }
}

#[test]
fn drop_ins_are_read_in_the_order_of_their_names() {
    let (_dir, path) = main_file(GROUP);
    fs::write(drop_in(&path, "20.toml"), "mode.balloon = \"enforce\"\n").unwrap();
    fs::write(drop_in(&path, "10.toml"), "mode.balloon = \"recommend\"\n").unwrap();
    fs::write(drop_in(&path, "30.toml.bak"), "nonsense").unwrap();
    fs::write(drop_in(&path, ".hidden.toml"), "nonsense").unwrap();
    let (code, text) = checked(&path);
    assert_eq!(text, "1 group, 0 VMs with settings of their own, balloon mode enforce, 2 drop-ins");
    assert_eq!(code, 0);
}

#[test]
fn a_missing_file_is_an_error_that_names_the_example() {
    let dir = tempfile::tempdir().unwrap();
    let (code, text) = checked(&dir.path().join("overbook.toml"));
    assert_eq!(code, 1);
    assert!(text.contains("no such file; start with a copy of the example"), "{text}");
    assert_eq!(text.lines().count(), 1);
}

#[test]
fn every_unusable_file_is_reported_at_once() {
    let (_dir, path) = main_file("[host]\nreserve = 1\n");
    fs::write(drop_in(&path, "1-binary.toml"), b"# ok\n\xff\xfe").unwrap();
    fs::write(drop_in(&path, "2-large.toml"), vec![b'#'; (1 << 20) + 1]).unwrap();
    fs::create_dir(drop_in(&path, "3-directory.toml")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, drop_in(&path, "4-pipe.toml"), rustix::fs::Mode::RUSR)
        .unwrap();
    std::os::unix::fs::symlink("/nowhere", drop_in(&path, "5-dangling.toml")).unwrap();
    let (code, text) = checked(&path);
    assert_eq!(code, 1);
    for part in [
        "1-binary.toml: line 2 is not UTF-8",
        "2-large.toml: the file is larger than 1 MiB",
        "3-directory.toml: this is not a regular file",
        "4-pipe.toml: this is not a regular file",
        "5-dangling.toml: there is no such file",
        "overbook.toml:2: `reserve`: `1` has no unit",
    ] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
    assert_eq!(text.lines().count(), 6, "{text}");
}

#[test]
fn a_reload_with_faults_keeps_the_last_good_configuration() {
    let (_dir, path) = main_file(GROUP);
    let mut reloader = Reloader::start(&path).unwrap();
    let good = reloader.spec();
    fs::write(&path, "[group.a]\nvms = [\"b-*\"]\nbas = 1\n").unwrap();
    reloader.reload(|_| None).unwrap_err();
    assert_eq!(reloader.spec(), good);
    assert!(reloader.error().unwrap().contains("unknown key `bas`"));
    fs::write(&path, "[group.a]\nvms = [\"b-*\"]\n").unwrap();
    reloader.reload(|_| None).unwrap();
    assert_eq!(reloader.error(), None);
    assert_ne!(reloader.spec(), good);
}

#[test]
fn what_needs_a_restart_is_said_and_the_rest_applies() {
    let (_dir, path) = main_file(GROUP);
    let mut reloader = Reloader::start(&path).unwrap();
    let text = "mode.balloon = \"enforce\"\napi.socket = \"/run/other.sock\"\nhost.state = \"/srv\"\n\
         [pool]\nname = \"p\"\nhost = \"h\"\netcd = [\"http://127.0.0.1:2379\"]\n\
         insecure = true\n";
    fs::write(&path, text).unwrap();
    let news = reloader.reload(|_| None).unwrap();
    assert_eq!(
        news,
        "changed: [mode] balloon is \"enforce\" (it was \"observe\"), [host], [api], [pool], \
         [group.a] (gone)"
    );
    let spec = reloader.spec();
    assert_eq!(spec.modes.balloon, Mode::Enforce);
    assert_eq!(spec.host.state, Path::new("/var/lib/overbook"));
    assert_eq!((&spec.pool, reloader.error()), (&None, None));
    assert_eq!(
        reloader.waiting().unwrap(),
        "the change of [api] and `state` in [host] and [pool] takes effect at a restart; all else \
         is in force"
    );
    fs::write(&path, "mode.balloon = \"enforce\"\n").unwrap();
    assert_eq!(reloader.reload(|_| None).unwrap(), "nothing has changed");
    assert_eq!(reloader.waiting(), None, "it was taken back");
}

#[test]
fn a_daemon_without_a_good_configuration_does_not_start() {
    let (_dir, path) = main_file("[group.a]\n");
    assert!(Reloader::start(&path).is_err());
}

#[test]
fn a_glob_that_the_daemon_could_not_use_is_a_fault() {
    let (_dir, path) = main_file("[host]\nqmp = [\"/run/***\",\n'/srv/[a']\n");
    let (code, text) = checked(&path);
    assert_eq!(code, 1);
    for part in
        ["overbook.toml:2: `qmp`: `/run/***` is no glob", "overbook.toml:3: `qmp`: `/srv/[a`"]
    {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
}

#[test]
fn only_another_configuration_meets_an_objection() {
    let (_dir, path) = main_file(GROUP);
    let mut reloader = Reloader::start(&path).unwrap();
    let objects = |_: &Spec| Some("it takes much".to_owned());
    assert_eq!(reloader.reload(objects).unwrap(), "nothing has changed");
    fs::write(&path, format!("{GROUP}[api]\nsocket = \"/run/other.sock\"\n")).unwrap();
    reloader.reload(objects).unwrap();
    assert!(reloader.waiting().unwrap().contains("[api]"));
    fs::write(&path, format!("{GROUP}[mode]\nballoon = \"enforce\"\n")).unwrap();
    let held = reloader.reload(objects).unwrap_err();
    assert_eq!(held.to_string(), "it takes much");
    assert_ne!(reloader.spec().modes.balloon, Mode::Enforce);
    reloader.reload(objects).unwrap();
    assert_eq!(reloader.spec().modes.balloon, Mode::Enforce);
}
