//! Golden screens, compared letter by letter.

use std::sync::Arc;

use api::shown::{LastChange, TickView};
use api::wire::Explanation;
use ratatui::{Terminal, backend::TestBackend};

use super::*;
use crate::{
    fixture,
    top::{state::PauseRequest, watch::PollerEvent},
};

/// The fixture's page, as the daemon would send it; `web-1` swaps.
pub(crate) fn page() -> Page {
    let shown = TickView::first(Arc::new(fixture::published()));
    let mut host = HostStatus::of(&shown);
    host.tick_age_ms = 300;
    let mut vms = VmStatus::all(&shown);
    let web = vms.iter_mut().find(|vm| vm.name == "web-1").unwrap();
    web.swap_bytes_per_second = Some(3_200 << 10);
    web.last_change = Some(LastChange {
        wall_ms: host.wall_ms - 5_000,
        text: "target raised to 192 MiB: it is short of memory".to_owned(),
    });
    Page { host, groups: GroupStatus::all(&shown), vms, explanation: None }
}

fn screen(state: &ScreenState, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

fn state() -> ScreenState {
    let mut state = ScreenState::default();
    state.learn(PollerEvent::Page(Box::new(page())));
    state
}

#[test]
fn the_screen_shows_host_groups_vms_and_changes() {
    let expected = "\
host 6 GiB of 16 GiB available   mode enforce   tick 300 ms ago
     3 VMs, 1 unreachable, 1 uncooperative   pressure 0.5 %
web          ██████████████████░····· used 480 MiB of 580 MiB, surplus 100 MiB, demand, borrows 60 MiB, sharing saves 30

VM               GROUP      MAY USE    TARGET     HOST:USED  WSS        GUEST:SWAP   STATE         REASON
web-1            web        192 MiB    202 MiB    180 MiB    150 MiB    3.1 MiB/s    ok            target raised to 202
db-1             -          -          -          -          -          -            unreachable   QEMU does not answer:
web-2            web        384 MiB    128 MiB    300 MiB    -          -            uncooperative uncooperative: its ba

┌ last changes, the newest first ──────────────────────────────────────────────────────────────────────────────────────┐
│5 s ago  web-1: target raised to 192 MiB: it is short of memory                                                       │
│                                                                                                                      │
│                                                                                                                      │
│                                                                                                                      │
└──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
q quit   ↑↓ explain a VM   Esc back   p pause or resume";
    assert_eq!(screen(&state(), 120, 16).join("\n"), expected);
}

#[test]
fn a_selected_vm_is_explained() {
    let mut state = state();
    state.selected = Some("web-2".to_owned());
    let text = "web-2 may use …".to_owned();
    let explanation = Explanation { vm: "web-2".to_owned(), text };
    state.page.as_mut().unwrap().explanation = Some(explanation);
    let screen = screen(&state, 100, 20);
    assert!(screen.iter().any(|line| line.starts_with("┌ web-2 ")), "{screen:#?}");
    assert!(screen.iter().any(|line| line.starts_with("│web-2 may use …")), "{screen:#?}");
}

#[test]
fn a_question_and_a_lost_daemon_stand_in_the_last_line() {
    let mut state = state();
    state.asking = Some(PauseRequest::Pause);
    assert!(screen(&state, 100, 20)[19].starts_with("Pause: change nothing any more"));
    state.asking = None;
    state.learn(PollerEvent::Lost("no daemon answers at /s".to_owned()));
    assert_eq!(screen(&state, 100, 20)[19], "these figures are old: no daemon answers at /s");
}

#[test]
fn no_terminal_is_too_small() {
    for (width, height) in [(1, 1), (3, 2), (20, 5), (500, 3)] {
        screen(&state(), width, height);
    }
}
