//! `manage` and `unmanage`: the shim and free-page reporting in a domain's persistent description.
//!
//! **Problem.** Both are easy to write by hand, and hard to remove again without a trace: libvirt
//! writes every description anew, and an operator edits it in between.
//!
//! **Idea.** The text is edited, and nothing else in it is touched. A mark in the metadata holds
//! what was there before, so the undo needs no file of ours and travels with the domain. Before
//! anything is written, the undo is tried on the new text; after libvirt has written it, the undo
//! is tried again on libvirt's text. Both must give the original byte for byte, or the original
//! is put back.

use std::io::{self, IsTerminal, Write};
use std::ops::Range;
use std::path::Path;

use roxmltree::{Document, Node};
use similar::TextDiff;
use virt::domain::Domain;

use crate::connection::OpenConnection;
use crate::description::{balloon_of, child};
use crate::said;

/// The namespace of the mark.
const MARK: &str = "https://overbook.example/libvirt/managed/1";
/// The namespace of libvirt's options for QEMU.
const QEMU: &str = "http://libvirt.org/schemas/domain/qemu/1.0";
const REPORTING: &str = "freePageReporting";
const PRELOAD: &str = "LD_PRELOAD";
/// Lines that a difference shows around each change.
const AROUND: usize = 2;

/// Loads the shim and switches free-page reporting on, from the domain's next start on.
///
/// # Errors
/// The reason why nothing was changed.
pub(crate) fn manage(uri: &str, domain: &str, shim: &Path, yes: bool) -> Result<(), String> {
    let shim = path_in_xml(shim)?;
    rewrite(uri, domain, yes, &|xml| with(xml, shim), Some(&without))
}

/// Undoes [`manage`].
///
/// # Errors
/// The reason why nothing was changed.
pub(crate) fn unmanage(uri: &str, domain: &str, yes: bool) -> Result<(), String> {
    rewrite(uri, domain, yes, &without, None)
}

fn path_in_xml(path: &Path) -> Result<&str, String> {
    let text = path.to_str().filter(|text| !text.contains(['<', '&', '\'', '"', ':', ' ']));
    text.ok_or_else(|| format!("{} cannot be preloaded by this name", path.display()))
}

type Rewrite<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// Rewrites a domain's persistent description. With `back`, the change must be undone exactly by
/// it.
fn rewrite(
    uri: &str,
    name: &str,
    yes: bool,
    edit: Rewrite<'_>,
    back: Option<Rewrite<'_>>,
) -> Result<(), String> {
    virt::error::clear_error_callback();
    let told = |error: virt::error::Error| said(&error);
    if name.contains('\0') {
        return Err("no such domain".to_owned());
    }
    let connect = OpenConnection::open(uri).map_err(told)?;
    let domain = Domain::lookup_by_name(&connect, name).map_err(told)?;
    if !domain.is_persistent().map_err(told)? {
        return Err(format!("{name} is transient: libvirt keeps no description of it"));
    }
    let read = |flags| domain.get_xml_desc(virt_sys::VIR_DOMAIN_XML_INACTIVE | flags).map_err(told);
    // Passwords are written back, and not shown.
    let (before, shown) = (read(virt_sys::VIR_DOMAIN_XML_SECURE)?, read(0)?);
    let after = edit(&before)?;
    let undoes = |xml: &str| back.is_none_or(|back| back(xml).as_deref() == Ok(before.as_str()));
    if !undoes(&after) {
        return Err(format!("{name}: this could not be undone exactly, so nothing was changed"));
    }
    say(&difference(&shown, &edit(&shown)?))?;
    if !yes && !agrees()? {
        return Err("nothing was changed".to_owned());
    }
    if read(virt_sys::VIR_DOMAIN_XML_SECURE)? != before {
        return Err(format!("{name} was changed meanwhile: nothing was changed by this command"));
    }
    let define = |xml: &str| Domain::define_xml(&connect, xml).map_err(told);
    define(&after)?;
    if !undoes(&read(virt_sys::VIR_DOMAIN_XML_SECURE)?) {
        define(&before)?;
        return Err(format!("{name}: libvirt wrote it differently, so the original is back"));
    }
    say(&format!("{name}: written; it takes effect when the domain is next started\n"))
}

fn say(text: &str) -> Result<(), String> {
    let mut out = io::stdout();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error| error.to_string())
}

/// Asks at the terminal; without one nothing is agreed to.
fn agrees() -> Result<bool, String> {
    if !io::stdin().is_terminal() {
        return Err("nothing was changed: say --yes to write this".to_owned());
    }
    say("Write this? [y/N] ")?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer).map_err(|error| error.to_string())?;
    Ok(matches!(answer.trim(), "y" | "yes"))
}

fn difference(before: &str, after: &str) -> String {
    let lines = TextDiff::from_lines(before, after);
    lines.unified_diff().context_radius(AROUND).header("now", "then").to_string()
}

/// Replacements of parts of a text.
#[derive(Default)]
struct Splices(Vec<(Range<usize>, String)>);

impl Splices {
    fn insert(&mut self, at: usize, text: impl Into<String>) {
        self.0.push((at..at, text.into()));
    }

    fn replace(&mut self, range: Range<usize>, text: impl Into<String>) {
        self.0.push((range, text.into()));
    }

    fn remove(&mut self, range: Range<usize>) {
        self.replace(range, "");
    }

    fn apply(mut self, text: &str) -> String {
        self.0.sort_by_key(|(range, _)| range.start);
        let mut result = text.to_owned();
        for (range, new) in self.0.into_iter().rev() {
            result.replace_range(range, &new);
        }
        result
    }
}

/// The description with the shim, reporting, and the mark.
fn with(xml: &str, shim: &str) -> Result<String, String> {
    let document = parse(xml)?;
    let domain = document.root_element();
    if mark_in(domain).is_some() {
        return Err("it is managed already".to_owned());
    }
    let balloon = balloon_of(domain).ok_or("it has no virtio memballoon")?;
    let mut splices = Splices::default();
    let was = balloon.attribute_node(REPORTING);
    match &was {
        Some(reporting) => splices.replace(reporting.range_value(), "on"),
        None => {
            splices.insert(end_of_name(xml, balloon), format!(" {REPORTING}='on'"));
        }
    }
    let was = was.map_or("absent", |reporting| reporting.value());
    let mark = format!(
        "<overbook:managed xmlns:overbook=\"{MARK}\" reporting=\"{was}\" shim=\"{shim}\"/>"
    );
    match child(domain, "metadata") {
        Some(metadata) => {
            let last = metadata.last_element_child().ok_or("its metadata is empty")?;
            splices.insert(last.range().end, format!("\n    {mark}"));
        }
        None => {
            let after = ["description", "title", "hwuuid", "genid", "uuid", "name"];
            let place = after.into_iter().find_map(|name| child(domain, name));
            let place = place.ok_or("it has no name")?.range().end;
            splices.insert(place, format!("\n  <metadata>\n    {mark}\n  </metadata>"));
        }
    }
    match commandline_of(domain) {
        Some(commandline) => match preload_in(commandline) {
            Some(value) => splices.insert(value.range_value().start, format!("{shim}:")),
            None => {
                let last = commandline.last_element_child().ok_or("its command line is empty")?;
                splices.insert(last.range().end, format!("\n    {}", environment(shim)));
            }
        },
        None => {
            let env = environment(shim);
            let lines = format!("  <qemu:commandline>\n    {env}\n  </qemu:commandline>\n");
            let end = xml.rfind("</domain>").ok_or("it does not end")?;
            splices.insert(end, lines);
            if domain.lookup_prefix(QEMU).is_none() {
                let end = end_of_tag(xml, domain);
                splices.insert(end, format!(" xmlns:qemu='{QEMU}'"));
            }
        }
    }
    Ok(splices.apply(xml))
}

/// The description without what [`with`] has added.
fn without(xml: &str) -> Result<String, String> {
    let document = parse(xml)?;
    let domain = document.root_element();
    let mark = mark_in(domain).ok_or("`overbook libvirt manage` has not changed it")?;
    let shim = mark.attribute("shim").ok_or("its mark does not name the shim")?;
    let mut splices = Splices::default();
    let metadata = mark.parent().ok_or("its mark stands nowhere")?;
    let is_alone = metadata.children().filter(Node::is_element).count() == 1;
    remove_with_space(xml, if is_alone { metadata } else { mark }, &mut splices);
    let reporting = balloon_of(domain).and_then(|balloon| balloon.attribute_node(REPORTING));
    if let Some(reporting) = reporting {
        match mark.attribute("reporting") {
            Some("absent") | None => {
                let start = xml[..reporting.range().start].trim_end().len();
                splices.remove(start..reporting.range().end);
            }
            Some(was) => splices.replace(reporting.range_value(), was),
        }
    }
    let preload = commandline_of(domain).and_then(|it| Some((it, preload_in(it)?)));
    if let Some((commandline, value)) = preload {
        let range = value.range_value();
        if value.value() == shim {
            let is_alone = commandline.children().filter(Node::is_element).count() == 1;
            let env =
                commandline.children().find(|node| node.attribute_node("value") == Some(value));
            match (is_alone, env) {
                (true, _) => {
                    remove_with_space(xml, commandline, &mut splices);
                    let declared = xml.find(&format!(" xmlns:qemu='{QEMU}'"));
                    let declared = declared.filter(|at| *at < end_of_tag(xml, domain));
                    let length = " xmlns:qemu=''".len() + QEMU.len();
                    declared.into_iter().for_each(|at| splices.remove(at..at + length));
                }
                (false, Some(env)) => remove_with_space(xml, env, &mut splices),
                (false, None) => {}
            }
        } else if value.value().starts_with(&format!("{shim}:")) {
            splices.remove(range.start..range.start + shim.len() + 1);
        }
    }
    Ok(splices.apply(xml))
}

fn parse(xml: &str) -> Result<Document<'_>, String> {
    Document::parse(xml).map_err(|error| error.to_string())
}

fn environment(shim: &str) -> String {
    format!("<qemu:env name='{PRELOAD}' value='{shim}'/>")
}

fn mark_in<'a, 'input>(domain: Node<'a, 'input>) -> Option<Node<'a, 'input>> {
    child(domain, "metadata")?.children().find(|node| node.has_tag_name((MARK, "managed")))
}

fn commandline_of<'a, 'input>(domain: Node<'a, 'input>) -> Option<Node<'a, 'input>> {
    domain.children().find(|node| node.has_tag_name((QEMU, "commandline")))
}

/// The value of the variable that names preloaded libraries.
fn preload_in<'a, 'input>(
    commandline: Node<'a, 'input>,
) -> Option<roxmltree::Attribute<'a, 'input>> {
    let is_it = |node: &Node<'_, '_>| {
        node.has_tag_name((QEMU, "env")) && node.attribute("name") == Some(PRELOAD)
    };
    commandline.children().find(is_it)?.attribute_node("value")
}

/// The end of an element's name in its start tag.
fn end_of_name(xml: &str, node: Node<'_, '_>) -> usize {
    let attributes = node.attributes();
    let last = attributes.map(|attribute| attribute.range().end).max();
    last.unwrap_or_else(|| end_of_tag(xml, node))
}

/// The place of the `>` that ends an element's start tag. libvirt writes no `>` into a value.
fn end_of_tag(xml: &str, node: Node<'_, '_>) -> usize {
    let start = node.range().start;
    xml[start..].find('>').map_or(xml.len(), |length| start + length)
}

/// Removes an element and the space before it.
fn remove_with_space(xml: &str, node: Node<'_, '_>, splices: &mut Splices) {
    let range = node.range();
    splices.remove(xml[..range.start].trim_end().len()..range.end);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHIM: &str = "/usr/lib/overbook/liboverbook_shim.so";

    fn domain(metadata: &str, balloon: &str, commandline: &str) -> String {
        let declared = if commandline.is_empty() {
            ""
        } else {
            " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"
        };
        format!(
            "<domain type='kvm'{declared}>\n  <name>web-1</name>\n  <uuid>7</uuid>\n{metadata}  \
             <memory unit='KiB'>262144</memory>\n  <devices>\n    <memballoon {balloon}>\n      \
             <stats period='5'/>\n    </memballoon>\n  </devices>\n{commandline}</domain>\n"
        )
    }

    const OTHERS: &str = "  <metadata>\n    <a:b xmlns:a=\"x\"/>\n  </metadata>\n";
    const ARGS: &str = "  <qemu:commandline>\n    <qemu:arg value='-s'/>\n  </qemu:commandline>\n";
    const ENV: &str = "  <qemu:commandline>\n    <qemu:env name='LD_PRELOAD' value='/x.so'/>\n  \
        </qemu:commandline>\n";

    #[test]
    fn the_undo_is_exact_whatever_was_there_before() {
        for metadata in ["", OTHERS] {
            for balloon in ["model='virtio'", "model='virtio' freePageReporting='off'"] {
                for commandline in ["", ARGS, ENV] {
                    let before = domain(metadata, balloon, commandline);
                    let after = with(&before, SHIM).unwrap();
                    assert!(after.contains(SHIM) && after.contains("freePageReporting='on'"));
                    assert_eq!(without(&after).unwrap(), before, "of {after}");
                    assert_eq!(with(&after, SHIM).unwrap_err(), "it is managed already");
                }
            }
        }
    }

    #[test]
    fn an_edit_of_the_operator_in_between_stays() {
        let after = with(&domain("", "model='virtio'", ""), SHIM).unwrap();
        let edited = after.replace("262144", "524288");
        let back = without(&edited).unwrap();
        assert_eq!(back, domain("", "model='virtio'", "").replace("262144", "524288"));
    }

    #[test]
    fn the_new_description_reads_as_meant() {
        let after = with(&domain(OTHERS, "model='virtio'", ENV), SHIM).unwrap();
        assert!(after.contains(&format!("value='{SHIM}:/x.so'")), "{after}");
        assert!(after.contains("<memballoon model='virtio' freePageReporting='on'>"), "{after}");
        let shown = difference(&domain(OTHERS, "model='virtio'", ENV), &after);
        assert!(shown.contains("\n+    <memballoon model='virtio' freePageReporting='on'>\n"));
    }

    #[test]
    fn a_domain_that_cannot_be_managed_is_told_why() {
        let none = "<domain><name>a</name><devices/></domain>";
        assert_eq!(with(none, SHIM).unwrap_err(), "it has no virtio memballoon");
        assert!(without(none).unwrap_err().contains("has not changed it"));
        assert!(path_in_xml(Path::new("/a b")).is_err());
    }
}
