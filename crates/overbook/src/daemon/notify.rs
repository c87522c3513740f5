//! Tells systemd how the daemon is doing. Without systemd all of it is silence.

use sd_notify::NotifyState;

pub(super) fn ready() {
    say(NotifyState::Ready);
}

/// Feeds the watchdog: a loop that hangs is restarted, and its guests keep what they have.
pub(super) fn alive() {
    say(NotifyState::Watchdog);
}

pub(super) fn stopping() {
    say(NotifyState::Stopping);
}

fn say(state: NotifyState<'_>) {
    // Nothing depends on being heard.
    let _ = sd_notify::notify(&[state]);
}
