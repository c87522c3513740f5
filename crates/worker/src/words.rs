//! Makes texts of a shim safe to show: it runs inside QEMU, which a guest may have taken over.

use model::words::plain;
use protocol::{Answer, Refusal, State, WireError};

/// The number of the request that a packet answers, and the answer with plain texts.
pub(super) fn decode(packet: &[u8]) -> Result<(u32, Answer), WireError> {
    let (id, mut answer) = Answer::decode(packet)?;
    match &mut answer {
        Answer::Welcome { state, .. } => state_in_plain_words(state),
        Answer::Status(status) => state_in_plain_words(&mut status.state),
        Answer::Refused(refusal) => refusal_in_plain_words(refusal),
        Answer::About { release } => *release = plain(release),
        Answer::Done { .. } | Answer::Merged(_) | Answer::Taken(_) => {}
    }
    Ok((id, answer))
}

fn state_in_plain_words(state: &mut State) {
    match state {
        State::Suspended { why } | State::Unsupported { why } => *why = plain(why),
        State::Off | State::On(_) => {}
    }
}

fn refusal_in_plain_words(refusal: &mut Refusal) {
    match refusal {
        Refusal::Invalid { field, valid, .. } => {
            (*field, *valid) = (plain(field), plain(valid));
        }
        Refusal::NotMerging { why } | Refusal::NotTracking { why } | Refusal::NotTaking { why } => {
            *why = plain(why);
        }
        Refusal::Kernel { call, .. } => *call = plain(call),
        Refusal::Version { .. }
        | Refusal::Malformed { .. }
        | Refusal::Busy { .. }
        | Refusal::NotPermitted { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_answer_of_a_shim_commands_a_terminal() {
        let hostile = || format!("\u{1b}[2J{}\n", "x".repeat(1_000));
        let answers = [
            Answer::Refused(Refusal::NotTracking { why: hostile() }),
            Answer::Refused(Refusal::NotMerging { why: hostile() }),
            Answer::Refused(Refusal::NotTaking { why: hostile() }),
            Answer::Refused(Refusal::Kernel { call: hostile(), errno: 1 }),
            Answer::Refused(Refusal::Invalid { field: hostile(), value: 0, valid: hostile() }),
        ];
        for answer in answers {
            let (_, Answer::Refused(refusal)) = decode(&answer.encode(1).unwrap()).unwrap() else {
                panic!("a refusal")
            };
            let text = refusal.to_string();
            assert!(!text.contains(char::is_control) && text.len() < 500, "{text:?}");
        }
        let about = Answer::About { release: hostile() };
        let (_, Answer::About { release }) = decode(&about.encode(1).unwrap()).unwrap() else {
            panic!("a release")
        };
        assert!(model::words::is_plain(&release), "{release:?}");
        let version = protocol::VERSION;
        for state in [State::Suspended { why: hostile() }, State::Unsupported { why: hostile() }] {
            let answer = Answer::Welcome { version, regions: Vec::new(), state };
            let (_, Answer::Welcome { state, .. }) = decode(&answer.encode(0).unwrap()).unwrap()
            else {
                panic!("a welcome")
            };
            let (State::Suspended { why } | State::Unsupported { why }) = state else {
                panic!("the same state")
            };
            assert!(model::words::is_plain(&why), "{why:?}");
        }
    }
}
