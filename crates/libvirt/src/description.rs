//! Reads a domain's description: its balloon, and Overbook's element in its metadata.
//!
//! ```xml
//! <metadata>
//!   <overbook:vm xmlns:overbook="https://overbook.example/libvirt/1"
//!                group="web" min="256 MiB" base="512 MiB" max="1 GiB"/>
//! </metadata>
//! ```

use model::Bytes;
use model::libvirt::DomainSettings;
use roxmltree::{Document, Node};

use crate::nova;

/// The namespace of Overbook's settings in a domain's metadata.
pub(crate) const SETTINGS: &str = "https://overbook.example/libvirt/1";

/// The parts of a domain's description that Overbook needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Description {
    /// Overbook's settings, or the fault in them.
    pub(crate) settings: Option<Result<DomainSettings, String>>,
    /// Whether it has a virtio balloon.
    pub(crate) has_balloon: bool,
    /// Whether the balloon reports free pages.
    pub(crate) reports_free_pages: bool,
    /// Whether the balloon deflates before the guest's kernel kills a program.
    pub(crate) deflates_on_oom: bool,
    /// The interval of the guest's statistics in seconds; 0: none.
    pub(crate) stats_period_s: u64,
}

impl Description {
    /// Reads libvirt's XML of a domain.
    ///
    /// # Errors
    /// It is no XML.
    pub(crate) fn read(xml: &str) -> Result<Self, String> {
        let document = Document::parse(xml).map_err(|error| error.to_string())?;
        let domain = document.root_element();
        let metadata = child(domain, "metadata");
        let settings = metadata
            .into_iter()
            .flat_map(|metadata| metadata.children())
            .find(|node| node.tag_name().namespace() == Some(SETTINGS));
        let settings = nova::add_to(settings.map(settings_in), metadata);
        let mut read = Self { settings, ..Self::default() };
        if let Some(balloon) = balloon_of(domain) {
            let is_on = |key| balloon.attribute(key) == Some("on");
            read.has_balloon = true;
            read.reports_free_pages = is_on("freePageReporting");
            read.deflates_on_oom = is_on("autodeflate");
            let period = child(balloon, "stats").and_then(|stats| stats.attribute("period"));
            read.stats_period_s = period.and_then(|text| text.parse().ok()).unwrap_or(0);
        }
        Ok(read)
    }
}

/// The virtio balloon of a domain.
pub(crate) fn balloon_of<'a, 'input>(domain: Node<'a, 'input>) -> Option<Node<'a, 'input>> {
    let balloon = child(child(domain, "devices")?, "memballoon")?;
    balloon.attribute("model").is_some_and(|model| model.starts_with("virtio")).then_some(balloon)
}

/// The first element of this name, which has no namespace.
pub(crate) fn child<'a, 'input>(of: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    of.children().find(|node| node.has_tag_name(name))
}

fn settings_in(node: Node<'_, '_>) -> Result<DomainSettings, String> {
    if node.tag_name().name() != "vm" {
        return Err(format!("its metadata has <{}>; valid is <vm>", node.tag_name().name()));
    }
    let mut settings = DomainSettings::default();
    for attribute in node.attributes() {
        let (name, value) = (attribute.name(), attribute.value());
        let size = || match value.parse::<Bytes>() {
            Ok(size) => Ok(Some(size)),
            Err(error) => Err(format!("`{name}` in its metadata: {error}")),
        };
        match name {
            "group" => settings.group = Some(value.into()),
            "min" => settings.limits.min = size()?,
            "base" => settings.limits.base = size()?,
            "max" => settings.limits.max = size()?,
            _ => {
                let valid = "valid are group, min, base and max";
                return Err(format!("its metadata has `{name}`; {valid}"));
            }
        }
    }
    if !settings.limits.is_ordered() {
        return Err("the limits in its metadata are not in order: min, base, max".to_owned());
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use model::spec::LimitsSpec;

    use super::*;

    fn with(vm: &str) -> Description {
        let xml = format!(
            "<domain type='kvm'><name>web-1</name><metadata>\
             <nova:instance xmlns:nova='http://openstack.org/xmlns/libvirt/nova/1.1'/>\
             {vm}</metadata><devices><memballoon model='virtio' autodeflate='on' \
             freePageReporting='off'><stats period='10'/></memballoon></devices></domain>"
        );
        Description::read(&xml).unwrap()
    }

    fn settings(attributes: &str) -> Result<DomainSettings, String> {
        with(&format!("<o:vm xmlns:o='{SETTINGS}' {attributes}/>")).settings.unwrap()
    }

    #[test]
    fn group_and_limits_are_read_and_other_programs_metadata_is_not() {
        let read = settings("group='web' min='256 MiB' max='1 GiB'").unwrap();
        assert_eq!(read.group, Some("web".into()));
        let limits =
            LimitsSpec { min: Some(Bytes::mib(256)), base: None, max: Some(Bytes::mib(1024)) };
        assert_eq!(read.limits, limits);
        assert_eq!(with("").settings, None);
    }

    #[test]
    fn a_fault_is_named() {
        for (attributes, why) in [
            ("grupo='web'", "its metadata has `grupo`; valid are group, min, base and max"),
            ("min='256'", "`min` in its metadata: `256` has no unit"),
            ("min='2 GiB' max='1 GiB'", "not in order"),
        ] {
            let fault = settings(attributes).unwrap_err();
            assert!(fault.contains(why), "{fault}");
        }
    }

    #[test]
    fn the_balloon_is_as_libvirt_writes_it() {
        let read = with("");
        assert!(read.has_balloon && read.deflates_on_oom && !read.reports_free_pages);
        assert_eq!(read.stats_period_s, 10);
        let none = "<domain><devices><memballoon model='none'/></devices></domain>";
        assert!(!Description::read(none).unwrap().has_balloon);
        assert_eq!(Description::read("<domain/>").unwrap(), Description::default());
    }
}
