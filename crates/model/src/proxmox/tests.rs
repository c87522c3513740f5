//! Recorded forms of Proxmox VE 7, 8 and 9: the keys, sections, lists and encodings that qm.conf(5)
//! and pveum(1) of these versions document, with invented values.

use proptest::prelude::*;

use super::*;

const PVE_7: &str = include_str!("fixtures/pve7.conf");
const PVE_8: &str = include_str!("fixtures/pve8.conf");
const PVE_9: &str = include_str!("fixtures/pve9.conf");
const USER_CFG: &str = include_str!("fixtures/user.cfg");

fn texts(list: &[&str]) -> Vec<String> {
    list.iter().map(|text| (*text).to_owned()).collect()
}

fn vm(vmid: u32, text: &str) -> ProxmoxVm {
    let pool = pools_in(USER_CFG).remove(&vmid);
    ProxmoxVm { vmid, process: None, pool, conf: ProxmoxConf::read(text) }
}

#[test]
fn proxmox_7_is_read_without_its_snapshots_and_its_description() {
    let vm = vm(101, PVE_7);
    let expected = ProxmoxConf {
        name: Some("shop-1".to_owned()),
        memory: Some(4096),
        balloon: Some(1024),
        shares: Some(2000),
        tags: texts(&["prod", "shop"]),
        args: None,
        pending_args: None,
    };
    assert_eq!(vm.conf, expected);
    assert_eq!(vm.name(), "shop-1".into());
    let settings = vm.settings();
    assert_eq!(settings.labels, ["vmid:101", "pool:shop", "tag:prod", "tag:shop"]);
    assert_eq!((settings.limits.base, settings.weight), (Some(Bytes::mib(1024)), Some(2)));
    assert_eq!(vm.record().balances.as_deref(), Some("qm set 101 --shares 0"));
}

#[test]
fn proxmox_8_has_pending_values_and_special_sections() {
    let vm = vm(102, PVE_8);
    let conf = &vm.conf;
    assert_eq!((conf.name.as_deref(), conf.memory), (Some("db-1"), Some(8192)));
    assert_eq!(conf.tags, texts(&["prod", "db", "eu_west+1"]));
    assert_eq!(
        conf.args.as_deref(),
        Some("-cpu host,+vmx -device 'virtio-rng-pci,id=rng9'"),
        "as it is"
    );
    assert_eq!(conf.next_args(), Some("-cpu host"));
    assert_eq!(vm.record().balances, None, "shares: 0");
    assert_eq!(vm.settings().limits.base, Some(Bytes::mib(2048)));
    assert_eq!((vm.settings().weight, vm.pool.as_deref()), (None, Some("late")));
}

#[test]
fn proxmox_9_has_lists_of_properties_and_keys_that_are_not_known() {
    let vm = vm(103, PVE_9);
    assert_eq!((vm.conf.memory, vm.conf.balloon), (Some(6144), None));
    assert_eq!(vm.conf.next_args(), None);
    assert_eq!(vm.record().balances, None, "without `balloon` pvestatd moves nothing");
    let settings = vm.settings();
    assert_eq!((settings.limits, settings.weight), (LimitsSpec::default(), Some(1)));
    assert_eq!(settings.labels, ["vmid:103", "tag:ci"]);
}

#[test]
fn pools_are_read_and_the_first_that_names_a_vm_has_it() {
    let pools = pools_in(USER_CFG);
    let expected = [(101, "shop"), (102, "late"), (104, "shop"), (105, "shop/eu")];
    assert_eq!(pools, expected.map(|(vmid, pool)| (vmid, pool.to_owned())).into());
}

#[test]
fn pvestatd_moves_a_balloon_whose_least_size_is_written() {
    let is = |text: &str| ProxmoxConf::read(text).is_balanced();
    assert!(is("balloon: 512\nmemory: 1024\n"));
    assert!(is("balloon: 1024\nmemory: 1024\n"), "it raises the balloon to that");
    assert!(is("balloon: 512\nshares: 7\n"));
    for left_alone in ["memory: 1024\n", "balloon: 0\n", "balloon: 512\nshares: 0\n", "balloon: x"]
    {
        assert!(!is(left_alone), "{left_alone}");
    }
}

#[test]
fn a_vm_without_a_name_has_the_one_that_its_qemu_gets() {
    assert_eq!(vm(7, "memory: 1\n").name(), "vm7".into());
}

proptest! {
    #[test]
    fn no_text_upsets_the_parser(text in ".{0,400}") {
        let _ = (vm(1, &text).settings(), vm(1, &text).record(), pools_in(&text));
    }

    /// Lines in the file's own form, in any order and with odd values.
    #[test]
    fn values_stay_within_their_bounds(
        lines in proptest::collection::vec(
            ("(name|memory|balloon|shares|tags|args|#|\\[s\\]|\\[PENDING\\]|delete)", ": ?", ".{0,40}"),
            0..40,
        )
    ) {
        let line = |(key, colon, value): &(String, String, String)| format!("{key}{colon}{value}\n");
        let text: String = lines.iter().map(line).collect();
        let vm = vm(1, &text);
        let settings = vm.settings();
        prop_assert!(settings.labels.len() <= MOST_TAGS + 2);
        prop_assert!(settings.labels.iter().all(|label| words::is_plain(label)));
        prop_assert!(words::is_plain(vm.name().as_str()));
        prop_assert!(settings.weight.is_none_or(|weight| ShareSpec::WEIGHTS.contains(&weight)));
        let memory = Bytes::mib(vm.conf.memory.unwrap_or(DEFAULT_MEMORY));
        prop_assert!(settings.limits.base.is_none_or(|base| base <= memory));
    }

    /// The text of a section changes nothing that is in force.
    #[test]
    fn sections_change_nothing_that_is_in_force(name in "[a-z][a-z0-9_-]{0,9}", value in "[0-9]{1,5}") {
        let with = |section: &str| {
            let more = format!("\n[{section}]\nname: other\nballoon: {value}\nargs: -S\n");
            ProxmoxConf::read(&format!("{PVE_9}{more}"))
        };
        let is_pending = name.eq_ignore_ascii_case("pending");
        let expected = ProxmoxConf::read(PVE_9);
        prop_assert!(is_pending || with(&name) == expected);
        let pending = with("PENDING");
        prop_assert_eq!(pending.next_args(), Some("-S"));
        prop_assert_eq!(ProxmoxConf { pending_args: expected.pending_args.clone(), ..pending }, expected);
    }
}
