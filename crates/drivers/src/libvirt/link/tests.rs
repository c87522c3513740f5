use std::sync::Arc;

use model::libvirt::SOCKET_NAME;
use tokio::io::AsyncBufReadExt;
use tokio::net::UnixListener;
use tokio::task::JoinSet;

use super::super::tests::{domain, process};
use super::*;

/// One client's side of `overbook-libvirt`: what it sends, and where answers go.
struct LinkPeer {
    requests: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
}

impl LinkPeer {
    async fn by(listener: &UnixListener) -> Self {
        let (reader, writer) = listener.accept().await.unwrap().0.into_split();
        Self { requests: BufReader::new(reader).lines(), writer }
    }

    async fn request(&mut self) -> ToLibvirt {
        serde_json::from_str(&self.requests.next_line().await.unwrap().unwrap()).unwrap()
    }

    async fn send(&mut self, message: &FromLibvirt) {
        self.writer.write_all(&line(message).unwrap()).await.unwrap();
    }
}

fn stage() -> (tempfile::TempDir, UnixListener, Arc<Domains>) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join(SOCKET_NAME);
    let listener = UnixListener::bind(&socket).unwrap();
    let domains = Arc::new(Domains::new(socket));
    let run_by = Arc::clone(&domains);
    tokio::spawn(async move { run(&run_by).await });
    (dir, listener, domains)
}

async fn ask(domains: Arc<Domains>, pid: u32) -> Result<(), String> {
    domains.change(process(pid), &domain("a", pid), DomainChange::StatsPeriod(1)).await
}

#[tokio::test]
async fn all_requests_share_a_connection_and_each_gets_its_own_answer() {
    let (_dir, listener, domains) = stage();
    let mut server = LinkPeer::by(&listener).await;
    // A report shows that the connection is up.
    server.send(&FromLibvirt::Domains { at: boot_now(), domains: vec![domain("a", 7)] }).await;
    while domains.of(process(7)).is_none() {
        tokio::task::yield_now().await;
    }
    let mut asked = JoinSet::new();
    for pid in 1..=20 {
        let domains = Arc::clone(&domains);
        asked.spawn(async move { (pid, ask(domains, pid).await) });
    }
    let mut requests = Vec::new();
    for _ in 1..=20 {
        requests.push(server.request().await);
    }
    requests.reverse();
    for ToLibvirt { id, process, before, .. } in requests {
        assert!(before <= boot_now().after(PATIENCE));
        let refusal = (process.pid % 2 == 0).then(|| format!("not {}", process.pid));
        server.send(&FromLibvirt::Answer { id, refusal }).await;
    }
    while let Some(answered) = asked.join_next().await {
        let (pid, answer) = answered.unwrap();
        let expected = if pid % 2 == 0 { Err(format!("not {pid}")) } else { Ok(()) };
        assert_eq!(answer, expected);
    }
    assert!(domains.link.waiting().answers.is_empty());
}

#[tokio::test]
async fn the_end_of_the_connection_is_the_answer_and_the_next_one_works() {
    let (_dir, listener, domains) = stage();
    let mut server = LinkPeer::by(&listener).await;
    server.send(&FromLibvirt::Domains { at: boot_now(), domains: vec![domain("a", 7)] }).await;
    while domains.of(process(7)).is_none() {
        tokio::task::yield_now().await;
    }
    let asked = tokio::spawn(ask(Arc::clone(&domains), 7));
    server.request().await;
    drop(server);
    let why = asked.await.unwrap().unwrap_err();
    assert!(why.starts_with("overbook-libvirt: "), "{why}");
    let mut server = LinkPeer::by(&listener).await;
    let now = boot_now();
    let at = now.after(Millis(1));
    server.send(&FromLibvirt::Domains { at, domains: vec![domain("a", 7)] }).await;
    let asked = tokio::spawn(ask(Arc::clone(&domains), 7));
    let ToLibvirt { id, .. } = server.request().await;
    server.send(&FromLibvirt::Answer { id, refusal: None }).await;
    assert_eq!(asked.await.unwrap(), Ok(()));
}
