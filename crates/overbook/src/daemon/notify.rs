//! Tells systemd how the daemon is doing; does nothing without systemd.

use sd_notify::NotifyState;

pub(super) fn ready() {
    say(NotifyState::Ready);
}

/// Feeds the watchdog: systemd restarts a daemon whose loop hangs. The guests keep what they have.
pub(super) fn alive() {
    say(NotifyState::Watchdog);
}

pub(super) fn stopping() {
    say(NotifyState::Stopping);
}

fn say(state: NotifyState<'_>) {
    // A failure is ignored: nothing depends on the message.
    let _ = sd_notify::notify(&[state]);
}
