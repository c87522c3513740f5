//! Peers that are not well-behaved VMs: sockets that do not speak QMP, and a guest without a
//! balloon driver.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

use lab::MachineSpec;
use model::{Bytes, Mode};
use overbook_tests::{BASE, Stage, hungry, idle};

/// Serves the socket `name` among the QMP sockets until the process ends.
fn serve(stage: &Stage, name: &str, answer: fn(&mut UnixStream) -> std::io::Result<()>) {
    let socket = stage.lab.dir().join(format!("qmp/{name}.sock"));
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let mut open = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // An error is expected when the daemon closes the connection.
            let _ = answer(&mut stream);
            open.push(stream);
        }
    });
}

/// Greets as QEMU does, then sends one endless line until the connection is closed.
fn one_gigantic_line(stream: &mut UnixStream) -> std::io::Result<()> {
    stream.write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\n{\"return\": \"")?;
    loop {
        stream.write_all(&[b'x'; 1 << 16])?;
    }
}

#[test]
fn sockets_that_are_no_qmp_are_shown_with_what_is_wrong_and_disturb_nobody() {
    let Some(stage) = Stage::start(Mode::Enforce, &[idle("good")]) else { return };
    serve(&stage, "garbage", |stream| stream.write_all(b"220 smtp ready\r\n"));
    serve(&stage, "silent", |_| Ok(()));
    serve(&stage, "endless", one_gigantic_line);
    let wrong = [
        ("garbage", "not QMP: first line was `220 smtp ready"),
        ("silent", "no QMP greeting in"),
        ("endless", "a line of more than"),
    ];
    stage.until("each says what is wrong", |stage| {
        wrong.iter().all(|(name, why)| {
            let vm = stage.vm(name);
            vm["link_up"] == false && vm["link_error"].as_str().unwrap().contains(why)
        })
    });
    stage.throughout(Duration::from_secs(3), "the good one is served", |stage| {
        let vm = stage.vm("good");
        vm["link_up"] == true && vm["stats_age_ms"].as_u64().is_some_and(|age| age < 6000)
    });
    assert_eq!(stage.host()["unreachable_vms"], 3);
    let page = stage.says(&["status"]);
    assert!(wrong.iter().all(|(_, why)| page.contains(why)), "{page}");
}

#[test]
fn a_guest_without_balloon_driver_keeps_its_memory_and_its_group_gets_on_without_it() {
    let deaf = MachineSpec { balloon_driver: false, memory_max: BASE, ..idle("deaf") };
    let guests = [hungry(), idle("calm"), deaf];
    let Some(stage) = Stage::start(Mode::Enforce, &guests) else { return };
    stage.until("the group goes on", |stage| stage.balloon("hungry") > BASE);
    let vm = stage.vm("deaf");
    assert_eq!(vm["link_up"], true);
    assert!(!vm["unsupported"]["statistics"].is_null(), "{vm}");
    assert!(vm["refusals"].as_array().unwrap().iter().any(|r| r["code"] == "no_stats"), "{vm}");
    assert_eq!(stage.balloon("deaf"), BASE);
    let record = stage.undo().into_iter().find(|record| record["vm"] == "deaf").unwrap();
    assert!(record["balloon"].is_null(), "{record}");
}

#[test]
fn a_balloon_that_somebody_else_moves_is_left_alone_and_said_though_overbook_never_moved_it() {
    let Some(stage) = Stage::start(Mode::Enforce, &[idle("guest")]) else { return };
    let says = |stage: &Stage, code: &str| {
        let vm = stage.vm("guest");
        vm["refusals"].as_array().unwrap().iter().any(|refusal| refusal["code"] == code)
    };
    stage.until("nothing calls for a change", |stage| says(stage, "content"));
    // Memory is taken after ten seconds of calm; until then the balloon may still be moving.
    stage.throughout(Duration::from_secs(12), "its balloon rests", |stage| {
        stage.balloon("guest") == BASE
    });
    let less = BASE.minus(Bytes::mib(24));
    stage.guest("guest").set_balloon(less).unwrap();
    stage.until("it is said", |stage| says(stage, "moved_by_others"));
    let words = stage.says(&["explain", "guest"]);
    assert!(words.contains("another program moved its balloon from 128 MiB to 1"), "{words}");
    stage.throughout(Duration::from_secs(5), "it is left alone", |stage| {
        stage.balloon("guest") <= BASE.minus(Bytes::mib(20))
    });
}
