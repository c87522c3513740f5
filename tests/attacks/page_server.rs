//! Malicious clients and repositories against the real `overbook disks` and `overbook
//! repository`, as an unprivileged user. The resources that they can occupy are bounded, and
//! other clients are served meanwhile.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lab::attack::{Attacker, NOBODY};
use overbook_tests::{Requirement, program, requires, take_turn};
use pageserver::client::{self, Client, ClientError};
use pageserver::nbd::ProtocolError;
use pageserver::nbd::dialogue::Wanted;
use pageserver::tls::Connector;
use sys::process::{Child, Identity, Spawn, children_of};
use tokio::net::{TcpSocket, UnixStream};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Maximum time of any wait, long enough for a busy machine.
const LIMIT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Time for which the cost of an attack is measured.
const ATTACKED: Duration = Duration::from_secs(5);
const MIB: u64 = 1 << 20;
/// The size of each disk.
const SIZE: u64 = 64 * MIB;
const PAGE: u32 = 4096;

/// Programs with a world-readable directory; dropping it ends the programs.
struct Served {
    dir: tempfile::TempDir,
    child: Child,
    runtime: Runtime,
}

/// A client; dropping it closes the connection.
struct Connected {
    client: Client,
    running: JoinHandle<()>,
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.running.abort();
    }
}

/// Only root can run processes as another user.
fn is_root() -> bool {
    requires(Requirement::Root, requires::root()).is_some()
}

fn directory() -> tempfile::TempDir {
    let dir = tempfile::Builder::new().prefix("ob-").tempdir_in("/tmp").unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn spawn(dir: &tempfile::TempDir, arguments: &[&str]) -> Child {
    let log = fs::File::create(dir.path().join("log")).unwrap();
    let spawn = Spawn::new(program().get_program()).args(arguments);
    spawn.output_to(log).unwrap().die_with_parent().spawn().unwrap()
}

impl Served {
    /// Two disks of one group: `mine` belongs to [`NOBODY`], `other` to root. `more` is appended
    /// to the table of `mine`.
    fn disks(dir: tempfile::TempDir, more: &str) -> Self {
        let at = dir.path().display();
        fs::create_dir(dir.path().join("files")).unwrap();
        let file = dir.path().join("files/mine");
        fs::write(&file, "").unwrap();
        chown(&file, Some(NOBODY), None).unwrap();
        let disk = |name: &str, vm: &str| {
            format!(
                "[disk.{name}]\nvm = \"{vm}\"\nfile = \"{at}/files/{name}\"\nsize = \"{SIZE}B\"\n"
            )
        };
        let config = format!(
            "[host]\nattach = \"off\"\ngrace_s = 0\nstate = \"{at}/state\"\n[api]\nsocket = \"{at}/overbook.sock\"\n\
             [group.web]\nvms = [\"web-*\"]\n{}{}{more}",
            disk("other", "web-2"),
            disk("mine", "web-1"),
        );
        let path = dir.path().join("overbook.toml");
        fs::write(&path, config).unwrap();
        let child = spawn(&dir, &["--config", &path.display().to_string(), "disks", "web"]);
        let served = Self { dir, child, runtime: runtime() };
        served.until("both disks are served", || {
            served.socket("mine").exists() && served.client("other").is_ok()
        });
        served
    }

    fn socket(&self, disk: &str) -> PathBuf {
        self.dir.path().join("disks").join(format!("{disk}.sock"))
    }

    fn client(&self, disk: &str) -> Result<Connected, ClientError> {
        self.runtime.block_on(async {
            let stream = UnixStream::connect(self.socket(disk)).await?;
            let wanted = Wanted { name: disk.to_owned(), tls: false, status: false };
            let connected = timeout(LIMIT, client::connect(stream, wanted)).await.unwrap();
            let (client, connection) = connected?;
            let running = tokio::spawn(async move { drop(connection.run().await) });
            Ok(Connected { client, running })
        })
    }

    fn until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !is_so() {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap();
            assert!(Instant::now() < end, "not so within {LIMIT:?}: {what}\n{log}");
            std::thread::sleep(POLL);
        }
    }

    /// The serving process: the keeper's child, or the program itself.
    fn serving(&self) -> Identity {
        let own = self.child.identity();
        children_of(own.pid).unwrap().pop().unwrap_or(own)
    }

    /// The memory of the serving process in MiB, and its locked memory.
    fn memory(&self) -> (u64, u64) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.serving().pid)).unwrap();
        let mib = |field: &str| {
            let line = status.lines().find(|line| line.starts_with(field)).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
        };
        (mib("VmRSS:"), mib("VmLck:"))
    }

    /// Calls `ask` repeatedly for [`ATTACKED`]; returns the server's peak memory.
    fn most_while(&self, mut ask: impl FnMut()) -> u64 {
        let (end, mut most) = (Instant::now() + ATTACKED, 0);
        while Instant::now() < end {
            ask();
            most = most.max(self.memory().0);
        }
        most
    }

    /// Writes and reads a page at varying places, and compares it with the data written.
    fn uses(&self, Connected { client, .. }: &Connected, turn: u64) {
        let offset = turn * 37 % (SIZE / u64::from(PAGE)) * u64::from(PAGE);
        let page = bytes::Bytes::from(vec![turn.to_le_bytes()[0]; PAGE as usize]);
        self.runtime.block_on(async {
            timeout(LIMIT, client.write(offset, page.clone())).await.unwrap().unwrap();
            let read = timeout(LIMIT, client.read(offset, PAGE)).await.unwrap().unwrap();
            assert!(read == page, "something else was read");
        });
    }
}

/// Regression test: 24 connections held 810 MB.
#[test]
fn stuck_connections_hold_little_and_the_other_disk_is_served() {
    let Some(_turn) = take_turn() else { return };
    if !is_root() {
        return;
    }
    let served = Served::disks(directory(), "shared = 8\n");
    let other = served.client("other").unwrap();
    served.uses(&other, 0);
    let before = served.memory().0;
    let socket = served.socket("mine").display().to_string();
    // Each attacker is a process of the user that the disk belongs to.
    let start = || Attacker::start("stuck_nbd", &[&socket, "mine"], Some(NOBODY)).unwrap();
    let attackers: Vec<_> = (0..9).map(|_| start()).collect();
    let first = attackers[0].saw(LIMIT).unwrap();
    let mut turn = 0;
    let most = served.most_while(|| {
        turn += 1;
        served.uses(&other, turn);
    });
    let saw: Vec<String> =
        attackers.iter().filter_map(|a| a.all_seen().pop().or_else(|| a.saw(LIMIT))).collect();
    println!("{before} MiB became {most}; the attackers saw: {first}; {saw:#?}");
    // The budget, and 1 MiB for each connection of eight processes.
    assert!(most < before + 64 + 32, "{before} MiB became {most}: {saw:#?}");
    let held = |line: &String| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap();
    assert!(saw.len() == attackers.len() && saw.iter().all(|line| held(line) <= 4), "{saw:#?}");
    assert!(saw.iter().any(|line| line.contains("have it")), "none is turned away: {saw:#?}");
}

#[test]
fn a_disk_is_served_to_one_process_and_to_the_next_one_as_soon_as_that_has_ended() {
    let Some(_turn) = take_turn() else { return };
    if !is_root() {
        return;
    }
    let served = Served::disks(directory(), "");
    let socket = served.socket("mine").display().to_string();
    let vm = served.client("mine").unwrap();
    served.uses(&vm, 1);
    let attacker = Attacker::start("stuck_nbd", &[&socket, "mine"], Some(NOBODY)).unwrap();
    let saw = attacker.saw(LIMIT).unwrap();
    let us = format!("process {} has it", std::process::id());
    assert!(saw.starts_with("saw: 0 connections are held") && saw.contains(&us), "{saw}");
    // A new connection of the same process is served while the old one exists.
    let again = served.client("mine").unwrap();
    served.uses(&again, 2);
    served.uses(&vm, 3);
    drop(attacker);

    // Another user's disk cannot be opened at all.
    let socket = served.socket("other").display().to_string();
    let attacker = Attacker::start("stuck_nbd", &[&socket, "other"], Some(NOBODY)).unwrap();
    let saw = attacker.saw(LIMIT).unwrap();
    assert!(saw.contains("0 connections") && saw.contains("Permission denied"), "{saw}");
    drop(attacker);

    // Another process follows at once: a VM that is restarted does not wait.
    let socket = served.socket("mine").display().to_string();
    let former = Attacker::start("stuck_nbd", &[&socket, "mine"], Some(NOBODY)).unwrap();
    assert!(former.saw(LIMIT).unwrap().contains(&us));
    drop((vm, again));
    served.until("the other process has it", || !former.saw(LIMIT).unwrap().starts_with("saw: 0 "));
    let error = served.client("mine").map(drop).unwrap_err();
    let is_told = matches!(error, ClientError::Protocol(ProtocolError::Refused { .. }));
    assert!(is_told, "{error}");
    drop(former);
    let vm = served.client("mine").unwrap();
    served.uses(&vm, 4);
}

/// Regression test: a repository that claimed to lend 1 TiB cost 1.09 GB of tables.
#[test]
fn a_repository_that_says_much_and_takes_nothing_costs_its_client_little() {
    let Some(_turn) = take_turn() else { return };
    if !is_root() {
        return;
    }
    let dir = directory();
    let lair = dir.path().join("lair");
    fs::create_dir(&lair).unwrap();
    chown(&lair, Some(NOBODY), None).unwrap();
    let socket = lair.join("repository").display().to_string();
    let attacker = Attacker::start("fat_repository", &[&socket], Some(NOBODY)).unwrap();
    assert!(attacker.saw(LIMIT).unwrap().ends_with("is there"));
    let served = Served::disks(dir, &format!("repositories = [\"{socket}\"]\n"));
    let mine = served.client("mine").unwrap();
    let before = served.memory().0;
    let mut saw = String::new();
    served.until("it has said so", || {
        saw = attacker.saw(LIMIT).unwrap();
        saw.contains("is told of 1099511627776 bytes")
    });
    let (mut turn, long) = (0, bytes::Bytes::from(vec![7; 1 << 20]));
    let most = served.most_while(|| {
        turn += 1;
        served.uses(&mine, turn);
        let offset = turn % (SIZE / MIB) * MIB;
        let written =
            async { timeout(LIMIT, mine.client.write(offset, long.clone())).await.unwrap() };
        served.runtime.block_on(written).unwrap();
    });
    let seen = attacker.all_seen();
    println!("{before} MiB became {most}; the repository {saw}; {seen:#?}");
    assert!(most < before + 96, "{before} MiB became {most}");
}

/// Regression test: 256 silent clients blocked a repository.
#[test]
fn silent_clients_shut_no_repository() {
    let Some(_turn) = take_turn() else { return };
    if !is_root() {
        return;
    }
    let dir = directory();
    lab::certificates(dir.path(), "127.0.0.1".parse().unwrap()).unwrap();
    let tls = dir.path().display().to_string();
    let at = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let arguments = ["repository", "--memory", "32MiB", "--listen", &at, "--tls", &tls];
    let child = spawn(&dir, &arguments);
    let served = Served { dir, child, runtime: runtime() };
    let connector = Connector::new(served.dir.path()).unwrap();
    let to: SocketAddr = at.parse().unwrap();
    let lease = async |from: &str| {
        let socket = TcpSocket::new_v4()?;
        socket.bind(format!("{from}:0").parse().unwrap())?;
        let stream = socket.connect(to).await?;
        let with = (&connector, "127.0.0.1");
        let (client, connection) =
            client::connect_tls(stream, "lease/1".to_owned(), false, with).await?;
        let running = tokio::spawn(connection.run());
        client.write(0, bytes::Bytes::from_static(b"lent")).await?;
        assert_eq!(client.read(0, 4).await?, b"lent");
        running.abort();
        Ok::<_, ClientError>(())
    };
    let block_on =
        |from| served.runtime.block_on(async { timeout(LIMIT, lease(from)).await.unwrap() });
    served.until("it lends", || block_on("127.0.0.1").is_ok());
    let before = served.memory().0;
    let from = ["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6", "127.0.0.7"];
    let arguments: Vec<&str> = [&at[..]].into_iter().chain(from).collect();
    let attacker = Attacker::start("silent_clients", &arguments, Some(NOBODY)).unwrap();
    let all = |line: String| line.split(' ').nth(3).unwrap().parse::<usize>().unwrap();
    served.until("it has tried more than there are places", || {
        attacker.saw(LIMIT).map(all).unwrap() > 1000
    });
    let mut leases = 0;
    let most = served.most_while(|| {
        // The slabs of the previous lease may still be being zeroed.
        match block_on("127.0.0.1") {
            Ok(()) => leases += 1,
            Err(ClientError::Protocol(ProtocolError::Refused { .. })) => {
                served.runtime.block_on(async { sleep(POLL).await });
            }
            Err(error) => panic!("an honest client is turned away: {error}"),
        }
    });
    // Eventually also from the attacker's address.
    served.until("a client beside the attacker is served", || block_on("127.0.0.2").is_ok());
    let mut saw = String::new();
    let open = |line: &str| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap();
    served.until("it holds no more than there are places", || {
        saw = attacker.saw(LIMIT).unwrap();
        open(&saw) <= 128
    });
    println!("{before} MiB became {most}; {leases} leases; the attacker {saw}");
    assert!(leases > 5, "{leases} leases");
    assert!(most < before + 32, "{before} MiB became {most}");
}
