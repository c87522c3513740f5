//! Two hosts on one machine: network namespaces with a cable between them.
//!
//! The cable is a veth pair, and a token bucket at each end limits its rate. Programs in such a
//! host connect to the other one by its address, and see the same files.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use model::Bytes;
use serde_json::Value;
use sys::process::Spawn;

use crate::command;
use crate::lab::LabError;

/// One of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The host of the guest.
    Near,
    /// The host that has memory to lend.
    Far,
}

/// Two hosts; dropping it removes them.
#[derive(Debug)]
pub struct Hosts {
    names: [String; 2],
}

impl Hosts {
    /// Makes them, with a cable of `mbit` Mbit/s between them.
    ///
    /// # Errors
    /// [`LabError::Hosts`]: this user may make no network namespaces, or `ip` and `tc` are missing.
    pub fn start(mbit: u32) -> Result<Self, LabError> {
        let own = std::process::id();
        let hosts = Self { names: ["near", "far"].map(|side| format!("overbook-{own}-{side}")) };
        let [near, far] = &hosts.names;
        for name in &hosts.names {
            ip(["netns", "add", name])?;
        }
        ip([
            "-n", near, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", far,
        ])?;
        for host in [Host::Near, Host::Far] {
            let (name, address) = (hosts.name(host), format!("{}/30", host.address()));
            ip(["-n", name, "address", "add", &address, "dev", CABLE])?;
            ip(["-n", name, "link", "set", CABLE, "up"])?;
            ip(["-n", name, "link", "set", "lo", "up"])?;
            let rate = format!("{mbit}mbit");
            let shape = ["-n", name, "qdisc", "add", "dev", CABLE, "root", "tbf", "rate", &rate];
            let spawn = Spawn::new("tc").args(shape).args(["burst", "128kb", "latency", "20ms"]);
            command::run("tc", spawn).map_err(LabError::Hosts)?;
        }
        Ok(hosts)
    }

    /// Bytes that the cable has carried, both ways.
    pub fn carried(&self) -> Result<Bytes, LabError> {
        let words = ["-n", self.name(Host::Near), "-s", "-j", "link", "show", "dev", CABLE];
        let said = command::run("ip", Spawn::new("ip").args(words)).map_err(LabError::Hosts)?;
        let said: Value = serde_json::from_slice(&said).unwrap_or_default();
        let bytes = |way: &str| said[0]["stats64"][way]["bytes"].as_u64().unwrap_or(0);
        Ok(Bytes(bytes("rx") + bytes("tx")))
    }

    /// A command that starts a program on `host`.
    pub fn spawn(&self, host: Host, program: &Path) -> Spawn {
        Spawn::new("ip").args(["netns", "exec", self.name(host)]).arg(program)
    }

    fn name(&self, host: Host) -> &str {
        &self.names[usize::from(host == Host::Far)]
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // Not by `command::run`: that ends its program when the user has interrupted, and
            // this must be done above all then. A host that was never made needs no removal.
            let spawn = Spawn::new("ip").args(["netns", "delete", name]).stderr(Stdio::null());
            let _ = spawn.spawn().and_then(|mut ip| ip.wait_for(END));
        }
    }
}

/// The name of the interface on both hosts.
const CABLE: &str = "cable";
/// Timeout for the removal of a host.
const END: Duration = Duration::from_secs(10);

impl Host {
    pub const fn address(self) -> Ipv4Addr {
        match self {
            Self::Near => Ipv4Addr::new(10, 213, 0, 1),
            Self::Far => Ipv4Addr::new(10, 213, 0, 2),
        }
    }
}

fn ip<const N: usize>(words: [&str; N]) -> Result<(), LabError> {
    command::run("ip", Spawn::new("ip").args(words)).map_err(LabError::Hosts)?;
    Ok(())
}
