//! Common parts of the experiments on group dedup (Kim 2014, §6.2 and §6.3).
//!
//! A *mix* of guests is run under one *setting* after the other, each time with fresh guests. The
//! window of a run begins when all guests have filled their memory and work. The daemon, if the
//! setting has one, starts at that moment, so the time that it needs to find memory counts, as in
//! the paper. A job ends in the paper, and repeats itself here. Its normalised execution time is
//! therefore the work done without Overbook, divided by the work done with it.
//!
//! ```text
//! jobs      the work of a guest, and its memory
//! setting   without Overbook, or with it: controller, policy
//! course    one mix under one setting: the work of each guest, and the daemon's ticks meanwhile
//! trial     mixes under settings, round after round: normalised times, and their spread
//! ```

pub mod course;
pub mod jobs;
pub mod setting;
pub mod trial;
