//! Other projects' NBD clients against our page server: libnbd's programs, QEMU's, and the
//! kernel's driver if it is available. They use a unix socket and TCP with TLS.
//!
//! The programs come from the distribution and are unpacked privately, like the lab's QEMU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use lab::packages::Unpacked;
use overbook::pki::{self, CertificateRequest, Purpose};
use overbook_tests::{Requirement, ensure, requires, text, unpacked};
use pageserver::layer::{self, Layer};
use pageserver::layers::file::File;
use pageserver::layers::memory::Memory;
use pageserver::nbd::request::Export;
use pageserver::server::{Catalogue, Limits, Opened, Server, Who, of_layer};
use pageserver::tls::Acceptor;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Runtime;

const SIZE: u64 = 32 << 20;
/// Programs of other projects.
struct ClientPrograms(Unpacked);

impl ClientPrograms {
    fn provide() -> Option<Self> {
        unpacked("nbd-clients", &["libnbd-bin", "qemu-utils"]).map(Self)
    }

    /// A program, ended after two minutes: a server that does not answer must not stop all tests.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command.arg("120").arg(self.0.program(program));
        command.env("LD_LIBRARY_PATH", self.0.libraries());
        command
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        self.command(program).args(arguments).output().unwrap()
    }

    /// The output of a program, which must succeed.
    fn succeeds(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.run(program, arguments);
        let said = text(&output);
        assert!(output.status.success(), "{program} {arguments:?}:\n{said}");
        said
    }

    /// The output of `qemu-io` for these commands.
    fn qemu_io(&self, image: &[&str], commands: &[&str]) -> String {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        let said =
            self.succeeds("qemu-io", &image.iter().copied().chain(commands).collect::<Vec<_>>());
        assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
        said
    }
}

/// A disk of each kind.
struct ClientDisks(Vec<(&'static str, Arc<dyn Layer>)>);

impl Catalogue for ClientDisks {
    fn list(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| (*name).to_owned()).collect()
    }

    fn find(&self, name: &str, _: &Who) -> Option<Export> {
        self.0.iter().find(|disk| disk.0 == name).map(|(_, layer)| of_layer(&**layer))
    }

    fn open(&self, name: &str, _: &Who) -> Option<Opened> {
        let (name, layer) = self.0.iter().find(|disk| disk.0 == name)?;
        Some(Opened { name: (*name).to_owned(), layer: layer.clone() })
    }
}

/// A page server of two disks on a unix socket, and with TLS on a port.
struct ClientStage {
    programs: ClientPrograms,
    dir: tempfile::TempDir,
    memory: Arc<Memory>,
    port: u16,
    runtime: Runtime,
}

impl ClientStage {
    fn start() -> Option<Self> {
        let programs = ClientPrograms::provide()?;
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let memory = Arc::new(Memory::new(SIZE));
        let handle = tempfile::tempfile().unwrap();
        handle.set_len(SIZE).unwrap();
        let file = Arc::new(File::new(Path::new("disk"), handle, SIZE));
        let disks = Arc::new(ClientDisks(vec![("memory", memory.clone()), ("file", file)]));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        certificates(dir.path());
        let port = {
            let _inside = runtime.enter();
            let plain = Server::new(disks.clone(), None, Limits::default());
            let socket = UnixListener::bind(dir.path().join("socket")).unwrap();
            runtime.spawn(plain.listen_unix(socket));
            let tls = Acceptor::new(&dir.path().join("server")).unwrap();
            let tls = Server::new(disks, Some(tls), Limits::default());
            let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
            let port = listener.local_addr().unwrap().port();
            runtime.spawn(tls.listen_tcp(listener));
            port
        };
        Some(Self { programs, dir, memory, port, runtime })
    }

    /// A path below the stage's directory.
    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn unix(&self, disk: &str) -> String {
        format!("nbd+unix:///{disk}?socket={}", self.path("socket"))
    }

    /// A TLS address in libnbd's form.
    fn tls(&self, disk: &str) -> String {
        format!("nbds://localhost:{}/{disk}?tls-certificates={}", self.port, self.path("client"))
    }

    /// A TLS address in the form of QEMU's options.
    fn tls_options(&self, disk: &str) -> [String; 2] {
        let (dir, port) = (self.path("client"), self.port);
        let object = format!("tls-creds-x509,id=tls,endpoint=client,dir={dir}");
        let image = format!(
            "driver=nbd,server.type=inet,server.host=localhost,server.port={port},export={disk},\
             tls-creds=tls"
        );
        [object, image]
    }

    /// Fills a file with different pages and holes.
    fn image(&self, name: &str) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(11);
        let mut image = vec![0; usize::try_from(SIZE).unwrap()];
        for page in image.chunks_exact_mut(64 << 10) {
            if random.bool() {
                page.fill_with(|| random.u8(..));
            }
        }
        std::fs::write(self.path(name), &image).unwrap();
        image
    }

    fn is_in_memory(&self, image: &[u8]) {
        let found = self.runtime.block_on(layer::read(&*self.memory, 0, image.len())).unwrap();
        assert!(found == image, "something else has come");
    }
}

/// An authority, and its certificates for both sides, in the files that QEMU and libnbd expect.
fn certificates(dir: &Path) {
    let authority = dir.join("pki");
    pki::init(&authority).unwrap();
    let here = ["localhost".to_owned()];
    let valid = Duration::from_secs(3600);
    let order = CertificateRequest { name: "here", addresses: &here, valid, renews: false };
    let own = pki::host(&authority, order).unwrap();
    for (purpose, side) in [(Purpose::Repository, "server"), (Purpose::Disks, "client")] {
        std::fs::rename(own.join(purpose.directory()), dir.join(side)).unwrap();
    }
}

#[test]
fn libnbd_lists_and_knows_what_there_is() {
    let Some(stage) = ClientStage::start() else { return };
    for uri in [stage.unix("file"), stage.tls("file")] {
        let info = stage.programs.succeeds("nbdinfo", &["--json", &uri]);
        let info: Value = serde_json::from_str(&info).unwrap();
        assert_eq!(info["protocol"], "newstyle-fixed");
        assert_eq!(info["structured"], true, "{info}");
        let export = &info["exports"][0];
        assert_eq!(export["export-size"], SIZE, "{info}");
        for can in ["is_read_only", "is_rotational"] {
            assert_eq!(export[can], false, "{can}: {info}");
        }
        for can in ["can_multi_conn", "can_trim", "can_zero", "can_fua", "can_flush", "can_df"] {
            assert_eq!(export[can], true, "{can}: {info}");
        }
        assert_eq!(export["contexts"][0], "base:allocation", "{info}");
    }
    let uri = stage.unix("");
    let list = stage.programs.succeeds("nbdinfo", &["--list", &uri]);
    assert!(list.contains("export=\"memory\"") && list.contains("export=\"file\""), "{list}");
    let plain = format!("nbd://localhost:{}/file", stage.port);
    assert!(!stage.programs.run("nbdinfo", &[&plain]).status.success(), "it does without TLS");
    assert!(!stage.programs.run("nbdinfo", &[&stage.unix("other")]).status.success());
}

#[test]
fn libnbd_copies_in_and_out_on_many_connections() {
    let Some(stage) = ClientStage::start() else { return };
    let image = stage.image("image");
    let (from, to) = (stage.path("image"), stage.path("copy"));
    let memory = [stage.unix("memory"), stage.tls("memory")];
    for (i, uri) in memory.iter().enumerate() {
        let many = ["--connections=4", "--requests=32", "--flush"];
        stage.programs.succeeds("nbdcopy", &[&many[..], &[&*from, &**uri]].concat());
        stage.is_in_memory(&image);
        let uri = &memory[1 - i];
        stage.programs.succeeds("nbdcopy", &[&many[..2], &[&**uri, &*to]].concat());
        assert!(std::fs::read(&to).unwrap() == image, "a copy differs");
    }
    stage.programs.succeeds("nbdcopy", &[&memory[0], &stage.tls("file")]);
    stage.programs.succeeds("nbdcopy", &["--synchronous", &stage.unix("file"), &to]);
    assert!(std::fs::read(&to).unwrap() == image, "a copy differs");
    let map = stage.programs.succeeds("nbdinfo", &["--map", "--json", &memory[0]]);
    let map: Value = serde_json::from_str(&map).unwrap();
    let mut at = 0;
    for extent in map.as_array().unwrap() {
        let number = |name: &str| usize::try_from(extent[name].as_u64().unwrap()).unwrap();
        assert_eq!(number("offset"), at, "{map}");
        let part = &image[at..at + number("length")];
        at += part.len();
        let is_hole = number("type") != 0;
        assert!(!is_hole || part.iter().all(|byte| *byte == 0), "a hole holds something: {extent}");
    }
    assert_eq!(at, image.len());
    assert!(map.as_array().unwrap().len() > 10, "there are holes: {map}");
}

#[test]
fn qemu_copies_compares_and_maps() {
    let Some(stage) = ClientStage::start() else { return };
    let image = stage.image("image");
    let (from, unix) = (stage.path("image"), stage.unix("memory"));
    let [object, options] = stage.tls_options("memory");
    let programs = &stage.programs;
    programs.succeeds("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", &from, &unix]);
    stage.is_in_memory(&image);
    let tls = ["--object", &object, "--image-opts"];
    let target = "driver=raw,file.filename=".to_owned() + &from;
    programs.succeeds("qemu-img", &[&["compare"], &tls[..], &[&*options, &*target]].concat());
    let info = programs
        .succeeds("qemu-img", &[&["info", "--output=json"], &tls[..], &[&*options]].concat());
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!(info["virtual-size"], SIZE);
    let map = programs.succeeds("qemu-img", &["map", "--output=json", "-f", "raw", &unix]);
    let map: Value = serde_json::from_str(&map).unwrap();
    assert!(map.as_array().unwrap().iter().any(|extent| extent["zero"] == true), "{map}");
    let bench = ["bench", "-c", "5000", "-d", "64", "-s", "4096", "-f", "raw", "-w", &unix];
    programs.succeeds("qemu-img", &bench);
    let other = format!("{unix}x");
    assert!(!programs.run("qemu-img", &["info", &other]).status.success());
}

#[test]
fn qemu_writes_trims_and_zeroes() {
    let Some(stage) = ClientStage::start() else { return };
    for disk in ["memory", "file"] {
        let unix = stage.unix(disk);
        let [object, options] = stage.tls_options(disk);
        let tls = ["--object", &object, "--image-opts", &*options];
        for image in [&["-f", "raw", &*unix][..], &tls] {
            let said = stage.programs.qemu_io(
                image,
                &[
                    "write -P 0x5a 0 1M",
                    "write -f -P 0xa5 64k 4k",
                    "read -P 0x5a 0 64k",
                    "read -P 0xa5 64k 4k",
                    "read -P 0x5a 68k 956k",
                    "write -z 128k 128k",
                    "write -z -u 256k 64k",
                    "write -z -f 320k 64k",
                    "read -P 0 128k 256k",
                    "discard 512k 128k",
                    "read -P 0 512k 128k",
                    "aio_write -P 0x11 700k 8k",
                    "aio_write -P 0x22 720k 8k",
                    "aio_flush",
                    "flush",
                    "read -P 0x11 700k 8k",
                    "read -P 0x22 720k 8k",
                    "read -P 0x5a 384k 128k",
                ],
            );
            assert!(said.contains("wrote 1048576/1048576"), "{said}");
        }
        let beyond = ["-f", "raw", "-c", "read 32M 4k", &*unix];
        assert!(
            !stage.programs.run("qemu-io", &beyond).status.success(),
            "it reads beyond the end"
        );
    }
}

/// QEMU's server uses ours as its disk, and our client uses QEMU's server.
#[test]
fn our_client_asks_qemus_server_before_ours() {
    let Some(stage) = ClientStage::start() else { return };
    let socket = stage.path("qemu");
    let [object, _] = stage.tls_options("memory");
    let mut server = stage
        .programs
        .command("qemu-storage-daemon")
        .args(["--object", &object, "--blockdev"])
        .arg(format!(
            "driver=nbd,node-name=disk,server.type=inet,server.host=localhost,server.port={},\
             export=memory,tls-creds=tls,discard=unmap",
            stage.port
        ))
        .args(["--nbd-server", &format!("addr.type=unix,addr.path={socket}"), "--export"])
        .arg("type=nbd,id=export,node-name=disk,name=disk,writable=on")
        .spawn()
        .unwrap();
    let done = stage.runtime.block_on(async {
        use pageserver::client::{self, ClientError};
        use pageserver::nbd::dialogue::Wanted;
        use pageserver::nbd::request::Command;
        let mut tries = 0..600;
        let stream = loop {
            match tokio::net::UnixStream::connect(&socket).await {
                Ok(stream) => break stream,
                Err(_) if tries.next().is_some() => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(error) => return Err(error.into()),
            }
        };
        let wanted = Wanted { name: "disk".to_owned(), tls: false, status: true };
        let (client, connection) = client::connect(stream, wanted).await?;
        tokio::spawn(connection.run());
        assert_eq!(client.session().export.size, SIZE);
        assert!(client.session().status, "block status is not agreed on");
        client.write(1 << 20, vec![7; 8192].into()).await?;
        client.order(Command::Flush, 0, 0, 0).await?;
        assert_eq!(client.read(1 << 20, 8192).await?, [7; 8192]);
        client.order(Command::WriteZeroes, 0, 1 << 20, 4096).await?;
        assert_eq!(client.read(1 << 20, 4096).await?, [0; 4096]);
        let extents = client.extents(0, 2 << 20).await?;
        assert!(extents.len() > 1 && extents[0].is_hole, "{extents:?}");
        assert!(client.read(SIZE, 512).await.is_err());
        Ok::<_, ClientError>(())
    });
    // SIGTERM, which `timeout` passes on: SIGKILL would leave QEMU's server behind.
    kill_process(Pid::from_child(&server), Signal::TERM).unwrap();
    server.wait().unwrap();
    done.unwrap();
    let found = stage.runtime.block_on(layer::read(&*stage.memory, 1 << 20, 8192)).unwrap();
    assert!(found[..4096] == [0; 4096] && found[4096..] == [7; 4096]);
}

#[test]
fn the_kernels_driver_uses_a_disk() {
    let device = "/dev/nbd0";
    let found = ensure(Path::new(device).exists(), format!("no {device}"));
    let Some(()) = requires(Requirement::Nbd, found) else { return };
    let client = requires::program("nbd-client");
    let Some(()) = requires(Requirement::Program("nbd-client"), client) else { return };
    let Some(stage) = ClientStage::start() else { return };
    let socket = stage.path("socket");
    let connect = ["-unix", &socket, "-N", "memory", device];
    let attached = Command::new("nbd-client").args(connect).output().unwrap();
    let is_attached = ensure(attached.status.success(), text(&attached));
    let Some(()) = requires(Requirement::Nbd, is_attached) else { return };
    let image = stage.image("image");
    let written = std::fs::write(device, &image);
    let read = std::fs::read(device);
    let detached = Command::new("nbd-client").args(["-d", device]).output().unwrap();
    written.unwrap();
    assert!(read.unwrap() == image, "the kernel reads something else");
    assert!(detached.status.success(), "{}", text(&detached));
    stage.is_in_memory(&image);
}
