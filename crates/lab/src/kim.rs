//! What the experiments on group dedup share (Kim 2014, §6.2 and §6.3).
//!
//! A *mix* of guests is run under one *setting* after the other, each time with fresh guests, for a
//! window that begins when all have filled their memory and work: in that moment the daemon starts,
//! if the setting has one, so how soon memory is found counts, as in the paper. There a job has an
//! end; here each repeats itself, and its normalised execution time is what it got done without
//! Overbook, divided by what it got done with it.
//!
//! ```text
//! jobs      what a guest does, and how much memory it has
//! setting   without Overbook, or with it: controller, policy
//! course    one mix under one setting: what each guest got done, and the daemon's ticks meanwhile
//! trial     mixes under settings, round after round: normalised times, and how sure they are
//! ```

pub mod course;
pub mod jobs;
pub mod setting;
pub mod trial;
