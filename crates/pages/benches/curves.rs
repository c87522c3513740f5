//! Million references per CPU-second and bytes per object, for every structure, on the same Zipf
//! traces.
//!
//! The trace has 20 M references to 2 M objects, skew 0.8 and 1.0; the ids are spread over
//! 64 bits. CPU time is what the kernel counts for this thread, because other programs share the
//! machine. Memory is the peak resident set above that of the trace, so the figure includes the
//! moments of growth and renumbering; for that each line runs in a process of its own. The list
//! would take hours, so it gets only the beginning of the trace, which favours it. `cargo bench
//! -p overbook-pages --bench curves [a method's beginning]`

#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on has failed")]

use std::{env, fs, hint::black_box, process::Command};

use pages::{
    curve::{Histogram, MissRatioCurve},
    lru::{AvlStack, Bitmap, Fenwick, HashedStack, ListStack, LiveTimes, StackDistance},
    shards::Shards,
};

const OBJECTS: u32 = 2_000_000;
const REFERENCES: usize = 20_000_000;
/// References that the list is given.
const FEW: usize = 200_000;
const SKEWS: [f64; 2] = [0.8, 1.0];
/// The methods, each with its target on Zipf 0.8 in million references per CPU-second.
const METHODS: [(&str, f64); 8] = [
    ("list", 0.0),
    ("avl", 0.0),
    ("fenwick", 0.0),
    ("bitmap one by one", 0.0),
    ("bitmap", 9.0),
    ("shards rate 0.01", 300.0),
    ("shards rate 0.001", 300.0),
    ("shards size 8192", 0.0),
];
const MOST_BYTES_PER_OBJECT: f64 = 25.0;
const MOST_ERROR: f64 = 0.01;

fn main() {
    let words: Vec<String> = env::args().skip(1).filter(|word| word != "--bench").collect();
    if let [child, method, skew] = &words[..]
        && child == "--measure"
    {
        return measure(method, skew.parse().unwrap());
    }
    let wanted = words.first().map_or("", String::as_str);
    println!("{REFERENCES} references to {OBJECTS} objects; per CPU-second, and per object seen\n");
    for skew in SKEWS {
        for (method, _) in METHODS.iter().filter(|(method, _)| method.starts_with(wanted)) {
            let mut child = Command::new(env::current_exe().unwrap());
            // A fixed threshold: once the trace builder has freed its memory, the allocator would
            // otherwise raise it and copy where it now remaps.
            child.env("MALLOC_MMAP_THRESHOLD_", "131072");
            let status = child.args(["--measure", method, &skew.to_string()]).status().unwrap();
            assert!(status.success(), "{method} misses its target");
        }
    }
}

fn measure(method: &str, skew: f64) {
    let trace = zipf(skew);
    let trace = if method == "list" { &trace[..FEW] } else { &trace[..] };
    let objects = distinct(trace);
    let (curve, seconds, bytes) = timed(|| curve_by(method, trace));
    let (million, per_object) = (trace.len() as f64 / 1e6 / seconds, bytes / f64::from(objects));
    print!("Zipf {skew:.1}  {method:<18} {million:>8.2} M/s {per_object:>6.1} B/object");
    let target = METHODS.iter().find(|(name, _)| *name == method).unwrap().1;
    assert!(skew > 0.8 || million >= target, "{million} M/s; the target is {target}");
    if method == "bitmap" {
        assert!(per_object <= MOST_BYTES_PER_OBJECT, "{per_object} B per object");
    }
    if method.starts_with("shards") {
        let exact = curve_by("bitmap", trace);
        let error = exact.mean_absolute_error(&curve, exact.end());
        print!("   mean absolute error {error:.4}");
        assert!(method != "shards rate 0.01" || error <= MOST_ERROR, "error {error}");
    }
    println!();
}

fn curve_by(method: &str, trace: &[u64]) -> MissRatioCurve {
    match method {
        "list" => one_by_one::<ListStack>(trace),
        "avl" => one_by_one::<AvlStack>(trace),
        "fenwick" => batched::<Fenwick>(trace),
        "bitmap one by one" => one_by_one::<HashedStack<Bitmap>>(trace),
        "bitmap" => batched::<Bitmap>(trace),
        "shards rate 0.01" => sampled(Shards::fixed_rate(0.01).unwrap(), trace),
        "shards rate 0.001" => sampled(Shards::fixed_rate(0.001).unwrap(), trace),
        "shards size 8192" => sampled(Shards::fixed_size(8192).unwrap(), trace),
        other => panic!("no method is called {other}"),
    }
}

fn one_by_one<S: StackDistance + Default>(trace: &[u64]) -> MissRatioCurve {
    let (mut stack, mut histogram) = (S::default(), Histogram::default());
    trace.iter().for_each(|id| histogram.record(stack.touch(*id)));
    histogram.curve()
}

fn batched<L: LiveTimes>(trace: &[u64]) -> MissRatioCurve {
    let (mut stack, mut histogram) = (HashedStack::<L>::new(), Histogram::default());
    stack.touch_all(trace, |distance| histogram.record(distance));
    histogram.curve()
}

fn sampled(mut shards: Shards, trace: &[u64]) -> MissRatioCurve {
    shards.touch_all(trace);
    shards.curve()
}

/// The result of `run`, its CPU seconds, and its peak resident bytes.
fn timed<T>(run: impl FnOnce() -> T) -> (T, f64, f64) {
    // "5" resets the peak to the present resident set.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let (bytes, start_s) = (status_bytes("VmRSS:"), cpu_s());
    let answer = black_box(run());
    (answer, cpu_s() - start_s, status_bytes("VmHWM:") - bytes)
}

/// CPU time of this thread.
fn cpu_s() -> f64 {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    text.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1e9
}

fn status_bytes(field: &str) -> f64 {
    let text = fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 1024.0
}

fn distinct(trace: &[u64]) -> u32 {
    let mut ids = trace.to_vec();
    ids.sort_unstable();
    ids.dedup();
    u32::try_from(ids.len()).unwrap()
}

/// Ranks drawn by inverting their cumulative distribution; each rank has an id of its own.
fn zipf(skew: f64) -> Vec<u64> {
    let mut sum = 0.0;
    let mut sum_to = |rank: u32| {
        sum += f64::from(rank).powf(-skew);
        sum
    };
    let sums: Vec<f64> = (1..=OBJECTS).map(&mut sum_to).collect();
    let mut random = fastrand::Rng::with_seed(42);
    let mut id = || {
        let wanted = random.f64() * sums[sums.len() - 1];
        let rank = sums.partition_point(|sum| *sum <= wanted) as u64;
        rank.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    (0..REFERENCES).map(|_| id()).collect()
}
