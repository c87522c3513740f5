use std::time::Instant;

use model::Bytes;

use super::*;

/// The domain of libvirt's driver for tests.
const TEST: (&str, &str) = ("test:///default", "6695eb01-f6a4-8304-79aa-97f2502e193f");
const LIMIT: Duration = Duration::from_secs(60);

struct ServerStage {
    server: Arc<LibvirtServer>,
    dir: tempfile::TempDir,
}

impl ServerStage {
    fn start() -> Self {
        virt::error::clear_error_callback();
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        let server = LibvirtServer::new(TEST.0);
        let serves = Arc::clone(&server);
        thread::spawn(move || serves.welcome_all(&listener));
        Self { server, dir }
    }

    fn client(&self) -> BufReader<UnixStream> {
        let stream = UnixStream::connect(self.dir.path().join("s")).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        BufReader::new(stream)
    }

    fn publish(&self, why: &str) {
        self.server.board.publish(&FromLibvirt::Lost { why: why.to_owned() });
    }
}

fn read(client: &mut BufReader<UnixStream>) -> String {
    let mut line = String::new();
    client.read_line(&mut line).unwrap();
    line
}

#[test]
fn clients_that_go_make_room_for_others() {
    let served = ServerStage::start();
    served.publish("news");
    for _ in 0..3 {
        let mut clients: Vec<_> = (0..MOST_CLIENTS).map(|_| served.client()).collect();
        for client in &mut clients {
            // A place is free as soon as the server has seen that its client has gone.
            let deadline = Instant::now() + LIMIT;
            while !read(client).contains("news") {
                assert!(Instant::now() < deadline, "no place becomes free");
                *client = served.client();
            }
        }
        assert!(read(&mut served.client()).contains("8 clients of overbook-libvirt are connected"));
    }
}

#[test]
fn a_client_that_sends_nonsense_is_disconnected_and_loses_its_place() {
    let served = ServerStage::start();
    let mut client = served.client();
    client.get_mut().write_all(b"nonsense\n").unwrap();
    assert_eq!(read(&mut client), "", "the end of the connection");
    let deadline = Instant::now() + LIMIT;
    while served.server.clients.taken() > 0 {
        assert!(Instant::now() < deadline, "its place stays taken");
        thread::yield_now();
    }
}

#[test]
fn a_change_that_was_given_up_or_was_meant_for_another_start_is_not_made() {
    let served = ServerStage::start();
    let mut client = served.client();
    let mut answer = |request: &ToLibvirt| {
        let mut line = serde_json::to_vec(request).unwrap();
        line.push(b'\n');
        client.get_mut().write_all(&line).unwrap();
        read(&mut client)
    };
    let request = ToLibvirt {
        id: 3,
        uuid: TEST.1.to_owned(),
        process: DomainProcess { pid: std::process::id(), start_ticks: 1 },
        before: boot_now().after(model::Millis::secs(60)),
        change: DomainChange::StatsPeriod(1),
    };
    let told = answer(&request);
    assert!(told.contains("\"id\":3,\"refusal\":\"the QEMU for which this was decided"), "{told}");
    let told = answer(&ToLibvirt { uuid: "../x".to_owned(), ..request.clone() });
    assert!(told.contains("no UUID"), "{told}");
    let change = DomainChange::Memory(Bytes::mib(64));
    let _call = served.server.calls.begin(TEST.1).unwrap();
    let told = answer(&ToLibvirt { change, ..request });
    assert!(told.contains("an earlier call of libvirt about it has not come back"), "{told}");
}

#[test]
fn a_request_is_void_after_its_time_and_in_another_start() {
    let own = sys::process::Identity::own().unwrap();
    let process = DomainProcess { pid: own.pid, start_ticks: own.start_ticks };
    let request = |process, before| ToLibvirt {
        id: 1,
        uuid: TEST.1.to_owned(),
        process,
        before,
        change: DomainChange::StatsPeriod(1),
    };
    let later = boot_now().after(model::Millis::secs(60));
    assert_eq!(check(&request(process, later), Some(process)), Ok(()));
    let why = check(&request(process, boot_now()), Some(process)).unwrap_err();
    assert!(why.contains("libvirt took too long"), "{why}");
    let next = DomainProcess { start_ticks: own.start_ticks + 1, ..process };
    for now in [None, Some(next)] {
        let why = check(&request(process, later), now).unwrap_err();
        assert!(why.contains("has ended"), "{why}");
    }
}
