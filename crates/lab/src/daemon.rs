//! Overbook's own daemon in the lab: the real program, with a configuration made from the guests.
//!
//! **Idea.** An experiment runs the same program as a user: the `overbook` binary as a process of
//! its own. It is configured by a file and signals, and read through its API. The experiment
//! links none of it, so the daemon can be killed at any moment.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::client::ApiClient;
use model::{
    Bytes, ColdSpec, DedupSpec, FreePagesSpec, Millis, Mode, PagesPerMs, Policy, TrackingBudget,
};
use policy::Case;
use sys::process::{Identity, Signal, Spawn};

use crate::inside;
use crate::lab::{Lab, LabError, Machine};

/// The helper's name in the lab.
const NAME: &str = "daemon";
/// Timeout for its first answer after a start.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The group of guests that are in none of the daemon's groups: it observes them, and leaves them
/// alone.
pub const OUTSIDE: &str = "outside";

/// Settings for all groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DaemonSettings {
    /// Its use of balloons.
    pub mode: Mode,
    /// Its search for identical pages.
    pub dedup: DedupSpec,
    /// Its handling of memory that guests free.
    pub free_pages: FreePagesSpec,
    /// Its budget for the tracking of working sets.
    pub tracking: TrackingBudget,
    /// Its paging of memory that guests do not touch.
    pub cold: ColdSpec,
    /// The distribution of a group's surplus.
    pub policy: Policy,
    /// Whether groups lend each other idle memory.
    pub lend: bool,
    /// Guarantee of each VM, and its least. `None`: the guarantee is the provisioned memory, and
    /// the least is half of that. In either case a group pays for the memory that its VMs were
    /// provisioned with.
    pub guaranteed: Option<Bytes>,
    /// Time for which nothing is taken after a start and a change of the configuration.
    pub grace: Millis,
}

impl From<Mode> for DaemonSettings {
    /// A mode alone: no page is merged, and VMs that are short get the surplus.
    fn from(mode: Mode) -> Self {
        let (dedup, tracking) = (DedupSpec::Off, TrackingBudget::default());
        let (policy, free_pages) = (Policy::Demand, FreePagesSpec::Off);
        let (cold, lend, guaranteed, grace) = (ColdSpec::Off, false, None, Millis(0));
        Self { mode, dedup, free_pages, tracking, cold, policy, lend, guaranteed, grace }
    }
}

impl DaemonSettings {
    /// All that it can do: it tracks, merges, takes freed memory, pages, balances and lends.
    pub fn everything() -> Self {
        Self {
            dedup: DedupSpec::Adaptive,
            free_pages: FreePagesSpec::Lazy,
            cold: ColdSpec::WhenNeeded,
            policy: Policy::Balance,
            lend: true,
            ..Mode::Enforce.into()
        }
    }
}

/// Further settings for all groups, where these are promised more memory than there is.
#[derive(Debug, Clone)]
pub struct Overbooked {
    /// The budget that each group pays for.
    pub budget: Bytes,
    /// Tables of pages that their VMs share, if there are any.
    pub tables: Vec<PathBuf>,
}

/// The daemon of one lab.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    config: PathBuf,
    settings: DaemonSettings,
    overbooked: Option<Overbooked>,
    client: ApiClient,
    process: Identity,
    log: PathBuf,
}

impl Daemon {
    /// Starts it over all guests of the lab and waits until it answers.
    ///
    /// # Errors
    /// When the program is missing or does not come up; its log is in the lab's `log` directory.
    pub fn start(lab: &mut Lab, settings: impl Into<DaemonSettings>) -> Result<Self, LabError> {
        Self::start_with(lab, settings.into(), None)
    }

    /// Same as [`Self::start`], for groups that are promised more memory than there is.
    pub fn start_overbooked(
        lab: &mut Lab,
        settings: DaemonSettings,
        overbooked: Overbooked,
    ) -> Result<Self, LabError> {
        Self::start_with(lab, settings, Some(overbooked))
    }

    fn start_with(
        lab: &mut Lab,
        settings: DaemonSettings,
        overbooked: Option<Overbooked>,
    ) -> Result<Self, LabError> {
        let config = lab.dir().join("etc").join("overbook.toml");
        std::fs::write(&config, configuration(lab, settings, overbooked.as_ref()))?;
        let program = inside::built("overbook")?;
        let process = spawn(lab, &program, &config)?;
        let client = ApiClient::new(&socket(lab.dir()))?;
        let log = lab.dir().join("log").join(NAME);
        let daemon = Self { program, config, settings, overbooked, client, process, log };
        daemon.wait_until_it_answers(lab)?;
        Ok(daemon)
    }

    /// Its process.
    pub fn process(&self) -> Identity {
        self.process
    }

    /// Its latest tick, complete.
    pub fn case(&self) -> Result<Case, LabError> {
        Ok(self.client.get("/v1/case")?)
    }

    /// Its latest tick, for a caller that records one every second. `None`: it does not answer
    /// just now.
    ///
    /// # Errors
    /// When it has died: a later recording would not show its work.
    pub fn latest(&self) -> Result<Option<Case>, LabError> {
        self.ensure_alive()?;
        Ok(self.case().ok())
    }

    /// Checks that it is alive.
    pub fn ensure_alive(&self) -> Result<(), LabError> {
        if self.process.is_alive() {
            return Ok(());
        }
        Err(LabError::Daemon(std::fs::read_to_string(&self.log).unwrap_or_default()))
    }

    /// Changes the mode as an operator does: by a new file and SIGHUP.
    pub fn set_mode(&self, lab: &Lab, mode: Mode) -> Result<(), LabError> {
        self.configure(lab, DaemonSettings { mode, ..self.settings })?;
        lab.wait_for("the daemon to read its configuration again", START_LIMIT, |_| {
            Ok(self.case()?.spec.modes.balloon == mode)
        })
    }

    /// Tells it of guests that were added.
    pub fn meet(&self, lab: &Lab) -> Result<(), LabError> {
        self.configure(lab, self.settings)
    }

    fn configure(&self, lab: &Lab, settings: DaemonSettings) -> Result<(), LabError> {
        std::fs::write(&self.config, configuration(lab, settings, self.overbooked.as_ref()))?;
        if settings.grace == Millis(0) {
            self.process.signal(Signal::HUP)?;
        } else {
            // A second SIGHUP would confirm what takes much; this says so at once.
            self.client.post("/v1/reload?yes=true")?;
        }
        Ok(())
    }

    /// Kills it (SIGKILL) without any warning.
    ///
    /// # Errors
    /// When it has already died by itself, or cannot be signalled.
    pub fn kill(&self, lab: &mut Lab) -> Result<(), LabError> {
        self.ensure_alive()?;
        lab.end_helper(NAME, true)
    }

    /// Ends it in good order (SIGTERM), and starts this program in its place: the same for a
    /// restart, another one for an upgrade.
    pub fn change_to(&mut self, lab: &mut Lab, program: &Path) -> Result<(), LabError> {
        self.ensure_alive()?;
        lab.end_helper(NAME, false)?;
        self.program = program.to_owned();
        self.restart(lab)
    }

    /// Starts it again after [`Daemon::kill`].
    pub fn restart(&mut self, lab: &mut Lab) -> Result<(), LabError> {
        self.process = spawn(lab, &self.program, &self.config)?;
        self.wait_until_it_answers(lab)
    }

    fn wait_until_it_answers(&self, lab: &Lab) -> Result<(), LabError> {
        lab.wait_for("the daemon to answer and to know every guest", START_LIMIT, |lab| {
            self.ensure_alive()?;
            Ok(self.case().is_ok_and(|case| case.view.vms.len() == lab.machines().len()))
        })
    }
}

fn spawn(lab: &mut Lab, program: &Path, config: &Path) -> Result<Identity, LabError> {
    lab.spawn(NAME, Spawn::new(program).arg("--config").arg(config).arg("daemon"))
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("run").join("overbook.sock")
}

/// The daemon's configuration: one group for each group of the guests.
fn configuration(lab: &Lab, settings: DaemonSettings, overbooked: Option<&Overbooked>) -> String {
    let dir = lab.dir().display();
    let (mode, grace_s) = (settings.mode, settings.grace.0 / 1_000);
    let dedup = match settings.dedup {
        DedupSpec::Fixed(PagesPerMs(rate)) => rate.to_string(),
        named => format!("\"{named}\""),
    };
    let mut text = format!(
        "[host]\nattach = \"off\"\ngrace_s = {grace_s}\nqmp = [\"{dir}/qmp/*.sock\"]\nstate = \"{dir}/run/state\"\n\n\
         [mode]\nballoon = \"{mode}\"\n\n\
         [api]\nsocket = \"{dir}/run/overbook.sock\"\n"
    );
    let mut groups: BTreeMap<&str, (Vec<String>, Bytes)> = BTreeMap::new();
    let size = |size: Bytes| format!("\"{}KiB\"", size.0 / 1024);
    for spec in lab.machines().iter().map(Machine::spec).filter(|spec| spec.group != OUTSIDE) {
        let (vms, budget) = groups.entry(&spec.group).or_default();
        vms.push(format!("{:?}", spec.name));
        *budget = budget.plus(spec.memory_base);
        let half = spec.memory_base.share(1, 2);
        let (min, base) = settings.guaranteed.map_or((half, spec.memory_base), |all| (all, all));
        let (min, base, max) = (size(min), size(base), size(spec.memory_max));
        let swap = spec.swap.is_some();
        let name = &spec.name;
        let _ = write!(
            text,
            "\n[vm.{name:?}]\nmin = {min}\nbase = {base}\nmax = {max}\nswap = {swap}\n"
        );
    }
    let DaemonSettings { policy, tracking, free_pages, cold, lend, .. } = settings;
    for (group, (vms, budget)) in groups {
        let vms = vms.join(", ");
        let _ = write!(
            text,
            "\n[group.{group:?}]\npolicy = \"{policy}\"\nvms = [{vms}]\ndedup = {dedup}\n\
             free_pages = \"{free_pages}\"\ntracking = \"{tracking}\"\nlend = {lend}\n\
             cold = \"{cold}\"\n"
        );
        if let Some(Overbooked { budget, tables }) = overbooked {
            let budget = size(*budget);
            let _ = writeln!(text, "budget = {budget}");
            if !tables.is_empty() {
                let _ = writeln!(text, "static = {tables:?}");
            }
        } else if settings.guaranteed.is_some() {
            let _ = writeln!(text, "budget = {}", size(budget));
        }
    }
    text
}
