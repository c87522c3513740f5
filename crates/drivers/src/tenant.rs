//! Determines to which group a VM belongs, by evidence from root and never by QEMU's word alone.
//!
//! **Problem.** A VM's name is the one that its QEMU reports. A compromised QEMU, or any program
//! that listens like one, can report the name of another tenant's VM.
//!
//! **Idea.** A name only chooses a group; an object that root has made has to confirm it. Any of
//! these does:
//!
//! * the QMP socket is in a directory that has the group's name ([`place`]);
//! * the process runs as a user that the group names (`uid`), and no manager runs other VMs as
//!   that user;
//! * only root can create sockets in the socket's directory, and the socket is named like the VM;
//! * the host's VM manager says that this process is this VM ([`managers`]).
//!
//! And no evidence may contradict: neither the directory of another group, nor a user that is not
//! one of the group's, nor another name in the manager's records. A VM without confirmation is
//! only watched, under the path of its socket, which matches no group.
//!
//! **Left out.** Which VM of one group is which: a tenant's own QEMUs may take each other's
//! names.

pub mod managers;
pub(crate) mod place;

use std::path::Path;

use model::{GroupName, GroupSpec, NamePattern, VmName};
use sys::process::Identity;
use sys::users::{uid_of, user_of_process};

use crate::proxmox::Proxmox;
use managers::Managed;
use place::{Makers, SocketLocation};

/// The configuration's rules about the VMs of each group.
#[derive(Debug, Default)]
pub(super) struct Rules(Vec<GroupRule>);

#[derive(Debug)]
struct GroupRule {
    name: GroupName,
    vms: Vec<NamePattern>,
    /// `None`: the group names no user. A name that is unknown on this host matches no user.
    users: Option<Vec<u32>>,
}

/// The evidence about a VM's identity, in addition to its QEMU's answers.
#[derive(Debug)]
pub(super) struct Evidence {
    pub(super) place: SocketLocation,
    /// The user that its process runs as.
    pub(super) uid: Option<u32>,
    pub(super) managed: Option<Managed>,
    /// Whether a manager runs other VMs as the same user; the user then confirms nothing.
    pub(super) is_shared_user: bool,
}

/// Why a VM is in no group, although its name matches one.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Stranger {
    #[error("QEMU calls itself `{told}`, but {manager} has started it as `{name}`")]
    Misnamed { told: VmName, manager: &'static str, name: VmName },
    #[error("its name is of group {group}, but its socket lies in the directory of group {other}")]
    OtherDirectory { group: GroupName, other: GroupName },
    #[error("its name is of group {group}, but it runs as {}, who is none of the group's (`uid`)",
        user(*.uid))]
    OtherUser { group: GroupName, uid: Option<u32> },
    #[error("its name is of group {group}, but nothing that root made says so{}: put its QMP \
        socket into a directory {group}, or name its user, {}, as `uid` in [group.{group}]",
        because(.fault.as_deref()), user(*.uid))]
    Unconfirmed { group: GroupName, uid: Option<u32>, fault: Option<String> },
}

fn user(uid: Option<u32>) -> String {
    uid.map_or("a user who is not known".to_owned(), |uid| format!("user {uid}"))
}

fn because(fault: Option<&str>) -> String {
    fault.map(|fault| format!(" ({fault})")).unwrap_or_default()
}

impl Rules {
    /// The rules of these groups; their users are looked up now.
    pub(super) fn of<'a>(groups: impl IntoIterator<Item = (&'a GroupName, &'a GroupSpec)>) -> Self {
        let uids = |group: &GroupSpec| group.users.iter().filter_map(|user| uid_of(user)).collect();
        let rule = |(name, group): (&GroupName, &GroupSpec)| GroupRule {
            name: name.clone(),
            vms: group.vms.clone(),
            users: (!group.users.is_empty()).then(|| uids(group)),
        };
        Self(groups.into_iter().map(rule).collect())
    }

    /// The group whose patterns match this name.
    pub(super) fn group_of(&self, vm: &VmName) -> Option<&GroupName> {
        let group = self.0.iter().find(|group| group.vms.iter().any(|p| p.matches(vm)))?;
        Some(&group.name)
    }

    /// Whether a VM that reports the name `told` may have this name.
    ///
    /// # Errors
    /// The name matches a group, and no evidence confirms that the VM belongs to it.
    pub(super) fn admit(&self, told: &VmName, evidence: &Evidence) -> Result<(), Stranger> {
        let Evidence { place, uid, managed, is_shared_user } = evidence;
        let Some(group) = self.0.iter().find(|group| group.vms.iter().any(|p| p.matches(told)))
        else {
            return Ok(());
        };
        let name = || group.name.clone();
        if let Some(Managed { manager, name }) = managed.as_ref().filter(|it| it.name != *told) {
            let (told, name) = (told.clone(), name.clone());
            return Err(Stranger::Misnamed { told, manager, name });
        }
        let is_of = |other: &&GroupRule| place.directory == other.name.as_str();
        let directory = self.0.iter().find(is_of).filter(|_| place.makers.is_trusted());
        if let Some(other) = directory.filter(|other| other.name != group.name) {
            return Err(Stranger::OtherDirectory { group: name(), other: other.name.clone() });
        }
        let is_users =
            group.users.as_ref().map(|users| uid.is_some_and(|uid| users.contains(&uid)));
        if is_users == Some(false) {
            return Err(Stranger::OtherUser { group: name(), uid: *uid });
        }
        let is_named_by_root = place.makers == Makers::Root && place.stem == *told;
        let is_by_user = is_users.is_some() && !is_shared_user;
        if directory.is_some() || is_by_user || is_named_by_root || managed.is_some() {
            return Ok(());
        }
        let shared = || format!("other VMs run as {}, too", user(*uid));
        let fault = place.makers.fault().map(str::to_owned);
        let fault = fault.or_else(|| (is_users.is_some() && *is_shared_user).then(shared));
        Err(Stranger::Unconfirmed { group: name(), uid: *uid, fault })
    }
}

impl Evidence {
    /// Collects the evidence about the VM behind this socket. `managed` is what a manager said of
    /// this very process earlier, and remains valid. Later its file may be unreadable (a cluster
    /// file system without a quorum), or contain the name that the VM gets at its next start.
    ///
    /// Reads files, so it needs a blocking thread.
    pub(super) fn of(
        socket: &Path,
        process: Option<Identity>,
        uid: Option<u32>,
        managed: Option<Managed>,
        proxmox: &Proxmox,
    ) -> Self {
        let by = |process| managers::name_of(process, |vmid| proxmox.name_of(vmid));
        let managed = managed.or_else(|| process.and_then(by));
        let is_shared_user = managed.is_none() && process.is_some_and(managers::share_user_of);
        Self { place: SocketLocation::of(socket), uid, managed, is_shared_user }
    }

    /// Collects the evidence about a VM that is known only by its process.
    ///
    /// Reads files, so it needs a blocking thread.
    pub(super) fn of_process(process: Identity, proxmox: &Proxmox) -> Self {
        let managed = managers::name_of(process, |vmid| proxmox.name_of(vmid));
        let is_shared_user = managed.is_none() && managers::share_user_of(process);
        let uid = user_of_process(process.pid);
        Self { place: SocketLocation::nowhere(), uid, managed, is_shared_user }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        let group = |name: &str, users: Option<Vec<u32>>| GroupRule {
            name: name.into(),
            vms: vec![NamePattern::new(format!("{name}-*"))],
            users,
        };
        Rules(vec![group("web", None), group("db", Some(vec![7, 8]))])
    }

    fn at(directory: &str, stem: &str, makers: Makers, uid: u32) -> Evidence {
        let place = SocketLocation { directory: directory.to_owned(), stem: stem.into(), makers };
        Evidence { place, uid: Some(uid), managed: None, is_shared_user: false }
    }

    fn admit(told: &str, evidence: &Evidence) -> Result<(), String> {
        rules().admit(&told.into(), evidence).map_err(|why| why.to_string())
    }

    #[test]
    fn a_name_alone_is_no_proof_and_the_operator_is_told_what_would_be() {
        let why = admit("web-evil", &at("qmp", "web-evil", Makers::Some, 65534)).unwrap_err();
        assert!(why.contains("nothing that root made says so: put its QMP socket"), "{why}");
        assert!(why.contains("its user, user 65534, as `uid` in [group.web]"), "{why}");
        let open = Makers::Anybody("everybody may write to /tmp".to_owned());
        let why = admit("web-evil", &at("web", "web-evil", open, 65534)).unwrap_err();
        assert!(why.contains("says so (everybody may write to /tmp): put"), "{why}");
    }

    #[test]
    fn each_thing_that_root_made_confirms_a_name() {
        assert_eq!(admit("web-1", &at("web", "qmp", Makers::Some, 1)), Ok(()));
        assert_eq!(admit("web-1", &at("qmp", "web-1", Makers::Root, 1)), Ok(()));
        assert_eq!(admit("db-1", &at("qmp", "x", Makers::Some, 8)), Ok(()));
        let managed = Some(Managed { manager: "libvirt", name: "web-1".into() });
        let by_libvirt = Evidence { managed, ..at("qmp", "x", Makers::Some, 1) };
        assert_eq!(admit("web-1", &by_libvirt), Ok(()));
        // A VM of no group needs no proof.
        assert_eq!(admit("test", &at("qmp", "x", Makers::Some, 1)), Ok(()));
    }

    #[test]
    fn what_contradicts_is_refused_whatever_else_confirms() {
        let why = admit("web-1", &at("db", "web-1", Makers::Root, 7)).unwrap_err();
        assert!(why.ends_with("its socket lies in the directory of group db"), "{why}");
        let why = admit("db-1", &at("db", "db-1", Makers::Root, 9)).unwrap_err();
        assert!(why.ends_with("runs as user 9, who is none of the group's (`uid`)"), "{why}");
        let managed = Some(Managed { manager: "libvirt", name: "db-1".into() });
        let evil = Evidence { managed, ..at("web", "web-evil", Makers::Root, 1) };
        let why = admit("web-evil", &evil).unwrap_err();
        assert_eq!(why, "QEMU calls itself `web-evil`, but libvirt has started it as `db-1`");
        let why = admit("web-2", &at("qmp", "web-1", Makers::Root, 1)).unwrap_err();
        assert!(why.contains("nothing that root made"), "{why}");
        let forked = Evidence { is_shared_user: true, ..at("qmp", "x", Makers::Some, 8) };
        let why = admit("db-1", &forked).unwrap_err();
        assert!(why.contains("says so (other VMs run as user 8, too): put"), "{why}");
    }

    #[test]
    fn users_that_this_host_does_not_know_are_nobody() {
        let spec = GroupSpec {
            vms: vec![NamePattern::new("web-*")],
            users: vec!["no such user".to_owned()],
            ..GroupSpec::default()
        };
        let rules = Rules::of([(&"web".into(), &spec)]);
        let admitted = rules.admit(&"web-1".into(), &at("web", "web-1", Makers::Root, 0));
        assert!(matches!(admitted, Err(Stranger::OtherUser { .. })), "{admitted:?}");
    }
}
