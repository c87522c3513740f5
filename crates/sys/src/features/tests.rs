use std::os::unix::fs::PermissionsExt;

use super::*;

fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    root
}

#[test]
fn every_feature_gives_a_finding_with_words() {
    for feature in ALL {
        let finding = probe(feature);
        eprintln!("{feature:?}: {finding:?}");
        assert!(!finding.detail().is_empty(), "{feature:?}");
    }
}

#[test]
fn the_list_names_each_feature_once() {
    for (index, feature) in ALL.iter().enumerate() {
        assert_eq!(ALL.iter().position(|other| other == feature), Some(index));
    }
}

#[test]
fn a_feature_that_works_needs_those_below_it() {
    if !probe(Feature::Userfaultfd).works() {
        assert!(!probe(Feature::UffdioMove).works());
    }
}

#[test]
fn who_may_use_userfaultfd_is_read_from_sysctl_and_the_devices_mode() {
    let device = "dev/userfaultfd";
    let sysctl = "proc/sys/vm/unprivileged_userfaultfd";
    let ask = |root: &tempfile::TempDir, mode| {
        let path = root.path().join(device);
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        userfaultfd_for_users(root.path())
    };
    let closed = host(&[(sysctl, "0\n"), (device, "")]);
    let why = "/dev/userfaultfd has mode 0600: root alone may use it";
    assert_eq!(ask(&closed, 0o600), Err(why.to_owned()));
    assert!(ask(&closed, 0o666).is_ok());
    assert!(ask(&host(&[(sysctl, "1\n"), (device, "")]), 0o600).is_ok());
    assert!(userfaultfd_for_users(host(&[]).path()).is_err());
}

#[test]
fn the_memory_controller_is_found_in_either_version() {
    let v2 = host(&[("sys/fs/cgroup/cgroup.controllers", "cpu memory io\n")]);
    assert_eq!(cgroup_memory(v2.path()), Ok("cgroup v2".to_owned()));
    let hybrid = [
        ("sys/fs/cgroup/unified/cgroup.controllers", "\n"),
        ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
    ];
    assert_eq!(cgroup_memory(host(&hybrid).path()), Ok("cgroup v1".to_owned()));
    assert!(cgroup_memory(host(&[]).path()).is_err());
}

#[test]
fn huge_pages_that_are_switched_off_are_missing() {
    let path = "sys/kernel/mm/transparent_hugepage/enabled";
    let on = host(&[(path, "always [madvise] never\n")]);
    assert_eq!(huge_pages(on.path()), Ok("madvise".to_owned()));
    assert!(huge_pages(host(&[(path, "always madvise [never]\n")]).path()).is_err());
    assert!(huge_pages(host(&[(path, "nonsense")]).path()).is_err());
    assert!(huge_pages(host(&[]).path()).is_err());
}

#[test]
fn swap_space_is_added_up_and_zswap_named() {
    let head = "Filename Type Size Used Priority\n";
    let two = format!("{head}/dev/sda2 partition 1048576 0 -2\n/swap file 524288 0 -3\n");
    let on = host(&[("proc/swaps", &two), ("sys/module/zswap/parameters/enabled", "Y\n")]);
    assert_eq!(swap(on.path()), Ok("1536 MiB, behind zswap".to_owned()));
    let off = host(&[("proc/swaps", head)]);
    assert_eq!(swap(off.path()), Err("no swap space is on".to_owned()));
}
