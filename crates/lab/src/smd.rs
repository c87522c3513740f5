//! Common parts of the experiments on static memory deduplication (Jia et al., 2017): guests that
//! run a Debian's programs, and the table of these programs' code.

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
    pub name: &'static str,
    /// Its memory.
    pub mb: u64,
    pub workload: &'static str,
}

/// One guest of each kind.
pub const GUESTS: [Guest; 4] = [
    Guest { name: "web", mb: 192, workload: "nginx --mb 8" },
    Guest { name: "database", mb: 192, workload: "redis --mb 8" },
    Guest { name: "builder", mb: 320, workload: "gcc" },
    Guest { name: "calm", mb: 160, workload: "shell" },
];

/// The programs, and the table of their code.
#[derive(Debug)]
pub struct Programs {
    debian: Debian,
    /// The table in its file format.
    table: Vec<u8>,
}

impl Programs {
    /// Takes the system from the cache, else builds it. The table is always built anew, which
    /// takes a second.
    pub fn provide(context: &Context) -> Result<Self, LabError> {
        Self::of(context, Debian::provide(&Cache::open()?)?)
    }

    /// The programs of this system.
    pub fn of(context: &Context, debian: Debian) -> Result<Self, LabError> {
        let table = debian::code(&[&debian])?;
        let programs = Self { debian, table };
        context.say(&format!("{} pages of code are known", programs.table()?.len()));
        Ok(programs)
    }

    pub fn debian(&self) -> &Debian {
        &self.debian
    }

    /// The code of all executables.
    ///
    /// # Errors
    /// A table that was just built has none.
    pub fn table(&self) -> Result<TableRef<'_>, LabError> {
        Ok(TableRef::parse(&self.table).map_err(std::io::Error::other)?)
    }

    /// Writes the table to a file for a worker; the file is removed with the lab.
    pub fn write_table(&self, lab: &Lab) -> Result<PathBuf, LabError> {
        let path = lab.dir().join("etc").join("debian.spt");
        std::fs::write(&path, &self.table)?;
        Ok(path)
    }

    /// A lab's description of a guest; without the shim.
    pub fn machine(&self, guest: &Guest) -> MachineSpec {
        let memory = Bytes::mib(guest.mb);
        let spec = MachineSpec::new(guest.name, "code", memory, memory, guest.workload);
        spec.with_debian(&self.debian)
    }
}
