//! A process that the daemon takes for a QEMU, with a guest that does as it is told: for tests of
//! the dashboard.
//!
//! `overbook-scripted-qemu NAME SOCKET RAM USED AVAILABLE SWAP`: sizes are in MiB. The process
//! occupies USED of its RAM, tells AVAILABLE as the guest's, and counts SWAP MiB a second as
//! swapped in. The program must lie under a name of QEMU's, such as `qemu-system-x86_64`. It ends
//! with its standard input.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    sync::atomic::{AtomicU64, Ordering},
    time::{Instant, UNIX_EPOCH},
};

use serde_json::{Value, json};

struct ScriptedGuest {
    name: String,
    ram: u64,
    available: u64,
    swapped_per_s: u64,
    /// Memory that the balloon leaves the guest.
    balloon: AtomicU64,
    started: Instant,
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mib = |at: usize| words[at].parse::<u64>().unwrap() << 20;
    let guest = ScriptedGuest {
        name: words[0].clone(),
        ram: mib(2),
        available: mib(4),
        swapped_per_s: mib(5),
        balloon: AtomicU64::new(mib(2)),
        started: Instant::now(),
    };
    let guest: &'static ScriptedGuest = Box::leak(Box::new(guest));
    let mut ram = vec![0_u8; usize::try_from(guest.ram).unwrap()];
    ram[..usize::try_from(mib(3)).unwrap()].fill(1);
    let listener = UnixListener::bind(&words[1]).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // The daemon may close a connection at any time.
            std::thread::spawn(move || drop(guest.talk(stream.unwrap())));
        }
    });
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(ram);
}

impl ScriptedGuest {
    fn talk(&self, stream: UnixStream) -> std::io::Result<()> {
        let mut write = stream.try_clone()?;
        write.write_all(b"{\"QMP\": {}}\n")?;
        for line in BufReader::new(stream).lines() {
            let message: Value = serde_json::from_str(&line?)?;
            let answer = json!({"return": self.answer(&message), "id": message["id"]});
            write.write_all(format!("{answer}\n").as_bytes())?;
        }
        Ok(())
    }

    fn answer(&self, message: &Value) -> Value {
        let command = message["execute"].as_str().unwrap_or_default();
        let property = message["arguments"]["property"].as_str().unwrap_or_default();
        match (command, property) {
            ("query-name", _) => json!({"name": self.name}),
            ("query-memdev", _) => json!([{"size": self.ram}]),
            ("query-memory-size-summary", _) => {
                json!({"base-memory": self.ram, "plugged-memory": 0})
            }
            ("query-balloon", _) => json!({"actual": self.balloon.load(Ordering::Relaxed)}),
            ("balloon", _) => {
                let value = message["arguments"]["value"].as_u64().unwrap_or(self.ram);
                self.balloon.store(value.min(self.ram), Ordering::Relaxed);
                json!({})
            }
            ("query-status", _) => json!({"status": "running"}),
            ("qom-list", _) => json!([{"name": "b0", "type": "child<virtio-balloon-pci>"}]),
            ("qom-get", "guest-stats-polling-interval") => json!(1),
            ("qom-get", "guest-stats") => self.statistics(),
            ("qom-get", "free-page-reporting") => json!(true),
            _ => json!({}),
        }
    }

    fn statistics(&self) -> Value {
        let balloon = self.balloon.load(Ordering::Relaxed);
        let taken = self.ram - balloon;
        let available = self.available.saturating_sub(taken);
        let stats = json!({
            "stat-total-memory": balloon,
            "stat-free-memory": available,
            "stat-available-memory": available,
            "stat-disk-caches": 0,
            "stat-swap-in": self.started.elapsed().as_secs() * self.swapped_per_s,
            "stat-swap-out": 0,
            "stat-major-faults": 0,
            "stat-minor-faults": 0,
        });
        json!({"stats": stats, "last-update": UNIX_EPOCH.elapsed().unwrap().as_secs()})
    }
}
