//! What the experiments of static memory deduplication (Jia et al., 2017) share: guests that run a
//! Debian's programs, and the table of the code that these programs are.

use std::path::PathBuf;

use model::Bytes;
use pages::offline::TableRef;

use crate::cache::Cache;
use crate::debian::{self, Debian};
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::scenario::Context;

/// A guest that runs such programs.
#[derive(Debug, Clone)]
pub struct Guest {
    /// Its name.
    pub name: &'static str,
    /// Its memory.
    pub mb: u64,
    /// What it does.
    pub workload: &'static str,
}

/// One of each.
pub const GUESTS: [Guest; 4] = [
    Guest { name: "web", mb: 192, workload: "nginx --mb 8" },
    Guest { name: "database", mb: 192, workload: "redis --mb 8" },
    Guest { name: "builder", mb: 320, workload: "gcc" },
    Guest { name: "calm", mb: 160, workload: "shell" },
];

/// The programs, and what is known of them before they run.
#[derive(Debug)]
pub struct Programs {
    debian: Debian,
    /// As a file holds it.
    table: Vec<u8>,
}

impl Programs {
    /// From the cache, else built; the table is always built anew, which takes a second.
    ///
    /// # Errors
    /// When there is no Debian, or no table of it.
    pub fn provide(context: &Context) -> Result<Self, LabError> {
        Self::of(context, Debian::provide(&Cache::open()?)?)
    }

    /// Those of this system.
    ///
    /// # Errors
    /// When there is no table of it.
    pub fn of(context: &Context, debian: Debian) -> Result<Self, LabError> {
        let table = debian::code(&[&debian])?;
        let programs = Self { debian, table };
        context.say(&format!("{} pages of code are known", programs.table()?.len()));
        Ok(programs)
    }

    /// The system that they belong to.
    #[must_use]
    pub fn debian(&self) -> &Debian {
        &self.debian
    }

    /// The code of all executables.
    ///
    /// # Errors
    /// None that a table just built can have.
    pub fn table(&self) -> Result<TableRef<'_>, LabError> {
        Ok(TableRef::parse(&self.table).map_err(std::io::Error::other)?)
    }

    /// Writes it to a file for a worker to read, which ends with the lab.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write_table(&self, lab: &Lab) -> Result<PathBuf, LabError> {
        let path = lab.dir().join("etc").join("debian.spt");
        std::fs::write(&path, &self.table)?;
        Ok(path)
    }

    /// What a lab needs to know of a guest; without the shim.
    #[must_use]
    pub fn machine(&self, guest: &Guest) -> MachineSpec {
        let memory = Bytes::mib(guest.mb);
        let spec = MachineSpec::new(guest.name, "code", memory, memory, guest.workload);
        spec.with_debian(&self.debian)
    }
}
