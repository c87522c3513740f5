//! Two hosts on one: network namespaces with a cable between them.
//!
//! The cable is a pair of virtual interfaces, and a token bucket at each end makes it as fast as it
//! is said to be. Programs that are started in such a host reach the other one by its address, and
//! files as ever.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use model::Bytes;
use serde_json::Value;
use sys::process::Spawn;

use crate::command;
use crate::lab::LabError;

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// Where the guest is.
    Near,
    /// Where there is memory to lend.
    Far,
}

/// Two hosts; they are gone when this is.
#[derive(Debug)]
pub struct Hosts {
    /// Of their namespaces.
    names: [String; 2],
}

impl Hosts {
    /// Makes them, with a cable of so many Mbit/s between them.
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

    /// What the cable has carried, both ways.
    ///
    /// # Errors
    /// [`LabError::Hosts`].
    pub fn carried(&self) -> Result<Bytes, LabError> {
        let words = ["-n", self.name(Host::Near), "-s", "-j", "link", "show", "dev", CABLE];
        let said = command::run("ip", Spawn::new("ip").args(words)).map_err(LabError::Hosts)?;
        let said: Value = serde_json::from_slice(&said).unwrap_or_default();
        let bytes = |way: &str| said[0]["stats64"][way]["bytes"].as_u64().unwrap_or(0);
        Ok(Bytes(bytes("rx") + bytes("tx")))
    }

    /// Starts a program on one of them.
    #[must_use]
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
            // Not by `command::run`: that ends its program when the user has interrupted, and this
            // must be done then above all. A host that was never made is gone as well.
            let spawn = Spawn::new("ip").args(["netns", "delete", name]).stderr(Stdio::null());
            let _ = spawn.spawn().and_then(|mut ip| ip.wait_for(END));
        }
    }
}

/// What the interface is called on both hosts.
const CABLE: &str = "cable";
/// It may take so long until a host is gone.
const END: Duration = Duration::from_secs(10);

impl Host {
    /// Its address.
    #[must_use]
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
