//! `page-server-vs`: our page server compared with widely used ones, under the same lean client.
//!
//! Each serves memory: ours, `nbdkit` with its memory plugin, `qemu-storage-daemon` with a file
//! in shared memory (it has no memory backend that keeps data). The client reads and writes pages
//! at random, with 1, 16 or 64 requests in flight, over a unix socket, TCP and TLS. All pages
//! were written before. Servers take turns within each point, and points repeat several times, so
//! that other load on the machine affects all of them alike. The client has a CPU of its own, and
//! the server under load has another one. Without pinning the scheduler would at times put both
//! on one.

use std::fmt::Write as _;
use std::net::Ipv4Addr;
use std::sync::Arc;

use bytes::Bytes;
use pageserver::layer::Layer;
use pageserver::layers::memory::Memory;
use pageserver::layers::seal::{PAGE, Seal};
use pageserver::nbd::request::Command;

use super::prelude::*;
use crate::nbd_load::{Rate, raw_round_trips};
use crate::nbd_servers::{Programs, Running, ServerKind, Transport, certificates};
use crate::pinning;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "page-server-vs",
    summary: "our page server beside nbdkit and qemu-storage-daemon",
    measures: &[&[file!()], measured::DISKS],
    claims: claims! {
        "vs_nbdkit_64" >= 3.0 => "ratio",
            "The page server answers more 4 KiB requests than nbdkit's memory plugin, 64 in flight";
        "vs_nbdkit_16" >= 1.5 => "ratio",
            "The page server answers more than nbdkit with 16 in flight";
        "vs_nbdkit_1" >= 1.0 => "ratio",
            "The page server answers no fewer than nbdkit with one in flight";
        "tls_vs_nbdkit" >= 1.0 => "ratio", "The page server answers no fewer than nbdkit by TLS";
        "p99_vs_nbdkit" <= 1.0 => "ratio", "The slowest 1 % of answers are no slower than nbdkit's";
        "vs_qsd_64" >= 1.0 => "ratio",
            "The page server answers no fewer 4 KiB requests than qemu-storage-daemon, 64 in \
             flight";
        "vs_qsd_16" >= 1.0 => "ratio",
            "The page server answers no fewer than qemu-storage-daemon with 16 in flight";
        "vs_qsd_1" >= 1.0 => "ratio",
            "The page server answers no fewer than qemu-storage-daemon with one in flight";
        "tls_vs_qsd" >= 1.0 => "ratio",
            "The page server answers no fewer than qemu-storage-daemon by TLS";
        "p99_vs_qsd" <= 1.0 => "ratio",
            "The slowest 1 % of answers are no slower than qemu-storage-daemon's";
        "cpu_us" <= 1.5 => "us", "A request costs little CPU";
        "seal_us" <= 1.0 => "us", "To seal a page costs little CPU";
        "tcp_vs_raw" <= 1.5 => "ratio",
            "A read over loopback TCP costs little more than the socket's round trip through an \
             event loop";
    },
    run,
};

const SIZE_MIB: u64 = 256;
const ROUNDS: u32 = 5;
const TIME: Duration = Duration::from_millis(1200);
const COMMANDS: [Command; 2] = [Command::Read, Command::Write];
const DEPTHS: [u32; 3] = [1, 16, 64];
const SEALS: u32 = 20_000;

/// One point of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Point {
    way: Transport,
    command: Command,
    depth: u32,
}

/// One measurement of one server at one point.
struct Measured {
    point: Point,
    kind: ServerKind,
    rate: Rate,
    cpu_us: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let programs = Programs::provide()?;
    let dir = tempfile::tempdir()?;
    certificates(dir.path(), Ipv4Addr::LOCALHOST)?;
    let mut servers = Vec::new();
    let has_two = std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() >= 2);
    let (client, server): (&[usize], &[usize]) = if has_two { (&[0], &[1]) } else { (&[], &[]) };
    for way in Transport::ALL {
        for kind in ServerKind::ALL {
            servers.push(Running::start((kind, way), &programs, server, dir.path(), SIZE_MIB)?);
        }
    }
    pinning::this_thread(client)?;
    let (mut all, mut raw) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        context.say(&format!("Round {} of {ROUNDS} ...", round + 1));
        for point in points() {
            for server in servers.iter_mut().filter(|server| server.way == point.way) {
                all.push(measure(server, point, context.seed + u64::from(round))?);
                if interrupt::interrupted() {
                    return Err(interrupt::Interrupted.into());
                }
            }
            if point == RAW {
                raw.push(raw_round_trips(TIME, server)?.per_s);
            }
        }
    }
    drop(servers);
    let mut figures = context.figures(SCENARIO.name, ROUNDS);
    figures.preface = table(&all);
    add_figures(&mut figures, &all, &raw);
    let note = format!("median of {ROUNDS} times {SEALS} pages, less what memory alone takes");
    figures.tell("seal_us", median((0..ROUNDS).map(|_| seal_us())), "us", note);
    Ok(figures)
}

/// The point at which a read is compared with a round trip of as many bytes.
const RAW: Point = Point { way: Transport::Tcp, command: Command::Read, depth: 1 };

fn points() -> impl Iterator<Item = Point> {
    let of_way = |way| COMMANDS.into_iter().map(move |command| (way, command));
    let all = Transport::ALL.into_iter().flat_map(of_way);
    all.flat_map(|(way, command)| DEPTHS.map(|depth| Point { way, command, depth }))
}

fn measure(server: &mut Running, point: Point, seed: u64) -> Result<Measured, LabError> {
    let cpu = |server: &Running| server.child.identity().usage().map(|usage| usage.cpu);
    let before = cpu(server);
    let rate = server.load.measure(point.command, point.depth, TIME, seed)?;
    let cpu_s = cpu(server).zip(before).map(|(after, before)| (after - before).as_secs_f64());
    let cpu_us = cpu_s.map_or(f64::NAN, |s| s * 1e6 / f64::from(rate.requests));
    Ok(Measured { point, kind: server.kind, rate, cpu_us })
}

/// Values of a server at a point, one a round.
fn values<'a>(
    all: &'a [Measured],
    kind: ServerKind,
    point: Point,
    what: impl Fn(&Measured) -> f64 + 'a,
) -> impl Iterator<Item = f64> + 'a {
    let here = move |measured: &&Measured| measured.kind == kind && measured.point == point;
    all.iter().filter(here).map(what)
}

/// Ours divided by another server's: the median of the ratios of all rounds.
fn ratio(
    all: &[Measured],
    other: ServerKind,
    point: Point,
    what: impl Fn(&Measured) -> f64 + Copy,
) -> f64 {
    let ours: Vec<f64> = values(all, ServerKind::Ours, point, what).collect();
    let theirs: Vec<f64> = values(all, other, point, what).collect();
    if ours.len() != theirs.len() {
        return f64::NAN;
    }
    median(ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs))
}

/// Adds our rates and our slowest answers compared with those of another server.
fn add_comparison(figures: &mut Figures, all: &[Measured], (other, name): (ServerKind, &str)) {
    let per_s = |measured: &Measured| measured.rate.per_s;
    let least = |points: Vec<Point>| {
        points.into_iter().map(|point| ratio(all, other, point, per_s)).smallest()
    };
    for depth in DEPTHS {
        let by_unix = points().filter(|p| p.way == Transport::Unix && p.depth == depth).collect();
        let note = "our requests/s to its, unix socket, the worse of reads and writes";
        figures.tell(&format!("vs_{name}_{depth}"), least(by_unix), "ratio", note);
    }
    let by_tls = points().filter(|p| p.way == Transport::Tls).collect();
    let note = "the same by TLS, the worst of all depths";
    figures.tell(&format!("tls_vs_{name}"), least(by_tls), "ratio", note);
    let slow = |point| ratio(all, other, point, |measured| measured.rate.p99_us);
    let worst = points().map(slow).largest();
    let at = points().find(|point| slow(*point).total_cmp(&worst).is_eq());
    let at = at.map_or(String::new(), |Point { way, command, depth }| {
        format!(": {command:?} {depth} {way:?}")
    });
    let note = format!("our p99 to its, the worst of all points{at}");
    figures.tell(&format!("p99_vs_{name}"), worst, "ratio", note);
}

fn add_figures(figures: &mut Figures, all: &[Measured], raw: &[f64]) {
    let per_s = |measured: &Measured| measured.rate.per_s;
    for other in [(ServerKind::Nbdkit, "nbdkit"), (ServerKind::Qemu, "qsd")] {
        add_comparison(figures, all, other);
    }
    let busy = points().filter(|p| p.way == Transport::Unix && p.depth == 64);
    let cpu = busy.map(|point| median(values(all, ServerKind::Ours, point, |m| m.cpu_us)));
    let note = "our server's CPU time for a request, 64 under way, unix socket, the worse of two";
    figures.tell("cpu_us", cpu.largest(), "us", note);
    let ours: Vec<f64> = values(all, ServerKind::Ours, RAW, per_s).collect();
    let is_whole = ours.len() == raw.len();
    let ratios = raw.iter().zip(&ours).map(|(raw, ours)| raw / ours).filter(|_| is_whole);
    let note = "a read by TCP to a round trip of as many bytes through an epoll loop";
    figures.tell_rounds("tcp_vs_raw", ratios.collect(), "ratio", note);
}

fn table(all: &[Measured]) -> String {
    let mut text =
        String::from("requests/s, p50/p99 in us, CPU time of the server in us/request\n");
    let _ = write!(text, "{:<14}", "");
    for kind in ServerKind::ALL {
        let _ = write!(text, "  {:>33}", kind.name());
    }
    for point in points() {
        let Point { way, command, depth } = point;
        let name = format!("{} {command:?} {depth}", way.name()).to_lowercase();
        let _ = write!(text, "\n{name:<14}");
        for kind in ServerKind::ALL {
            let of = |what: fn(&Measured) -> f64| median(values(all, kind, point, what));
            let (per_s, cpu_us) = (of(|m| m.rate.per_s), of(|m| m.cpu_us));
            let (p50, p99) = (of(|m| m.rate.p50_us), of(|m| m.rate.p99_us));
            let _ = write!(text, "  {per_s:>9.0} {p50:>7.1}/{p99:>8.1} {cpu_us:>6.2}");
        }
    }
    text + "\n\n"
}

/// The time that sealing adds to writing a page, in microseconds.
fn seal_us() -> f64 {
    let memory = || Arc::new(Memory::new(64 << 20));
    let Some(sealed) = Seal::over(memory()) else { return f64::NAN };
    (write_us(&sealed) - write_us(&*memory())).max(0.0)
}

fn write_us(layer: &dyn Layer) -> f64 {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().build() else {
        return f64::NAN;
    };
    static PAGE_OF_ONE_VALUE: [u8; PAGE] = [0x5a; PAGE];
    let page = Bytes::from_static(&PAGE_OF_ONE_VALUE);
    let pages = layer.size() / PAGE as u64;
    let write = |number: u64| {
        let written = layer.write(number % pages * PAGE as u64, page.clone());
        async move { written.result().await.is_ok() }
    };
    runtime.block_on(async {
        for number in 0..pages {
            write(number).await;
        }
        let began = Instant::now();
        for number in 0..u64::from(SEALS) {
            if !write(number).await {
                return f64::NAN;
            }
        }
        began.elapsed().as_secs_f64() * 1e6 / f64::from(SEALS)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two rounds in which ours answers four times as many as nbdkit and twice as many as qemu.
    fn all() -> Vec<Measured> {
        let of = |kind: ServerKind, point: Point| {
            let (per_s, p99_us) = match kind {
                ServerKind::Ours => (400.0, 10.0),
                ServerKind::Nbdkit => (100.0, 20.0),
                ServerKind::Qemu => (200.0, 40.0),
            };
            let rate = Rate { requests: 9, per_s, p50_us: 5.0, p99_us };
            Measured { point, kind, rate, cpu_us: 1.2 }
        };
        let round = || points().flat_map(|point| ServerKind::ALL.map(|kind| of(kind, point)));
        round().chain(round()).collect()
    }

    fn figures(all: &[Measured], raw: &[f64]) -> Figures {
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, all, raw))
    }

    fn value(all: &[Measured], name: &str) -> f64 {
        figures(all, &[500.0, 500.0]).value(name)
    }

    #[test]
    fn ours_is_set_against_each_of_both_others_and_against_the_socket() {
        let expected = [
            ("vs_nbdkit_64", 4.0),
            ("vs_qsd_64", 2.0),
            ("tls_vs_qsd", 2.0),
            ("p99_vs_nbdkit", 0.5),
            ("p99_vs_qsd", 0.25),
            ("cpu_us", 1.2),
            ("tcp_vs_raw", 1.25),
        ];
        for (name, wanted) in expected {
            assert!((value(&all(), name) - wanted).abs() < 1e-9, "{name}");
        }
        assert!(!figures(&all(), &[1_000.0, 1_000.0]).met("tcp_vs_raw"));
    }

    #[test]
    fn servers_that_are_swapped_miss() {
        let mut swapped = all();
        for measured in &mut swapped {
            measured.kind = match measured.kind {
                ServerKind::Ours => ServerKind::Qemu,
                ServerKind::Qemu => ServerKind::Ours,
                ServerKind::Nbdkit => ServerKind::Nbdkit,
            };
        }
        let figures = figures(&swapped, &[500.0, 500.0]);
        for name in ["vs_qsd_64", "vs_qsd_16", "vs_qsd_1", "tls_vs_qsd", "p99_vs_qsd"] {
            assert!(!figures.met(name), "{name}");
        }
    }

    #[test]
    fn a_server_that_is_missing_or_a_rate_that_was_not_read_is_no_number() {
        let mut missing = all();
        missing.retain(|measured| measured.kind != ServerKind::Qemu);
        let mut short = all();
        short.pop();
        let mut unread = all();
        unread.last_mut().unwrap().rate.per_s = f64::NAN;
        for bad in [missing, short, unread] {
            assert!(value(&bad, "tls_vs_qsd").is_nan());
        }
        assert!(figures(&all(), &[500.0]).value("tcp_vs_raw").is_nan());
    }
}
