//! A guest changes hosts: two real QEMUs, two daemons that die at any moment, a network that
//! breaks. It runs on exactly one of them, always, and loses no byte.
//!
//! What each daemon writes down stays; all else it forgets when it dies.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use lab::lab::{Lab, Provisions};
use lab::machine::{self, Files, MachineSpec};
use model::{Bytes, Millis};
use overbook::drivers::migration::{
    Limits, Turn, source_turn, source_turn_without, target_turn, target_turn_without,
};
use overbook::drivers::qmp::{Client, Command};
use overbook_tests::{provisions, take_turn};
use policy::handover::{Seen, SourceQemu, SourceStep, TargetQemu, TargetStep};
use serde_json::Value;
use sys::process::Identity;
use tokio::runtime::Runtime;
use tokio::time::sleep;

const LIMIT: Duration = Duration::from_secs(120);
/// A guest of some 100 MiB takes a second or two, and writes faster than that if it verifies.
const LIMITS: Limits =
    Limits { bandwidth: Bytes::mib(64), downtime: Millis(300), precopy: Millis::secs(4) };
const ROUNDS: u64 = 10;

/// A network between two hosts that can be cut.
struct Cable {
    listener: TcpListener,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Cable {
    fn new() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        Self { listener, ends: Arc::default() }
    }

    /// Carries whatever comes here to `there`; answers where that is.
    fn to(&self, there: &str) -> String {
        let there: SocketAddr = there.strip_prefix("tcp:").unwrap().parse().unwrap();
        let listener = self.listener.try_clone().unwrap();
        let ends = self.ends.clone();
        thread::spawn(move || {
            while let Ok((here, _)) = listener.accept() {
                let Ok(there) = TcpStream::connect(there) else { continue };
                let pairs = [(&here, &there), (&there, &here)];
                for (from, to) in pairs {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                ends.lock().unwrap().extend([here, there]);
            }
        });
        format!("tcp:{}", self.listener.local_addr().unwrap())
    }

    fn cut(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

/// A QEMU; a daemon that dies forgets the connection.
struct Qemu {
    files: Files,
    process: Option<Identity>,
    client: Option<Client>,
}

impl Qemu {
    fn of(files: Files, process: Option<Identity>) -> Self {
        Self { files, process, client: None }
    }

    fn is_alive(&self) -> bool {
        self.process.is_some_and(|process| process.is_alive())
    }

    /// `None`: it has ended, was not started yet, or does not answer yet.
    async fn client(&mut self) -> Option<&mut Client> {
        if !self.is_alive() {
            self.client = None;
        } else if self.client.is_none() {
            self.client = Client::connect(&self.files.daemon_socket).await.ok();
        }
        self.client.as_mut()
    }

    async fn runs(&mut self) -> bool {
        let Some(client) = self.client().await else { return false };
        match client.execute(Command::new("query-status")).await {
            Ok(status) => status["running"] == true,
            Err(_) => {
                self.client = None;
                false
            }
        }
    }
}

/// What both hosts have written down.
#[derive(Default)]
struct Steps {
    source: Option<SourceStep>,
    target: Option<TargetStep>,
}

/// What happens beside it in one round.
struct Trouble {
    /// One turn in so many of either daemon ends with its death.
    deadly: u32,
    /// The network breaks so long after the first bytes.
    cut_after: Option<Duration>,
    /// The intent is withdrawn after so long.
    late_after: Option<Duration>,
}

/// A guest on its way from one QEMU to the next.
struct Journey<'a> {
    lab: &'a mut Lab,
    with: &'a Provisions,
    spec: MachineSpec,
    here: Qemu,
    there: Qemu,
    generation: u64,
    random: fastrand::Rng,
}

impl Journey<'_> {
    /// One intent, until both hosts have ended it; answers whether the guest has moved.
    async fn go(&mut self, trouble: &Trouble) -> bool {
        let (mut steps, cable, begun) = (Steps::default(), Cable::new(), Instant::now());
        let (mut is_cut, mut moving_at) = (false, None);
        loop {
            let why = "nobody ends it";
            assert!(begun.elapsed() < LIMIT, "{why}: {:?}, {:?}", steps.source, steps.target);
            let is_late = trouble.late_after.is_some_and(|after| begun.elapsed() > after);
            if steps.source == Some(SourceStep::Moving) {
                moving_at.get_or_insert_with(Instant::now);
            }
            let due = |at: Instant| trouble.cut_after.is_some_and(|after| at.elapsed() > after);
            if !is_cut && moving_at.is_some_and(due) {
                cable.cut();
                is_cut = true;
            }
            let target_over = self.target(&mut steps, is_late, trouble.deadly, &cable).await;
            let source_over = self.source(&mut steps, is_late, trouble.deadly).await;
            // The source first: it runs no more once the target may.
            let both = self.here.runs().await && self.there.runs().await;
            assert!(!both, "it runs twice: {:?}, {:?}", steps.source, steps.target);
            if target_over && source_over {
                return steps.source == Some(SourceStep::Left);
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// A turn of the source's daemon; answers whether it is done with this intent.
    async fn source(&mut self, steps: &mut Steps, is_late: bool, deadly: u32) -> bool {
        let seen = steps.seen(is_late);
        let is_alive = self.here.is_alive();
        let client = self.here.client().await;
        if is_alive && client.is_none() {
            return false;
        }
        let dies = self.random.u32(0..deadly) == 0;
        let turn = match client {
            Some(client) => source_turn(client, self.generation, seen, LIMITS).await,
            None => Ok(source_turn_without(&SourceQemu::Gone, seen)),
        };
        match turn {
            Ok(Turn::Over) => return true,
            Ok(Turn::Write(step)) if !dies => steps.source = Some(step),
            Ok(_) if !dies => {}
            Ok(_) | Err(_) => self.here.client = None,
        }
        false
    }

    /// A turn of the target's daemon; answers whether it is done with this intent.
    async fn target(
        &mut self,
        steps: &mut Steps,
        is_late: bool,
        deadly: u32,
        cable: &Cable,
    ) -> bool {
        let seen = steps.seen(is_late);
        let (is_launched, is_alive) = (self.there.process.is_some(), self.there.is_alive());
        let client = self.there.client().await;
        if is_alive && client.is_none() {
            return false;
        }
        let dies = self.random.u32(0..deadly) == 0;
        let is_ours = seen.target.is_some();
        let without = |qemu| Ok(target_turn_without(&qemu, seen));
        let turn = match client {
            Some(client) => target_turn(client, is_ours, seen, "tcp:127.0.0.1:0").await,
            None if is_launched => without(TargetQemu::Gone("its QEMU has ended".to_owned())),
            None => without(TargetQemu::Absent),
        };
        match turn {
            Ok(Turn::Over) => return true,
            Ok(Turn::Launch) => self.launch(),
            Ok(Turn::Write(TargetStep::Prepared { address })) if !dies => {
                steps.target = Some(TargetStep::Prepared { address: cable.to(&address) });
            }
            Ok(Turn::Write(step)) if !dies => steps.target = Some(step),
            Ok(_) if !dies => {}
            Ok(_) | Err(_) => self.there.client = None,
        }
        false
    }

    /// As whoever starts VMs on the target does.
    fn launch(&mut self) {
        let Provisions { qemu, image, accel } = self.with;
        let files = &self.there.files;
        let command = machine::command(&self.spec, files, qemu, image, *accel);
        let waits = command.args(["-incoming", "defer", "-S"]);
        let name = format!("host-{}", self.generation);
        self.there.process = Some(self.lab.spawn(&name, waits).unwrap());
    }

    /// What the guest says next, wherever it is now.
    async fn works_on(&self) {
        let file = &self.here.files.metrics;
        let lines = || fs::read_to_string(file).unwrap_or_default().lines().count();
        let (before, begun) = (lines(), Instant::now());
        while lines() < before + 2 {
            assert!(begun.elapsed() < LIMIT, "the guest does nothing any more");
            sleep(Duration::from_millis(50)).await;
        }
        for line in fs::read_to_string(file).unwrap().lines() {
            // The first one may have begun on the other host.
            let Ok(line) = serde_json::from_str::<Value>(line) else { continue };
            assert!(line["bad_bytes"].as_u64().unwrap_or(0) == 0, "{line}");
        }
    }
}

impl Steps {
    fn seen(&self, is_late: bool) -> Seen<'_> {
        let (source, target) = (self.source.as_ref(), self.target.as_ref());
        Seen { source, target, is_late, is_alone: false }
    }
}

#[test]
fn a_guest_that_changes_hosts_runs_on_one_of_them_whatever_happens() {
    let Some(_turn) = take_turn() else { return };
    let Some(with) = provisions() else { return };
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let memory = Bytes::mib(160);
    let spec = MachineSpec::new("guest", "shop", memory, memory, "verify --mb 64");
    let mut lab = Lab::start(&dir.path().join("lab"), &with, std::slice::from_ref(&spec)).unwrap();
    let own = lab.machine("guest").unwrap();
    own.hang_up();
    let here = Qemu::of(own.files().clone(), Some(own.process()));
    let files = |lab: &Lab, generation: u64| Files::new(lab.dir(), &format!("guest-{generation}"));
    let there = Qemu::of(files(&lab, 1), None);
    let mut journey = Journey {
        lab: &mut lab,
        with: &with,
        spec,
        here,
        there,
        generation: 1,
        random: fastrand::Rng::with_seed(31),
    };
    let (mut moved, mut stayed) = (0, 0);
    Runtime::new().unwrap().block_on(async {
        for round in 0..ROUNDS {
            let after = |random: &mut fastrand::Rng| Duration::from_millis(random.u64(0..2500));
            // The first one is without trouble, and must succeed.
            let random = &mut journey.random;
            let trouble = Trouble {
                deadly: if round == 0 { u32::MAX } else { 6 },
                cut_after: (round % 3 == 1).then(|| after(random)),
                late_after: (round % 3 == 2).then(|| after(random)),
            };
            let has_moved = journey.go(&trouble).await;
            let next = Qemu::of(files(journey.lab, journey.generation + 1), None);
            let there = std::mem::replace(&mut journey.there, next);
            if has_moved {
                journey.here = there;
                moved += 1;
            } else {
                stayed += 1;
            }
            assert!(journey.here.runs().await, "it runs nowhere after round {round}");
            journey.works_on().await;
            journey.generation += 1;
            assert!(round > 0 || moved == 1, "without trouble it does not move");
        }
    });
    assert!(stayed > 0, "there was no trouble at all");
    drop(journey);
    lab.stop().unwrap();
}
