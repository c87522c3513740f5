//! A cgroup for each group's worker, below the daemon's own. So the operator can account a
//! worker, and limit it without limiting the daemon.
//!
//! While its group lends memory, a worker runs in the borrower's cgroup, whose limits then hold
//! for both workers together (overhead migration, Kim 2014 §7.1). Its own cgroup stays.
//!
//! A cgroup that a killed daemon has left is removed by the next one ([`CgroupRecord`]).
//!
//! Nothing depends on the cgroups. Where the tree is not writable (a container, no cgroup v2),
//! workers run in the daemon's cgroup.

mod record;

use std::fs;
use std::io;
use std::path::PathBuf;

use model::GroupName;

pub(super) use record::CgroupRecord;

/// The beginning of the names of workers' cgroups.
const PREFIX: &str = "overbook-worker-";

/// The cgroup membership of a worker. Drop it when its process has ended.
#[derive(Debug)]
pub(super) struct CgroupMembership {
    pid: u32,
    home: Cgroup,
    /// The group that pays instead, and its cgroup.
    away: Option<(GroupName, Cgroup)>,
    record: CgroupRecord,
}

impl CgroupMembership {
    /// Moves the worker of `group`, process `pid`, into its group's cgroup, which is noted.
    pub(super) fn take(group: &GroupName, pid: u32, record: &CgroupRecord) -> io::Result<Self> {
        let home = Cgroup::of(group)?;
        drop(record.note(&home.dir));
        home.enter(pid)?;
        Ok(Self { pid, home, away: None, record: record.clone() })
    }

    /// Charges `payer`'s cgroup from now on; `None`: its own group's. Earlier usage stays where
    /// it was charged.
    pub(super) fn charge(&mut self, payer: Option<&GroupName>) -> io::Result<()> {
        if self.payer() == payer {
            return Ok(());
        }
        let away = payer.map(|group| Ok::<_, io::Error>((group.clone(), Cgroup::of(group)?)));
        let away = away.transpose()?;
        away.iter().for_each(|(_, cgroup)| drop(self.record.note(&cgroup.dir)));
        away.as_ref().map_or(&self.home, |(_, cgroup)| cgroup).enter(self.pid)?;
        self.away = away;
        Ok(())
    }

    /// The group that pays, if it is not its own.
    pub(super) fn payer(&self) -> Option<&GroupName> {
        self.away.as_ref().map(|(group, _)| group)
    }
}

/// A group's cgroup, removed when dropped. The kernel refuses if it still has a process.
#[derive(Debug)]
struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    fn of(group: &GroupName) -> io::Result<Self> {
        let own = sys::cgroup::of_process(std::process::id()).map_err(io::Error::other)?;
        let own = own.ok_or_else(|| io::Error::other("this host has no cgroup v2 tree"))?;
        Ok(Self { dir: own.join(directory_name(group)) })
    }

    /// Moves a process into the cgroup.
    fn enter(&self, pid: u32) -> io::Result<()> {
        match fs::create_dir(&self.dir) {
            // The directory is an earlier daemon's, or in use by another worker.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        fs::write(self.dir.join("cgroup.procs"), pid.to_string())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // If the removal fails, the group's next worker uses the directory.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// A valid file name: letters and digits stay, other bytes become hexadecimal.
fn directory_name(group: &GroupName) -> String {
    let mut name = PREFIX.to_owned();
    for byte in group.as_str().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => name.push(byte.into()),
            other => name += &format!("_{other:02x}"),
        }
    }
    // A file name has at most 255 bytes.
    name.truncate(255);
    name
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    use requires::{Requirement, requires};

    use super::*;

    /// A process that ends with the test.
    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            Self(Command::new("sleep").arg("600").spawn().unwrap())
        }

        fn sits_in(&self, group: &GroupName) -> bool {
            let dir = sys::cgroup::of_process(self.0.id()).unwrap().unwrap();
            dir.file_name().unwrap() == directory_name(group).as_str()
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn group(name: &str) -> GroupName {
        format!("test-{}-{name}", std::process::id()).as_str().into()
    }

    fn unrecorded(group: &GroupName, worker: &Sleeper) -> io::Result<CgroupMembership> {
        CgroupMembership::take(group, worker.0.id(), &CgroupRecord::default())
    }

    #[test]
    fn the_cgroup_of_a_killed_daemon_goes_with_the_next_one_after_its_worker() {
        let state = tempfile::tempdir().unwrap();
        let (record, worker) = (CgroupRecord::in_state(state.path()), Sleeper::start());
        let seat = CgroupMembership::take(&group("killed"), worker.0.id(), &record);
        let Some(seat) = requires(Requirement::Cgroup, seat) else { return };
        let (dir, file) = (seat.home.dir.clone(), state.path().join(record::FILE_NAME));
        // A process that is killed drops nothing.
        std::mem::forget(seat);
        let begin = Instant::now();
        while fs::read_to_string(&file).unwrap_or_default() != format!("{}\n", dir.display()) {
            assert!(begin.elapsed() < Duration::from_secs(60), "it is not on record");
            std::thread::sleep(Duration::from_millis(1));
        }
        CgroupRecord::in_state(state.path());
        assert!(dir.exists(), "its worker still runs");
        drop(worker);
        CgroupRecord::in_state(state.path());
        assert!(!dir.exists());
    }

    #[test]
    fn a_worker_sits_with_who_pays_and_comes_home() {
        let (lender, borrower) = (group("lender"), group("borrower"));
        let worker = Sleeper::start();
        let Some(mut seat) = requires(Requirement::Cgroup, unrecorded(&lender, &worker)) else {
            return;
        };
        let (home, away) = (seat.home.dir.clone(), Cgroup::of(&borrower).unwrap());
        assert!(worker.sits_in(&lender));
        seat.charge(Some(&borrower)).unwrap();
        assert!(worker.sits_in(&borrower) && home.exists(), "its limits are lost");
        seat.charge(Some(&borrower)).unwrap();
        seat.charge(None).unwrap();
        assert!(worker.sits_in(&lender) && !away.dir.exists());
        drop(worker);
        drop(seat);
        assert!(!home.exists());
    }

    #[test]
    fn the_borrowers_own_worker_keeps_its_seat() {
        let (lender, borrower) = (group("guest"), group("host"));
        let (visitor, host) = (Sleeper::start(), Sleeper::start());
        let visits = unrecorded(&lender, &visitor);
        let Some(mut seat) = requires(Requirement::Cgroup, visits) else { return };
        let hosts = unrecorded(&borrower, &host).unwrap();
        seat.charge(Some(&borrower)).unwrap();
        fs::remove_dir(&seat.home.dir).unwrap();
        seat.charge(None).unwrap();
        assert!(visitor.sits_in(&lender) && host.sits_in(&borrower));
        drop((visitor, host));
        drop((seat, hosts));
    }

    #[test]
    fn no_group_name_leads_out_of_the_directory() {
        assert_eq!(directory_name(&"web-1".into()), "overbook-worker-web-1");
        assert_eq!(directory_name(&"../a b".into()), "overbook-worker-_2e_2e_2fa_20b");
        assert!(directory_name(&"ü".repeat(200).as_str().into()).len() <= 255);
    }
}
