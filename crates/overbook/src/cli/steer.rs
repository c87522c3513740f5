//! `overbook pause`, `resume` and `reload`.

use api::client::{ApiClient, ClientError, order_path};
use api::wire::Done;
use model::Scope;

use super::{Names, context::Context, error::CliError, output::Output, scope::KnownNames};

/// Gives the daemon an order for the whole host, or for the named VMs and groups.
pub(super) fn order(context: &Context, order: &str, asked: &Names) -> Result<Output, CliError> {
    let client = context.client()?;
    if asked.names.is_empty() {
        let done = client.post(&order_path(order, &Scope::Host))?;
        return shown(&done, asked.format.json);
    }
    each(&client, order, &asked.names, asked.format.json)
}

/// Gives the order for each of these names; a refused one does not keep the daemon from the rest.
pub(super) fn each(
    client: &ApiClient,
    order: &str,
    names: &[String],
    json: bool,
) -> Result<Output, CliError> {
    let known = KnownNames::ask(client)?;
    let scopes: Vec<_> = names.iter().map(|name| known.scope(name)).collect::<Result<_, _>>()?;
    let (mut messages, mut code) = (Vec::new(), 0);
    for scope in &scopes {
        match client.post(&order_path(order, scope)) {
            Ok(done) => messages.push(done.message),
            Err(error) if messages.is_empty() && !matches!(error, ClientError::Refused(_)) => {
                return Err(error.into());
            }
            Err(error) => {
                messages.push(error.to_string());
                code = 1;
            }
        }
    }
    Ok(shown(&Done { message: messages.join("\n") }, json)?.with_code(code))
}

/// Arguments of `overbook reload`.
#[derive(Debug, clap::Args)]
pub(super) struct ReloadArguments {
    /// Use the configuration although it takes much
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    format: super::Format,
}

pub(super) fn reload(context: &Context, arguments: &ReloadArguments) -> Result<Output, CliError> {
    let path = format!("/v1/reload?yes={}", arguments.yes);
    shown(&context.client()?.post(&path)?, arguments.format.json)
}

pub(super) fn shown(done: &Done, json: bool) -> Result<Output, CliError> {
    if json { Output::json(done) } else { Ok(Output::text(&format!("{}\n", done.message))) }
}
