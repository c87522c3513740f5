//! GB per CPU-second: pages in memory are classified, hashed and put into a table; a table is
//! read.
//!
//! The inputs are 256 MiB of pages that are all different, of pages that each occur eight times,
//! and of zeros. CPU time is what the kernel counts for this thread. `cargo bench -p
//! overbook-pages --bench tables`

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on has failed")]

use std::{fs, hint::black_box};

use pages::offline::{Builder, PAGE_LEN, Page, RECORD_LEN, Sampling, TableRef, hash};

const PAGES: usize = 1 << 16;
/// The target, in GB per CPU-second.
const LEAST: f64 = 1.0;

fn main() {
    let distinct = random_pages(PAGES);
    let eightfold: Vec<Page> =
        distinct.iter().take(PAGES / 8).cycle().take(PAGES).copied().collect();
    let sampling = Sampling::default();
    let hashed = |page: &Page| (sampling.sample(page), hash(page));
    told("sampled and hashed", || distinct.iter().for_each(|page| _ = black_box(hashed(page))));
    told("all different", || drop(black_box(built(&distinct))));
    told("each eight times", || drop(black_box(built(&eightfold))));
    let zeros = vec![[0; PAGE_LEN]; PAGES];
    told("zeros", || drop(black_box(built(&zeros))));
    let table = built(&distinct).finish().to_bytes("bench").unwrap();
    let seconds = cpu_seconds(|| assert_eq!(TableRef::parse(&table).unwrap().len(), PAGES));
    let gb = (PAGES * RECORD_LEN) as f64 / 1e9;
    println!("{:<20}{:6.2} GB/s of table", "table checked", gb / seconds);
}

fn random_pages(number: usize) -> Vec<Page> {
    let mut random = fastrand::Rng::with_seed(7);
    let mut pages = vec![[0; PAGE_LEN]; number];
    pages.iter_mut().for_each(|page| random.fill(page));
    pages
}

fn built(pages: &[Page]) -> Builder {
    let mut builder = Builder::new(Sampling::default());
    pages.iter().try_for_each(|page| builder.add(page, true)).unwrap();
    builder
}

fn told(what: &str, work: impl Fn()) {
    let gb = (PAGES * PAGE_LEN) as f64 / 1e9 / cpu_seconds(work);
    println!("{what:<20}{gb:6.2} GB/s per core");
    assert!(gb >= LEAST, "{what}: below {LEAST} GB/s per core");
}

/// The mean over enough runs to fill a second, because the kernel counts in ticks.
fn cpu_seconds(work: impl Fn()) -> f64 {
    let before = cpu_now();
    let mut runs = 0.0;
    loop {
        work();
        runs += 1.0;
        let seconds = cpu_now() - before;
        if seconds >= 1.0 {
            return seconds / runs;
        }
    }
}

fn cpu_now() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split(' ').next().unwrap().parse::<f64>().unwrap() / 1e9
}
