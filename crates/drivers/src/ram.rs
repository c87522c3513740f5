//! How much memory a VM has: memory that its balloon can take, and other memory devices.
//!
//! QEMU's balloon counts the machine's base memory and its DIMMs (`get_current_ram_size` in
//! `hw/virtio/virtio-balloon.c`). Other memory devices (NVDIMM, virtio-pmem, virtio-mem, SGX EPC)
//! count in `query-memory-size-summary` and in the guest's own statistics, but the balloon cannot
//! take their memory. All memory can be plugged and unplugged while the guest runs, so it is
//! queried again whenever the balloon is read.

use model::Bytes;
use serde_json::Value;

use super::qmp::{Command, QmpClient, QmpError};
use super::questions;

const SUMMARY: &str = "query-memory-size-summary";

/// No machine has more memory devices (QEMU's `slots` is at most 256); further items in an answer
/// are ignored.
const MAX_DEVICES: usize = 256;

/// A VM's memory at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ram {
    /// Base memory and DIMMs: the balloon's reported size when it is empty.
    pub(super) reach: Bytes,
    /// The part of it in DIMMs that were plugged while the guest ran.
    pub(super) hotplugged: Bytes,
    /// Memory of all other memory devices.
    pub(super) devices: Bytes,
}

impl Ram {
    /// Reduces it to at most `most`, which is all memory that the kernel sees.
    pub(super) fn within(self, most: Bytes) -> Self {
        let reach = self.reach.min(most);
        let hotplugged = self.hotplugged.min(reach);
        Self { reach, hotplugged, devices: self.devices.min(most.minus(reach)) }
    }
}

/// The commands whose answers [`ram_in`] needs.
pub(super) const fn commands() -> [Command; 2] {
    [Command::new(SUMMARY), Command::new("query-memory-devices")]
}

/// How much memory the VM has now.
pub(super) async fn ram(client: &mut QmpClient) -> Result<Ram, QmpError> {
    let [summary, devices] = client.batch(commands()).await?;
    ram_in(&summary?, devices.as_ref().ok())
}

/// How much memory the VM has now, and its balloon's size at the same moment.
pub(super) async fn with_balloon(client: &mut QmpClient) -> Result<(Ram, Bytes), QmpError> {
    let ([before, devices], [after, _]) = (commands(), commands());
    let all = [before, devices, Command::new("query-balloon"), after];
    let [before, devices, balloon, after] = client.batch(all).await?;
    let (before, balloon) = (before?, questions::balloon_in(&balloon?)?);
    if before != after? {
        let what = "it changes at this moment".to_owned();
        return Err(QmpError::Nonsense { command: SUMMARY, what });
    }
    Ok((ram_in(&before, devices.as_ref().ok())?, balloon))
}

/// The same in QEMU's answers. Plugged memory counts as DIMMs only if an answer lists it as such.
pub(super) fn ram_in(summary: &Value, devices: Option<&Value>) -> Result<Ram, QmpError> {
    let field = |name| summary.get(name).and_then(Value::as_u64).map(Bytes);
    let base = field("base-memory").filter(|base| !base.is_zero()).ok_or_else(|| {
        QmpError::Nonsense { command: SUMMARY, what: "no base-memory".to_owned() }
    })?;
    let plugged = field("plugged-memory").unwrap_or_default();
    let devices = devices.and_then(Value::as_array).into_iter().flatten().take(MAX_DEVICES);
    let (mut dimms, mut hotplugged) = (Bytes::ZERO, Bytes::ZERO);
    for (size, is_hotplugged) in devices.filter_map(dimm) {
        dimms = dimms.plus(size).min(plugged);
        hotplugged = hotplugged.plus(if is_hotplugged { size } else { Bytes::ZERO }).min(dimms);
    }
    Ok(Ram { reach: base.plus(dimms), hotplugged, devices: plugged.minus(dimms) })
}

/// The size of a device that is a DIMM, and whether it was plugged while the guest ran.
fn dimm(device: &Value) -> Option<(Bytes, bool)> {
    if device.get("type")?.as_str()? != "dimm" {
        return None;
    }
    let data = device.get("data")?;
    let is_hotplugged = data.get("hotplugged").and_then(Value::as_bool).unwrap_or(false);
    Some((Bytes(data.get("size")?.as_u64()?), is_hotplugged))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(kind: &str, mib: u64) -> Value {
        json!({"type": kind, "data": {"id": "m", "size": mib << 20}})
    }

    #[test]
    fn the_balloon_reaches_dimms_and_no_other_memory_device() {
        let summary = json!({"base-memory": 512 << 20, "plugged-memory": 1024 << 20});
        let others = ["nvdimm", "virtio-pmem", "virtio-mem", "sgx-epc"];
        let devices: Vec<_> = others.map(|kind| device(kind, 192)).to_vec();
        let devices = json!([devices, vec![device("dimm", 256)]].concat());
        let ram = ram_in(&summary, Some(&devices)).unwrap();
        let (reach, apart) = (Bytes::mib(768), Bytes::mib(768));
        assert_eq!(ram, Ram { reach, hotplugged: Bytes::ZERO, devices: apart });
    }

    #[test]
    fn dimms_that_were_plugged_while_the_guest_ran_are_told_from_the_others() {
        let summary = json!({"base-memory": 512 << 20, "plugged-memory": 384 << 20});
        let mut devices = json!([device("dimm", 256), device("dimm", 128)]);
        devices[1]["data"]["hotplugged"] = json!(true);
        let ram = ram_in(&summary, Some(&devices)).unwrap();
        assert_eq!((ram.reach, ram.hotplugged), (Bytes::mib(896), Bytes::mib(128)));
    }

    #[test]
    fn what_is_not_known_to_be_a_dimm_is_none_and_a_dimm_is_no_larger_than_all_that_is_plugged() {
        let summary = json!({"base-memory": 512 << 20, "plugged-memory": 256 << 20});
        let apart = Ram { reach: Bytes::mib(512), devices: Bytes::mib(256), ..Ram::default() };
        for unknown in [None, Some(json!({})), Some(json!([7, {"type": "dimm"}, null]))] {
            assert_eq!(ram_in(&summary, unknown.as_ref()).unwrap(), apart);
        }
        let huge = json!([device("dimm", 1 << 20), device("dimm", 1 << 20)]);
        let bounded = Ram { reach: Bytes::mib(768), ..Ram::default() };
        assert_eq!(ram_in(&summary, Some(&huge)).unwrap(), bounded);
        assert!(ram_in(&json!({"plugged-memory": 1}), None).is_err());
    }

    #[test]
    fn no_more_is_believed_than_the_kernel_sees() {
        let reach = Bytes::mib(1 << 20);
        let said = Ram { reach, hotplugged: reach, devices: Bytes::mib(64) };
        let bound = Bytes::mib(300);
        let seen = Ram { reach: bound, hotplugged: bound, devices: Bytes::ZERO };
        assert_eq!(said.within(Bytes::mib(300)), seen);
        assert_eq!(said.within(Bytes(u64::MAX)), said);
    }
}
