//! `qmp_flood SOCKET`: a QEMU that greets and answers the first commands. It then sends events as
//! fast as they are read, of one size per connection, each size in turn.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use serde_json::{Value, json};

use crate::lab::LabError;

/// Bytes of padding in each event.
const SIZES: [usize; 4] = [20, 4 << 10, 60 << 10, 1 << 20];
const RAM: u64 = 256 << 20;

pub(super) fn run(args: &[String]) -> Result<(), LabError> {
    let [socket] = args else { return Err(super::usage("qmp_flood SOCKET")) };
    let listener = UnixListener::bind(socket)?;
    let mut cut_at = Instant::now();
    for size in SIZES.into_iter().cycle() {
        let (stream, _) = listener.accept()?;
        let paused = cut_at.elapsed();
        let sent = flood(stream, size);
        println!(
            "saw: asked again after {} ms, and cut off after {} KiB of events of {size} bytes",
            paused.as_millis(),
            sent >> 10
        );
        cut_at = Instant::now();
    }
    Ok(())
}

/// Floods until the daemon hangs up; returns the number of bytes of events that were sent.
fn flood(stream: UnixStream, size: usize) -> usize {
    let mut sent = 0;
    // The daemon ends the connection.
    let _ = talk(stream, size, &mut sent);
    sent
}

fn talk(stream: UnixStream, size: usize, sent: &mut usize) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut stream = stream;
    stream.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n")?;
    let data = json!({"actual": RAM, "more": "x".repeat(size)});
    let event = json!({"event": "BALLOON_CHANGE", "data": data}).to_string() + "\n";
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let asked: Value = serde_json::from_str(&line)?;
        let answer = match asked["execute"].as_str().unwrap_or_default() {
            "query-name" => json!({"name": "flood"}),
            "query-memory-size-summary" => json!({"base-memory": RAM, "plugged-memory": 0}),
            "query-memdev" => json!([{"size": RAM}]),
            "qom-list" => json!([{"name": "b", "type": "child<virtio-balloon-pci>"}]),
            "query-balloon" => json!({"actual": RAM}),
            "query-status" => json!({"status": "running"}),
            _ => json!({}),
        };
        let text = json!({"return": answer, "id": asked["id"]}).to_string() + "\n";
        stream.write_all(text.as_bytes())?;
        if asked["execute"] == "qom-list" {
            loop {
                stream.write_all(event.as_bytes())?;
                *sent += event.len();
            }
        }
    }
}
