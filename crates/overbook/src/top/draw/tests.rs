//! Golden screens, compared letter by letter.

use std::sync::Arc;

use api::client::ClientError;
use api::shown::{LastChange, TickView};
use api::verdict::HostVerdict;
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
    let groups = GroupStatus::all(&shown);
    let verdict = HostVerdict::judge(&host, &groups, &vms);
    Page { verdict, host, groups, vms, explanation: None }
}

fn screen(state: &ScreenState, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| {
            draw(frame, state);
        })
        .unwrap();
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
WARNING: db-1: no connection to its QEMU: no such socket (and 2 more)
6 GiB of 16 GiB available   mode enforce   tick 300 ms ago   pressure 0.5 %   3 VMs, 1 unreachable, 1 uncooperative
web ██████████████████░····· used 480 MiB of 580 MiB, untouched grants 12 MiB, surplus 100 MiB, borrows 60 MiB, demand

VM     GROUP  MAY USE   TARGET  HOST:USED      WSS  GUEST:SWAP  STATE          REASON
web-1  web    192 MiB  202 MiB    180 MiB  150 MiB   3.1 MiB/s  ok             target raised to 202 MiB: it is short of…
db-1   -            -        -          -        -           -  unreachable    no connection to its QEMU: no such socket
web-2  web    384 MiB  128 MiB    300 MiB        -           -  uncooperative  uncooperative: its balloon stands at 384…




┌ last changes, the newest first ──────────────────────────────────────────────────────────────────────────────────────┐
│5 s ago  web-1: target raised to 192 MiB: it is short of memory                                                       │
└──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
? help  sorted by GUEST:SWAP  q quit  ↑↓ explain a VM  / filter  s sort  p pause or resume";
    assert_eq!(screen(&state(), 120, 16).join("\n"), expected);
}

/// 33 VMs with long names in a group over its budget.
fn crowded() -> ScreenState {
    let mut page = page();
    let vm = page.vms.iter().find(|vm| vm.name == "web-1").unwrap().clone();
    let named = |n: u32| VmStatus { name: format!("web-customer-frontend-{n:04}"), ..vm.clone() };
    page.vms = (0..33).map(named).collect();
    let group = &mut page.groups[0];
    (group.name, group.deficit_bytes) = ("web-customers-of-the-north".to_owned(), 35 << 20);
    page.verdict = HostVerdict::judge(&page.host, &page.groups, &page.vms);
    let mut state = ScreenState::default();
    state.learn(PollerEvent::Page(Box::new(page)));
    state
}

#[test]
fn a_screen_of_80x24_letter_by_letter() {
    let expected = "\
OK: 33 VMs (33 short of memory now), 1 group, 6 GiB of 16 GiB available, mode e…
6 GiB of 16 GiB available   mode enforce   tick 300 ms ago   pressure 0.5 %
web-custome…orth ███████··· OVER by 35 MiB, used 480 MiB of 580 MiB, demand

VM                   MAY USE  HOST:USED  GUEST:SWAP  STATE  REASON
web-customer-f…0000  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0001  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0002  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0003  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0004  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0005  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0006  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0007  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0008  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0009  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0010  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
web-customer-f…0011  192 MiB    180 MiB   3.1 MiB/s  ok     target raised to 20…
┌ last changes, the newest first ──────────────────────────────────────────────┐
│5 s ago  web-customer-frontend-0000: target raised to 192 MiB: it is short of…│
│5 s ago  web-customer-frontend-0001: target raised to 192 MiB: it is short of…│
│5 s ago  web-customer-frontend-0002: target raised to 192 MiB: it is short of…│
│5 s ago  web-customer-frontend-0003: target raised to 192 MiB: it is short of…│
└──────────────────────────────────────────────────────────────────────────────┘
? help  rows 1-12 of 33  sorted by GUEST:SWAP  q quit  ↑↓ explain a VM  / filter";
    assert_eq!(screen(&crowded(), 80, 24).join("\n"), expected);
}

#[test]
fn a_screen_of_40x8_letter_by_letter() {
    let expected = "\
OK: 33 VMs (33 short of memory now), 1 …
web-…rth OVER by 35 MiB, surplus 100 MiB
VM                GUEST:SWAP  REASON
web-custome…0000   3.1 MiB/s  target ra…
web-custome…0001   3.1 MiB/s  target ra…
web-custome…0002   3.1 MiB/s  target ra…
web-custome…0003   3.1 MiB/s  target ra…
? help  rows 1-4 of 33  q quit  / filter";
    assert_eq!(screen(&crowded(), 40, 8).join("\n"), expected);
}

#[test]
fn names_stay_distinct_and_the_overrun_of_a_group_is_seen() {
    for (width, height) in [(40, 50), (80, 50), (132, 50)] {
        let screen = screen(&crowded(), width, height);
        let rows = screen.iter().filter(|line| line.starts_with("web-cust") && line.contains("…0"));
        let names: std::collections::BTreeSet<_> =
            rows.map(|line| line.split_whitespace().next()).collect();
        let whole = screen.iter().filter(|line| line.starts_with("web-customer-frontend-")).count();
        assert_eq!(names.len().max(whole), 33, "{screen:#?}");
        assert!(screen.iter().any(|line| line.contains("OVER by 35 MiB")), "{screen:#?}");
    }
}

#[test]
fn the_table_follows_the_selection() {
    let mut state = crowded();
    for (vm, first) in [(0, "0000"), (20, "0011"), (32, "0023"), (23, "0023"), (22, "0022")] {
        state.selected = Some(format!("web-customer-frontend-{vm:04}"));
        let mut terminal = Terminal::new(TestBackend::new(80, 14)).unwrap();
        let mut room = ScreenRoom::default();
        terminal.draw(|frame| room = draw(frame, &state)).unwrap();
        assert_eq!(room.rows, 10);
        state.room = room;
        let screen = screen(&state, 80, 14);
        assert!(screen[3].contains(first), "{vm}: {screen:#?}");
        assert!(screen.iter().any(|line| line.contains(&format!("{vm:04}"))), "{screen:#?}");
    }
}

#[test]
fn an_explanation_scrolls_to_its_last_line() {
    let mut state = state();
    state.selected = Some("web-2".to_owned());
    let label = |n: u32| format!("Label {n:<7}a sentence that is longer than the screen is wide\n");
    let text = (0..14).map(label).collect::<String>() + "To change it give the guest swap";
    state.page.as_mut().unwrap().explanation = Some(Explanation { vm: "web-2".to_owned(), text });
    let beside = screen(&state, 60, 24);
    assert!(
        beside.iter().any(|line| line.contains(" web-2, 22 more lines: Enter ")),
        "{beside:#?}"
    );
    state.focus = ScreenPart::Explanation;
    let begin = screen(&state, 60, 24);
    assert!(begin[2].contains(" web-2, lines 1-19 of 29 "), "{begin:#?}");
    assert!(begin[4].starts_with("│             wide"), "wrapped below its label: {begin:#?}");
    state.first_line = usize::MAX;
    let end = screen(&state, 60, 24);
    assert!(end.iter().any(|line| line.starts_with("│To change it give the guest")), "{end:#?}");
    state.page.as_mut().unwrap().explanation = None;
    assert!(screen(&state, 60, 24)[3].contains("waiting for its explanation"));
}

#[test]
fn the_help_names_every_key() {
    let mut state = state();
    state.focus = ScreenPart::Help;
    let help = screen(&state, 80, 24).join("\n");
    for key in ["PageUp PageDown", "Home End", "Enter", "/ ", "s ", "r ", "p ", "Esc", "q "] {
        assert!(help.contains(&format!("│{key}")), "{key}: {help}");
    }
}

#[test]
fn a_filter_is_seen_while_it_is_typed_and_after() {
    let mut state = state();
    (state.filter, state.is_typing) = ("db".to_owned(), true);
    let screen_of = |state: &ScreenState| screen(state, 100, 20);
    assert_eq!(screen_of(&state)[19], "/db█");
    state.is_typing = false;
    let shown = screen_of(&state);
    assert!(shown[19].starts_with("? help  /db: 1 of 3 VMs"), "{shown:#?}");
    assert!(!shown.iter().any(|line| line.starts_with("web-2")), "{shown:#?}");
}

#[test]
fn without_colours_the_screen_has_none_and_marks_stay_visible() {
    let buffer = |has_colour: bool| {
        let mut state = ScreenState { has_colour, ..state() };
        state.asking = Some(PauseRequest::Pause);
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal
            .draw(|frame| {
                draw(frame, &state);
            })
            .unwrap();
        terminal.backend().buffer().clone()
    };
    let plain = buffer(false);
    let is_plain =
        |cell: &ratatui::buffer::Cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset);
    assert!(plain.content.iter().all(is_plain));
    assert!(plain[(0, 23)].modifier.contains(Modifier::REVERSED), "the question");
    assert!(!buffer(true).content.iter().all(is_plain));
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
    state.learn(PollerEvent::Lost(HostVerdict::of_failure(&ClientError::NoDaemon("/s".into()))));
    let screen = screen(&state, 100, 20);
    assert!(screen[19].starts_with("these figures are old: no daemon answers at /s"), "{screen:?}");
    assert!(screen[0].starts_with("CRITICAL: no daemon answers at /s"), "{screen:?}");
}

#[test]
fn no_terminal_is_too_small() {
    for (width, height) in [(1, 1), (3, 2), (20, 5), (40, 8), (500, 3)] {
        for focus in [ScreenPart::Vms, ScreenPart::Explanation, ScreenPart::Help] {
            screen(&ScreenState { focus, ..state() }, width, height);
        }
    }
}
