//! A traced guest on real QEMU: its exact working set is the array that it works on. The trace
//! survives a killed QEMU, and the guest survives a trace that cannot be written.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::time::{Duration, Instant};

use lab::accel::{Accel, Choice, UP_MARK};
use lab::cache::Cache;
use lab::image::Image;
use lab::machine::{self, KERNEL_BASICS};
use lab::qemu::Qemu;
use lab::truth::{Definition, Truth};
use lab::{Lab, MachineSpec, Provisions};
use model::{Bytes, Millis};
use sys::process::Signal;

const MEMORY: Bytes = Bytes::mib(128);
const ARRAY_MIB: u64 = 24;
/// The kernel and the program, and granules of which only a page is touched.
const OTHERS_MIB: u64 = 14;
/// A busy machine boots a traced guest slowly.
const BOOT_LIMIT: Duration = Duration::from_secs(180);

#[test]
fn the_working_set_of_a_known_array_is_exact_and_the_trace_outlives_a_killed_qemu() {
    // Paths of sockets must be short.
    let parent = tempfile::Builder::new().prefix("ob-").tempdir_in("/var/tmp").unwrap();
    let dir = parent.path().join("lab");
    let with = Provisions::provide(Choice::Tcg).unwrap();
    let workload = format!("random-array --mb {ARRAY_MIB}");
    let spec = MachineSpec::new("vm", "g", MEMORY, MEMORY, &workload);
    let lab = Lab::start(&dir, &with, &[MachineSpec { traced: true, ..spec }]).unwrap();
    let vm = lab.machine("vm").unwrap();
    lab.wait_for("accesses", BOOT_LIMIT, |_| {
        Ok(vm.last_metric().is_some_and(|m| m.value["ops"].as_u64().unwrap_or(0) > 0))
    })
    .unwrap();

    let mut truth = Truth::open(&vm.files().trace, Definition::default()).unwrap();
    let (least, most) = (Bytes::mib(ARRAY_MIB), Bytes::mib(ARRAY_MIB + OTHERS_MIB));
    lab.wait_for("boot and filling to be forgotten", BOOT_LIMIT, |_| {
        truth.advance_to(u64::MAX)?;
        let lately = truth.exact().working_set_over(Millis(3000));
        Ok(lately < truth.exact().touched() && truth.exact().working_set_size() <= most)
    })
    .unwrap();
    let exact = truth.exact();
    assert!(exact.working_set_size() >= least, "{}", exact.working_set_size());
    assert!(exact.working_set_over(Millis(3000)) >= least);
    #[expect(clippy::cast_precision_loss, reason = "bytes of a small guest")]
    let third = least.0 as f64 / 3.0;
    assert!(exact.curve().miss_ratio(third) > 0.4);
    let before_us = exact.now_us();

    std::thread::sleep(Duration::from_millis(500));
    vm.process().signal(Signal::KILL).unwrap();
    assert!(vm.process().wait_for(Duration::from_secs(5)).unwrap());
    truth.advance_to(u64::MAX).unwrap();
    assert!(truth.exact().now_us() > before_us, "the trace ends before QEMU did");
}

#[test]
fn a_guest_boots_on_when_its_trace_cannot_be_written() {
    let (console, said) = boot_with_plugin("out=/dev/full,ram=134217728");
    assert!(console.contains(UP_MARK), "{console}\n{said}");
    assert!(said.contains("cannot write the trace") && said.contains("No space"), "{said}");
}

#[test]
fn qemu_does_not_start_with_a_bad_option_of_the_tracer() {
    let (console, said) = boot_with_plugin("out=/dev/null,ram=1000");
    assert!(console.is_empty(), "{console}");
    assert!(said.contains("ram=1000: must be whole pages"), "{said}");
}

/// Boots a guest with the tracer. Returns the output of the guest's console and of QEMU, until
/// the guest is up or dead.
fn boot_with_plugin(options: &str) -> (String, String) {
    let cache = Cache::open().unwrap();
    let (qemu, image) = (Qemu::provide(&cache).unwrap(), Image::provide(&cache).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (console, log) = (dir.path().join("console"), dir.path().join("log"));
    let tracer = lab::command::own_program("liboverbook_tracer.so").unwrap();
    let mut child = machine::bare(&qemu, &image, Accel::Tcg)
        .args(["-m", "128M", "-append", KERNEL_BASICS, "-serial"])
        .arg(format!("file:{}", console.display()))
        .args(["-plugin", &format!("{},{options}", tracer.display())])
        .output_to(std::fs::File::create(&log).unwrap())
        .unwrap()
        .die_with_parent()
        .spawn()
        .unwrap();
    let text = |path: &Path| {
        String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
    };
    let deadline = Instant::now() + BOOT_LIMIT;
    while child.identity().is_alive()
        && !text(&console).contains(UP_MARK)
        && Instant::now() < deadline
    {
        std::thread::sleep(Duration::from_millis(50));
    }
    child.end(Duration::from_secs(5)).unwrap();
    (text(&console), text(&log))
}
