//! Groups and limits from the records of VMs' managers, on top of the configuration: libvirt's
//! metadata, and Proxmox's files.
//!
//! The configuration decides where both say something: a VM that a group's patterns name is in
//! that group, and limits of `[vm]` stand. A group has to be in the configuration, because it is
//! the operator's contract with a tenant. Metadata names it, or the group has a pattern that
//! matches one of the VM's labels. A fault changes nothing, and the VM shows it.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::libvirt::DomainSettings;
use model::spec::ShareSpec;
use model::view::ManagerRecord;
use model::{GroupName, GroupSpec, NamePattern, Spec, VmName, VmView};

use super::super::vm::OF_A_GROUP;
use super::{AllSettings, Domains};

/// A configuration with the domains' settings in it, kept until either changes.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    base: Option<Arc<Spec>>,
    settings: [Arc<AllSettings>; 2],
    spec: Option<Arc<Spec>>,
    /// Why a VM's settings are not in force.
    pub(crate) faults: BTreeMap<VmName, String>,
}

impl Overlay {
    /// The latest one.
    pub(crate) fn spec(&self) -> Option<Arc<Spec>> {
        self.spec.clone()
    }

    /// The configuration `base` with the settings of libvirt's domains and of `others`.
    pub(crate) fn over(
        &mut self,
        base: &Arc<Spec>,
        domains: &Domains,
        others: Arc<AllSettings>,
    ) -> Arc<Spec> {
        let settings = [domains.settings(), others];
        let is_same = |(old, new): (&Arc<AllSettings>, _)| Arc::ptr_eq(old, new);
        if let (Some(old), Some(spec)) = (&self.base, &self.spec)
            && Arc::ptr_eq(old, base)
            && self.settings.iter().zip(&settings).all(is_same)
        {
            return Arc::clone(spec);
        }
        let (spec, faults) = merged(base, settings.iter().flat_map(|all| all.iter()));
        let spec = spec.map_or_else(|| Arc::clone(base), Arc::new);
        (self.base, self.settings, self.faults) = (Some(Arc::clone(base)), settings, faults);
        self.spec = Some(Arc::clone(&spec));
        spec
    }
}

impl Overlay {
    /// Shows titles and labels, and faults in VMs that are in no group.
    pub(crate) fn tell(&self, vms: &mut BTreeMap<VmName, VmView>) {
        for (name, settings) in self.settings[0].iter() {
            let (Some(vm), Ok(settings)) = (vms.get_mut(name), settings) else { continue };
            let (title, labels) = (settings.title.clone(), settings.labels.clone());
            if title.is_some() || !labels.is_empty() {
                vm.manager = Some(ManagerRecord { title, labels, balances: None });
            }
        }
        for (name, why) in &self.faults {
            let is_in_group = self.spec.as_ref().is_some_and(|spec| spec.group_of(name).is_some());
            let Some(vm) = vms.get_mut(name).filter(|_| !is_in_group) else { continue };
            vm.limits.extend(OF_A_GROUP.map(|mechanism| (mechanism, why.clone())));
        }
    }
}

/// `None`: no VM has settings.
fn merged<'a>(
    base: &Spec,
    all: impl Iterator<Item = (&'a VmName, &'a Result<DomainSettings, String>)>,
) -> (Option<Spec>, BTreeMap<VmName, String>) {
    let mut spec = None;
    let mut faults = BTreeMap::new();
    for (name, settings) in all {
        let spec = spec.get_or_insert_with(|| base.clone());
        let merged = settings.as_ref().map_err(String::clone);
        if let Err(why) = merged.and_then(|settings| merge(base, spec, name, settings)) {
            faults.insert(name.clone(), why);
        }
    }
    (spec, faults)
}

/// The group that a VM's settings name; `None`: they name none.
fn group_in(base: &Spec, settings: &DomainSettings) -> Result<Option<GroupName>, String> {
    let has = |group: &GroupSpec, label: &String| group.vms.iter().any(|p| p.matches_label(label));
    let by_labels = settings.labels.iter().flat_map(|label| {
        let groups = base.groups.iter().filter(move |(_, group)| has(group, label));
        groups.map(move |(name, _)| (name.clone(), format!("its label {label} is of group {name}")))
    });
    let named = |name: &GroupName| (name.clone(), format!("its metadata names group {name}"));
    let mut all = settings.group.iter().map(named).chain(by_labels);
    let Some((group, why)) = all.next() else { return Ok(None) };
    match all.find(|(other, _)| *other != group) {
        Some((_, other)) => Err(format!("{why}, and {other}: it is in neither")),
        None => Ok(Some(group)),
    }
}

fn merge(
    base: &Spec,
    spec: &mut Spec,
    name: &VmName,
    settings: &DomainSettings,
) -> Result<(), String> {
    let own = base.group_of(name).map(|(group, _)| group);
    if let Some(group) = &group_in(base, settings)? {
        match own {
            Some(own) if own == group => {}
            Some(own) => {
                return Err(format!(
                    "its manager has it in group {group}, but the configuration has it in {own}"
                ));
            }
            None if !is_literal(name) => {
                return Err("its name cannot be a member of a group".to_owned());
            }
            None => {
                let group_spec = spec.groups.get_mut(group).ok_or_else(|| {
                    format!("its metadata names group {group}, which the configuration has not")
                })?;
                group_spec.vms.push(NamePattern::new(name.as_str()));
            }
        }
    }
    let vm = spec.vms.entry(name.clone()).or_default();
    vm.limits = vm.limits.or(settings.limits);
    if vm.share.weight == ShareSpec::default().weight {
        vm.share.weight = settings.weight.unwrap_or(vm.share.weight);
    }
    Ok(())
}

/// Whether a pattern of this text matches this name and no other.
fn is_literal(name: &VmName) -> bool {
    !name.as_str().contains(['*', '?']) && NamePattern::new(name.as_str()).matches(name)
}

#[cfg(test)]
mod tests {
    use model::Bytes;
    use model::config::parse;
    use model::spec::LimitsSpec;

    use super::*;

    const CONFIGURATION: &str = "[group.web]\nvms = [\"web-*\"]\n[group.db]\nvms = [\"db-*\"]\n\
        [group.mail]\nvms = [\"pool:mail*\"]\n[group.ci]\nvms = [\"tag:ci\"]\n\
        [vm.web-1]\nbase = \"300 MiB\"\n";

    fn spec() -> Arc<Spec> {
        Arc::new(parse(&[("test".to_owned(), CONFIGURATION.to_owned())]).unwrap())
    }

    fn over(name: &str, group: Option<&str>) -> (Spec, BTreeMap<VmName, String>) {
        let limits = LimitsSpec {
            min: Some(Bytes::mib(100)),
            base: Some(Bytes::mib(200)),
            max: Some(Bytes::mib(400)),
        };
        let group = group.map(Into::into);
        with(name, DomainSettings { group, limits, ..DomainSettings::default() })
    }

    fn with(name: &str, settings: DomainSettings) -> (Spec, BTreeMap<VmName, String>) {
        let (spec, faults) = merged(&spec(), [(&name.into(), &Ok(settings))].into_iter());
        (spec.unwrap(), faults)
    }

    fn labelled(labels: &[&str]) -> DomainSettings {
        let labels = labels.iter().map(|label| (*label).to_owned()).collect();
        DomainSettings { labels, weight: Some(3), ..DomainSettings::default() }
    }

    #[test]
    fn a_label_names_the_group_whose_pattern_it_matches() {
        let (spec, faults) = with("shop", labelled(&["vmid:101", "pool:mail/eu", "tag:x"]));
        assert!(faults.is_empty(), "{faults:?}");
        assert_eq!(spec.group_of(&"shop".into()).unwrap().0.as_str(), "mail");
        assert_eq!(spec.vms[&VmName::from("shop")].share.weight, 3);
        let (spec, _) = with("shop", labelled(&["tag:x"]));
        assert!(spec.group_of(&"shop".into()).is_none());
    }

    #[test]
    fn labels_of_two_groups_name_neither() {
        let (spec, faults) = with("shop", labelled(&["pool:mail", "tag:ci"]));
        assert_eq!(spec, *self::spec());
        let why = "its label pool:mail is of group mail, and its label tag:ci is of group ci: \
            it is in neither";
        assert_eq!(faults[&"shop".into()], why);
        let (_, faults) = with("web-1", labelled(&["pool:mail"]));
        let why = "its manager has it in group mail, but the configuration has it in web";
        assert_eq!(faults[&"web-1".into()], why);
    }

    #[test]
    fn metadata_names_group_and_limits() {
        let (spec, faults) = over("shop", Some("web"));
        assert!(faults.is_empty());
        let (name, group) = spec.group_of(&"shop".into()).unwrap();
        assert_eq!(name.as_str(), "web");
        let limits = spec.limits_of(&"shop".into(), group, Bytes::mib(1024));
        assert_eq!((limits.min, limits.max), (Bytes::mib(100), Bytes::mib(400)));
    }

    #[test]
    fn the_configuration_decides_where_both_say_something() {
        let (spec, faults) = over("web-1", Some("web"));
        assert!(faults.is_empty());
        let limits = spec.vms[&VmName::from("web-1")].limits;
        assert_eq!((limits.min, limits.base), (Some(Bytes::mib(100)), Some(Bytes::mib(300))));
        let (spec, faults) = over("web-1", Some("db"));
        assert_eq!(spec, *self::spec());
        let why = faults.values().next().unwrap();
        assert_eq!(why, "its manager has it in group db, but the configuration has it in web");
    }

    #[test]
    fn faulty_metadata_changes_nothing_and_is_told() {
        for (name, group, why) in [
            ("shop", "shops", "its metadata names group shops, which the configuration has not"),
            ("s*", "web", "its name cannot be a member of a group"),
            ("pool:mail", "web", "its name cannot be a member of a group"),
        ] {
            let (spec, faults) = over(name, Some(group));
            assert_eq!((&spec, &*faults[&name.into()]), (&*self::spec(), why));
        }
        let broken = Err("`min`: no size".to_owned());
        let (spec, faults) = merged(&self::spec(), [(&"shop".into(), &broken)].into_iter());
        assert_eq!(spec.as_ref(), Some(&*self::spec()));
        assert_eq!(faults[&"shop".into()], "`min`: no size");
    }

    #[test]
    fn the_merged_configuration_is_made_once() {
        let (domains, base) = (Domains::new("/s".into()), spec());
        let (mut overlay, none) = (Overlay::default(), Arc::default());
        let first = overlay.over(&base, &domains, Arc::clone(&none));
        assert!(Arc::ptr_eq(&first, &base), "no domain has settings");
        let settings = Some(Ok(DomainSettings { group: Some("web".into()), ..Default::default() }));
        let shop =
            model::libvirt::LibvirtDomain { settings, ..super::super::tests::domain("shop", 7) };
        domains.note(vec![shop.clone()], model::Time(0));
        let second = overlay.over(&base, &domains, Arc::clone(&none));
        assert!(second.group_of(&"shop".into()).is_some());
        domains.note(vec![shop], model::Time(1));
        assert!(Arc::ptr_eq(&second, &overlay.over(&base, &domains, Arc::clone(&none))));
    }
}
