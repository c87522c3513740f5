//! Groups and limits from the domains' metadata, on top of the configuration.
//!
//! The configuration decides where both say something: a VM that a group's patterns name is in
//! that group, and limits of `[vm]` stand. A group has to be in the configuration, because it is
//! the operator's contract with a tenant. Faulty metadata changes nothing, and the VM shows the
//! fault.

use std::collections::BTreeMap;
use std::sync::Arc;

use model::libvirt::DomainSettings;
use model::{NamePattern, Spec, VmName, VmView};

use super::super::vm::OF_A_GROUP;
use super::{AllSettings, Domains};

/// A configuration with the domains' settings in it, kept until either changes.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    base: Option<Arc<Spec>>,
    settings: Arc<AllSettings>,
    spec: Option<Arc<Spec>>,
    /// Why a domain's metadata is not in force.
    pub(crate) faults: BTreeMap<VmName, String>,
}

impl Overlay {
    /// The latest one.
    pub(crate) fn spec(&self) -> Option<Arc<Spec>> {
        self.spec.clone()
    }

    /// The configuration `base` with the domains' settings.
    pub(crate) fn over(&mut self, base: &Arc<Spec>, domains: &Domains) -> Arc<Spec> {
        let settings = domains.settings();
        if let (Some(old), Some(spec)) = (&self.base, &self.spec)
            && Arc::ptr_eq(old, base)
            && Arc::ptr_eq(&self.settings, &settings)
        {
            return Arc::clone(spec);
        }
        let (spec, faults) = merged(base, &settings);
        let spec = spec.map_or_else(|| Arc::clone(base), Arc::new);
        (self.base, self.settings, self.faults) = (Some(Arc::clone(base)), settings, faults);
        self.spec = Some(Arc::clone(&spec));
        spec
    }
}

impl Overlay {
    /// Shows the faults of metadata in VMs that are in no group.
    pub(crate) fn tell(&self, vms: &mut BTreeMap<VmName, VmView>) {
        for (name, why) in &self.faults {
            let is_in_group = self.spec.as_ref().is_some_and(|spec| spec.group_of(name).is_some());
            let Some(vm) = vms.get_mut(name).filter(|_| !is_in_group) else { continue };
            vm.limits.extend(OF_A_GROUP.map(|mechanism| (mechanism, why.clone())));
        }
    }
}

/// `None`: no domain has settings.
fn merged(base: &Spec, all: &AllSettings) -> (Option<Spec>, BTreeMap<VmName, String>) {
    let mut spec = (!all.is_empty()).then(|| base.clone());
    let mut faults = BTreeMap::new();
    for (name, settings) in all {
        let merge = |spec: &mut Spec| merge(base, spec, name, settings.as_ref()?);
        if let Some(Err(why)) = spec.as_mut().map(merge) {
            faults.insert(name.clone(), why);
        }
    }
    (spec, faults)
}

fn merge(
    base: &Spec,
    spec: &mut Spec,
    name: &VmName,
    settings: &DomainSettings,
) -> Result<(), String> {
    let own = base.group_of(name).map(|(group, _)| group);
    if let Some(group) = &settings.group {
        match own {
            Some(own) if own == group => {}
            Some(own) => {
                return Err(format!(
                    "its metadata names group {group}, but the configuration has it in {own}"
                ));
            }
            None if name.as_str().contains(['*', '?']) || name.as_str().starts_with('/') => {
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use model::Bytes;
    use model::config::parse;
    use model::spec::LimitsSpec;

    use super::*;

    const CONFIGURATION: &str = "[group.web]\nvms = [\"web-*\"]\n[group.db]\nvms = [\"db-*\"]\n\
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
        let settings = Ok(DomainSettings { group: group.map(Into::into), limits });
        let (spec, faults) = merged(&spec(), &AllSettings::from([(name.into(), settings)]));
        (spec.unwrap(), faults)
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
        assert_eq!(why, "its metadata names group db, but the configuration has it in web");
    }

    #[test]
    fn faulty_metadata_changes_nothing_and_is_told() {
        for (name, group, why) in [
            ("shop", "shops", "its metadata names group shops, which the configuration has not"),
            ("s*", "web", "its name cannot be a member of a group"),
        ] {
            let (spec, faults) = over(name, Some(group));
            assert_eq!((&spec, &*faults[&name.into()]), (&*self::spec(), why));
        }
        let broken = AllSettings::from([("shop".into(), Err("`min`: no size".to_owned()))]);
        let (spec, faults) = merged(&self::spec(), &broken);
        assert_eq!(spec.as_ref(), Some(&*self::spec()));
        assert_eq!(faults[&"shop".into()], "`min`: no size");
    }

    #[test]
    fn the_merged_configuration_is_made_once() {
        let (domains, base) = (Domains::new("/s".into()), spec());
        let mut overlay = Overlay::default();
        let first = overlay.over(&base, &domains);
        assert!(Arc::ptr_eq(&first, &base), "no domain has settings");
        let settings = Some(Ok(DomainSettings { group: Some("web".into()), ..Default::default() }));
        let shop =
            model::libvirt::LibvirtDomain { settings, ..super::super::tests::domain("shop", 7) };
        domains.note(vec![shop.clone()], model::Time(0));
        let second = overlay.over(&base, &domains);
        assert!(second.group_of(&"shop".into()).is_some());
        domains.note(vec![shop], model::Time(1));
        assert!(Arc::ptr_eq(&second, &overlay.over(&base, &domains)));
    }
}
