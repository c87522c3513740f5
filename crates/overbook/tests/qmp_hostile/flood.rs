//! QEMUs that send more than they were asked for, and the real daemon.

use super::daemon_fixture::TestDaemon;
use super::*;

/// Maximum memory of the daemon: some 20 MiB without a VM, and the data that eight flooding QEMUs
/// can make it keep.
const MOST_MIB: u64 = 64;
/// Number of simultaneous attackers of each kind.
const OF_EACH: usize = 2;

/// The attack of a hostile QEMU, which begins after the greeting.
#[derive(Clone, Copy, Debug)]
enum Flood {
    /// Events of 1 MiB, one after the other.
    LargeEvents,
    /// Events of the maximum length of a line.
    LongestEvents,
    /// Events of a hundred bytes.
    SmallEvents,
    /// The largest answers, without the last one of a batch.
    FatAnswers,
}

const ALL: [(Flood, &str); 4] = [
    (Flood::LargeEvents, "bytes: cut off, no QMP message is so long"),
    (Flood::LongestEvents, "more than 64 KiB of events a second"),
    (Flood::SmallEvents, "more than 64 KiB of events a second"),
    (Flood::FatAnswers, "no answer to query-status in 2 s"),
];

impl Flood {
    async fn serve(self, name: &'static str, path: PathBuf) {
        let listener = UnixListener::bind(path).unwrap();
        while let Ok((stream, _)) = listener.accept().await {
            // The daemon closes the connection; the next one is attacked as well.
            let _ = self.attack(name, BufReader::new(stream)).await;
        }
    }

    async fn attack(self, name: &'static str, mut stream: BufReader<UnixStream>) -> io::Result<()> {
        stream.get_mut().write_all(b"{\"QMP\": {}}\n").await?;
        let event = |size: usize| {
            let rest = "x".repeat(size);
            format!(
                "{{\"event\": \"BALLOON_CHANGE\", \"data\": {{\"actual\": 1, \"x\": \"{rest}\"}}}}\n"
            )
        };
        let event = match self {
            Self::LargeEvents => event(1 << 20),
            Self::LongestEvents => event((64 << 10) - 100),
            Self::SmallEvents | Self::FatAnswers => event(20),
        };
        let fake = Fake::new(name);
        let mut is_known = false;
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await? == 0 {
                return Ok(());
            }
            let message: Value = serde_json::from_str(&line)?;
            let answer = match self {
                Self::FatAnswers if message["execute"] == "query-status" => continue,
                // JSON that takes the most memory for its length.
                Self::FatAnswers if is_known => json!(vec![json!({"a": 0}); 7000]),
                _ => fake.answer(&message),
            };
            is_known |= message["execute"] == "query-memory-size-summary";
            let text = json!({"return": answer, "id": message["id"]}).to_string() + "\n";
            stream.get_mut().write_all(text.as_bytes()).await?;
            if !matches!(self, Self::FatAnswers) && is_known {
                loop {
                    stream.get_mut().write_all(event.as_bytes()).await?;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_flood_of_events_neither_grows_the_daemon_nor_keeps_it_from_other_vms() {
    let dir = tempfile::tempdir().unwrap();
    let well = Fake::new("well");
    tokio::spawn(well.clone().serve(dir.path().join("well.qmp")));
    let mut names = Vec::new();
    for (flood, reason) in ALL {
        for number in 0..OF_EACH {
            let name: &'static str = format!("{flood:?}-{number}").leak();
            tokio::spawn(flood.serve(name, dir.path().join(format!("{name}.qmp"))));
            names.push((name, reason));
        }
    }
    tokio::task::spawn_blocking(move || watch_the_daemon(dir, &well, &names)).await.unwrap();
}

fn watch_the_daemon(dir: tempfile::TempDir, well: &Fake, hostile: &[(&'static str, &str)]) {
    let mut daemon = TestDaemon::start(dir, "");
    let vm = |daemon: &TestDaemon, name: &str| {
        let vm: Option<Value> = daemon.try_get(&format!("/v1/vms/{name}"));
        vm.unwrap_or_default()
    };
    for (name, reason) in hostile {
        daemon.until(&format!("{name} is cut off: {reason}"), |daemon| {
            vm(daemon, name)["link_error"].as_str().is_some_and(|why| why.contains(reason))
        });
    }
    // The attacks go on: each QEMU is connected to again, and attacks again.
    let before = well.heard("query-balloon");
    daemon.until("the VM beside them was asked thirty more times", |daemon| {
        assert_eq!(vm(daemon, "well")["link_up"], true, "{}", daemon.log());
        well.heard("query-balloon") >= before + 30
    });
    let most = daemon.most_memory_mib();
    println!("under {} flooding QEMUs the daemon had {most} MiB at most", hostile.len());
    assert!(most <= MOST_MIB, "the daemon had {most} MiB");
}
