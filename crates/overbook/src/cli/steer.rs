//! `overbook pause`, `resume` and `release`.
//!
//! `release` must work in every state, above all when the daemon is dead: then the journal says what
//! there is to undo.

use std::path::Path;

use super::{context::Context, error::CliError, output::Output};
use crate::{client::ClientError, http::wire::Done};

pub(super) fn pause(context: &Context, json: bool) -> Result<Output, CliError> {
    shown(&context.client()?.post("/v1/pause")?, json)
}

pub(super) fn resume(context: &Context, json: bool) -> Result<Output, CliError> {
    shown(&context.client()?.post("/v1/resume")?, json)
}

pub(super) fn release(context: &Context, json: bool) -> Result<Output, CliError> {
    let done = match context.client()?.post("/v1/release") {
        Err(error @ ClientError::NoDaemon(_)) => offline(&context.config, error)?,
        other => other?,
    };
    shown(&done, json)
}

fn offline(_config: &Path, error: ClientError) -> Result<Done, CliError> {
    Err(error.into())
}

fn shown(done: &Done, json: bool) -> Result<Output, CliError> {
    if json { Output::json(done) } else { Ok(Output::text(&format!("{}\n", done.message))) }
}
