//! The memory that a hostile client can make a server hold is bounded. The tests run one at a
//! time, because each measures the memory of the whole process.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use common::raw::{self, choose};
use common::{LIMIT, Listening, SingleExport, listen};
use pageserver::budget::{Budget, PIECE};
use pageserver::client;
use pageserver::layer::{Answer, Layer, Read, Zeros};
use pageserver::layers::fault::{FaultLayer, InjectedFaults};
use pageserver::layers::memory::Memory;
use pageserver::nbd::dialogue::Wanted;
use pageserver::nbd::reply::Extent;
use pageserver::nbd::request::Command;
use pageserver::nbd::wire::{self, MAX_PAYLOAD};
use pageserver::order::Ordered;
use pageserver::places::Owner;
use pageserver::server::Server;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;

const SIZE: u64 = 64 << 20;
const MIB: usize = 1 << 20;
/// Length of a long read, in bytes.
const LONG: u32 = 1 << 20;

static TURN: Mutex<()> = Mutex::const_new(());

/// Resident memory of this process, in MiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() >> 10
}

fn grown_by_less_than(mib: usize, before: usize) {
    let now = resident();
    assert!(now < before + mib, "{before} MiB have become {now}");
}

async fn is_served(server: &Listening) {
    let client = timeout(LIMIT, server.client("disk")).await.unwrap().unwrap();
    for i in 0..200 {
        timeout(LIMIT, client.read(i * 4096, 4096)).await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_claims_much_and_sends_little_costs_little() {
    let _turn = TURN.lock().await;
    let server = listen(Arc::new(SingleExport("disk", Arc::new(Memory::new(SIZE)))));
    let before = resident();
    let mut claims = Vec::new();
    for _ in 0..64 {
        let mut stream = server.raw().await;
        choose(&mut stream, "disk").await;
        stream.write_all(&raw::request(Command::Write, 1, 0, MAX_PAYLOAD)).await.unwrap();
        // The socket's buffer is smaller than this, so the server has read most of it.
        stream.write_all(&vec![1; MIB]).await.unwrap();
        claims.push(stream);
    }
    is_served(&server).await;
    // The clients claimed 2 GiB and sent 64 MiB: the server holds one piece of each.
    grown_by_less_than(100, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_read_replies_is_not_read_from() {
    let _turn = TURN.lock().await;
    let server = listen(Arc::new(SingleExport("disk", Arc::new(Memory::new(SIZE)))));
    let before = resident();
    let mut asks = raw::request(Command::Read, 1, 0, 1 << 20).repeat(10_000);
    asks.extend_from_slice(&raw::request(Command::Read, 1, 0, MAX_PAYLOAD));
    let mut talking = Vec::new();
    for _ in 0..4 {
        let mut stream = server.raw().await;
        choose(&mut stream, "disk").await;
        let asks = asks.clone();
        talking.push(tokio::spawn(async move { stream.write_all(&asks).await }));
    }
    is_served(&server).await;
    // The clients asked for 40 GiB of replies: the server makes 1 MiB for each, and one piece.
    grown_by_less_than(64, before);
    talking.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_holds_no_more_than_so_much() {
    let _turn = TURN.lock().await;
    let faults = InjectedFaults { cut: true, ..InjectedFaults::default() };
    let disk = Arc::new(FaultLayer::over(Arc::new(Memory::new(SIZE)), faults));
    let server = listen(Arc::new(SingleExport("disk", disk.clone())));
    let before = resident();
    let (mut hears, mut says) = {
        let mut stream = server.raw().await;
        choose(&mut stream, "disk").await;
        stream.into_split()
    };
    const WRITES: usize = 400;
    let talking = tokio::spawn(async move {
        for _ in 0..WRITES {
            says.write_all(&raw::request(Command::Write, 1, 0, 1 << 20)).await.unwrap();
            says.write_all(&vec![1; MIB]).await.unwrap();
        }
        says
    });
    let other = server.client("disk").await.unwrap();
    for _ in 0..20 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        grown_by_less_than(100, before);
    }
    disk.set(InjectedFaults::default());
    let mut replies = vec![0; WRITES * 16];
    timeout(LIMIT, hears.read_exact(&mut replies)).await.unwrap().unwrap();
    assert!(replies == raw::simple_reply(0, 1).repeat(WRITES));
    assert_eq!(other.read(0, 1).await.unwrap(), [1]);
    drop(talking.await.unwrap());
}

/// A byte of a write keeps the buffer into which it was received.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_are_written_slowly_hold_no_more_than_so_much() {
    let _turn = TURN.lock().await;
    let faults = InjectedFaults { cut: true, ..InjectedFaults::default() };
    let disk = Arc::new(FaultLayer::over(Arc::new(Memory::new(SIZE)), faults));
    let budget = Arc::new(Budget::new(2 * MIB, PIECE));
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner { user: rustix::process::geteuid().as_raw(), processes: 1 };
    let only = Arc::new(SingleExport("disk", disk.clone()));
    let server = Server::of_one(only, owner, budget.clone());
    let server = common::serve_at(dir.path().join("socket"), server);
    let (mut hears, mut says) = {
        let mut stream = server.raw().await;
        choose(&mut stream, "disk").await;
        stream.into_split()
    };
    const BYTES: usize = 60;
    // Enough requests to fill a buffer; they are invalid and answered at once.
    const BETWEEN: usize = 10_000;
    let before = resident();
    let talking = tokio::spawn(async move {
        let nothing = raw::request(Command::Read, 2, 0, 0).repeat(BETWEEN);
        for _ in 0..BYTES {
            says.write_all(&raw::request(Command::Write, 1, 0, 1)).await.unwrap();
            says.write_all(&[[7].as_slice(), &nothing].concat()).await.unwrap();
        }
        says
    });
    let hearing = tokio::spawn(async move {
        let mut replies = vec![0; BYTES * (BETWEEN + 1) * 16];
        hears.read_exact(&mut replies).await.unwrap();
        replies
    });
    common::waits_for("the budget to be used up", || budget.used() >= 2 * MIB - PIECE).await;
    for _ in 0..20 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        assert!(budget.used() <= 2 * MIB, "{} bytes are held", budget.used());
        // The replies themselves take most of this.
        grown_by_less_than(16, before);
    }
    disk.set(InjectedFaults::default());
    let replies = timeout(LIMIT, hearing).await.unwrap().unwrap();
    let done = raw::simple_reply(0, 1);
    assert_eq!(replies.chunks_exact(16).filter(|reply| *reply == done).count(), BYTES);
    drop(timeout(LIMIT, talking).await.unwrap().unwrap());
    common::waits_for("the memory to be given back", || budget.used() == 0).await;
}

/// Clients that take no replies hold the whole budget. Other clients are served, and the stuck
/// ones lose their connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_are_stuck_make_room_for_others() {
    let _turn = TURN.lock().await;
    let budget = Arc::new(Budget::new(MIB, PIECE));
    let disk = Arc::new(SingleExport("disk", Arc::new(Memory::new(SIZE))));
    let dir = tempfile::tempdir().unwrap();
    let owner = Owner { user: rustix::process::geteuid().as_raw(), processes: 16 };
    let at = |name: &str| {
        let server = Server::of_one(disk.clone(), owner, budget.clone());
        common::serve_at(dir.path().join(name), server)
    };
    let server = at("stuck");
    let mut stuck = server.raw().await;
    choose(&mut stuck, "disk").await;
    stuck.write_all(&raw::request(Command::Read, 1, 0, LONG).repeat(8)).await.unwrap();
    common::waits_for("it holds all it can", || budget.used() > MIB / 2).await;
    assert!(budget.used() <= MIB, "{} bytes are held", budget.used());
    // This client is refused memory beyond its first piece, and is served nevertheless.
    let other = at("other");
    let client = other.client("disk").await.unwrap();
    let mut reads = 0;
    let served = async {
        while budget.used() > 0 {
            let both = tokio::join!(client.read(0, LONG), client.read(0, LONG));
            assert!(both.0.unwrap().len() == MIB && both.1.unwrap().len() == MIB);
            reads += 1;
        }
    };
    timeout(LIMIT, served).await.unwrap();
    assert!(reads > 10, "{reads}");
    let mut rest = Vec::new();
    let _or_reset = timeout(LIMIT, stuck.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.len() < 8 * MIB, "it was served to its end");
}

/// Counts the writes that have come to the layer below.
struct CountedWrites(Ordered, AtomicUsize);

impl Layer for CountedWrites {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        self.0.read(offset, into)
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        let answer = self.0.write(offset, data);
        self.1.fetch_add(1, Ordering::Relaxed);
        answer
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        self.0.zero(offset, length, zeros)
    }

    fn flush(&self) -> Answer<'_> {
        self.0.flush()
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        self.0.extents(offset, length)
    }
}

/// A write begins behind reads whose replies its client does not take. It ends nevertheless, and
/// so does another connection's read of the same bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_takes_no_replies_holds_up_no_other_connection() {
    let _turn = TURN.lock().await;
    // More than the server's and the socket's buffers hold.
    const READS: usize = 40;
    let faults = InjectedFaults { cut: true, ..InjectedFaults::default() };
    let slow = Arc::new(FaultLayer::over(Arc::new(Memory::new(SIZE)), faults));
    let disk = Arc::new(CountedWrites(Ordered::over(slow.clone()), AtomicUsize::new(0)));
    let server = listen(Arc::new(SingleExport("disk", disk.clone())));
    let mut stalled = server.raw().await;
    choose(&mut stalled, "disk").await;
    let piece = u32::try_from(PIECE).unwrap();
    let mut asks = raw::request(Command::Read, 1, u64::from(LONG), piece).repeat(READS);
    asks.extend_from_slice(&raw::request(Command::Write, 2, 0, 4096));
    asks.extend_from_slice(&[7; 4096]);
    stalled.write_all(&asks).await.unwrap();
    common::waits_for("the write to begin", || disk.1.load(Ordering::Relaxed) == 1).await;
    slow.set(InjectedFaults::default());
    let other = server.client("disk").await.unwrap();
    let read = timeout(LIMIT, other.read(0, 4096)).await.unwrap().unwrap();
    assert_eq!(read, [7; 4096]);
    drop(stalled);
}

/// A server that sends extents without end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_status_without_an_end_is_ended() {
    let _turn = TURN.lock().await;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let serving = tokio::spawn(async move {
        theirs.write_all(&raw::server_says()).await.unwrap();
        let mut content = wire::ALLOCATION_ID.to_be_bytes().to_vec();
        content.extend_from_slice(&[0, 0, 0, 1, 0, 0, 0, 0].repeat(100_000));
        let mut chunk = raw::chunk(wire::chunk::BLOCK_STATUS, 0, &content);
        chunk[4..6].copy_from_slice(&[0, 0]);
        while theirs.write_all(&chunk).await.is_ok() {}
    });
    let wanted = Wanted { name: "disk".to_owned(), tls: false, status: true };
    let before = resident();
    let (client, connection) = client::connect(ours, wanted).await.unwrap();
    let running = tokio::spawn(connection.run());
    assert!(timeout(LIMIT, client.extents(0, 1 << 20)).await.unwrap().is_err());
    timeout(LIMIT, running).await.unwrap().unwrap();
    timeout(LIMIT, serving).await.unwrap().unwrap();
    grown_by_less_than(100, before);
}
