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
use std::time::{Duration, Instant};

use bytes::Bytes;
use pageserver::layer::Layer;
use pageserver::layers::memory::Memory;
use pageserver::layers::seal::{PAGE, Seal};
use pageserver::nbd::request::Command;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::lab::LabError;
use crate::nbd_load::{Rate, raw_round_trips};
use crate::nbd_servers::{Programs, Running, ServerKind, Transport, certificates};
use crate::pinning;
use crate::recording::median;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "page-server-vs",
    summary: "our page server beside nbdkit and qemu-storage-daemon",
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
    let seal = Figure::new(median((0..ROUNDS).map(|_| seal_us())), "us", note);
    figures.add("seal_us", seal.target(Target::AtMost(1.0)));
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

/// Ours divided by nbdkit's: the median of the ratios of all rounds.
fn ratio(all: &[Measured], point: Point, what: impl Fn(&Measured) -> f64 + Copy) -> f64 {
    let ours = values(all, ServerKind::Ours, point, what);
    let theirs = values(all, ServerKind::Nbdkit, point, what);
    median(ours.zip(theirs).map(|(ours, theirs)| ours / theirs))
}

fn add_figures(figures: &mut Figures, all: &[Measured], raw: &[f64]) {
    let per_s = |measured: &Measured| measured.rate.per_s;
    let least = |points: Vec<Point>| {
        let ratios = points.into_iter().map(|point| ratio(all, point, per_s));
        ratios.reduce(f64::min).unwrap_or(f64::NAN)
    };
    for (depth, target) in [(64, 3.0), (16, 1.5), (1, 1.0)] {
        let by_unix = points().filter(|p| p.way == Transport::Unix && p.depth == depth).collect();
        let note = "our requests/s to its, unix socket, the worse of reads and writes";
        let figure = Figure::new(least(by_unix), "ratio", note).target(Target::AtLeast(target));
        figures.add(&format!("vs_nbdkit_{depth}"), figure);
    }
    let by_tls = points().filter(|p| p.way == Transport::Tls).collect();
    let note = "the same by TLS, the worst of all depths";
    let figure = Figure::new(least(by_tls), "ratio", note).target(Target::AtLeast(1.0));
    figures.add("tls_vs_nbdkit", figure);
    let p99 = points().map(|point| (ratio(all, point, |measured| measured.rate.p99_us), point));
    let worst = p99.max_by(|a, b| a.0.total_cmp(&b.0));
    if let Some((worst, Point { way, command, depth })) = worst {
        let note = format!("our p99 to its, the worst of all points: {command:?} {depth} {way:?}");
        let figure = Figure::new(worst, "ratio", note).target(Target::AtMost(1.0));
        figures.add("p99_vs_nbdkit", figure);
    }
    let busy = points().filter(|p| p.way == Transport::Unix && p.depth == 64);
    let cpu = busy.map(|point| median(values(all, ServerKind::Ours, point, |m| m.cpu_us)));
    let note = "our server's CPU time for a request, 64 under way, unix socket, the worse of two";
    let figure = Figure::new(cpu.fold(f64::NAN, f64::max), "us", note);
    figures.add("cpu_us", figure.target(Target::AtMost(1.5)));
    let ours = values(all, ServerKind::Ours, RAW, per_s);
    let ratios = raw.iter().zip(ours).map(|(raw, ours)| raw / ours);
    let note = "a read by TCP to a round trip of as many bytes through a thread that blocks";
    let figure = Figure::new(median(ratios), "ratio", note).target(Target::AtMost(1.5));
    figures.add("tcp_vs_raw", figure);
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
