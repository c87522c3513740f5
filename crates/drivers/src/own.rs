//! Finds the QEMU processes of this Overbook: those behind the sockets that its configuration
//! names, and those that its journal names. Another Overbook on the same host has others.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::join_all;
use model::VmName;
use sys::peer::{Peer, PeerError};
use sys::process::Identity;
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::qmp::connect;
use super::{discovery, identity};
use crate::journal::UndoRecord;

/// Timeout for all sockets together. The kernel alone completes a connection, unless another
/// client is connected and others wait.
const PATIENCE: Duration = Duration::from_secs(2);

/// The processes found, and the sockets that could not be checked.
#[derive(Debug, Default)]
pub struct Own {
    /// Processes, each with the name of its VM or of its socket.
    pub processes: BTreeMap<Identity, String>,
    /// Sockets that could not be checked, each with the name of its VM, and why.
    pub unknown: Vec<UnknownSocket>,
}

/// A socket that could not be checked.
#[derive(Debug, PartialEq, Eq)]
pub struct UnknownSocket {
    /// The name that its VM has by the socket's.
    pub vm: VmName,
    /// Path.
    pub socket: PathBuf,
    /// The fault.
    pub why: String,
}

/// The processes of the VMs that these records and the sockets of these globs name.
pub async fn own_processes(records: &[UndoRecord], globs: &[String]) -> Own {
    let mut own = Own::default();
    for record in records {
        if let Some(process) = identity::alive(record.incarnation) {
            own.processes.insert(process, record.vm.to_string());
        }
    }
    let sockets = discovery::find(globs);
    let looks = sockets.iter().map(|socket| process_at(socket));
    for (socket, found) in sockets.iter().zip(join_all(looks).await) {
        let vm = super::shared::name_of_socket(socket);
        match found {
            Ok(None) => {}
            Ok(Some(process)) => {
                own.processes.entry(process).or_insert(vm.to_string());
            }
            Err(why) => own.unknown.push(UnknownSocket { vm, socket: socket.clone(), why }),
        }
    }
    own
}

/// The process that listens on this socket; `None`: there is none, or it is not on this host.
async fn process_at(socket: &Path) -> Result<Option<Identity>, String> {
    let stream: UnixStream = match timeout(PATIENCE, connect(socket)).await {
        Err(_) => return Err(format!("no connection within {} s", PATIENCE.as_secs())),
        Ok(Err(error)) if is_nobodys(&error) => return Ok(None),
        Ok(Err(error)) => return Err(error.to_string()),
        Ok(Ok(stream)) => stream,
    };
    match Peer::of(&stream) {
        Ok(peer) => Ok(Some(peer.process)),
        // A process that has ended maps no memory, and Overbook never works with the memory of a
        // process in another PID namespace.
        Err(PeerError::Ended { .. } | PeerError::Unseen { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn is_nobodys(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn who_listens_at_a_socket_of_ours_is_ours_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let _own = UnixListener::bind(dir.path().join("web-1.sock")).unwrap();
        drop(UnixListener::bind(dir.path().join("stale.sock")).unwrap());
        let elsewhere = tempfile::tempdir().unwrap();
        let _others = UnixListener::bind(elsewhere.path().join("db-1.sock")).unwrap();
        let own = own_processes(&[], &[format!("{}/*.sock", dir.path().display())]).await;
        assert_eq!(own.unknown, []);
        let expected = [(Identity::own().unwrap(), "web-1".to_owned())];
        assert_eq!(own.processes, expected.into());
    }

    #[tokio::test]
    async fn the_journal_names_processes_that_no_socket_does_as_long_as_they_live() {
        let name = model::VmName::from("web-1");
        let life = identity::of_process(Identity::own().unwrap());
        let record = |life| UndoRecord::untouched(name.clone(), "/gone".into(), life);
        let own = own_processes(&[record(life), record(life + (1 << 22))], &[]).await;
        assert_eq!(own.processes, [(Identity::own().unwrap(), "web-1".to_owned())].into());
    }
}
