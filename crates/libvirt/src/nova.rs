//! Reads the metadata that OpenStack's Nova writes into a domain.
//!
//! ```xml
//! <nova:instance xmlns:nova="http://openstack.org/xmlns/libvirt/nova/1.1">
//!   <nova:name>shop-1</nova:name>
//!   <nova:flavor name="m1.small" …>
//!     <nova:extraSpecs><nova:extraSpec name="overbook:base">512 MiB</nova:extraSpec>…
//!   </nova:flavor>
//!   <nova:owner><nova:project uuid="8f2c…">shop</nova:project>…
//! ```
//!
//! Nova has written `extraSpecs` since its release 2025.2. The project's UUID becomes a label for
//! the patterns of groups. Its name does not, because two domains of Keystone may have projects
//! with the same name. The instance's name is its tenant's choice, so it is only shown.

use model::libvirt::DomainSettings;
use model::{Bytes, words};
use roxmltree::Node;

/// The beginning of Nova's namespaces: 1.0 until Victoria, 1.1 since Wallaby.
const NAMESPACE: &str = "http://openstack.org/xmlns/libvirt/nova/";

/// A domain's settings, with those that Nova's metadata adds. Overbook's own element decides where
/// both say something.
pub(crate) fn add_to(
    settings: Option<Result<DomainSettings, String>>,
    metadata: Option<Node<'_, '_>>,
) -> Option<Result<DomainSettings, String>> {
    let Some(instance) = metadata.and_then(|metadata| child(metadata, "instance")) else {
        return settings;
    };
    let told = settings_in(instance);
    let Some(own) = settings else {
        return (told != Ok(DomainSettings::default())).then_some(told);
    };
    Some(own.and_then(|own| {
        let DomainSettings { limits, title, labels, .. } = told?;
        Ok(DomainSettings { limits: own.limits.or(limits), title, labels, ..own })
    }))
}

fn settings_in(instance: Node<'_, '_>) -> Result<DomainSettings, String> {
    let mut settings = DomainSettings::default();
    let name = child(instance, "name").and_then(|name| name.text());
    settings.title = name.map(words::plain).filter(|name| !name.is_empty());
    let project = child(instance, "owner").and_then(|owner| child(owner, "project"));
    let uuid = project.and_then(|project| project.attribute("uuid"));
    settings.labels.extend(uuid.map(|uuid| words::plain(&format!("project:{uuid}"))));
    let flavor = child(instance, "flavor");
    let specs = flavor.and_then(|flavor| child(flavor, "extraSpecs"));
    for spec in specs.into_iter().flat_map(|specs| specs.children().filter(Node::is_element)) {
        let Some(key) = spec.attribute("name").and_then(|it| it.strip_prefix("overbook:")) else {
            continue;
        };
        let limit = match key {
            "min" => &mut settings.limits.min,
            "base" => &mut settings.limits.base,
            "max" => &mut settings.limits.max,
            _ => {
                let key = words::plain(key);
                let valid = "valid are overbook:min, overbook:base and overbook:max";
                return Err(format!("its flavor has the extra spec overbook:{key}; {valid}"));
            }
        };
        let size = spec.text().unwrap_or_default().trim().parse::<Bytes>();
        let fault = |error| format!("the extra spec overbook:{key} of its flavor: {error}");
        *limit = Some(size.map_err(fault)?);
    }
    match settings.limits.is_ordered() {
        true => Ok(settings),
        false => {
            Err("the limits in its flavor's extra specs are not in order: min, base, max".into())
        }
    }
}

/// The first element of Nova's with this name.
fn child<'a, 'input>(of: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    of.children().find(|node| {
        let tag = node.tag_name();
        let is_novas = tag.namespace().is_some_and(|it| it.starts_with(NAMESPACE));
        is_novas && tag.name() == name
    })
}

#[cfg(test)]
mod tests {
    use model::spec::LimitsSpec;
    use proptest::prelude::*;

    use super::*;
    use crate::description::{Description, SETTINGS};

    /// As Nova writes it from its release Juno (2014.2) to Victoria (22).
    const NOVA_1_0: &str = include_str!("fixtures/nova-1.0.xml");
    /// As it writes it from Wallaby (23) to 2025.1 (31).
    const NOVA_1_1: &str = include_str!("fixtures/nova-1.1.xml");
    /// As it writes it since 2025.2 (32).
    const NOVA_32: &str = include_str!("fixtures/nova-32.xml");

    const PROJECT: &str = "project:0123456789abcdef0123456789abcdef";

    fn read(xml: &str) -> DomainSettings {
        Description::read(xml).unwrap().settings.unwrap().unwrap()
    }

    #[test]
    fn all_releases_tell_name_and_project() {
        for xml in [NOVA_1_0, NOVA_1_1, NOVA_32] {
            let settings = read(xml);
            assert_eq!(settings.title.as_deref(), Some("shop frontend ü"), "{xml}");
            assert_eq!(settings.labels, [PROJECT], "{xml}");
            assert_eq!(settings.group, None);
        }
        for xml in [NOVA_1_0, NOVA_1_1] {
            assert_eq!(read(xml).limits, LimitsSpec::default());
        }
    }

    #[test]
    fn a_flavor_has_limits() {
        let expected = LimitsSpec {
            min: Some(Bytes::mib(512)),
            base: Some(Bytes::mib(1024)),
            max: Some(Bytes::mib(2048)),
        };
        assert_eq!(read(NOVA_32).limits, expected);
    }

    #[test]
    fn overbooks_own_element_decides_where_both_say_something() {
        let own = format!("<o:vm xmlns:o='{SETTINGS}' group='web' base='768 MiB'/></metadata>");
        let settings = read(&NOVA_32.replace("</metadata>", &own));
        assert_eq!(settings.group, Some("web".into()));
        assert_eq!(settings.limits.base, Some(Bytes::mib(768)));
        assert_eq!((settings.limits.min, settings.labels.len()), (Some(Bytes::mib(512)), 1));
    }

    #[test]
    fn a_fault_in_a_flavor_is_named() {
        let fault = |from: &str, to: &str| {
            let xml = NOVA_32.replace(from, to);
            assert_ne!(xml, NOVA_32);
            Description::read(&xml).unwrap().settings.unwrap().unwrap_err()
        };
        let why = fault("overbook:min", "overbook:least");
        assert!(why.ends_with("valid are overbook:min, overbook:base and overbook:max"), "{why}");
        let why = fault("512 MiB", "512");
        assert!(why.starts_with("the extra spec overbook:min of its flavor: "), "{why}");
        let why = fault("512 MiB", "3 GiB");
        assert!(why.ends_with("not in order: min, base, max"), "{why}");
    }

    #[test]
    fn a_domain_of_another_program_has_no_settings() {
        let other = NOVA_32.replace(NAMESPACE, "http://example.org/nova/");
        assert_eq!(Description::read(&other).unwrap().settings, None);
    }

    proptest! {
        #[test]
        fn names_and_specs_of_tenants_upset_nothing(
            name in "[^<&\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\u{fffe}\u{ffff}]{0,300}",
            key in "[a-z:]{0,20}",
        ) {
            let xml = NOVA_32.replace("shop frontend ü", &name).replace("overbook:min", &key);
            if let Some(Ok(settings)) = Description::read(&xml).unwrap().settings {
                prop_assert!(settings.title.is_none_or(|title| words::is_plain(&title)));
            }
        }
    }
}
