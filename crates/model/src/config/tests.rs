//! One test for each behaviour of the configuration reader; texts stand for files.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{
    Bytes, ColdSpec, DedupSpec, FreePagesSpec, KsmSpec, Mode, OverloadSpec, PagesPerMs, Policy,
    TrackingBudget,
    spec::{LendSpec, ShareSpec},
};

const EXAMPLE: &str = include_str!("../../../../packaging/overbook.toml");
const CONFIGURE_PAGE: &str = include_str!("../../../../docs/src/configure.md");

fn parse_one(text: &str) -> Result<Spec, Faults> {
    parse(&[("overbook.toml".to_owned(), text.to_owned())])
}

fn parse_two(main: &str, drop_in: &str) -> Result<Spec, Faults> {
    let files = [("overbook.toml", main), ("overbook.d/10.toml", drop_in)];
    parse(&files.map(|(name, text)| (name.to_owned(), text.to_owned())))
}

fn faults_of(text: &str) -> String {
    parse_one(text).expect_err("this text has faults").to_string()
}

#[test]
fn nothing_written_means_the_defaults() {
    let spec = parse_one("").unwrap();
    assert_eq!(spec.host.qmp, super::check::DEFAULT_QMP);
    assert_eq!(spec.host.state.to_str(), Some("/var/lib/overbook"));
    assert_eq!(spec.api.socket.to_str(), Some("/run/overbook/overbook.sock"));
    assert_eq!((spec.host.reserve, spec.host.ksm, spec.api.tcp), (None, KsmSpec::Off, None));
    assert_eq!(spec.modes.balloon, Mode::Observe);
    assert!(spec.groups.is_empty());
}

#[test]
fn every_key_arrives_in_the_spec() {
    let spec = parse_one(
        r#"
        host = { reserve = "2GiB", qmp = ["/run/q/*"], state = "/srv/overbook", ksm = "drive", attach = "off", grace_s = 5 }
        mode.balloon = "enforce"
        [api]
        socket = "/run/o.sock"
        tcp = "[::1]:7780"
        token_file = "/etc/overbook/token"
        [group.web]
        policy = "entitlement"
        vms = ["web-*", "www"]
        budget = "4GiB"
        base = "512MiB"
        tracking = "0.25%"
        dedup = "adaptive"
        attach = "off"
        free_pages = "lazy"
        cold = "0.2%"
        lend = true
        [vm."web-1"]
        min = "256MiB"
        max = "1GiB"
        swap = true
        weight = 3
        priority = 9
        "#,
    )
    .unwrap();
    assert_eq!((spec.host.reserve, spec.host.ksm), (Some(Bytes::mib(2048)), KsmSpec::Drive));
    assert_eq!(spec.host.attach, crate::AttachSpec::Off);
    assert_eq!(spec.host.grace, crate::Millis::secs(5));
    assert_eq!(spec.api.tcp.unwrap().port(), 7780);
    let (name, group) = spec.group_of(&"web-1".into()).unwrap();
    assert_eq!((name.as_str(), group.policy), ("web", Policy::Entitlement));
    assert_eq!(group.budget, Some(Bytes::mib(4096)));
    assert_eq!(group.tracking, TrackingBudget::BasisPoints(25));
    assert_eq!(group.dedup, DedupSpec::Adaptive);
    assert_eq!(group.attach, crate::AttachSpec::Off);
    assert_eq!(group.free_pages, FreePagesSpec::Lazy);
    assert_eq!(group.cold, ColdSpec::Ahead(20));
    assert_eq!(group.lend, LendSpec::Open(true));
    let limits = spec.limits_of(&"web-1".into(), group, Bytes::mib(2048));
    assert_eq!((limits.min, limits.base), (Bytes::mib(256), Bytes::mib(512)));
    assert_eq!((limits.max, spec.swap_of(&"web-1".into())), (Bytes::mib(1024), Some(true)));
    assert_eq!(spec.vms[&"web-1".into()].share, ShareSpec { weight: 3, priority: 9 });
}

#[test]
fn every_fault_is_reported_at_once_with_its_line() {
    let text = r#"
[host]
reserve = 2
qmp = ["run/*.sock"]
ksm = "always"
[mod]
balloon = "enforce"
[api]
tcp = "localhost"
[group.web]
bas = "512MiB"
vms = ["web-*"]
min = "1GiB"
max = "512MiB"
[group.db]
policy = "balanced"
tracking = "20%"
vms = ["*-1", ""]
[group.shop]
vms = ["*-7"]
dedup = 1001
free_pages = "late"
lend = "yes"
[vm."web-1"]
base = "0B"
swap = "yes"
weight = 0
priority = "high"
"#;
    let expected = "\
overbook.toml:3: `reserve`: `2` has no unit; write for example \"512MiB\" (B, KiB, MiB, GiB, TiB)
overbook.toml:4: `qmp` is \"run/*.sock\"; write a path that begins with /
overbook.toml:5: `ksm` is \"always\"; valid: off, drive
overbook.toml:6: unknown table [mod]; valid: api, disk, group, host, mode, overload, pool, vm; did you mean `mode`?
overbook.toml:9: `tcp` is \"localhost\"; write an address and a port such as \"127.0.0.1:7780\"
overbook.toml:9: `tcp` needs `token_file`: over TCP the API answers only to those who hold the token
overbook.toml:11: unknown key `bas` in [group.web]; valid: attach, base, budget, cold, dedup, free_pages, lend, max, min, policy, static, tracking, uid, vms; did you mean `base`?
overbook.toml:12: groups `shop` and `web` overlap: a VM can match both \"*-7\" (overbook.toml:20) and \"web-*\"
overbook.toml:13: `min` of 1 GiB is more than `max` of 512 MiB; needed: min ≤ base ≤ max
overbook.toml:16: `policy` is \"balanced\"; valid: fair, entitlement, demand, balance; did you mean `balance`?
overbook.toml:17: `tracking` is \"20%\"; valid: \"off\" or a share of one vCPU from \"0.1%\" to \"10%\"
overbook.toml:18: `vms` must not be empty
overbook.toml:21: `dedup` is 1001; valid: \"off\", \"adaptive\", \"adaptive-c\", \"adaptive-cs\" or 1 to 1000 pages per ms
overbook.toml:22: `free_pages` is \"late\"; valid: off, lazy; did you mean `lazy`?
overbook.toml:23: `lend` is `yes`: write true or false without quotes, or the name of a circle of groups
overbook.toml:25: `base` must be more than zero
overbook.toml:26: `swap` must be true or false, not a text
overbook.toml:27: `weight` is 0; valid: a whole number from 1 to 1000
overbook.toml:28: `priority` must be a whole number from 0 to 9, not a text";
    assert_eq!(faults_of(text), expected);
}

#[test]
fn syntax_errors_have_their_line_and_hide_no_other_file() {
    let error = parse_two("[host\nreserve = \"2GiB\"\n", "[group.a]\nbase = 1\n").unwrap_err();
    let text = error.to_string();
    assert!(text.contains("overbook.toml:1: not valid TOML"), "{text}");
    assert!(text.contains("overbook.d/10.toml:2: `base`: `1` has no unit"), "{text}");
}

#[test]
fn a_key_written_twice_is_a_fault() {
    let twice = |key: &str, first: u32, text: &str| {
        let line = text.lines().count();
        let expected = format!(
            "overbook.toml:{line}: not valid TOML: the key `{key}` is written twice; it stands in \
             line {first} too"
        );
        assert!(faults_of(text).contains(&expected), "{}", faults_of(text));
    };
    twice("state", 2, "[host]\nstate = \"/a\"\nstate = \"/b\"");
    twice("mode", 1, "[mode]\nballoon = \"observe\"\n[host]\n[mode]");
    twice("web", 1, "[group.web]\n[group.db]\n[group.web]");
}

#[test]
fn a_drop_in_overrides_only_what_it_says() {
    let main = "[group.a]\nvms = [\"a-*\"]\nbase = \"1GiB\"\nmax = \"2GiB\"\n";
    let spec = parse_two(main, "[group.a]\nmax = \"3GiB\"\nvms = [\"b-*\"]\n").unwrap();
    let group = &spec.groups[&"a".into()];
    assert_eq!(group.limits.base, Some(Bytes::mib(1024)));
    assert_eq!(group.limits.max, Some(Bytes::mib(3072)));
    assert_eq!(group.vms.len(), 1, "a list is replaced, not extended");
}

#[test]
fn limits_of_a_vm_and_its_group_are_compared_with_each_other() {
    let main = "[group.a]\nvms = [\"a-*\"]\nbase = \"1GiB\"\n";
    let faults = parse_two(main, "[vm.a-1]\nmin = \"2GiB\"\n").unwrap_err().to_string();
    let expected = "overbook.d/10.toml:2: `min` of 2 GiB is more than `base` of 1 GiB (from its group, \
                    overbook.toml:3); needed: min ≤ base ≤ max";
    assert_eq!(faults, expected);
}

#[test]
fn a_group_without_patterns_and_a_vm_without_group_are_faults() {
    assert!(faults_of("[group.a]\n").contains("overbook.toml:1: group `a` has no `vms`"));
    let faults = faults_of("[group.a]\nvms = [\"a\"]\n[vm.b]\nswap = true\n");
    assert_eq!(
        faults,
        "overbook.toml:3: no group's `vms` match \"b\": this table would have no effect"
    );
}

#[test]
fn a_pattern_twice_in_one_group_is_a_fault() {
    assert!(faults_of("[group.a]\nvms = [\"x\", \"x\"]\n").contains("stands twice"));
}

#[test]
fn overlapping_patterns_within_one_group_are_fine() {
    parse_one("[group.a]\nvms = [\"x-*\", \"x-1\"]\n").unwrap();
}

#[test]
fn names_that_cannot_be_names_are_refused() {
    let long = "n".repeat(256);
    for (text, part) in [
        ("[group.\"\"]\nvms = [\"x\"]\n".to_owned(), "must not be empty"),
        ("[group.\"a\\u0007\"]\nvms = [\"x\"]\n".to_owned(), "holds a control character"),
        (format!("[group.{long}]\nvms = [\"x\"]\n"), "longer than 255 bytes"),
        (format!("[group.a]\nvms = [\"{long}\"]\n"), "longer than 255 bytes"),
        ("[group.a]\nvms = [\"a*\"]\n[vm.\"a*\"]\nswap = true\n".to_owned(), "names one VM"),
        ("[group]\na = 1\n".to_owned(), "must be a table"),
    ] {
        let faults = faults_of(&text);
        assert!(faults.contains(part), "{faults}");
        assert!(!faults.chars().any(|c| c.is_control() && c != '\n'), "{faults:?}");
    }
}

#[test]
fn paths_must_be_absolute_and_sockets_short() {
    let faults = faults_of(&format!("[api]\nsocket = \"/{}\"\n", "s".repeat(107)));
    assert!(faults.contains("`socket` is 108 bytes long"), "{faults}");
    assert!(faults_of("[host]\nstate = \"var\"\n").contains("begins with /"));
}

#[test]
fn the_api_is_never_taken_for_a_vm() {
    let faults = faults_of("[host]\nqmp = [\"/run/overbook/*.sock\"]\n");
    assert!(faults.contains("matches the API's own socket"), "{faults}");
}

#[test]
fn a_token_without_tcp_is_a_fault() {
    assert!(faults_of("[api]\ntoken_file = \"/t\"\n").contains("no effect without `tcp`"));
    let faults = faults_of("[api]\nread_token_file = \"/t\"\n");
    assert!(faults.contains("`read_token_file` has no effect without `tcp`"), "{faults}");
}

#[test]
fn a_budget_below_what_is_guaranteed_is_a_fault() {
    let faults = faults_of(
        "[group.a]\nvms = [\"a-*\", \"b\"]\nbase = \"1GiB\"\nbudget = \"2GiB\"\n[vm.a-1]\nbase = \"1025MiB\"\n",
    );
    assert!(faults.starts_with("overbook.toml:4: `budget` of 2 GiB is less than"), "{faults}");
}

#[test]
fn what_tracking_may_cost_is_a_share_of_a_vcpu_or_off() {
    let read = |text: &str| {
        let spec = parse_one(&format!("[group.a]\nvms = [\"x\"]\ntracking = {text}\n"));
        spec.map(|spec| spec.groups[&"a".into()].tracking).ok()
    };
    assert_eq!(read("\"off\""), Some(TrackingBudget::Off));
    assert_eq!(read("\"1%\""), Some(TrackingBudget::default()));
    assert_eq!(read("\"0.1 %\""), Some(TrackingBudget::BasisPoints(10)));
    assert_eq!(read("\"10%\""), Some(TrackingBudget::BasisPoints(1000)));
    for bad in
        ["\"0.05%\"", "\"11%\"", "\"1\"", "\"%\"", "\"-1%\"", "\"1.001%\"", "\"1e0%\"", "1", "true"]
    {
        assert_eq!(read(bad), None, "{bad}");
    }
}

#[test]
fn what_is_cold_is_paged_out_when_it_is_needed_or_up_to_a_share_of_refaults() {
    let read = |text: &str| {
        let spec = parse_one(&format!("[group.a]\nvms = [\"x\"]\ncold = {text}\n"));
        spec.map(|spec| spec.groups[&"a".into()].cold).ok()
    };
    assert_eq!(read("\"off\""), Some(ColdSpec::default()));
    assert_eq!(read("\"when-needed\""), Some(ColdSpec::WhenNeeded));
    assert_eq!(read("\"0.2%\""), Some(ColdSpec::Ahead(20)));
    assert_eq!(read("\"10%\"").unwrap().to_string(), "10 %");
    for bad in ["\"0%\"", "\"11%\"", "\"always\"", "0.2", "true"] {
        assert_eq!(read(bad), None, "{bad}");
    }
    assert_eq!(read("\"off\"\npolicy = \"balance\""), Some(ColdSpec::Off));
    let of = |policy: &str| {
        let spec = parse_one(&format!("[group.a]\nvms = [\"x\"]\npolicy = \"{policy}\"\n"));
        spec.map(|spec| spec.groups[&"a".into()].cold).ok()
    };
    assert_eq!(of("demand"), Some(ColdSpec::Off));
    assert_eq!(of("balance"), Some(ColdSpec::WhenNeeded), "it needs whole curves");
}

#[test]
fn what_an_overload_is_can_be_written_and_makes_sense() {
    let spec = parse_one("[overload]\npages_per_s = 50\nwindow = 6\nsustained = 6\n");
    let expected = OverloadSpec { interval_s: 10, pages_per_s: 50, window: 6, sustained: 6 };
    assert_eq!(spec.expect("it makes sense").overload, expected);
    assert_eq!(
        faults_of("[overload]\nwindow = 7\ninterval_s = 1\n"),
        "overbook.toml:2: `sustained` is 8 and `window` 7: of that many intervals no more can be \
         overloaded\n\
         overbook.toml:3: `interval_s` is 1; valid: a whole number from 2 to 300"
    );
}

#[test]
fn nobody_lends_who_has_not_said_so() {
    let spec = parse_one("[group.a]\nvms = [\"x\"]\n").unwrap();
    assert!(!spec.groups[&"a".into()].lend.takes_part());
}

#[test]
fn dedup_is_off_adaptive_or_a_rate() {
    let read = |text: &str| {
        let spec = parse_one(&format!("[group.a]\nvms = [\"x\"]\ndedup = {text}\n"));
        spec.map(|spec| spec.groups[&"a".into()].dedup).ok()
    };
    assert_eq!(read("\"off\""), Some(DedupSpec::Off));
    assert_eq!(read("\"adaptive\""), Some(DedupSpec::Adaptive));
    assert_eq!(read("\"adaptive-c\""), Some(DedupSpec::AdaptiveC));
    assert_eq!(read("\"adaptive-cs\""), Some(DedupSpec::AdaptiveCs));
    for rate in [1, 20, 1000] {
        assert_eq!(read(&rate.to_string()), Some(DedupSpec::Fixed(PagesPerMs(rate))));
    }
    for bad in
        ["0", "-1", "1001", "99999999999", "1.5", "\"20\"", "\"on\"", "\"adaptive-csd\"", "true"]
    {
        assert_eq!(read(bad), None, "{bad}");
    }
    let faults = faults_of("[group.a]\nvms = [\"x\"]\ndedup = \"fast\"\n");
    assert!(faults.starts_with("overbook.toml:3: `dedup` is \"fast\"; valid: "), "{faults}");
}

#[test]
fn a_thousand_faults_are_a_thousand_lines() {
    let text: String = (0..1000).map(|i| format!("k{i} = 1\n")).collect();
    let faults = parse_one(&text).unwrap_err();
    assert_eq!(faults.as_slice().len(), 1000);
}

#[test]
fn patterns_beyond_the_limit_are_refused_quickly() {
    let list: Vec<String> = (0..5000).map(|i| format!("\"vm-{i}\"")).collect();
    let faults = faults_of(&format!("[group.a]\nvms = [{}]\n", list.join(",")));
    assert!(faults.contains("more than 4096 patterns"), "{faults}");
}

/// The keys that the reader knows, taken from its message about an unknown key.
fn known_keys() -> Vec<(&'static str, Vec<String>)> {
    ["host", "mode", "api", "group.g", "vm.v"]
        .into_iter()
        .map(|table| {
            let faults = faults_of(&format!("[{table}]\nunheard-of-key = 1\n"));
            let line = faults.lines().find(|line| line.contains("unheard-of-key")).unwrap();
            let (_, keys) = line.split_once("valid: ").unwrap();
            (table, keys.split(", ").map(ToOwned::to_owned).collect())
        })
        .collect()
}

/// The example with every setting enabled: a `#` directly before a word hides a setting.
fn example_switched_on() -> String {
    let hidden =
        |line: &str| line.strip_prefix('#').filter(|rest| !rest.starts_with([' ', '#'])).is_some();
    EXAMPLE
        .lines()
        .map(|line| if hidden(line) { &line[1..] } else { line })
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn the_example_is_valid_as_shipped_and_changes_nothing() {
    assert_eq!(parse_one(EXAMPLE).unwrap(), parse_one("").unwrap());
}

#[test]
fn the_example_is_valid_with_every_setting_switched_on() {
    let spec = parse_one(&example_switched_on()).unwrap();
    assert!(!spec.groups.is_empty() && !spec.vms.is_empty());
}

#[test]
fn tables_of_shared_pages_are_named_by_whole_paths() {
    let group =
        |tables: &str| parse_one(&format!("[group.web]\nvms = [\"web-*\"]\nstatic = {tables}\n"));
    let spec = group(r#"["/a/one.spt", "/b/two.spt"]"#).unwrap();
    let tables = &spec.groups[&"web".into()].tables;
    assert_eq!(*tables, ["/a/one.spt", "/b/two.spt"].map(std::path::PathBuf::from));
    let fault = group(r#"["one.spt"]"#).unwrap_err().to_string();
    assert!(fault.contains("`static` is \"one.spt\"; write a path that begins with /"), "{fault}");
}

#[test]
fn the_example_and_the_guide_show_every_key() {
    let example = example_switched_on();
    let mut table = "";
    let mut shown = BTreeSet::new();
    for line in example.lines() {
        if let Some(title) = line.strip_prefix('[') {
            table = title.split(['.', ']']).next().unwrap();
        } else if let Some((key, _)) = line.split_once('=') {
            shown.insert((table, key.trim()));
        }
    }
    for (table, keys) in known_keys() {
        let table = table.split('.').next().unwrap();
        for key in keys {
            assert!(
                shown.contains(&(table, key.as_str())),
                "{key} of [{table}] is not in the example"
            );
            let row = format!("| `{key}` |");
            assert!(CONFIGURE_PAGE.contains(&row), "{key} of [{table}] is not in configure.md");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,200}|[\\[\\]\\.=\"#a-z0-9\n ]{0,200}") {
        let _ = parse_one(&text);
    }

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse_one(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn no_damage_to_the_example_makes_the_reader_panic(at in 0..4000usize, with in "\\PC{0,4}") {
        let mut text = example_switched_on();
        let at = (0..=at.min(text.len())).rev().find(|i| text.is_char_boundary(*i)).unwrap();
        text.insert_str(at, &with);
        if let Err(faults) = parse_one(&text) {
            prop_assert!(!faults.as_slice().is_empty());
        }
    }

    #[test]
    fn what_is_accepted_has_ordered_limits(
        sizes in proptest::collection::vec(proptest::option::of(1..6u64), 6),
        ram in 1..8u64,
    ) {
        let keys = ["min", "base", "max"];
        let lines = |sizes: &[Option<u64>]| -> String {
            let written = keys.iter().zip(sizes);
            written.filter_map(|(k, n)| n.map(|n| format!("{k} = \"{n}GiB\"\n"))).collect()
        };
        let (group, vm) = (lines(&sizes[..3]), lines(&sizes[3..]));
        let text = format!("[group.g]\nvms = [\"v\"]\n{group}[vm.v]\n{vm}");
        if let Ok(spec) = parse_one(&text) {
            let all = spec.vms[&"v".into()].limits.or(spec.groups[&"g".into()].limits);
            for (low, high) in [(all.min, all.base), (all.base, all.max), (all.min, all.max)] {
                prop_assert!(low.zip(high).is_none_or(|(low, high)| low <= high), "{text}");
            }
            let limits = all.resolve(Bytes::mib(ram * 1024));
            prop_assert!(limits.min <= limits.base && limits.base <= limits.max);
        }
    }
}

#[test]
fn files_with_faults_still_say_where_state_and_socket_are() {
    let main = "[host]\nstate = \"/s/1\"\nreserve = 7\n[api]\nsocket = \"/s/a\"\nnonsense = 1\n";
    let drop_in = "[host]\nstate = \"/s/2\"\nqmp = [\n[mode\nballoon = = 3\n";
    let files = [("a", main), ("b", drop_in)].map(|(n, t)| (n.to_owned(), t.to_owned()));
    assert!(parse(&files).is_err());
    let found = salvage(&files);
    let default: Vec<String> = super::check::DEFAULT_QMP.map(str::to_owned).into();
    let socket = Some("/s/a".into());
    assert_eq!(found, Salvaged { state: Some("/s/2".into()), socket, qmp: default.clone() });
    let useless = "[host]\nstate = 5\n[api]\nsocket = \"relative\"\n";
    let nothing = Salvaged { state: None, socket: None, qmp: default };
    assert_eq!(salvage(&[("a".to_owned(), useless.to_owned())]), nothing);
    let qmp = "[host]\nqmp = [\"/q/*.sock\", \"relative\"]\n[group\n";
    assert_eq!(salvage(&[("a".to_owned(), qmp.to_owned())]).qmp, ["/q/*.sock"]);
}

#[test]
fn a_groups_users_are_names_or_numbers_and_no_other_groups() {
    let users = |uid: &str| {
        let spec = parse_one(&format!("group.web = {{ vms = [\"web-*\"], uid = {uid} }}"));
        spec.map(|spec| spec.groups[&"web".into()].users.clone())
    };
    assert_eq!(users("\"libvirt-qemu\"").unwrap(), ["libvirt-qemu"]);
    assert_eq!(users("64055").unwrap(), ["64055"]);
    assert_eq!(users("[\"alice\", 1000]").unwrap(), ["alice", "1000"]);
    for bad in ["-1", "true", "[]", "[1.5]", "\"\"", "99999999999"] {
        assert!(users(bad).unwrap_err().to_string().contains("`uid`"), "{bad}");
    }
    let two = "group.web = { vms = [\"web-*\"], uid = 7 }\n\
               group.db = { vms = [\"db-*\"], uid = [\"alice\", 7] }\n";
    let error = parse_one(two).unwrap_err().to_string();
    assert!(error.contains("user 7 is of group `db` already (line 2)"), "{error}");
}

#[test]
fn a_disk_arrives_in_the_spec() {
    let spec = parse_one(
        r#"
        api.socket = "/run/o/overbook.sock"
        group.web.vms = ["web-*"]
        [disk.web-1-swap]
        vm = "web-1"
        file = "/srv/web-1"
        size = "4GiB"
        repositories = ["host-b:10810", "[::1]:10810", "/run/repository"]
        tls = "/etc/overbook/tls"
        read_delay_us = 5000
        shared = 2
        "#,
    )
    .unwrap();
    let (name, disk) = spec.disks_of(&"web".into()).next().unwrap();
    assert_eq!((name.as_str(), disk.vm.as_str()), ("web-1-swap", "web-1"));
    assert_eq!((disk.size, disk.read_delay_us), (Bytes::mib(4096), 5_000));
    assert_eq!(disk.shared, 2);
    assert_eq!(disk.repositories.len(), 3);
    assert_eq!(spec.disk_socket(name).to_str(), Some("/run/o/disks/web-1-swap.sock"));
    assert_eq!(spec.disks_of(&"db".into()).count(), 0);
    assert!(!spec.has_cache(&"web".into()));
}

#[test]
fn a_group_has_a_cache_when_one_of_its_disks_has() {
    let spec = parse_one(
        "group.web.vms = [\"web-*\"]\ngroup.db.vms = [\"db\"]\n[disk.d]\nvm = \"web-1\"\n\
         file = \"/srv/d\"\nsize = \"4GiB\"\ncache = true",
    )
    .unwrap();
    assert!(spec.has_cache(&"web".into()) && !spec.has_cache(&"db".into()));
}

#[test]
fn a_disk_that_cannot_be_says_why() {
    let disk = |keys: &str| faults_of(&format!("group.web.vms = [\"web-*\"]\n[disk.d]\n{keys}"));
    let whole = "vm = \"web-1\"\nfile = \"/srv/d\"\nsize = \"4GiB\"\n";
    for key in ["vm", "file", "size"] {
        let lacks: String =
            whole.lines().filter(|l| !l.starts_with(key)).collect::<Vec<_>>().join("\n");
        assert!(disk(&lacks).contains(&format!("[disk.d] has no `{key}`")), "{}", disk(&lacks));
    }
    let other = disk(&whole.replace("web-1", "db-1"));
    assert!(other.contains("`vm` is \"db-1\", which no group's `vms` match"), "{other}");
    let odd = disk(&whole.replace("4GiB", "4097B"));
    assert!(odd.contains("`size` of 4097 is no multiple of 4 KiB"), "{odd}");
    let relative = disk(&whole.replace("/srv/d", "srv/d"));
    assert!(relative.contains("`file` is \"srv/d\"; write a path that begins with /"));
    let port = disk(&format!("{whole}repositories = [\"host-b\"]"));
    assert!(port.contains("`repositories` has \"host-b\"; write a host and a port"), "{port}");
    let tls = disk(&format!("{whole}tls = \"/etc/tls\""));
    assert!(tls.contains("`tls` has no effect without `repositories`"), "{tls}");
    let both = disk(&format!("{whole}repositories = [\"/run/r\"]\ncache = true"));
    assert!(both.contains("a disk has one of them"), "{both}");
    let twice = disk(&format!("{whole}[disk.e]\n{whole}"));
    assert!(twice.contains("is the disk `d` already"), "{twice}");
    let name = faults_of(&format!("group.web.vms = [\"web-*\"]\n[disk.\"../d\"]\n{whole}"));
    assert!(name.contains("a disk cannot be called `../d`"), "{name}");
}

#[test]
fn a_host_in_a_pool_has_what_is_usual_and_a_wrong_pool_says_why() {
    let plain = "[pool]\nhost = \"a\"\netcd = [\"http://10.0.0.1:2379\"]\n";
    let whole = &format!("{plain}insecure = true\n");
    let pool = parse_one(whole).unwrap().pool.unwrap();
    assert_eq!((pool.name.as_str(), pool.host.as_str()), ("default", "a"));
    assert_eq!((pool.receive, pool.movable.len()), (None, 0));
    let faults = |keys: &str| faults_of(&format!("{whole}{keys}"));
    assert!(faults_of("[pool]\nhost = \"a\"").contains("[pool] has no `etcd`"));
    // No TLS needs an explicit `insecure`. The fault is reported once, for any list of addresses.
    for etcd in ["http://10.0.0.1:2379", "http://127.0.0.1:2379", "https://10.0.0.1:2379"] {
        let open = faults_of(&format!("[pool]\nhost = \"a\"\netcd = [\"{etcd}\"]"));
        assert!(
            open.contains("[pool] has no `tls`: any host that reaches etcd could move VMs"),
            "{open}"
        );
        assert_eq!(open.lines().count(), 1, "{open}");
    }
    assert!(faults_of(&format!("{plain}insecure = false")).contains("[pool] has no `tls`"));
    assert!(faults("tls = \"/etc/tls\"").contains("`insecure` has no effect with `tls`"));
    let odd = faults_of("[pool]\nhost = \"a/b\"\netcd = [\"10.0.0.1:2379\"]\ninsecure = true");
    assert!(odd.contains("`host` is \"a/b\"; valid: letters"), "{odd}");
    assert!(odd.contains("with `insecure` write addresses such as \"http://"), "{odd}");
    let tls = faults_of(&format!("{plain}tls = \"/etc/tls\""));
    assert!(tls.contains("with `tls` write addresses such as \"https://"), "{tls}");
    let anywhere = faults("address = \"0.0.0.0\"\nincoming = \"/x\"");
    assert!(anywhere.contains("`address` is \"0.0.0.0\""), "{anywhere}");
    assert!(faults("incoming = \"/x\"").contains("`incoming` needs `address`"));
    assert!(faults("address = \"10.0.0.1\"").contains("no effect without `incoming`"));
    assert!(faults("precopy_s = 0").contains("`precopy_s` is 0; valid"));
}
