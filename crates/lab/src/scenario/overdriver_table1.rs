//! `overdriver-table1`: network memory and a disk (Overdriver §3.2, Table 1).
//!
//! Two hosts are two network namespaces with 1 Gbit/s between them. One runs `overbook disks`,
//! the other `overbook repository`, with TLS as between real hosts. A lean client reads and
//! writes the disk that the former serves: sequentially as a kernel reads ahead (128 KiB, two
//! requests in flight), and page by page at random places. The link's token bucket delays no
//! single page: a real cable of 1 Gbit/s takes 34 us more for one.
//!
//! **The stated disk** is the paper's: 451 us for a page at a random place, 54.56 MB/s
//! sequentially. A memory server emulates it: it delays each read, one after the other, so that
//! both figures come out. Where this host's timers make it slower than that, the stated figures
//! count. Its writes are not measured.

use pageserver::nbd::request::Command;

use super::prelude::*;
use crate::hosts::Hosts;
use crate::nbd_load::{Address, Load, raw_round_trips};
use crate::nbd_servers::{Running, Slow, Transport};
use crate::remote_swap::{Disk, RemoteSwap, near_share};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "overdriver-table1",
    summary: "memory of another host, 1 Gbit/s away, beside a disk: throughput and latency",
    measures: &[&[file!()], measured::DISKS],
    claims: claims! {
        "read_throughput" >= 2.0 => "ratio",
            "Memory of another host, 1 Gbit/s away by TLS, is read faster than the paper's disk",
            "2.16";
        "read_latency" <= 0.25 => "ratio",
            "A page of it comes sooner than from the paper's disk", "0.26";
        "network_write" => "MB/s", "It is written as fast as the cable allows", "43.3";
    },
    run,
};

const LINK_MBIT: u32 = 1000;
const SIZE: Bytes = Bytes::mib(256);
const ROUNDS: u32 = 3;
/// As a kernel reads ahead: bytes of each request, and requests in flight.
const STREAM: (u32, u32) = (128 << 10, 2);
const TIME: Duration = Duration::from_secs(3);
/// The paper's disk: a page at a random place, in us, and a sequential read, in MB/s.
const DISK_US: f64 = 451.0;
const DISK_MB_S: f64 = 54.56;
/// The delays for both figures: 388 + 4096 * 0.01537 = 451 us for a page, and 388 + 131072 *
/// 0.01537 = 2402 us for 128 KiB.
const STATED: Slow = Slow { read_us: 388, ns_per_byte: 15.37 };

/// Measurements of one round.
#[derive(Clone, Copy)]
struct LengthRound {
    read_mb_s: f64,
    write_mb_s: f64,
    read_us: f64,
    write_us: f64,
    disk_mb_s: f64,
    disk_us: f64,
    tcp_vs_raw: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let disk = Disk { size: SIZE, read_delay_us: 0, lent: SIZE, cache: false };
    let dir = context.dir.with_extension("swap");
    let swap = RemoteSwap::start_apart(Hosts::start(LINK_MBIT)?, &dir, "none", disk)?;
    swap.wait_until_connected()?;
    let (socket, export) = swap.export();
    let mut network = Load::connect(&Address::Unix(socket), export)?;
    network.fill()?;
    let own = tempfile::tempdir()?;
    let mut stated = Running::ours(Transport::Unix, &[], own.path(), SIZE.0 >> 20, STATED)?;
    let mut tcp = Running::ours(Transport::Tcp, &[], own.path(), SIZE.0 >> 20, Slow::default())?;
    let before = swap.counts()?;
    let mut rounds = Vec::new();
    for n in 0..ROUNDS {
        context.say(&format!("Round {} of {ROUNDS} ...", n + 1));
        let seed = context.seed + u64::from(n);
        let raw = raw_round_trips(TIME, &[])?.per_s;
        rounds.push(LengthRound {
            read_mb_s: network.stream(Command::Read, STREAM, SIZE.0)?,
            write_mb_s: network.stream(Command::Write, STREAM, SIZE.0)?,
            read_us: network.measure(Command::Read, 1, TIME, seed)?.p50_us,
            write_us: network.measure(Command::Write, 1, TIME, seed)?.p50_us,
            disk_mb_s: stated.load.stream(Command::Read, STREAM, SIZE.0 / 4)?,
            disk_us: stated.load.measure(Command::Read, 1, TIME, seed)?.p50_us,
            tcp_vs_raw: raw / tcp.load.measure(Command::Read, 1, TIME, seed)?.per_s,
        });
        interrupt::sleep(Duration::ZERO)?;
    }
    let near = near_share(&before, &swap.counts()?);
    drop((network, stated, tcp));
    swap.end()?;
    Ok(figures(context, &rounds, near))
}

fn figures(context: &Context, rounds: &[LengthRound], near: f64) -> Figures {
    let mut figures = context.figures(SCENARIO.name, ROUNDS);
    let of = |what: fn(&LengthRound) -> f64| median(rounds.iter().map(what));
    let reads = of(|round| round.read_mb_s / round.disk_mb_s.max(DISK_MB_S));
    let note = "network memory to the stated disk, read from end to end";
    figures.tell("read_throughput", reads, "ratio", note);
    let latency = of(|round| round.read_us / round.disk_us.min(DISK_US));
    let note = "the same, a page at a random place: how long it takes";
    figures.tell("read_latency", latency, "ratio", note);
    let note = "from end to end, 128 KiB, two under way";
    let mut add = |name: &str, what: fn(&LengthRound) -> f64, unit, note, paper: &str| {
        figures.add(name, Figure::new(of(what), unit, note).paper(paper));
    };
    add("network_read", |round| round.read_mb_s, "MB/s", note, "118");
    add("network_write", |round| round.write_mb_s, "MB/s", note, "43.3");
    add("disk_read", |round| round.disk_mb_s, "MB/s", note, "54.56");
    let note = "4 KiB at a random place, one under way, medians";
    add("network_read_us", |round| round.read_us, "us", note, "119");
    add("network_write_us", |round| round.write_us, "us", note, "25.45");
    add("disk_read_us", |round| round.disk_us, "us", note, "451");
    let note = "of the reads: answered by the repository";
    figures.check("near", near, "ratio", note, Target::AtLeast(0.99));
    let note = "a read by loopback TCP to a round trip of as many bytes through an epoll loop";
    figures.check("tcp_vs_raw", of(|it| it.tcp_vs_raw), "ratio", note, Target::AtMost(1.5));
    figures
}
