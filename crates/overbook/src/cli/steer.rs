//! `overbook pause`, `resume` and `release`.
//!
//! `release` must work in every state, above all when the daemon is dead: then the journal says what
//! there is to undo.

use super::{context::Context, error::CliError, output::Output};
use crate::{client::ClientError, http::wire::Done, release};

pub(super) fn pause(context: &Context, json: bool) -> Result<Output, CliError> {
    shown(&context.client()?.post("/v1/pause")?, json)
}

pub(super) fn resume(context: &Context, json: bool) -> Result<Output, CliError> {
    shown(&context.client()?.post("/v1/resume")?, json)
}

pub(super) fn release(context: &Context, json: bool) -> Result<Output, CliError> {
    // A configuration that cannot be read does not say where the daemon is, so there the journal alone
    // helps; its lock tells if a daemon runs after all.
    match context.client().map(|client| client.post("/v1/release")) {
        Ok(Err(ClientError::NoDaemon(_))) | Err(CliError::Said(_)) => offline(context, json),
        Ok(done) => shown(&done?, json),
        Err(error) => Err(error),
    }
}

fn offline(context: &Context, json: bool) -> Result<Output, CliError> {
    let summary = release::offline(&context.config);
    let summary = summary.map_err(|error| CliError::Said(error.to_string()))?;
    let code = u8::from(!summary.is_complete);
    Ok(shown(&Done { message: summary.text }, json)?.with_code(code))
}

fn shown(done: &Done, json: bool) -> Result<Output, CliError> {
    if json { Output::json(done) } else { Ok(Output::text(&format!("{}\n", done.message))) }
}
