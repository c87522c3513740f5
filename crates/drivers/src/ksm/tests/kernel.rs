//! The same with the kernel's own files. Needs root, and no other user of KSM.

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
    let Ok(before) = ksm.settings() else {
        return eprintln!("SKIPPED: this kernel has no KSM");
    };
    if ksm.check_writable(&before).is_err() || before[&Knob::Run] != "0" {
        return eprintln!("SKIPPED: needs root, and KSM that is not at work");
    }
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
