//! Exports as a client sees them: written data is read back through every stack of layers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::cast_possible_truncation, reason = "a disk of 24 MiB")]

mod common;

use std::future::poll_fn;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::{LIMIT, SingleExport, listen, raw};
use pageserver::budget::PIECE;
use pageserver::client::ClientError;
use pageserver::layer::{Layer, Zeros};
use pageserver::layers::count::Count;
use pageserver::layers::fault::{FaultLayer, InjectedFaults};
use pageserver::layers::file::File;
use pageserver::layers::memory::{Memory, SLAB};
use pageserver::layers::remote::{Address, Remote};
use pageserver::layers::seal::Seal;
use pageserver::layers::write_through::WriteThrough;
use pageserver::nbd::Errno;
use pageserver::nbd::request::{Command, Request};
use pageserver::nbd::wire::command_flag::FUA;
use pageserver::order::Ordered;
use pageserver::repository::{Client, ROOM, Repository};
use pageserver::server::{Catalogue, Who};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

const SIZE: u64 = 24 << 20;

/// Writes at random places, and compares all reads with a copy.
async fn is_a_disk(layer: Arc<dyn Layer>) {
    let block = layer.block() as usize;
    let server = listen(Arc::new(SingleExport("disk", layer)));
    let client = server.client("disk").await.unwrap();
    let mut copy = vec![0; SIZE as usize];
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..400 {
        let length = random.usize(1..=64) * block.max(512);
        let offset = random.usize(0..=(copy.len() - length) / block) * block;
        let bytes = length as u32;
        let range = offset..offset + length;
        match random.u8(0..8) {
            0 => {
                client.order(Command::WriteZeroes, 0, offset as u64, bytes).await.unwrap();
                copy[range].fill(0);
            }
            1..4 => {
                let data: Bytes = (0..length).map(|_| random.u8(..)).collect();
                client.write(offset as u64, data.clone()).await.unwrap();
                copy[range].copy_from_slice(&data);
            }
            4 => client.order(Command::Flush, 0, 0, 0).await.unwrap(),
            _ => {
                let read = client.read(offset as u64, bytes).await.unwrap();
                assert!(read == copy[range], "{length} bytes at {offset} differ");
            }
        }
    }
    let status = client.extents(0, SIZE as u32).await.unwrap();
    let mut at = 0;
    for extent in status {
        let part = &copy[at..at + extent.length as usize];
        assert!(!extent.is_hole || part.iter().all(|byte| *byte == 0), "a hole holds something");
        at += part.len();
    }
}

fn file() -> File {
    let handle = tempfile::tempfile().unwrap();
    handle.set_len(SIZE).unwrap();
    File::new(Path::new("disk"), handle, SIZE)
}

async fn waits_for(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..3_000 {
        if is_so() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("not in time: {what}");
}

#[tokio::test]
async fn memory_is_a_disk() {
    is_a_disk(Arc::new(Count::over(Arc::new(Memory::new(SIZE))))).await;
}

#[tokio::test]
async fn a_file_is_a_disk() {
    is_a_disk(Arc::new(file())).await;
}

#[tokio::test]
async fn a_seal_is_a_disk_from_the_moment_it_is_zeroed() {
    let seal = Arc::new(Seal::over(Arc::new(Memory::new(SIZE))).unwrap());
    assert!(pageserver::layer::read(&*seal, 0, 4096).await.is_err());
    seal.zero(0, SIZE, Zeros::Write).result().await.unwrap();
    is_a_disk(seal.clone()).await;
    assert_eq!(seal.forged(), 0);
}

#[tokio::test]
async fn zeroed_pages_take_nothing_in_a_repository_and_are_not_read_there() {
    const ALL: usize = 8 * 4096;
    let repository = Arc::new(Repository::new(1, 1).unwrap());
    let server = listen(repository.clone());
    let remote = Arc::new(Remote::new(SIZE, vec![Address::Unix(server.socket.clone())]));
    waits_for("the repository", || remote.connected() == 1).await;
    let refused = remote.zero(0, 4096, Zeros::Write).result().await;
    assert_eq!(refused, Err(Errno::NotSupported), "a place that it frees holds no zeros");
    let seal = Seal::over(remote.clone()).unwrap();
    seal.write(0, vec![1; ALL].into()).result().await.unwrap();
    let mut copy = vec![1; ALL];
    for (page, zeros) in [(2, Zeros::Write), (3, Zeros::Write), (6, Zeros::Trim)] {
        seal.zero(page * 4096, 4096, zeros).result().await.unwrap();
        copy[page as usize * 4096..][..4096].fill(0);
    }
    assert_eq!(remote.pages(), 5);
    assert_eq!(pageserver::layer::read(&seal, 0, ALL).await.unwrap(), copy);
    let extents = seal.extents(0, ALL as u32);
    assert!(!extents.is_empty() && extents.iter().all(|extent| !extent.is_hole));
    assert_eq!(repository.take_back(1), 1);
    for page in [2, 3, 6] {
        let read = pageserver::layer::read(&seal, page * 4096, 4096).await;
        assert_eq!(read.unwrap(), [0; 4096], "page {page}");
    }
    // A page that never was written is unknown: a trim of it changes nothing.
    seal.zero(SIZE - 4096, 4096, Zeros::Trim).result().await.unwrap();
    assert!(pageserver::layer::read(&seal, SIZE - 4096, 4096).await.is_err());
}

#[tokio::test]
async fn a_write_that_ends_after_the_page_was_zeroed_does_not_bring_its_content_back() {
    // One page, then the two groups of pages that share a lock, the last of which is smaller.
    for (at, length) in [(0, 4096), (0, 16 << 20), (16 << 20, 8 << 20)] {
        let faults = InjectedFaults { cut: true, ..InjectedFaults::default() };
        let slow = Arc::new(FaultLayer::over(Arc::new(Memory::new(SIZE)), faults));
        let seal = Seal::over(slow.clone()).unwrap();
        let mut write = Box::pin(seal.write(at, vec![1; 4096].into()).result());
        assert!(poll_once(&mut write).await.is_pending());
        let mut zero = Box::pin(seal.zero(at, length, Zeros::Write).result());
        assert!(poll_once(&mut zero).await.is_pending());
        slow.set(InjectedFaults::default());
        let (written, zeroed) = tokio::join!(write, zero);
        assert_eq!((written, zeroed), (Ok(()), Ok(())));
        let read = pageserver::layer::read(&seal, at, 4096).await.unwrap();
        assert_eq!(read, [0; 4096], "{length} bytes");
        seal.write(at, vec![2; 4096].into()).result().await.unwrap();
        let read = pageserver::layer::read(&seal, at, 8192).await;
        assert_eq!(read.is_ok(), length > 4096, "the next page is known if it was zeroed too");
        assert_eq!(pageserver::layer::read(&seal, at, 4096).await.unwrap(), [2; 4096]);
    }
}

#[tokio::test]
async fn what_is_written_through_to_a_file_is_a_disk() {
    let repository = listen(Arc::new(Repository::new(4, 4).unwrap()));
    let file = Arc::new(file());
    let remote = Arc::new(Remote::new(SIZE, vec![Address::Unix(repository.socket.clone())]));
    waits_for("the repository", || remote.connected() == 1).await;
    let sealed = Arc::new(Seal::over(remote.clone()).unwrap());
    let both = Arc::new(WriteThrough::new(sealed.clone(), file));
    is_a_disk(both.clone()).await;
    assert_eq!(sealed.forged(), 0);
    assert!(remote.pages() > 0);
    assert!(both.counters().near.load(std::sync::atomic::Ordering::Relaxed) > 0);
}

#[tokio::test]
async fn what_makes_no_sense_is_refused() {
    let server = listen(Arc::new(SingleExport("disk", Arc::new(Memory::new(SIZE)))));
    assert!(server.client("other").await.is_err());
    let client = server.client("disk").await.unwrap();
    let refused = |result: Result<(), ClientError>, errno: Errno| match result {
        Err(ClientError::Refused(found)) => assert_eq!(found, errno),
        other => panic!("expected {errno}, found {other:?}"),
    };
    refused(client.read(SIZE - 10, 20).await.map(|_| ()), Errno::Invalid);
    refused(client.read(u64::MAX - 10, 20).await.map(|_| ()), Errno::Invalid);
    refused(client.read(0, (32 << 20) + 1).await.map(|_| ()), Errno::Invalid);
    refused(client.write(SIZE - 10, vec![1; 20].into()).await, Errno::NoSpace);
    refused(client.order(Command::Trim, 0, SIZE, 1).await, Errno::NoSpace);
    refused(client.order(Command::Trim, 1 << 15, 0, 512).await, Errno::Invalid);
    assert_eq!(client.read(0, 16).await.unwrap(), [0; 16]);
}

#[tokio::test]
async fn a_lease_is_found_by_its_capability_alone() {
    let repository = Arc::new(Repository::new(3, 3).unwrap());
    let server = listen(repository.clone());
    let first = server.client("lease/2").await.unwrap();
    assert_eq!(first.session().export.size, 2 * SLAB as u64);
    first.write(4096, Bytes::from_static(b"a secret")).await.unwrap();
    let capability = first.session().name.clone();
    assert_eq!(capability.len(), 64);
    let again = server.client(&capability).await.unwrap();
    assert_eq!(again.read(4096, 8).await.unwrap(), b"a secret");
    let second = server.client("lease/2").await.unwrap();
    assert_eq!(second.session().export.size, SLAB as u64);
    assert_eq!(second.read(4096, 8).await.unwrap(), [0; 8]);
    for name in ["", "lease/", "lease/0", "lease/-1", &capability[1..], &"0".repeat(64)] {
        assert!(server.client(name).await.is_err(), "{name} is an export");
    }
    assert!(server.client("lease/1").await.is_err(), "nothing is left");
}

#[tokio::test]
async fn a_client_has_no_more_than_its_quota_however_many_leases_it_has() {
    let repository = Arc::new(Repository::new(4, 2).unwrap());
    let server = listen(repository.clone());
    let first = server.client("lease/1").await.unwrap();
    let second = server.client("lease/2").await.unwrap();
    assert_eq!(second.session().export.size, SLAB as u64, "the rest of the quota");
    assert!(server.client("lease/1").await.is_err(), "two are free, and not for this client");
    let [own, other] = [rustix::process::geteuid().as_raw(), 12_345].map(Who::User);
    let told = |who| [ROOM, "lease/2"].map(|name| repository.find(name, who).map(|e| e.size));
    assert_eq!(told(&own), [Some(0), None]);
    assert_eq!(told(&other), [Some(2 * SLAB as u64); 2]);
    first.write(0, Bytes::from_static(b"something")).await.unwrap();
    first.read(0, 9).await.unwrap();
    let clients = repository.clients();
    assert_eq!(clients[&own], Client { leases: 2, slabs: 2, reads: 1, writes: 1 });
    assert_eq!((clients.len(), repository.refused()), (1, 1));
}

#[tokio::test]
async fn a_lease_ends_with_its_last_connection_and_the_next_one_holds_zeros() {
    let repository = Arc::new(Repository::new(2, 2).unwrap());
    let server = listen(repository.clone());
    let (first, connection) = server.connect("lease/2").await.unwrap();
    let running = tokio::spawn(connection.run());
    first.write(SLAB as u64, Bytes::from_static(b"a secret")).await.unwrap();
    let capability = first.session().name.clone();
    running.abort();
    waits_for("the slabs to be free again", || repository.lent().free == 2).await;
    assert!(server.client(&capability).await.is_err(), "the lease has ended");
    let second = server.client("lease/2").await.unwrap();
    assert_eq!(second.session().export.size, 2 * SLAB as u64);
    assert_eq!(second.read(SLAB as u64, 8).await.unwrap(), [0; 8]);
}

#[tokio::test]
async fn memory_that_is_taken_back_cannot_be_read() {
    let repository = Arc::new(Repository::new(2, 2).unwrap());
    let server = listen(repository.clone());
    let client = server.client("lease/2").await.unwrap();
    client.write(0, Bytes::from_static(b"first")).await.unwrap();
    client.write(SLAB as u64, Bytes::from_static(b"second")).await.unwrap();
    assert_eq!(repository.take_back(1), 1);
    assert_eq!(client.read(0, 5).await.unwrap(), b"first");
    assert!(matches!(client.read(SLAB as u64, 6).await, Err(ClientError::Refused(Errno::Io))));
    assert!(client.write(SLAB as u64, Bytes::from_static(b"second")).await.is_err());
    assert_eq!(repository.take_back(5), 1);
    assert!(client.read(0, 5).await.is_err());
}

#[tokio::test]
async fn of_what_is_taken_back_there_is_notice_and_pages_go_elsewhere() {
    let repository = Arc::new(Repository::new(3, 2).unwrap());
    let server = listen(repository.clone());
    let client = server.client("lease/2").await.unwrap();
    client.write(SLAB as u64, Bytes::from_static(b"second")).await.unwrap();
    // The free slab is taken at once, and one slab gets notice.
    assert_eq!(repository.give_notice(2), 2);
    let lent = repository.lent();
    assert_eq!((lent.free, lent.lent, lent.leaving), (0, 2, 1));
    assert_eq!(client.read(SLAB as u64, 6).await.unwrap(), b"second");
    let refused = client.write(SLAB as u64, Bytes::from_static(b"more")).await;
    assert!(matches!(refused, Err(ClientError::Refused(Errno::NoSpace))), "{refused:?}");
    client.write(0, Bytes::from_static(b"first")).await.unwrap();
    assert_eq!(repository.take_back_noticed(), 1);
    assert!(client.read(SLAB as u64, 6).await.is_err());
    assert_eq!(client.read(0, 5).await.unwrap(), b"first");
    // The host has free memory again.
    assert!(repository.pin_one() && repository.pin_one() && !repository.pin_one());
    assert_eq!(repository.lent().free, 2);
}

#[tokio::test]
async fn pages_of_slabs_that_leave_with_notice_or_without_find_room_elsewhere() {
    const COUNT: u64 = 64;
    let repositories = [1, 2, 3].map(|_| Arc::new(Repository::new(2, 2).unwrap()));
    let servers: Vec<_> = repositories.iter().map(|own| listen(own.clone())).collect();
    let addresses = servers.iter().map(|server| Address::Unix(server.socket.clone())).collect();
    let remote = Remote::new(2 * SLAB as u64, addresses);
    waits_for("all repositories", || remote.connected() == 3).await;
    let write = async |value: u8| {
        let mut refused = 0;
        for page in 0..COUNT {
            let written = remote.write(page * 4096, vec![value; 4096].into()).result().await;
            refused += usize::from(written.is_err());
        }
        refused
    };
    let reads = async |value: u8| {
        for page in 0..COUNT {
            let read = pageserver::layer::read(&remote, page * 4096, 4096).await;
            assert_eq!(read.unwrap(), [value; 4096], "page {page}");
        }
    };
    assert_eq!(write(1).await, 0);
    assert_eq!(remote.pages(), COUNT);
    // The pages were spread, so each repository has a part of them.
    assert_eq!(repositories[0].give_notice(2), 2);
    reads(1).await;
    let refused = write(2).await;
    assert!(refused > 0 && refused < 64, "{refused}");
    // A refused page finds room the next time; this repeats for each slab with notice that it
    // meets.
    while write(3).await > 0 {}
    repositories[0].take_back_noticed();
    reads(3).await;
    assert_eq!(repositories[1].take_back(2), 2);
    while write(4).await > 0 {}
    reads(4).await;
}

#[tokio::test]
async fn a_slab_that_was_taken_back_refuses_one_write_and_is_left_alone_from_then_on() {
    const SLABS: usize = 4;
    let small = Arc::new(Repository::new(1, 1).unwrap());
    let large = Arc::new(Repository::new(SLABS, SLABS).unwrap());
    let servers = [listen(small.clone()), listen(large.clone())];
    let addresses = servers.iter().map(|server| Address::Unix(server.socket.clone())).collect();
    let remote = Remote::new((SLABS * SLAB) as u64, addresses);
    waits_for("both repositories", || remote.connected() == 2).await;
    // Of several pages in one slab, one write is refused, and the other pages stay where they
    // are.
    remote.write(0, vec![1; 3 * 4096].into()).result().await.unwrap();
    assert_eq!(large.give_notice(SLABS), SLABS);
    assert!(remote.write(4096, vec![2; 4096].into()).result().await.is_err());
    assert_eq!(remote.pages(), 2);
    for page in [0, 2] {
        let read = pageserver::layer::read(&remote, page * 4096, 4096).await;
        assert_eq!(read.unwrap(), [1; 4096]);
    }
    let mut refused = 1;
    for page in 0..1000 {
        let written = remote.write(page * 4096, vec![3; 4096].into()).result().await;
        refused += usize::from(written.is_err());
    }
    assert!(refused <= SLABS, "{refused} writes were refused by {SLABS} slabs");
    assert_eq!(small.lent().lent, 1);
}

#[tokio::test]
async fn who_is_not_admitted_writes_nothing_there_and_reads_nothing_old() {
    let repository = Arc::new(Repository::new(1, 1).unwrap());
    let server = listen(repository.clone());
    let remote = Remote::new(SLAB as u64, vec![Address::Unix(server.socket.clone())]);
    waits_for("the repository", || remote.connected() == 1).await;
    remote.write(0, vec![1; 4096].into()).result().await.unwrap();
    remote.write(4096, vec![1; 4096].into()).result().await.unwrap();
    remote.admit(false);
    assert!(remote.write(0, vec![2; 4096].into()).result().await.is_err());
    assert!(pageserver::layer::read(&remote, 0, 4096).await.is_err(), "what is old is forgotten");
    // A page that was written before and has not changed is still valid.
    assert_eq!(pageserver::layer::read(&remote, 4096, 4096).await.unwrap(), [1; 4096]);
    remote.admit(true);
    remote.write(0, vec![3; 4096].into()).result().await.unwrap();
    assert_eq!(pageserver::layer::read(&remote, 0, 4096).await.unwrap(), [3; 4096]);
}

#[tokio::test]
async fn a_repository_that_says_nothing_is_left_and_one_that_answers_again_is_had_again() {
    let faults = InjectedFaults { cut: true, ..InjectedFaults::default() };
    let fault = Arc::new(FaultLayer::over(Arc::new(Memory::new(SLAB as u64)), faults));
    let server = listen(Arc::new(SingleExport("lease/1", fault.clone())));
    let remote = Remote::new(SLAB as u64, vec![Address::Unix(server.socket.clone())]);
    waits_for("the repository", || remote.connected() == 1).await;
    let begun = Instant::now();
    // The write would wait for ever; it fails when the connection is given up.
    assert!(remote.write(0, vec![1; 4096].into()).result().await.is_err());
    assert!(begun.elapsed() > Duration::from_secs(5), "who is slow is not left at once");
    fault.set(InjectedFaults::default());
    waits_for("it to be had again", || remote.connected() == 1).await;
    remote.write(0, vec![2; 4096].into()).result().await.unwrap();
    assert_eq!(pageserver::layer::read(&remote, 0, 4096).await.unwrap(), [2; 4096]);
}

#[tokio::test]
async fn what_a_repository_loses_comes_back_to_another_one_as_it_is_read() {
    const COUNT: u64 = 64;
    let repositories = [1, 2].map(|_| Arc::new(Repository::new(2, 2).unwrap()));
    let servers: Vec<_> = repositories.iter().map(|own| listen(own.clone())).collect();
    let addresses = servers.iter().map(|server| Address::Unix(server.socket.clone())).collect();
    let remote = Arc::new(Remote::new(2 * SLAB as u64, addresses));
    waits_for("both repositories", || remote.connected() == 2).await;
    let seal = Arc::new(Seal::over(remote.clone()).unwrap());
    let below = Arc::new(Memory::new(2 * SLAB as u64));
    let disk = WriteThrough::new(seal.clone(), below);
    for page in 0..COUNT {
        disk.write(page * 4096, vec![page as u8; 4096].into()).result().await.unwrap();
    }
    let read_all = async || {
        let before = disk.counters().near.load(Ordering::Relaxed);
        for page in 0..COUNT {
            let read = pageserver::layer::read(&disk, page * 4096, 4096).await.unwrap();
            assert_eq!(read, [page as u8; 4096]);
        }
        disk.counters().near.load(Ordering::Relaxed) - before
    };
    // On a busy machine a page may come from below because the near layer took too long.
    let all_are_near = async || {
        for _ in 0..1000 {
            if read_all().await == COUNT {
                return;
            }
        }
        panic!("some pages are not near");
    };
    all_are_near().await;
    assert_eq!(repositories[0].take_back(2), 2);
    assert!(read_all().await < COUNT, "some were lost");
    all_are_near().await;
    assert_eq!(seal.forged(), 0);
}

async fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    poll_fn(|context| Poll::Ready(Pin::new(&mut *future).poll(context))).await
}

#[tokio::test]
async fn what_a_read_brings_is_not_kept_where_a_write_has_begun_meanwhile() {
    let faults = InjectedFaults { cut: true, ..InjectedFaults::default() };
    let slow = Arc::new(FaultLayer::over(Arc::new(Memory::new(SIZE)), faults));
    let near = Arc::new(Seal::over(Arc::new(Memory::new(SIZE))).unwrap());
    let disk = Ordered::over(Arc::new(WriteThrough::new(near.clone(), slow.clone())));
    let read = pageserver::layer::read(&disk, 0, 4096);
    // The read goes below, because the near layer does not know the page yet.
    let mut read = Box::pin(read);
    assert!(poll_once(&mut read).await.is_pending());
    let mut write = Box::pin(disk.write(0, vec![2; 4096].into()).result());
    assert!(poll_once(&mut write).await.is_pending());
    slow.set(InjectedFaults::default());
    // The near layer has the written page, in either order of the two requests below.
    let (old, written) = tokio::join!(read, write);
    written.unwrap();
    assert!([[0; 4096], [2; 4096]].iter().any(|page| *page == old.as_ref().unwrap()[..]));
    assert_eq!(pageserver::layer::read(&*near, 0, 4096).await.unwrap(), [2; 4096]);
}

/// The flush of a long write begins when its last piece has ended, with nothing else in flight.
#[tokio::test]
async fn a_long_write_that_is_to_be_flushed_is_answered() {
    let slow = FaultLayer::over(Arc::new(Memory::new(SIZE)), InjectedFaults::default());
    let server = listen(Arc::new(SingleExport("disk", Arc::new(slow))));
    let mut client = server.raw().await;
    raw::choose(&mut client, "disk").await;
    let length = 4 * PIECE as u32;
    let (command, cookie) = (Some(Command::Write), 7);
    let mut ask = Vec::new();
    Request { flags: FUA, command, cookie, offset: 0, length }.encode(&mut ask);
    ask.resize(ask.len() + length as usize, 1);
    client.write_all(&ask).await.unwrap();
    let mut reply = [0; 16];
    timeout(LIMIT, client.read_exact(&mut reply)).await.unwrap().unwrap();
    assert_eq!(reply[..], raw::simple_reply(0, cookie));
}
