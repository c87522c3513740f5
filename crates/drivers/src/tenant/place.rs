//! The users that can create sockets in a directory, by the owners and modes of its path.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use model::VmName;

use crate::shared::name_of_socket;

/// Write permission of the group and of others.
const GROUP_OR_OTHERS: u32 = 0o022;
const OTHERS: u32 = 0o002;
/// Sticky bit: a user who may write to the directory may not replace another user's files.
const STICKY: u32 = 0o1000;

/// The place of a socket.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SocketLocation {
    /// The name of its directory.
    pub(crate) directory: String,
    /// The VM's name according to the socket's file name.
    pub(crate) stem: VmName,
    pub(crate) makers: Makers,
}

/// The users that can create sockets in a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Makers {
    /// Root, and the user that Overbook runs as.
    Root,
    /// A user or a group to whom root has given the directory.
    Some,
    /// Any user, or one who can replace the directory by another; with the reason, in words.
    Anybody(String),
}

impl Makers {
    /// Whether root has chosen these users.
    pub(crate) fn is_trusted(&self) -> bool {
        self.fault().is_none()
    }

    /// The fault of the directory.
    pub(crate) fn fault(&self) -> Option<&str> {
        match self {
            Self::Anybody(fault) => Some(fault),
            Self::Root | Self::Some => None,
        }
    }
}

impl SocketLocation {
    /// The place of a VM without a socket, which confirms nothing.
    pub(crate) fn nowhere() -> Self {
        Self { directory: String::new(), stem: VmName::from(""), makers: Makers::Some }
    }

    /// The place of a socket whose path has no symbolic links.
    pub(crate) fn of(socket: &Path) -> Self {
        let directory = socket.parent().unwrap_or(Path::new("/"));
        let name = directory.file_name().unwrap_or_default();
        Self {
            directory: name.to_string_lossy().into_owned(),
            stem: name_of_socket(socket),
            makers: makers_in(directory),
        }
    }
}

/// The users that can create files in `directory`, whose path has no symbolic links.
pub(crate) fn makers_in(directory: &Path) -> Makers {
    let mut way: Vec<&Path> = directory.ancestors().collect();
    way.reverse();
    // Whether others may create a missing directory at this point of the path.
    let mut is_open = false;
    for (at, dir) in way.iter().enumerate() {
        let shown = dir.display();
        let meta = match std::fs::symlink_metadata(dir) {
            Ok(meta) if meta.is_dir() => meta,
            Ok(_) => return Makers::Anybody(format!("{shown} is no directory")),
            Err(error) => return Makers::Anybody(format!("{shown}: {error}")),
        };
        let (is_last, mode) = (at + 1 == way.len(), meta.mode());
        let is_ours = is_trusted(meta.uid());
        if !is_ours && (!is_last || is_open) {
            let fault = format!("{shown} is of user {}, who can put anything there", meta.uid());
            return Makers::Anybody(fault);
        }
        if is_last && mode & OTHERS != 0 {
            return Makers::Anybody(format!("everybody may write to {shown}"));
        }
        if is_last {
            let is_roots = is_ours && mode & GROUP_OR_OTHERS == 0;
            return if is_roots { Makers::Root } else { Makers::Some };
        }
        is_open = mode & GROUP_OR_OTHERS != 0;
        if is_open && mode & STICKY == 0 {
            return Makers::Anybody(format!("others than root may write to {shown}"));
        }
    }
    Makers::Anybody("it has no directory".to_owned())
}

/// Root, and the user that Overbook runs as, can replace it in any case.
pub(crate) fn is_trusted(uid: u32) -> bool {
    [0, rustix::process::geteuid().as_raw()].contains(&uid)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, set_permissions};
    use std::os::unix::fs::{PermissionsExt, chown};

    use requires::{Requirement, requires};

    use super::*;

    struct Dirs(tempfile::TempDir);

    impl Dirs {
        fn make(&self, path: &str, mode: u32) -> Makers {
            let dir = self.0.path().join(path);
            let _ = create_dir(&dir);
            set_permissions(&dir, Permissions::from_mode(mode)).unwrap();
            makers_in(&dir)
        }
    }

    #[test]
    fn modes_say_who_can_make_sockets() {
        let dirs = Dirs(tempfile::tempdir().unwrap());
        assert_eq!(dirs.make("qmp", 0o755), Makers::Root);
        assert_eq!(dirs.make("qmp", 0o1770), Makers::Some);
        assert_eq!(dirs.make("qmp/web", 0o700), Makers::Root, "nobody can replace root's own");
        assert_eq!(dirs.make("qmp/web", 0o1770), Makers::Some);
        let fault = |makers: Makers| makers.fault().unwrap().to_owned();
        assert!(fault(dirs.make("qmp/web", 0o1777)).starts_with("everybody may write to /"));
        assert_eq!(dirs.make("qmp/web", 0o755), Makers::Root);
        dirs.make("qmp", 0o770);
        let why = fault(dirs.make("qmp/web", 0o755));
        assert!(why.starts_with("others than root may write to /"), "{why}");
        assert!(fault(makers_in(&dirs.0.path().join("none"))).contains("No such file"));
    }

    #[test]
    fn what_another_user_has_made_where_all_may_is_nobodys_word() {
        let dirs = Dirs(tempfile::tempdir().unwrap());
        dirs.make("qmp", 0o755);
        dirs.make("qmp/web", 0o700);
        let given = chown(dirs.0.path().join("qmp/web"), Some(65534), None);
        let Some(()) = requires(Requirement::Root, given) else { return };
        let web = dirs.0.path().join("qmp/web");
        assert_eq!(makers_in(&web), Makers::Some, "root has made it and given it away");
        dirs.make("qmp", 0o1777);
        let fault = makers_in(&web);
        assert!(fault.fault().unwrap().contains("is of user 65534"), "{fault:?}");
        create_dir(web.join("deeper")).unwrap();
        dirs.make("qmp", 0o755);
        assert!(!makers_in(&web.join("deeper")).is_trusted());
    }

    #[test]
    fn a_place_has_the_names_of_directory_and_socket() {
        let place = SocketLocation::of(Path::new("/run/overbook/qmp/web/web-1.sock"));
        assert_eq!((place.directory.as_str(), place.stem.as_str()), ("web", "web-1"));
    }
}
