//! A guest's processors under emulation: they read and write memory, with a working set that
//! moves.
//!
//! Three accesses of five go to a window of a few megabytes, which jumps now and then, so that
//! some memory is hot and some is cold. The others go anywhere. Readers look at pages while other
//! threads own them.

use std::io;
use std::time::Duration;

use crate::crew::{CrewState, Hand, Pace};
use crate::page::{Owned, PAGE};
use crate::ram::HeldPages;
use crate::watch::WorkKind;

/// Pages of the hot window.
const WINDOW: usize = 1024;
/// The pace, counted in accesses. The thread rests often, so that the shim is measured, and not
/// the queue for a CPU.
const PACE: Pace = Pace { stay: 20_000, spell: 100, rest: Duration::from_millis(1) };

/// Reads and writes until the end.
pub(crate) fn work(hand: &mut Hand<'_>) -> io::Result<()> {
    hand.roam(&PACE, |hand, window| {
        access(hand, window);
        Ok(())
    })
}

/// Reads pages anywhere until the end, without ever owning one.
pub(crate) fn look(hand: &mut Hand<'_>) -> io::Result<()> {
    for number in 0.. {
        if number % PACE.spell == 0 && !hand.rest(PACE.rest) {
            break;
        }
        let Some(held) = hand.any_ram() else { continue };
        let page = hand.rng.below(held.range().1 / PAGE);
        glance(hand, &held, page);
    }
    Ok(())
}

fn access(hand: &mut Hand<'_>, window: usize) {
    let Some(held) = hand.any_ram() else { return };
    let pages = held.range().1 / PAGE;
    let page = if hand.rng.chance(60) {
        (window + hand.rng.below(WINDOW)) % pages
    } else {
        hand.rng.below(pages)
    };
    let kind = match hand.rng.below(100) {
        0..55 => WorkKind::Modify,
        55..75 => WorkKind::Rewrite,
        75..90 => WorkKind::Check,
        _ => return glance(hand, &held, page),
    };
    let shared = hand.shared;
    hand.time(kind, || {
        let owned = held.entry(page).own()?;
        let (words, mut content) = (held.words(page), owned.content());
        match kind {
            // A page that may become zeros at any moment is written anew.
            WorkKind::Modify if content.is_freed => rewrite(shared, &held, page, &owned),
            WorkKind::Modify => {
                if let Some(harm) = content.modify(words) {
                    shared.watch.harm("a small change", page, &harm);
                    content.fill(words);
                }
                owned.set(content);
            }
            WorkKind::Rewrite => rewrite(shared, &held, page, &owned),
            _ => {
                shared.check("a check", &held, page, &owned);
            }
        }
        Some(())
    });
}

fn rewrite(shared: &CrewState, held: &HeldPages<'_>, page: usize, owned: &Owned<'_>) {
    shared.check("a rewrite", held, page, owned);
    let content = shared.fresh();
    content.fill(held.words(page));
    owned.set(content);
}

fn glance(hand: &Hand<'_>, held: &HeldPages<'_>, page: usize) {
    hand.time(WorkKind::Glance, || {
        let result = held.entry(page).glance(held.words(page))?;
        if let Err(harm) = result {
            hand.shared.watch.harm("a reader's glance", page, &harm);
        }
        Some(())
    });
}
