//! Checks and finishes `[pool]`.

use core::net::IpAddr;

use super::path;
use crate::config::Fault;
use crate::config::draft::PoolDraft;
use crate::config::table::{Located, printable};
use crate::spec::{PoolSpec, ReceiveSpec};
use crate::{HostName, Millis, NamePattern};

/// Longest name of a host or pool, in bytes. Both become parts of keys, and a host's name is in
/// its certificate.
const NAME_BYTES: usize = 63;

/// The fault for a pool that has neither TLS nor `insecure`.
const NEITHER: &str = "[pool] has no `tls`: any host that reaches etcd could move VMs, and any on the \
     network could read the guests that change hosts; make certificates by `overbook pki` and write \
     `tls = \"/etc/overbook/tls\"`, or, for a trial, `insecure = true`";

pub(super) fn finish(draft: &PoolDraft, faults: &mut Vec<Fault>) -> Option<PoolSpec> {
    for key in PoolDraft::NEEDED.iter().filter(|key| !draft.written.contains(*key)) {
        faults.push(draft.place.fault(format!("[pool] has no `{key}`")));
    }
    let (host, etcd) = (draft.host.as_ref()?, draft.etcd.as_ref()?);
    is_plain("host", host, faults);
    draft.name.iter().for_each(|name| is_plain("name", name, faults));
    match (draft.tls.is_some(), draft.insecure.unwrap_or_default()) {
        (false, false) => faults.push(draft.place.fault(NEITHER)),
        (true, true) => faults.push(draft.place.fault("`insecure` has no effect with `tls`")),
        (has_tls, _) => etcd.value.iter().for_each(|at| endpoint(at, has_tls, faults)),
    }
    let movable = draft.movable.iter().flat_map(|list| &list.value);
    Some(PoolSpec {
        name: draft.name.as_ref().map_or_else(|| "default".to_owned(), |name| name.value.clone()),
        host: HostName::from(host.value.as_str()),
        etcd: etcd.value.iter().map(|at| at.value.clone()).collect(),
        tls: path("tls", draft.tls.as_ref(), faults),
        receive: receive(draft, faults),
        movable: movable.map(|at| NamePattern::new(at.value.as_str())).collect(),
        bandwidth: draft.bandwidth.as_ref().map_or(PoolSpec::BANDWIDTH, |at| at.value),
        downtime: draft.downtime_ms.map_or(PoolSpec::DOWNTIME, |ms| Millis(ms.into())),
        precopy: draft.precopy_s.map_or(PoolSpec::PRECOPY, |s| Millis::secs(s.into())),
        rest: draft.rest_s.map_or(PoolSpec::REST, |s| Millis::secs(s.into())),
        certainty_percent: draft.certainty_percent.unwrap_or(PoolSpec::CERTAINTY),
    })
}

fn is_plain(key: &str, at: &Located<String>, faults: &mut Vec<Fault>) {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if !at.value.chars().all(fits) || at.value.len() > NAME_BYTES {
        let shown = printable(&at.value);
        faults.push(at.place.fault(format!(
            "`{key}` is \"{shown}\"; valid: letters, digits, `-`, `_` and `.`, at most {NAME_BYTES}"
        )));
    }
}

fn endpoint(at: &Located<String>, has_tls: bool, faults: &mut Vec<Fault>) {
    let scheme = if has_tls { "https://" } else { "http://" };
    let is_right = at.value.strip_prefix(scheme).is_some_and(|rest| {
        rest.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
        })
    });
    if !is_right {
        let (shown, with) =
            (printable(&at.value), if has_tls { "with `tls`" } else { "with `insecure`" });
        faults.push(at.place.fault(format!(
            "`etcd` has \"{shown}\"; {with} write addresses such as \"{scheme}10.0.0.1:2379\""
        )));
    }
}

fn receive(draft: &PoolDraft, faults: &mut Vec<Fault>) -> Option<ReceiveSpec> {
    let command = path("incoming", draft.incoming.as_ref(), faults);
    let address = draft.address.as_ref().and_then(|at| match at.value.parse::<IpAddr>() {
        Ok(address) if !address.is_unspecified() => Some(address),
        _ => {
            let shown = printable(&at.value);
            faults.push(at.place.fault(format!(
                "`address` is \"{shown}\"; write the address at which other hosts reach this one, \
                 such as \"10.0.0.1\""
            )));
            None
        }
    });
    match (&draft.address, &draft.incoming) {
        (Some(at), None) => {
            faults.push(at.place.fault("`address` has no effect without `incoming`"))
        }
        (None, Some(at)) => faults
            .push(at.place.fault(
                "`incoming` needs `address`: where this host's QEMUs listen for the guests",
            )),
        _ => {}
    }
    Some(ReceiveSpec { address: address?, command: command? })
}
