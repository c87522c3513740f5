//! The options of QEMU's command line that decide which of Overbook's mechanisms a VM can have.
//!
//! Options have two forms: `key=value,key=value`, with a comma in a value written twice, and JSON
//! (libvirt since 6.9 for `-object`, since 7.9 for `-device`). An unknown option is skipped. A
//! command line that says less than QEMU does (`-readconfig`) leads to fewer facts, not to wrong
//! ones: [`CommandLine::has_more`].

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::Bytes;
use serde_json::Value;

/// Devices that hold all memory of the guest.
const PASSED_THROUGH: [&str; 3] = ["vfio-", "vhost-scsi", "vhost-vdpa"];
/// Devices with memory that no balloon covers.
const WITH_MEMORY: [&str; 3] = ["nvdimm", "virtio-pmem", "virtio-mem"];

/// The facts that a command line tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CommandLine {
    /// `-name`.
    pub(super) name: Option<String>,
    /// `-uuid`.
    pub(super) uuid: Option<String>,
    /// The number in the name of Proxmox's PID file. Only Proxmox's own QEMU knows its `-id`.
    pub(super) vmid: Option<String>,
    /// `-m`.
    pub(super) ram: Option<Bytes>,
    /// Paths of the QMP sockets at which QEMU listens. A socket that was handed over as a
    /// descriptor has none.
    pub(super) qmp: Vec<PathBuf>,
    /// Whether libvirt's own monitor is there.
    pub(super) is_libvirts: bool,
    /// The balloon device.
    pub(super) balloon: Option<Balloon>,
    /// The memory backends of its RAM, without those of other memory devices.
    pub(super) backends: Vec<MemoryBackend>,
    /// `-mem-path`.
    pub(super) mem_path: Option<PathBuf>,
    /// `-mem-prealloc`, or a backend with `prealloc=on`.
    pub(super) is_preallocated: bool,
    /// `-overcommit mem-lock=on`.
    pub(super) is_locked: bool,
    /// The first device that pins the guest's memory.
    pub(super) passed_through: Option<String>,
    /// The first vhost-user device, which needs shared memory.
    pub(super) vhost_user: Option<String>,
    /// The first device with memory that no balloon covers.
    pub(super) other_memory: Option<String>,
    /// The machine `none`, by which managers ask a QEMU for its features: it is no VM.
    pub(super) is_no_machine: bool,
    /// Further options stand in a file (`-readconfig`).
    pub(super) has_more: bool,
}

/// The balloon device of a command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Balloon {
    /// `free-page-reporting=on`.
    pub(super) reports_free_pages: bool,
}

/// A memory backend of a command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryBackend {
    id: String,
    /// `share=on`.
    pub(super) is_shared: bool,
    /// `mem-path`.
    pub(super) path: Option<PathBuf>,
    /// `hugetlb=on`.
    pub(super) is_huge: bool,
}

impl CommandLine {
    /// Reads the words of a command line; the first is the program.
    pub(super) fn of(words: &[String]) -> Self {
        let mut line = Self::default();
        let mut sockets = BTreeMap::new();
        let mut monitors = Vec::new();
        let mut reporting_everywhere = false;
        let mut of_devices = Vec::new();
        let mut words = words.iter().skip(1).map(String::as_str).peekable();
        while let Some(word) = words.next() {
            let Some(option) = word.strip_prefix('-') else { continue };
            let option = option.strip_prefix('-').unwrap_or(option);
            match option {
                "mem-prealloc" => line.is_preallocated = true,
                "readconfig" => line.has_more = true,
                _ => {}
            }
            let Some(value) = words.next_if(|next| !next.starts_with('-')) else { continue };
            match option {
                "name" => line.name = properties(value, "guest").take("guest"),
                "uuid" => line.uuid = Some(value.to_owned()),
                "pidfile" => line.vmid = vmid(value),
                "m" => line.ram = properties(value, "size").take("size").and_then(|it| size(&it)),
                "machine" | "M" => {
                    line.is_no_machine |= properties(value, "type").is("type", "none")
                }
                "mem-path" => line.mem_path = Some(value.into()),
                "qmp" => line.qmp.extend(path_of_monitor(value)),
                "chardev" => {
                    let properties = properties(value, "backend");
                    if let (Some(id), Some(path)) = (properties.get("id"), properties.get("path"))
                        && properties.is("backend", "socket")
                        && (properties.is_on("server") || properties.has("server"))
                    {
                        sockets.insert(id.to_owned(), PathBuf::from(path));
                    }
                    line.is_libvirts |= properties.is("id", "charmonitor");
                }
                "mon" => {
                    let properties = properties(value, "chardev");
                    if properties.is("mode", "control") {
                        monitors.extend(properties.get("chardev").map(str::to_owned));
                    }
                }
                "object" => line.object(&properties(value, "qom-type")),
                "device" => {
                    let device = properties(value, "driver");
                    let kind = device.get("driver").unwrap_or_default();
                    if is_one(kind, &WITH_MEMORY) {
                        of_devices.extend(device.get("memdev").map(str::to_owned));
                    }
                    line.device(&device);
                }
                "netdev" => {
                    let properties = properties(value, "type");
                    line.uses(properties.get("type").unwrap_or_default());
                }
                "overcommit" | "realtime" => {
                    let properties = properties(value, "");
                    line.is_locked |= properties.is_on("mem-lock") || properties.is_on("mlock");
                }
                "global" => {
                    let mut parts = value.splitn(2, '=');
                    let key = parts.next().unwrap_or_default();
                    let is_it =
                        key.starts_with("virtio-balloon") && key.ends_with(".free-page-reporting");
                    reporting_everywhere |= is_it && is_on(parts.next().unwrap_or_default());
                }
                _ => {}
            }
        }
        let paths = monitors.iter().filter_map(|chardev| sockets.get(chardev).cloned());
        line.qmp.extend(paths);
        line.backends.retain(|backend| !of_devices.contains(&backend.id));
        if let Some(balloon) = line.balloon.as_mut().filter(|_| reporting_everywhere) {
            balloon.reports_free_pages = true;
        }
        line
    }

    fn object(&mut self, object: &Properties) {
        if !object.get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-")) {
            return;
        }
        self.is_preallocated |= object.is_on("prealloc");
        // A memory backend in shared memory of its own is shared unless it says otherwise.
        let is_shared_by_kind =
            object.is("qom-type", "memory-backend-memfd") && !object.has("share");
        self.backends.push(MemoryBackend {
            id: object.get("id").unwrap_or_default().to_owned(),
            is_shared: is_shared_by_kind || object.is_on("share"),
            path: object.get("mem-path").map(PathBuf::from),
            is_huge: object.is_on("hugetlb"),
        });
    }

    fn device(&mut self, device: &Properties) {
        let driver = device.get("driver").unwrap_or_default();
        if driver.starts_with("virtio-balloon") {
            let reports_free_pages = device.is_on("free-page-reporting");
            self.balloon = Some(Balloon { reports_free_pages });
        }
        self.uses(driver);
    }

    /// Notes a device or a network by its kind.
    fn uses(&mut self, kind: &str) {
        let own = || kind.to_owned();
        if kind.starts_with("vhost-user") {
            self.vhost_user.get_or_insert_with(own);
        } else if is_one(kind, &PASSED_THROUGH) {
            self.passed_through.get_or_insert_with(own);
        } else if is_one(kind, &WITH_MEMORY) {
            self.other_memory.get_or_insert_with(own);
        }
    }
}

/// Whether a device is of one of these kinds.
fn is_one(kind: &str, kinds: &[&str]) -> bool {
    kinds.iter().any(|known| kind.starts_with(known))
}

/// `unix:/path,server=on` of `-qmp`; other places have no path.
fn path_of_monitor(value: &str) -> Option<PathBuf> {
    let rest = value.strip_prefix("unix:")?;
    let properties = properties(rest, "path");
    let is_server = properties.has("server") && !properties.is("server", "off");
    is_server.then(|| properties.get("path").map(PathBuf::from)).flatten()
}

/// The keys and values of an option.
struct Properties(BTreeMap<String, String>);

impl Properties {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key).map(String::as_str)
    }

    fn take(mut self, key: &str) -> Option<String> {
        self.0.remove(key).filter(|value| !value.is_empty())
    }

    fn has(&self, key: &str) -> bool {
        self.0.contains_key(key)
    }

    fn is(&self, key: &str, value: &str) -> bool {
        self.get(key) == Some(value)
    }

    fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(is_on)
    }
}

/// Values by which QEMU switches something on.
fn is_on(value: &str) -> bool {
    matches!(value, "on" | "yes" | "y" | "true")
}

/// Reads both forms of an option. A first value without a key belongs to the key `implied`; a
/// later one is a key that is switched on.
fn properties(text: &str, implied: &str) -> Properties {
    if let Ok(Value::Object(json)) = serde_json::from_str(text) {
        let flat = |value: Value| match value {
            Value::String(text) => text,
            other => other.to_string(),
        };
        return Properties(json.into_iter().map(|(key, value)| (key, flat(value))).collect());
    }
    let mut found = BTreeMap::new();
    // A comma inside a value is written twice.
    let text = text.replace(",,", "\0");
    for (at, part) in text.split(',').enumerate() {
        let part = part.replace('\0', ",");
        match part.split_once('=') {
            Some((key, value)) => found.insert(key.to_owned(), value.to_owned()),
            None if at == 0 => found.insert(implied.to_owned(), part),
            None => found.insert(part, "on".to_owned()),
        };
    }
    Properties(found)
}

/// A size in MiB unless it has a unit.
fn size(text: &str) -> Option<Bytes> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "b" => 0,
        "k" => 10,
        "" | "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift).map(Bytes)
}

/// The VM's number, if this is Proxmox's PID file of a VM.
fn vmid(path: &str) -> Option<String> {
    let file = path.strip_prefix("/var/run/qemu-server/")?;
    file.strip_suffix(".pid").map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> CommandLine {
        CommandLine::of(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn monitors_are_found_in_all_their_forms() {
        let line = of("qemu -qmp unix:/run/a.sock,server=on,wait=off -qmp unix:/b,server,nowait \
             -qmp unix:/client -qmp tcp:localhost:4444,server=on \
             -chardev socket,id=qmp,path=/var/run/qemu-server/101.qmp,server=on,wait=off \
             -mon chardev=qmp,mode=control \
             -chardev socket,id=qmp-event,path=/var/run/qmeventd.sock,reconnect=5 \
             -mon chardev=qmp-event,mode=control -chardev socket,id=x,path=/x,server=on \
             -mon chardev=x,mode=readline --qmp unix:/with,,comma,server=on");
        let expected = ["/run/a.sock", "/b", "/with,comma", "/var/run/qemu-server/101.qmp"];
        assert_eq!(line.qmp, expected.map(PathBuf::from));
        let libvirt = of("qemu -chardev socket,id=charmonitor,fd=25,server=on,wait=off \
             -mon chardev=charmonitor,id=monitor,mode=control");
        assert!(libvirt.is_libvirts && libvirt.qmp.is_empty());
    }

    #[test]
    fn devices_are_read_as_text_and_as_json() {
        let text = of("qemu -device virtio-balloon-pci,id=balloon0,free-page-reporting=on");
        let json = of(r#"qemu -device {"driver":"virtio-balloon-pci","free-page-reporting":true}"#);
        assert_eq!(text.balloon, Some(Balloon { reports_free_pages: true }));
        assert_eq!(json.balloon, text.balloon);
        assert_eq!(of("qemu -device virtio-balloon-ccw").balloon, Some(Balloon::default()));
        let global = of("qemu -global virtio-balloon-pci.free-page-reporting=on -device \
             virtio-balloon-pci");
        assert_eq!(global.balloon, text.balloon);
        let vfio = of(r#"qemu -device {"driver":"vfio-pci","host":"0000:01:00.0"}"#);
        assert_eq!(vfio.passed_through.as_deref(), Some("vfio-pci"));
        assert_eq!(of("qemu -netdev vhost-vdpa,id=a").passed_through.unwrap(), "vhost-vdpa");
        assert_eq!(of("qemu -device vhost-user-fs-pci").vhost_user.unwrap(), "vhost-user-fs-pci");
        assert_eq!(of("qemu -device virtio-mem-pci").other_memory.unwrap(), "virtio-mem-pci");
    }

    #[test]
    fn memory_is_read_as_text_and_as_json() {
        let is_shared = |line: &CommandLine| line.backends.iter().all(|it| it.is_shared);
        for object in [
            "memory-backend-ram,id=a,size=1G,share=on",
            "memory-backend-memfd,id=a,size=1G",
            r#"{"qom-type":"memory-backend-memfd","id":"pc.ram","share":true,"size":7}"#,
        ] {
            let line = of(&format!("qemu -object {object}"));
            assert!(line.backends.len() == 1 && is_shared(&line), "{object}");
        }
        let nvdimm = of("qemu -object memory-backend-file,id=n,share=on,mem-path=/x \
             -device nvdimm,memdev=n");
        assert_eq!(nvdimm.backends, [], "it is no RAM of the guest");
        let file = of("qemu -object memory-backend-file,mem-path=/dev/hugepages/x,prealloc=yes");
        assert!(file.is_preallocated && !file.backends[0].is_shared);
        assert!(of("qemu -overcommit mem-lock=on").is_locked);
        assert!(!of("qemu -overcommit mem-lock=off -object rng-random,id=x").is_locked);
        let all = of("qemu -m size=2097152k,slots=16 -mem-prealloc -mem-path /x -readconfig y");
        assert_eq!(all.ram, Some(Bytes::mib(2048)));
        assert!(all.is_preallocated && all.has_more && all.mem_path.is_some());
    }

    #[test]
    fn no_command_line_makes_it_fail() {
        for line in
            ["", "qemu", "qemu -m", "qemu -name -m -1", "qemu -m 1.5G -device {\"a\"", "- -"]
        {
            let _ = of(line);
        }
        assert!(of("qemu -machine none,accel=kvm:tcg").is_no_machine);
        assert!(!of("qemu -machine pc,usb=off").is_no_machine);
        assert_eq!(of("qemu -m 99999999999T").ram, None);
        assert_eq!(of("qemu -name ,process=x").name, None);
        assert_eq!(of("qemu -name web-1,debug-threads=on").name.as_deref(), Some("web-1"));
    }
}
