//! A QEMU that claims a tebibyte of RAM. If that were believed, the VM would be guaranteed all of
//! it, and its group could hand out the part that it leaves idle.
//!
//! Its program is called like QEMU, and it answers as a QEMU with a calm guest. It has no such
//! memory.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::lab::LabError;

/// The attack's name on the command line.
pub(super) const NAME: &str = "ram_liar";
/// RAM that it claims to have.
const RAM: u64 = 1 << 40;
/// Memory that its balloon claims to leave to the guest.
const BALLOON: u64 = 128 << 20;
/// The program's name.
const QEMU: &str = "qemu-system-x86_64";

/// Serves QMP at the path that is the first argument, until the process is ended.
pub(super) fn run(args: &[String]) -> Result<(), LabError> {
    let socket = args.first().ok_or_else(|| io::Error::other("which socket?"))?;
    let program = std::env::current_exe()?;
    if program.file_name() != Some(QEMU.as_ref()) {
        let disguise = program.with_file_name(QEMU);
        std::fs::copy(&program, &disguise)?;
        return Err(Command::new(disguise).args([super::SUBCOMMAND, NAME, socket]).exec().into());
    }
    let listener = UnixListener::bind(Path::new(socket))?;
    println!("saw: the socket is there");
    for stream in listener.incoming() {
        // A client that hangs up is no error.
        let _ = answer_all(stream?);
    }
    Ok(())
}

fn answer_all(stream: UnixStream) -> io::Result<()> {
    let mut output = stream.try_clone()?;
    writeln!(output, "{}", json!({"QMP": {"version": {}, "capabilities": []}}))?;
    let mut ticks = 0_u64;
    for line in BufReader::new(stream).lines() {
        let message: Value = serde_json::from_str(&line?)?;
        let command = message["execute"].as_str().unwrap_or_default();
        if command == "query-balloon" {
            ticks += 1;
            println!("saw: was asked {ticks} times, and said that it has {RAM} bytes of RAM");
        }
        if command == "balloon" {
            println!("saw: balloon to {}", message["arguments"]["value"]);
        }
        let property = message["arguments"]["property"].as_str().unwrap_or_default();
        let value = answer(command, property);
        writeln!(output, "{}", json!({"return": value, "id": message["id"]}))?;
    }
    Ok(())
}

fn answer(command: &str, property: &str) -> Value {
    let now = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
    match (command, property) {
        ("query-name", _) => json!({"name": "liar"}),
        ("query-memdev", _) => json!([{"size": RAM}]),
        ("query-memory-size-summary", _) => json!({"base-memory": RAM, "plugged-memory": 0}),
        ("query-memory-devices", _) => json!([]),
        ("query-balloon", _) => json!({"actual": BALLOON}),
        ("query-status", _) => json!({"status": "running"}),
        ("qom-list", _) => json!([{"name": "balloon0", "type": "child<virtio-balloon-pci>"}]),
        ("qom-get", "free-page-reporting") => json!(true),
        ("qom-get", "guest-stats-polling-interval") => json!(1),
        ("qom-get", "guest-stats") => json!({"last-update": now, "stats": {
            "stat-total-memory": BALLOON,
            "stat-free-memory": BALLOON / 2,
            "stat-available-memory": BALLOON / 2,
            "stat-swap-in": 0,
            "stat-swap-out": 0,
            "stat-minor-faults": now,
        }}),
        _ => json!({}),
    }
}
