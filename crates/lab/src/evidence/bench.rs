//! Claims that benchmarks hold (`make bench`). They judge their limits themselves; their results
//! are carried over by hand until a benchmark writes a record.

use super::claim::{Claim, claims};

pub const NAME: &str = "bench";

pub const CLAIMS: &[Claim] = claims! {
    "tick_ms" < 5.0 => "ms", "One tick of the policy over 1,000 VMs in 50 groups takes little time";
    "optimum_16_ms" < 0.2 => "ms",
        "The sizes with the least misses of 16 VMs are found at once (units of 16 MiB)";
    "optimum_1000_ms" < 20.0 => "ms",
        "Those of 1,000 VMs on 4 TiB are found at once (each from 90 to 130 % of 4 GiB)";
    "optimum_1000_wide_ms" < 20.0 => "ms",
        "Those of 1,000 VMs are found at once (each from half to twice of 4 GiB)";
    "optimum_tick_ms" < 20.0 => "ms", "A whole tick with these VMs in one group takes little time";
    "misses_to_least" => "ratio",
        "1,000 VMs that get 85 % of their demand miss more under `balance` than they must";
    "moves_per_hour" => "count", "Each of these VMs is moved as often in an hour";
    "stack_m_per_s" >= 9.0 => "M/s",
        "Exact stack distances: references a CPU second (20 M references, 1.9 M objects, Zipf 0.8)";
    "stack_bytes" <= 25.0 => "B", "Exact stack distances: memory for each object";
    "shards_m_per_s" >= 300.0 => "M/s",
        "SHARDS at 0.01: references a second of the same trace, net of reading";
    "shards_error" <= 0.01 => "ratio", "SHARDS at 0.01 is near the exact curve of the same trace";
    "tables_gb_per_s" >= 1.0 => "GB/s",
        "Tables of shared pages: pages in memory are classified, hashed and collected on one core";
    "static_build_gb_per_s" >= 1.0 => "GB/s",
        "`overbook static build` of `/usr` in the page cache reads the code of 2,463 files";
    "pool_decision_ms" <= 1000.0 => "ms",
        "A pool's moves are decided at once, for 10,000 hosts with 200,000 VMs";
    "pool_day_s" <= 300.0 => "s",
        "A day of 1,000 hosts, a twentieth of which misbehave, is simulated in minutes";
};
