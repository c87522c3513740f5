//! A repository that lies or spies, and clients without a lease. A reader of the export sees only
//! data that was written to it, and the repository sees no data at all.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![allow(clippy::cast_possible_truncation, reason = "a disk of 1 MiB")]

mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::{LIMIT, SingleExport, listen, waits_for};
use pageserver::layer::{self, Answer, Layer, Read, Zeros};
use pageserver::layers::memory::{Memory, SLAB};
use pageserver::layers::remote::{Address, Remote};
use pageserver::layers::seal::{PAGE, Seal};
use pageserver::layers::write_through::WriteThrough;
use pageserver::nbd::Errno;
use pageserver::nbd::negotiation::{Exports, Negotiation, Step, Tls};
use pageserver::nbd::reply;
use pageserver::nbd::request::{Command, Export, HEADER, Request};
use pageserver::repository::Repository;
use pageserver::server::{Catalogue, Opened, Who};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};

const SIZE: u64 = 1 << 20;
const PAGES: u64 = SIZE / PAGE as u64;

/// Keeps all pages that it ever got, and answers with any of them.
struct Liar {
    told: Mutex<HashMap<u64, Vec<Vec<u8>>>>,
    random: Mutex<fastrand::Rng>,
    lies: AtomicU64,
}

impl Liar {
    fn new() -> Self {
        let random = Mutex::new(fastrand::Rng::with_seed(9));
        Self { told: Mutex::default(), random, lies: AtomicU64::new(0) }
    }

    fn random(&self, below: u64) -> u64 {
        self.random.lock().unwrap().u64(0..below)
    }

    fn page(&self, page: u64) -> Vec<u8> {
        let told = self.told.lock().unwrap();
        let of = |page: u64| told.get(&page).and_then(|all| all.last().cloned());
        let mut right = of(page).unwrap_or_else(|| vec![0; PAGE]);
        let kind = self.random(12);
        if kind < 5 {
            self.lies.fetch_add(1, Ordering::Relaxed);
        }
        match kind {
            0 => vec![0; PAGE],
            1 => {
                right[self.random(PAGE as u64) as usize] ^= 1 << self.random(8);
                right
            }
            2 => of(self.random(PAGES)).unwrap_or(right),
            3 => told.get(&page).map_or(right, |all| all[0].clone()),
            4 => told
                .get(&page)
                .map_or(right, |all| all[self.random(all.len() as u64) as usize].clone()),
            _ => right,
        }
    }

    fn is_told(&self, offset: u64, data: &[u8]) {
        let mut told = self.told.lock().unwrap();
        for (page, number) in data.chunks_exact(PAGE).zip(offset / PAGE as u64..) {
            told.entry(number).or_default().push(page.to_vec());
        }
    }
}

/// As a layer, it also delays, fails, and reports writes as done that are not.
impl Layer for Liar {
    fn size(&self) -> u64 {
        SIZE
    }

    fn describe(&self) -> String {
        "a liar".to_owned()
    }

    fn block(&self) -> u32 {
        4096
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let first = offset / PAGE as u64;
        let pages = first..first + (into.len() / PAGE) as u64;
        let data: Vec<u8> = pages.flat_map(|page| self.page(page)).collect();
        match self.random(8) {
            0 => Read::Now(Err(Errno::Io)),
            1 => Read::Later(Box::pin(std::future::pending())),
            2..5 => {
                let late = Duration::from_millis(self.random(30));
                Read::Later(Box::pin(async move {
                    sleep(late).await;
                    Ok(data)
                }))
            }
            _ => {
                into.copy_from_slice(&data);
                Read::Now(Ok(()))
            }
        }
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        match self.random(10) {
            0 => Answer::Now(Err(Errno::Io)),
            1 => Answer::Later(Box::pin(std::future::pending())),
            2 => Answer::Now(Ok(())),
            3 => {
                let late = Duration::from_millis(self.random(300));
                Answer::Later(Box::pin(async move {
                    sleep(late).await;
                    self.is_told(offset, &data);
                    Ok(())
                }))
            }
            _ => {
                self.is_told(offset, &data);
                Answer::Now(Ok(()))
            }
        }
    }

    fn zero(&self, _: u64, _: u64, _: Zeros) -> Answer<'_> {
        Answer::Now(Ok(()))
    }

    fn flush(&self) -> Answer<'_> {
        Answer::Now(Ok(()))
    }
}

/// Writes and reads pages of a part of the disk, and compares them with a copy.
async fn sees_what_was_written(
    layer: &dyn Layer,
    pages: std::ops::Range<u64>,
    seed: u64,
    n: usize,
) {
    let mut random = fastrand::Rng::with_seed(seed);
    let begin = pages.start * PAGE as u64;
    let mut copy = vec![0; (pages.end - pages.start) as usize * PAGE];
    for _ in 0..n {
        let length = random.usize(1..=4) * PAGE;
        let at = random.usize(0..=(copy.len() - length) / PAGE) * PAGE;
        let (offset, part) = (begin + at as u64, at..at + length);
        match random.u8(0..8) {
            0 => {
                layer.zero(offset, length as u64, Zeros::Write).result().await.unwrap();
                copy[part].fill(0);
            }
            1..4 => {
                copy[part.clone()].fill_with(|| random.u8(..));
                layer.write(offset, copy[part].to_vec().into()).result().await.unwrap();
            }
            _ => {
                let read = layer::read(layer, offset, length).await.unwrap();
                assert!(read == copy[part], "{length} bytes at {offset} are wrong");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_layer_that_lies_is_never_believed() {
    let liar = Arc::new(Liar::new());
    let seal = Arc::new(Seal::over(liar.clone()).unwrap());
    let disk = WriteThrough::new(seal.clone(), Arc::new(Memory::new(SIZE)));
    let part = |i: u64| sees_what_was_written(&disk, i * 32..(i + 1) * 32, i, 1500);
    tokio::join!(part(0), part(1), part(2), part(3));
    assert!(seal.forged() > 0 && liar.lies.load(Ordering::Relaxed) > 100);
    assert!(disk.counters().near.load(Ordering::Relaxed) > 0, "nothing is read from it at all");
}

/// Claims to be a repository.
struct Lends;

const LENT: Export = Export { size: SLAB as u64, read_only: false, block: 1 };

impl Exports for Lends {
    fn list(&self) -> Vec<String> {
        Vec::new()
    }

    fn find(&self, _: &str) -> Option<Export> {
        Some(LENT)
    }
}

/// A repository on the wire. In addition to the lies of [`Liar`], it answers twice, answers one
/// request with another's data, truncates replies, and hangs up.
async fn lies_on_the_wire(mut stream: UnixStream, liar: Arc<Liar>) -> std::io::Result<()> {
    let mut out = Vec::new();
    let mut negotiation = Negotiation::new(Tls::Absent, &mut out);
    let mut input = Vec::new();
    let structured = 'negotiated: loop {
        while let Ok(Some((length, step))) = negotiation.advance(&input, &Lends, &mut out) {
            input.drain(..length);
            if let Step::Chosen(session) = step {
                stream.write_all(&out).await?;
                break 'negotiated session.structured;
            }
        }
        stream.write_all(&out).await?;
        out.clear();
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    };
    let mut earlier = 0;
    loop {
        while input.len() < HEADER {
            if stream.read_buf(&mut input).await? == 0 {
                return Ok(());
            }
        }
        let Ok(Some(request)) = Request::parse(&input) else { return Ok(()) };
        while input.len() < HEADER + request.payload() {
            stream.read_buf(&mut input).await?;
        }
        let payload: Vec<u8> = input.drain(..HEADER + request.payload()).skip(HEADER).collect();
        let mut answer = Vec::new();
        if request.command == Some(Command::Read) {
            let first = request.offset / PAGE as u64;
            let pages = first..first + u64::from(request.length) / PAGE as u64;
            let cookie = if liar.random(200) == 0 { earlier } else { request.cookie };
            reply::before_data(&mut answer, structured, cookie, request.offset, request.length);
            answer.extend(pages.flat_map(|page| liar.page(page)));
            earlier = request.cookie;
        } else {
            liar.is_told(request.offset, &payload);
            reply::simple(&mut answer, request.cookie, Ok(()));
        }
        match liar.random(300) {
            0 => answer.extend(answer.clone()),
            1 => return stream.write_all(&answer[..answer.len() / 2]).await,
            2 => return Ok(()),
            _ => {}
        }
        stream.write_all(&answer).await?;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repository_that_lies_on_the_wire_is_never_believed() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let liar = Arc::new(Liar::new());
    let (of_server, connections) = (liar.clone(), Arc::new(AtomicU64::new(0)));
    let counted = connections.clone();
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(lies_on_the_wire(stream, of_server.clone()));
        }
    });
    let remote = Arc::new(Remote::new(SIZE, vec![Address::Unix(socket)]));
    let seal = Arc::new(Seal::over(remote.clone()).unwrap());
    let disk = WriteThrough::new(seal.clone(), Arc::new(Memory::new(SIZE)));
    let mut turn = 0;
    // Runs until it has lied in every way, and has hung up several times.
    while connections.load(Ordering::Relaxed) < 4 || seal.forged() < 20 {
        waits_for("the repository", || remote.connected() == 1).await;
        let part = |i: u64| sees_what_was_written(&disk, i * 32..(i + 1) * 32, turn * 4 + i, 200);
        let wipe = disk.zero(0, SIZE, Zeros::Write).result();
        timeout(LIMIT, wipe).await.unwrap().unwrap();
        timeout(LIMIT, async { tokio::join!(part(0), part(1), part(2), part(3)) }).await.unwrap();
        turn += 1;
    }
    serving.abort();
}

/// A repository that reads the memory that it lends.
struct Spy {
    repository: Repository,
    lent: Mutex<Vec<Arc<dyn Layer>>>,
    looks: AtomicBool,
}

impl Catalogue for Spy {
    fn list(&self) -> Vec<String> {
        self.repository.list()
    }

    fn find(&self, name: &str, who: &Who) -> Option<Export> {
        self.repository.find(name, who)
    }

    fn open(&self, name: &str, who: &Who) -> Option<Opened> {
        let opened = self.repository.open(name, who)?;
        if self.looks.load(Ordering::Relaxed) {
            self.lent.lock().unwrap().push(opened.layer.clone());
        }
        Some(opened)
    }
}

const MARK: &[u8; 16] = b"OVERBOOK-MARKER!";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sealed_is_nowhere_in_the_repositorys_memory() {
    let repository = Repository::new(1, 1).unwrap();
    let (lent, looks) = (Mutex::default(), AtomicBool::new(true));
    let spy = Arc::new(Spy { repository, lent, looks });
    let server = listen(spy.clone());
    let remote = Arc::new(Remote::new(SIZE, vec![Address::Unix(server.socket.clone())]));
    waits_for("the repository", || remote.connected() == 1).await;
    let seal = Seal::over(remote.clone()).unwrap();
    let page = MARK.repeat(PAGE / MARK.len());
    for number in 0..PAGES {
        seal.write(number * PAGE as u64, page.clone().into()).result().await.unwrap();
    }
    let data = layer::read(&seal, 0, SIZE as usize).await.unwrap();
    assert!(data.chunks_exact(MARK.len()).all(|part| part == MARK), "it cannot be read again");
    let lent = spy.lent.lock().unwrap().pop().unwrap();
    let memory = layer::read(&*lent, 0, SLAB).await.unwrap();
    let written: Vec<_> = memory.chunks_exact(PAGE).filter(|p| p.iter().any(|b| *b != 0)).collect();
    assert_eq!(written.len() as u64, PAGES, "not all of it went there");
    // Neither the mark nor a part of it appears anywhere, and no two pages look the same.
    let part = &MARK[..8];
    assert!(!memory.windows(part.len()).any(|window| window == part), "it is not sealed");
    let different: std::collections::HashSet<_> = written.iter().collect();
    assert_eq!(different.len(), written.len(), "equal pages look equal");
}

#[tokio::test]
async fn without_the_leases_name_nothing_is_read_and_nothing_is_left_for_the_next() {
    let repository = Arc::new(Repository::new(2, 2).unwrap());
    let server = listen(repository.clone());
    let client = server.client("lease/2").await.unwrap();
    let secret = b"a secret".repeat(PAGE / 8);
    for at in [0, 7 * PAGE, SLAB - PAGE, SLAB, 2 * SLAB - PAGE] {
        client.write(at as u64, secret.clone().into()).await.unwrap();
    }
    let name = client.session().name.clone();
    let mut random = fastrand::Rng::with_seed(5);
    let mut guesses: Vec<String> = (0..name.len()).map(|cut| name[..cut].to_owned()).collect();
    guesses.extend((1..name.len()).map(|cut| name[cut..].to_owned()));
    guesses.extend([
        name.to_uppercase(),
        format!("{name}0"),
        format!(" {name}"),
        format!("{name}\0"),
        format!("lease/{name}"),
        "lease".to_owned(),
        "lease/1".to_owned(),
        "lease/+".to_owned(),
        "lease/18446744073709551616".to_owned(),
    ]);
    guesses.extend((0..500).map(|_| (0..64).map(|_| random.char('0'..'g')).collect()));
    // Names with one digit changed.
    guesses.extend((0..name.len()).map(|i| {
        let digit = if &name[i..=i] == "0" { "1" } else { "0" };
        format!("{}{digit}{}", &name[..i], &name[i + 1..])
    }));
    for guess in guesses {
        assert_ne!(guess, name);
        assert!(repository.find(&guess, &Who::Anybody).is_none(), "{guess:?} is found");
        assert!(repository.open(&guess, &Who::Anybody).is_none(), "{guess:?} is opened");
    }
    assert!(repository.list().is_empty());
    client.order(Command::Disconnect, 0, 0, 0).await.unwrap_err();
    waits_for("the slabs", || repository.lent().free == 2).await;
    assert!(server.client(&name).await.is_err(), "a lease that has ended is found");
    let next = server.client("lease/2").await.unwrap();
    assert_ne!(next.session().name, name);
    for at in (0..2 * SLAB).step_by(8 << 20) {
        let read = next.read(at as u64, 8 << 20).await.unwrap();
        assert!(read.iter().all(|byte| *byte == 0), "something is left");
    }
    // A write to a part of a page does not reveal old data in the rest of it.
    next.write(7 * PAGE as u64 + 100, Bytes::from_static(b"new")).await.unwrap();
    let read = next.read(7 * PAGE as u64, PAGE as u32).await.unwrap();
    assert!(read.iter().filter(|byte| **byte != 0).count() == 3);
}

#[tokio::test]
async fn what_was_not_written_through_a_seal_is_not_read_through_it() {
    let below = Arc::new(Memory::new(SIZE));
    below.write(0, vec![7; PAGE].into()).result().await.unwrap();
    let first = Arc::new(Seal::over(below.clone()).unwrap());
    first.write(PAGE as u64, vec![8; PAGE].into()).result().await.unwrap();
    let server = listen(Arc::new(SingleExport("sealed", Arc::new(Seal::over(below).unwrap()))));
    let client = server.client("sealed").await.unwrap();
    for page in 0..2 {
        assert!(client.read(page * PAGE as u64, PAGE as u32).await.is_err());
    }
    assert_eq!(layer::read(&*first, PAGE as u64, PAGE).await.unwrap(), [8; PAGE]);
    assert!(layer::read(&*first, 0, PAGE).await.is_err());
}
