//! Passes reports about Proxmox's VMs to the drivers.
//!
//! A process makes the reports ([`crate::proxmox`]), because its reads may hang. If it ends, it is
//! started again. If it hangs, it is left alone: it goes on by itself when the reads end.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use drivers::lines::JsonLines;
use drivers::proxmox::Proxmox;
use model::proxmox::ProxmoxReport;
use tokio::time::{sleep, timeout};

use super::log;
use crate::helper::Helper;
use crate::proxmox::{MOST_REPORT, NodePaths};

/// Pause before the process is started again, and before a host is looked at again.
const AGAIN: Duration = Duration::from_secs(10);
/// Silence after which the file system counts as hanging: several reports are missing.
const SILENCE: Duration = Duration::from_secs(20);

/// Runs until the daemon ends.
pub(super) async fn keep(proxmox: Arc<Proxmox>) {
    let node = NodePaths::default();
    loop {
        if node.is_node()
            && let Err(error) = pass_on(&node, &proxmox).await
        {
            log::warn(&format!("the process that reads Proxmox's files has ended: {error}"));
        }
        sleep(AGAIN).await;
    }
}

async fn pass_on(node: &NodePaths, proxmox: &Proxmox) -> io::Result<()> {
    // The process ends when the first value is dropped.
    let (_reader, _down, up) = Helper::start(node.reader())?;
    let mut reports = JsonLines::new(up, MOST_REPORT);
    let (mut is_silent, mut fault) = (false, None);
    loop {
        let Ok(report) = timeout(SILENCE, reports.next::<ProxmoxReport>()).await else {
            if !is_silent {
                log::warn(&format!(
                    "{} does not answer: what it said last stays in force",
                    node.cluster.display()
                ));
            }
            is_silent = true;
            continue;
        };
        let report = report?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if std::mem::take(&mut is_silent) {
            log::info(&format!("{} answers again", node.cluster.display()));
        }
        if report.fault != fault {
            report.fault.iter().for_each(|why| log::warn(&format!("Proxmox: {why}")));
            fault.clone_from(&report.fault);
        }
        proxmox.note(report);
    }
}
