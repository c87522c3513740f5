//! `imr-table9` and `imr-table10`: the share of a guest's freed memory that comes back to the
//! host, and the cost of taking it.
//!
//! A guest fills 384 MB (the paper's 4·10⁸ bytes), frees them, rests, and begins again. When its
//! kernel has reported the free memory, all of that is taken. The share reclaimed is the fall of
//! QEMU's anonymous memory, relative to the memory that the guest has freed. So memory that QEMU
//! discards by itself counts, and memory that the guest has in use again does not. The first
//! round does not count, because the guest then also reports memory that it used while it booted.
//!
//! Guests' kernels report blocks from a configurable size on (`page_reporting_order`): smaller
//! free blocks stay unknown to the host. And they keep free pages on per-CPU lists first, up to
//! the zone's low watermark (some 44 MiB in a guest with transparent huge pages), and do not
//! report these. The claims are those of guests as they come. All is measured again where the
//! guest keeps these lists short (`vm.percpu_pagelist_high_fraction`): `short_lists`.

use model::FreePages;

use super::dedup_vs_ksm::anonymous_mib;
use super::prelude::*;
use crate::machine::USUAL_ORDER;
use crate::threads;

pub(super) const TABLE_9: Scenario = Scenario {
    name: "imr-table9",
    summary: "taking what a guest has freed, random and duplicated data: amount and cost",
    measures: &[&[file!()], measured::SHIM, measured::WORKER],
    claims: claims! {
        "take_us_per_page" <= 0.56 => "us",
            "To take a page that a guest has freed costs a fraction of a microsecond", "0.56";
        "take_us_per_page_duplicated" <= 0.56 => "us",
            "It costs the same where all pages are alike", "0.56";
        "reclaimed" >= 0.92 => "ratio",
            "Most of the memory that a guest as it comes frees comes back", "0.92";
        "reclaimed_duplicated" >= 0.89 => "ratio",
            "As much comes back where all pages are alike", "0.89";
        "take_us_per_page_short_lists" <= 0.56 => "us",
            "It costs the same where the guest's lists of free pages are kept short", "0.56";
        "take_us_per_page_duplicated_short_lists" <= 0.56 => "us",
            "It costs the same where all pages are alike, too", "0.56";
        "reclaimed_short_lists" >= 0.92 => "ratio",
            "Most of the memory comes back where these lists are kept short", "0.92";
        "reclaimed_duplicated_short_lists" >= 0.89 => "ratio",
            "As much comes back where all pages are alike, too", "0.89";
    },
    run: table_9,
};

pub(super) const TABLE_10: Scenario = Scenario {
    name: "imr-table10",
    summary: "how much of what a guest has freed comes back, by the size of what it reports",
    measures: &[&[file!()], measured::SHIM, measured::WORKER],
    claims: claims! {
        "reclaimed_4m" >= 0.923 => "ratio",
            "A guest as it comes gives most of it back in blocks of 4 MB", "0.923";
        "reclaimed_2m" >= 0.965 => "ratio", "It gives more in blocks of 2 MB", "0.965";
        "reclaimed_1m" >= 0.983 => "ratio", "It gives more in blocks of 1 MB", "0.983";
        "reclaimed_512k" >= 0.991 => "ratio", "It gives more in blocks of 512 kB", "0.991";
        "reclaimed_4m_short_lists" >= 0.923 => "ratio",
            "Where its lists of free pages are kept short, most comes back in blocks of 4 MB",
            "0.923";
        "reclaimed_2m_short_lists" >= 0.965 => "ratio",
            "More comes back there in blocks of 2 MB", "0.965";
        "reclaimed_1m_short_lists" >= 0.983 => "ratio",
            "More comes back there in blocks of 1 MB", "0.983";
        "reclaimed_512k_short_lists" >= 0.991 => "ratio",
            "More comes back there in blocks of 512 kB", "0.991";
        "reclaimed_scattered_2m" => "ratio",
            "A guest that frees every second page gives nearly nothing in blocks of 2 MB";
        "reclaimed_scattered_4k" => "ratio", "It gives more where it reports single pages";
    },
    run: table_10,
};

const MEMORY: Bytes = Bytes::mib(1024);
const FREED_MB: u32 = 384;
/// Rounds that count.
const ROUNDS: usize = 2;
const HOLD_S: u32 = 3;
/// The time for which the guest leaves its freed memory alone. With small blocks there is more to
/// report, which takes longer.
const REST_LARGE_S: u32 = 30;
const REST_SMALL_S: u32 = 60;
/// A guest that has reported nothing for this long has reported all: it reports every two
/// seconds, if its CPU allows.
const QUIET: Duration = Duration::from_secs(10);
/// Time for taking to end, and for the worker to report.
const TAKE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(120);
/// Options for a guest with almost empty per-CPU lists.
const SHORT_LISTS: &str = "sysctl.vm.percpu_pagelist_high_fraction=1000";
const SAME: &str = "--same";
/// Blocks of this order and above are large.
const LARGE_ORDER: u32 = 7;

#[derive(Clone, Copy)]
struct RegainRound {
    /// Share of the guest's freed memory. More than all of it is told as it is.
    reclaimed: f64,
    /// Memory handed over, as a share of the guest's freed memory.
    handed_over: f64,
    /// CPU time for each page of 4 KiB taken, in microseconds: of the shim's threads, and of the
    /// worker.
    us_per_page: f64,
    worker_us_per_page: f64,
}

/// Memory as it was measured in a round.
struct RegainReadings {
    full_mib: f64,
    left_mib: f64,
    handed_over_pages: f64,
    taken_pages: f64,
    shim_s: f64,
    worker_s: f64,
}

impl RegainRound {
    /// `pages`: those that the guest freed.
    fn of(measured: &RegainReadings, pages: f64) -> Self {
        let RegainReadings { full_mib, left_mib, handed_over_pages, taken_pages, shim_s, worker_s } =
            measured;
        Self {
            reclaimed: (full_mib - left_mib) / (pages / 256.0),
            handed_over: handed_over_pages / pages,
            us_per_page: shim_s * 1e6 / taken_pages,
            worker_us_per_page: worker_s * 1e6 / taken_pages,
        }
    }
}

fn table_9(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(TABLE_9.name, 1);
    for (lists, of_kernel) in [("", ""), ("_short_lists", SHORT_LISTS)] {
        for (name, of_work) in [("", ""), ("_duplicated", SAME)] {
            let rounds = regain(context, USUAL_ORDER, &format!("{of_kernel} {of_work}"))?;
            add_take(&mut figures, &format!("{name}{lists}"), &rounds);
        }
    }
    Ok(figures)
}

fn add_take(figures: &mut Figures, name: &str, rounds: &[RegainRound]) {
    figures.add(&format!("reclaimed{name}"), share(rounds));
    let note = format!(
        "the shim's CPU time; the worker's beside it {:.3} (paper: 0.56 us, 0.54 of it to write \
         zeros)",
        median(rounds.iter().map(|round| round.worker_us_per_page))
    );
    let each = rounds.iter().map(|round| round.us_per_page).collect();
    figures.tell_rounds(&format!("take_us_per_page{name}"), each, "us", note);
}

fn table_10(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(TABLE_10.name, 1);
    for (lists, of_kernel) in [("", ""), ("_short_lists", SHORT_LISTS)] {
        for (name, order) in [("4m", 10), ("2m", 9), ("1m", 8), ("512k", 7)] {
            let figure = share(&regain(context, order, of_kernel)?);
            figures.add(&format!("reclaimed_{name}{lists}"), figure);
        }
    }
    for (name, order) in [("2m", USUAL_ORDER), ("4k", 0)] {
        let figure = share(&regain(context, order, "--scatter")?);
        figures.add(&format!("reclaimed_scattered_{name}"), figure);
    }
    Ok(figures)
}

fn share(rounds: &[RegainRound]) -> Figure {
    let handed_over = median(rounds.iter().map(|round| round.handed_over));
    let note = format!("of what the guest freed; handed over {handed_over:.3}");
    Figure::of_rounds(rounds.iter().map(|round| round.reclaimed).collect(), "ratio", note)
}

/// `options`: the guest kernel's, which have a `=`, and its workload's.
fn regain(context: &Context, order: u32, options: &str) -> Result<Vec<RegainRound>, LabError> {
    context.say(&format!("blocks of 2^{order} pages {options} ..."));
    let rest = if order >= LARGE_ORDER { REST_LARGE_S } else { REST_SMALL_S };
    let (of_kernel, of_work): (Vec<&str>, Vec<&str>) =
        options.split_whitespace().partition(|option| option.contains('='));
    let of_work = of_work.join(" ");
    let work = format!("memhog --mb {FREED_MB} --hold {HOLD_S} --rest {rest} {of_work}");
    let spec = MachineSpec {
        reporting_order: Some(order),
        kernel_options: of_kernel.join(" "),
        ..context.guest("guest", "imr", MEMORY, work.trim_end()).with_shim(true)
    };
    let part = if of_work.contains("scatter") { 2.0 } else { 1.0 };
    let pages = f64::from(FREED_MB) * 256.0 / part;
    let mut lab = context.start([spec])?;
    let mut worker = WorkerProcess::start("imr")?;
    let mut rounds = Vec::new();
    for number in 0..=ROUNDS {
        let round = round(&lab, &mut worker, pages, rest)?;
        context.say(&format!(
            "  {:.3} reclaimed, {:.3} handed over, {:.3} us of the shim's CPU time for each page \
             and {:.3} of the worker's",
            round.reclaimed, round.handed_over, round.us_per_page, round.worker_us_per_page
        ));
        if number > 0 {
            rounds.push(round);
        }
    }
    worker.end()?;
    lab.stop()?;
    Ok(rounds)
}

/// The guest fills its memory and frees it, and all memory that it reports is taken.
fn round(
    lab: &Lab,
    worker: &mut WorkerProcess,
    pages: f64,
    rest_s: u32,
) -> Result<RegainRound, LabError> {
    let pids = [lab.machines()[0].process().pid];
    worker.take(lab, None)?;
    let is_full = |lab: &Lab| Ok(lab.machines()[0].reported("mb") >= f64::from(FREED_MB));
    lab.wait_for("the guest to fill its memory", LIMIT, is_full)?;
    interrupt::sleep(Duration::from_secs(1))?;
    let (before, full_mib) = (worker.freed(), anonymous_mib(&pids)?);
    lab.wait_for("the guest to free it", LIMIT, |lab| is_full(lab).map(|is_full| !is_full))?;
    let most = Duration::from_secs(rest_s.into()) - 2 * TAKE;
    until_reported(worker, &before, most)?;
    let shim_before = threads::shims_cpu_s(&pids);
    let worker_before = threads::cpu_s(&[worker.identity().pid], "");
    worker.take(lab, Some(Bytes::ZERO))?;
    interrupt::sleep(TAKE)?;
    let shim_s = threads::shims_cpu_s(&pids) - shim_before;
    let worker_s = threads::cpu_s(&[worker.identity().pid], "") - worker_before;
    let after = worker.freed();
    let grown = |of: fn(&FreePages) -> Bytes| of(&after).minus(of(&before)).0 as f64 / 4096.0;
    let measured = RegainReadings {
        full_mib,
        left_mib: anonymous_mib(&pids)?,
        handed_over_pages: grown(|free| free.handed_over),
        taken_pages: grown(|free| free.taken),
        shim_s,
        worker_s,
    };
    Ok(RegainRound::of(&measured, pages))
}

/// Waits until the guest has begun to report and reports nothing more, but no longer than `most`.
fn until_reported(
    worker: &WorkerProcess,
    before: &FreePages,
    most: Duration,
) -> Result<(), LabError> {
    let (deadline, mut told) = (Instant::now() + most, before.handed_over);
    let mut since = Instant::now();
    while Instant::now() < deadline && (told == before.handed_over || since.elapsed() < QUIET) {
        let handed_over = worker.freed().handed_over;
        if std::mem::replace(&mut told, handed_over) != handed_over {
            since = Instant::now();
        }
        interrupt::sleep(Duration::from_millis(200))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 100 MiB that were freed, 95 came back, at 0.2 us a page.
    const GOOD: RegainReadings = RegainReadings {
        full_mib: 300.0,
        left_mib: 205.0,
        handed_over_pages: 25_000.0,
        taken_pages: 24_000.0,
        shim_s: 0.0048,
        worker_s: 0.0024,
    };
    const PAGES: f64 = 25_600.0;

    fn figures(measured: &[RegainReadings]) -> Figures {
        let rounds: Vec<RegainRound> =
            measured.iter().map(|measured| RegainRound::of(measured, PAGES)).collect();
        Figures::invented(TABLE_9.name, |figures| add_take(figures, "", &rounds))
    }

    fn met(measured: RegainReadings, name: &str) -> bool {
        figures(&[measured]).met(name)
    }

    #[test]
    fn a_share_is_of_what_was_freed_and_a_cost_of_what_was_taken() {
        let figures = figures(&[GOOD]);
        figures.assert_near(&[("reclaimed", 0.95), ("take_us_per_page", 0.2)]);
        assert!(met(GOOD, "reclaimed") && met(GOOD, "take_us_per_page"));
    }

    #[test]
    fn more_than_all_is_not_made_all() {
        let more = RegainReadings { left_mib: 180.0, ..GOOD };
        assert!((figures(&[more]).value("reclaimed") - 1.2).abs() < 1e-9);
    }

    #[test]
    fn swapped_readings_a_take_of_nothing_and_a_guest_that_is_gone_miss() {
        let (full_mib, left_mib) = (GOOD.left_mib, GOOD.full_mib);
        assert!(!met(RegainReadings { full_mib, left_mib, ..GOOD }, "reclaimed"));
        assert!(!met(RegainReadings { left_mib: f64::NAN, ..GOOD }, "reclaimed"));
        assert!(!met(RegainReadings { taken_pages: 0.0, ..GOOD }, "take_us_per_page"));
        let one_unread = [GOOD, RegainReadings { full_mib: f64::NAN, ..GOOD }, GOOD];
        assert!(!figures(&one_unread).met("reclaimed"));
        assert!(!figures(&[]).met("reclaimed"));
    }
}
