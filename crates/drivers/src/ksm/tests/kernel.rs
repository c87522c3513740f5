//! The same with the kernel's own files. Needs root, and no other user of KSM.

use requires::{Requirement, ensure, requires};

use super::*;

/// Restores the kernel's settings, whether the test passes or not.
struct Kernels(Settings);

impl Drop for Kernels {
    fn drop(&mut self) {
        for (knob, value) in self.0.iter().rev() {
            let _ = Ksm::of_host().set(*knob, value);
        }
    }
}

#[test]
fn the_kernels_own_ksm_does_what_the_files_say() {
    let ksm = Ksm::of_host();
    let Some(before) = requires(Requirement::Ksm, ksm.settings()) else { return };
    let Some(()) = requires(Requirement::IdleKsm, ksm.check_writable(&before)) else { return };
    let is_idle = ensure(before[&Knob::Run] == "0", "it is at work");
    let Some(()) = requires(Requirement::IdleKsm, is_idle) else { return };
    let _guard = Kernels(before.clone());
    let state = tempfile::tempdir().unwrap();
    let mut hand = Hand::new(ksm.clone(), Records::new(Journal::open(state.path()).unwrap()));
    hand.obey(DRIVE).unwrap();
    let now = ksm.settings().unwrap();
    assert!(
        settings_at(RATE).iter().all(|(k, v)| now.get(k).is_none_or(|now| now == v)),
        "{now:?}"
    );
    hand.obey(KsmOrder::Rest).unwrap();
    hand.obey(DRIVE).unwrap();
    hand.obey(KsmOrder::PutBack).unwrap().unwrap();
    assert_eq!(ksm.settings().unwrap(), before);
    assert_eq!(Journal::open(state.path()).unwrap().ksm(), None);
}
