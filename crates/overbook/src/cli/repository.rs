//! `overbook repository`: lends memory for pages that other hosts' VMs have swapped out.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use api::client::ApiClient;
use api::published::Lender;
use clap::Args;
use disks::repository::{can_lend, mind_host};
use model::Bytes;
use pageserver::layers::memory::SLAB;
use pageserver::repository::Repository;
use pageserver::server::{Limits, Server};
use pageserver::tls::Acceptor;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use sys::heap;
use sys::log;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

use super::{context::Context, error::CliError, output::Output};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The most memory to lend, which is pinned: `4GiB`. With a daemon on this host, as much of it
    /// as the pool's overloads need and this host's VMs can do without
    #[arg(long, value_name = "SIZE")]
    memory: Bytes,
    /// Maximum memory for one client, over all its disks; by default, all of it
    #[arg(long, value_name = "SIZE")]
    most: Option<Bytes>,
    /// Where to listen for other hosts; without --tls only on this host
    #[arg(long, value_name = "ADDRESS:PORT", required_unless_present = "unix")]
    listen: Option<SocketAddr>,
    /// Directory of ca-cert.pem, server-cert.pem and server-key.pem
    #[arg(long, value_name = "DIRECTORY", requires = "listen")]
    tls: Option<PathBuf>,
    /// A socket to listen on
    #[arg(long, value_name = "PATH", conflicts_with = "listen")]
    unix: Option<PathBuf>,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<Output, CliError> {
    // Clients' pages are encrypted, but a dump would tell which of them are used, and when.
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        log::warn(&format!("a core dump of this process would have what it lends: {error}"));
    }
    heap::give_back_large();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| CliError::Said(error.to_string()))?;
    runtime.block_on(serve(context, arguments))?;
    Ok(Output::nothing())
}

async fn serve(context: &Context, arguments: &Arguments) -> Result<(), CliError> {
    let said = |text: String| CliError::Said(text);
    let slabs = |size: Bytes| usize::try_from(size.0 / SLAB as u64).unwrap_or(usize::MAX);
    let all = slabs(arguments.memory);
    let most = arguments.most.map_or(all, slabs);
    if all == 0 || most == 0 {
        return Err(said("a repository lends slabs of 16 MiB: give it at least one".to_owned()));
    }
    if arguments.listen.is_some_and(|to| !to.ip().is_loopback()) && arguments.tls.is_none() {
        return Err(said(
            "other hosts are served by TLS only: name a directory by --tls".to_owned(),
        ));
    }
    let tls = arguments.tls.as_deref().map(Acceptor::new).transpose();
    let tls = tls.map_err(|error| said(error.to_string()))?;
    can_lend(Bytes((all * SLAB) as u64)).map_err(|error| said(error.to_string()))?;
    let repository = Repository::new(all, most).map_err(|error| {
        let size = Bytes((all * SLAB) as u64);
        said(format!("{size} cannot be pinned (see `ulimit -l`): {error}"))
    })?;
    let repository = Arc::new(repository);
    let all_of_it = Bytes((all * SLAB) as u64);
    let socket = context.socket().ok();
    tokio::spawn(mind_host(repository.clone(), move |holds| {
        let client = ApiClient::new(socket.as_deref()?).ok()?;
        client.may_hold(Lender { holds, most: all_of_it }).ok()
    }));
    let server = Server::new(repository.clone(), tls, Limits::default());
    let listens = match (&arguments.unix, arguments.listen) {
        (Some(path), _) => {
            let listener = UnixListener::bind(path)
                .map_err(|error| CliError::File { path: path.clone(), error })?;
            tokio::spawn(server.listen_unix(listener));
            path.display().to_string()
        }
        (None, Some(address)) => {
            let listener = TcpListener::bind(address)
                .await
                .map_err(|error| said(format!("{address}: {error}")))?;
            tokio::spawn(server.listen_tcp(listener));
            address.to_string()
        }
        (None, None) => return Err(said("name --listen or --unix".to_owned())),
    };
    log::info(&format!("lends {} at {listens}", Bytes((all * SLAB) as u64)));
    let ended = async || {
        let (mut term, mut int) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut asked = signal(SignalKind::user_defined1())?;
        loop {
            tokio::select! {
                _ = term.recv() => return io::Result::Ok(()),
                _ = int.recv() => return Ok(()),
                _ = asked.recv() => eprint!("{}", who_has_what(&repository)),
            }
        }
    };
    ended().await.map_err(|error| said(error.to_string()))
}

/// A report for the operator, who asks for it by SIGUSR1.
fn who_has_what(repository: &Repository) -> String {
    let size = |slabs: usize| Bytes((slabs * SLAB) as u64);
    let lent = repository.lent();
    let mut text = format!(
        "overbook: {} free, {} lent, {} of it to be given back; {} times nothing was to be had\n",
        size(lent.free),
        size(lent.lent),
        size(lent.leaving),
        repository.refused(),
    );
    for (who, client) in repository.clients() {
        text += &format!(
            "overbook: {who} has {} in {} leases: {} reads, {} writes\n",
            size(client.slabs),
            client.leases,
            client.reads,
            client.writes,
        );
    }
    text
}
