//! Every step in every interleaving with a guest, a disk and a kernel that fails, does a part, or
//! reports a false result: over two pages.
//!
//! The explorer is a plain depth-first search. A run asks for its choices one by one, and is
//! repeated until all choices have been made. Before each call of the kernel the other actor may
//! act, and the call may go wrong, within a run's [`Budget`].

mod model;

use std::cell::{Cell, RefCell};

use super::*;
use model::{Budget, Choices, Ended, Home, Model, ModelState, PAGES, POOL, REGION, RUN};

/// Checks that each page's recorded state is true and that no byte is lost.
fn check(model: &Model<'_>, channel: &Channel) {
    let world = model.world.borrow();
    for page in 0..PAGES {
        let state = state(channel.shared(), RUN, page);
        let at_home = match world.home[page] {
            Home::Nothing => None,
            Home::Own(value) | Home::Pool(_, Some(value)) => Some(value),
            Home::Pool(slot, None) => Some(POOL[slot]),
        };
        let is_pools = matches!(world.home[page], Home::Pool(..));
        assert_eq!(is_pools, state == PageState::Merged, "page {page}, {state:?}: {world:?}");
        let content = match state {
            PageState::Plain | PageState::Merged => at_home,
            _ => at_home.or(world.away[page]),
        };
        let is_there_only = state == PageState::Plain || state == PageState::Merged;
        let in_two = world.away[page].is_some() && (is_there_only || at_home.is_some());
        assert!(!in_two, "page {page}, {state:?}: {world:?}");
        let found = content.unwrap_or(0);
        assert_eq!(found, world.expected[page], "page {page}, {state:?}: {world:?}");
    }
}

/// Moves back every page that is away; no call fails any more.
fn recover(model: &Model<'_>, channel: &Channel) {
    model.left.set(Budget { faults: 0, deeds: 0 });
    model.is_busy.set(false);
    for page in 0..PAGES {
        let part = RUN.part(page, 1);
        match state(channel.shared(), RUN, page) {
            PageState::Staged => {
                // SAFETY: a model.
                unsafe { unstage(model, channel.shared(), part) };
            }
            PageState::Aside => {
                // SAFETY: a model.
                assert!(unsafe { put_back(model, channel, part) });
            }
            _ => {}
        }
        let state = state(channel.shared(), RUN, page);
        assert!(matches!(state, PageState::Plain | PageState::Merged), "{state:?}");
    }
    check(model, channel);
}

/// Runs `act` with every choice, from several initial contents; returns the number of runs.
fn explore(budget: Budget, is_protected: bool, act: impl Fn(&Model<'_>, &Channel)) -> u32 {
    let channel = Channel::new(vec![REGION], 1, None).expect("shared memory");
    let mut runs = 0;
    for homes in [
        [Home::Own(POOL[0]), Home::Own(POOL[1])],
        [Home::Own(POOL[0]), Home::Nothing],
        [Home::Own(0), Home::Own(POOL[1])],
    ] {
        let choices = Choices::default();
        loop {
            channel.set(RUN.home, PageState::Plain);
            let expected = homes.map(|home| if let Home::Own(value) = home { value } else { 0 });
            let world = ModelState {
                home: homes,
                away: [None; PAGES],
                expected,
                pinned: [false; PAGES],
                is_protected,
                next_value: 100,
            };
            let model = Model {
                world: RefCell::new(world),
                left: Cell::new(budget),
                choices: &choices,
                is_busy: Cell::new(false),
                time: Cell::new(1),
            };
            act(&model, &channel);
            check(&model, &channel);
            recover(&model, &channel);
            runs += 1;
            if !choices.next() {
                break;
            }
        }
    }
    runs
}

/// Explores with few failures and much concurrent activity, and the reverse.
fn explore_all(act: impl Fn(&Model<'_>, &Channel) + Copy) {
    let few = Budget { faults: 1, deeds: 2 };
    let many = Budget { faults: 2, deeds: 1 };
    let runs: u32 = [few, many]
        .into_iter()
        .flat_map(|budget| [false, true].map(|protected| explore(budget, protected, act)))
        .sum();
    assert!(runs > 1_000, "{runs} runs");
    eprintln!("{runs} runs");
}

#[test]
fn what_is_staged_comes_home() {
    explore_all(|model, channel| {
        // SAFETY: a model.
        unsafe { stage(model, channel.shared(), RUN) };
        check(model, channel);
        model.is_busy.set(false);
        unstage_all(model, channel);
    });
}

fn unstage_all(model: &Model<'_>, channel: &Channel) {
    for page in 0..PAGES {
        if state(channel.shared(), RUN, page).is_staged() {
            // SAFETY: a model.
            unsafe { unstage(model, channel.shared(), RUN.part(page, 1)) };
        }
    }
}

#[test]
fn what_is_equal_is_shared_and_what_is_not_goes_back() {
    for content in [Content::Slot(0), Content::Zeros] {
        explore_all(|model, channel| {
            // SAFETY: a model.
            unsafe { merge(model, channel, RUN, content) };
        });
    }
}

#[test]
fn what_is_shared_is_replaced_by_the_guests_own() {
    let replace_after = |budget: Budget, fails_while_merging: bool| {
        explore(budget, true, |model, channel| {
            let whole = model.left.get();
            if !fails_while_merging {
                model.left.set(Budget { faults: 0, deeds: 0 });
            }
            // SAFETY: a model.
            unsafe { merge(model, channel, RUN, Content::Slot(0)) };
            check(model, channel);
            model.is_busy.set(false);
            model.left.set(if fails_while_merging { model.left.get() } else { whole });
            for page in 0..PAGES {
                let is_unwritten = matches!(model.world.borrow().home[page], Home::Pool(_, None));
                let is_known = state(channel.shared(), RUN, page) == PageState::Merged;
                if is_unwritten && is_known {
                    // SAFETY: as above; nothing can write to the page, for writes trap.
                    unsafe { replace(model, channel, RUN.part(page, 1)) };
                    check(model, channel);
                }
            }
        })
    };
    assert!(replace_after(Budget { faults: 2, deeds: 1 }, false) > 1_000);
    assert!(replace_after(Budget { faults: 1, deeds: 1 }, true) > 1_000);
}

#[test]
fn what_is_mapped_anew_keeps_its_content() {
    explore_all(|model, channel| {
        // SAFETY: a model.
        unsafe { map_anew(model, channel, RUN) };
    });
}

#[test]
fn a_page_that_lay_where_none_should_be_is_found_and_never_taken_for_another() {
    explore_all(|model, channel| {
        // A state that no step leaves: the content of a page recorded as plain is away.
        {
            let mut world = model.world.borrow_mut();
            if let Home::Own(value) = world.home[0] {
                world.home[0] = Home::Nothing;
                world.away[0] = Some(value);
            }
        }
        // SAFETY: a model.
        unsafe { stage(model, channel.shared(), RUN) };
        for _ in 0..3 {
            // The kernel may have refused the query.
            let budget = model.left.replace(Budget { faults: 0, deeds: 0 });
            // SAFETY: as above.
            unsafe { stage(model, channel.shared(), RUN) };
            model.left.set(budget);
        }
    });
}

#[test]
fn a_step_from_another_state_does_nothing() {
    let budget = Budget { faults: 1, deeds: 1 };
    let runs = explore(budget, true, |model, channel| {
        // SAFETY: a model.
        unsafe { stage(model, channel.shared(), RUN.part(1, 1)) };
        // One of these two pages is staged, so no other step applies to the run.
        // SAFETY: as above.
        unsafe {
            merge(model, channel, RUN, Content::Slot(0));
            map_anew(model, channel, RUN);
            replace(model, channel, RUN);
            stage(model, channel.shared(), RUN);
        }
        check(model, channel);
    });
    assert!(runs > 100, "{runs}");
}

#[test]
fn what_lay_in_the_buffer_passes_for_no_page() {
    explore(Budget { faults: 2, deeds: 2 }, false, |model, channel| {
        // A copy of the pool's content that could not be discarded; the guest's page holds
        // something else.
        let stale = POOL[0];
        {
            let mut world = model.world.borrow_mut();
            world.home[0] = Home::Own(5);
            (world.expected[0], world.away[0]) = (5, Some(stale));
        }
        // SAFETY: a model.
        let merged = unsafe { merge(model, channel, RUN, Content::Slot(0)) };
        assert_eq!(merged.shared, 0);
        let mut world = model.world.borrow_mut();
        assert!([Some(stale), None].contains(&world.away[0]), "{world:?}");
        world.away[0] = None;
    });
}

#[test]
fn a_page_in_two_places_ends_qemu() {
    let choices = Choices::default();
    let channel = Channel::new(vec![REGION], 1, None).expect("shared memory");
    let world = ModelState {
        home: [Home::Own(1), Home::Nothing],
        away: [Some(2), None],
        expected: [2, 0],
        pinned: [false; PAGES],
        is_protected: false,
        next_value: 100,
    };
    let model = Model {
        world: RefCell::new(world),
        left: Cell::new(Budget { faults: 0, deeds: 0 }),
        choices: &choices,
        is_busy: Cell::new(false),
        time: Cell::new(1),
    };
    // SAFETY: a model.
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| unsafe {
        unstage(&model, channel.shared(), RUN)
    }));
    let ended = *ended.expect_err("it went on").downcast::<Ended>().expect("it ends QEMU");
    assert!(ended.0.starts_with(TWO_PLACES), "{}", ended.0);
}
