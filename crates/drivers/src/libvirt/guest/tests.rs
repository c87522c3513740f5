use model::libvirt::{DomainProcess, FromLibvirt, SOCKET_NAME, ToLibvirt};
use model::{Link, Time, VmName};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixListener;
use tokio::sync::oneshot;

use super::super::super::records::Records;
use super::super::tests::{domain, process};
use super::*;
use crate::journal::Journal;
use crate::lines::line;

fn stage(domain: LibvirtDomain) -> (tempfile::TempDir, Arc<DriverState>, Arc<Slot>) {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::new(Journal::open(dir.path()).unwrap());
    let socket = dir.path().join(SOCKET_NAME);
    let shared = DriverState::new(Duration::from_secs(1), records, socket);
    shared.domains.note(vec![domain], boot_now());
    (dir, Arc::new(shared), Arc::new(Slot::new("/proc/7".into()).0))
}

fn take(target: Bytes) -> BalloonRequest {
    let incarnation = identity::of_process(process(7));
    BalloonRequest { incarnation, target: Some(target), ram: Bytes::mib(512) }
}

#[tokio::test]
async fn a_report_fills_the_view() {
    let stats = GuestStats { free: Some(Bytes::mib(100)), ..GuestStats::default() };
    let stats_date_s = wall_now_ms() / 1000;
    let stats_period_s = 1;
    let web = LibvirtDomain { stats, stats_date_s, stats_period_s, ..domain("web-1", 7) };
    let (_dir, shared, slot) = stage(web);
    let mut guest = DomainGuest::new(&shared, &slot, process(7));
    guest.look().await.unwrap();
    let view = slot.state().view.clone();
    assert_eq!(view.balloon.unwrap().value, Bytes::mib(512));
    assert_eq!(view.stats.unwrap().value, stats);
    assert_eq!((view.migration, view.immovable.is_some()), (Migration::None, true));
    assert_eq!(view.limits.keys().collect::<Vec<_>>(), [&Mechanism::FreePageReporting]);
}

#[tokio::test]
async fn impossible_statistics_are_refused_and_the_reason_is_shown() {
    let stats = GuestStats { free: Some(Bytes(u64::MAX)), ..GuestStats::default() };
    let lies = LibvirtDomain { stats, stats_date_s: wall_now_ms() / 1000, ..domain("a", 7) };
    let (_dir, shared, slot) = stage(LibvirtDomain { stats_period_s: 1, ..lies });
    DomainGuest::new(&shared, &slot, process(7)).look().await.unwrap();
    let view = slot.state().view.clone();
    assert_eq!(view.stats, None);
    assert!(view.limits[&Mechanism::Statistics].contains("not usable"));
}

#[tokio::test]
async fn a_suspended_domain_is_shown_as_such_until_it_is_resumed() {
    let web = LibvirtDomain { stats_period_s: 1, ..domain("web-1", 7) };
    let (_dir, shared, slot) = stage(web.clone());
    let mut guest = DomainGuest::new(&shared, &slot, process(7));
    for is_suspended in [true, false] {
        let next = LibvirtDomain { is_suspended, ..web.clone() };
        shared.domains.note(vec![next], boot_now());
        guest.look().await.unwrap();
        assert_eq!(slot.state().view.suspended, is_suspended);
    }
}

#[tokio::test]
async fn a_domain_is_up_once_it_is_shown_though_libvirt_is_silent() {
    let (dir, shared, slot) = stage(domain("a", 7));
    shared.domains.note(Vec::new(), Time(0));
    let listener = UnixListener::bind(dir.path().join(SOCKET_NAME)).unwrap();
    let runs = Arc::clone(&shared);
    tokio::spawn(async move { super::super::run(&runs.domains).await });
    let (requests, mut writer) = listener.accept().await.unwrap().0.into_split();
    let report = FromLibvirt::Domains { at: boot_now(), domains: vec![domain("a", 7)] };
    writer.write_all(&line(&report).unwrap()).await.unwrap();
    shared.domains.of_after(process(7), Time(0)).await.unwrap();
    let mut guest = DomainGuest::new(&shared, &slot, process(7));
    let mut requests = BufReader::new(requests).lines();
    tokio::select! {
        _ = guest.look() => panic!("it does not wait for the answer"),
        request = requests.next_line() => assert!(request.unwrap().is_some()),
    }
    assert_eq!(slot.state().view.link, Link::Up);
}

/// The behaviour of a guest's balloon.
#[derive(Clone, Copy, PartialEq)]
enum Balloon {
    /// It follows each change at once.
    Follows,
    Stands,
    /// It grows by itself.
    Moves,
}

/// An `overbook-libvirt` with one domain.
struct FollowingDomain {
    shared: Arc<DriverState>,
    slot: Arc<Slot>,
    dir: tempfile::TempDir,
}

impl FollowingDomain {
    /// The domain of this process, which has `current` now. The report that is known already
    /// shows `known`.
    fn start(known: u64, current: u64, balloon: Balloon) -> Self {
        let own = Identity::own().unwrap();
        let process = DomainProcess { pid: own.pid, start_ticks: own.start_ticks };
        let now = LibvirtDomain {
            process: Some(process),
            current: Some(Bytes::mib(current)),
            stats_period_s: 5,
            ..domain("a", own.pid)
        };
        let old = LibvirtDomain { current: Some(Bytes::mib(known)), ..now.clone() };
        let (dir, shared, slot) = stage(old);
        let listener = UnixListener::bind(dir.path().join(SOCKET_NAME)).unwrap();
        tokio::spawn(serve(listener, now, balloon));
        let runs = Arc::clone(&shared);
        tokio::spawn(async move { super::super::run(&runs.domains).await });
        Self { shared, slot, dir }
    }

    fn guest(&self) -> DomainGuest<'_> {
        DomainGuest::new(&self.shared, &self.slot, Identity::own().unwrap())
    }

    fn life(&self) -> u64 {
        identity::of_process(Identity::own().unwrap())
    }

    async fn take(&self, target: u64) -> Result<(), String> {
        let incarnation = self.life();
        let (target, ram) = (Some(Bytes::mib(target)), Bytes::mib(512));
        let wish = BalloonRequest { incarnation, target, ram };
        self.guest().set_balloon(wish).await
    }

    async fn original(&self) -> Option<Bytes> {
        self.shared.records.of_life(self.life()).await.and_then(|undo| undo.balloon)
    }

    async fn release(&self) -> String {
        let (reply, answer) = oneshot::channel();
        self.guest().obey(Restore { undo: Undo::Now, reply }).await;
        answer.await.unwrap().unwrap().unwrap().words
    }
}

async fn serve(listener: UnixListener, mut domain: LibvirtDomain, balloon: Balloon) {
    let (reader, mut writer) = listener.accept().await.unwrap().0.into_split();
    let mut requests = BufReader::new(reader).lines();
    let mut period = tokio::time::interval(Duration::from_millis(20));
    loop {
        let message = tokio::select! {
            _ = period.tick() => {
                if balloon == Balloon::Moves {
                    domain.current = domain.current.map(|size| size.plus(Bytes::mib(1)));
                }
                FromLibvirt::Domains { at: boot_now(), domains: vec![domain.clone()] }
            }
            request = requests.next_line() => {
                let Ok(Some(request)) = request else { return };
                let request: ToLibvirt = serde_json::from_str(&request).unwrap();
                match request.change {
                    DomainChange::Memory(size) => {
                        let follows = balloon == Balloon::Follows;
                        domain.current = if follows { Some(size) } else { domain.current };
                    }
                    DomainChange::StatsPeriod(seconds) => domain.stats_period_s = seconds,
                }
                FromLibvirt::Answer { id: request.id, refusal: None }
            }
        };
        if writer.write_all(&line(&message).unwrap()).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn the_original_is_not_a_size_that_an_old_report_shows() {
    // An earlier daemon had set 300 MiB and a release has just undone that.
    let domain = FollowingDomain::start(300, 512, Balloon::Follows);
    domain.take(400).await.unwrap();
    assert_eq!(domain.original().await, Some(Bytes::mib(512)));
    domain.take(350).await.unwrap();
    assert_eq!(domain.original().await, Some(Bytes::mib(512)));
    assert_eq!(domain.release().await, "balloon back to 512 MiB");
    assert_eq!(domain.original().await, None);
    domain.take(300).await.unwrap();
    assert_eq!(domain.original().await, Some(Bytes::mib(512)));
}

#[tokio::test]
async fn the_original_is_no_size_on_the_way_to_another() {
    let domain = FollowingDomain::start(300, 300, Balloon::Moves);
    let why = domain.take(400).await.unwrap_err();
    assert_eq!(why, "not changed while another program moves it");
    assert_eq!(domain.original().await, None);
}

#[tokio::test]
async fn the_original_moves_along_when_the_domain_is_reached_by_another_way() {
    let domain = FollowingDomain::start(300, 300, Balloon::Follows);
    let by_qmp = UndoRecord {
        balloon: Some(Bytes::mib(512)),
        ..UndoRecord::untouched("a".into(), "/run/overbook/qmp/a.sock".into(), domain.life())
    };
    domain.shared.records.keep(by_qmp).await.unwrap();
    domain.take(400).await.unwrap();
    let all = domain.shared.records.all().await;
    let [record] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!(
        (record.balloon, record.socket.parent()),
        (Some(Bytes::mib(512)), Some(domain.dir.path().join(SOCKET_NAME).as_path()))
    );
}

#[tokio::test]
async fn a_guest_that_has_not_followed_a_release_stays_on_record() {
    let domain = FollowingDomain::start(300, 300, Balloon::Stands);
    let record = UndoRecord {
        balloon: Some(Bytes::mib(512)),
        ..UndoRecord::untouched(
            "a".into(),
            place_of(&domain.shared.domains.socket, &super::super::tests::domain("a", 1)),
            domain.life(),
        )
    };
    domain.shared.records.keep(record).await.unwrap();
    let told = domain.release().await;
    assert_eq!(told, "balloon back to 512 MiB; it stays on record until the guest has followed");
    assert_eq!(domain.original().await, Some(Bytes::mib(512)));
}

#[tokio::test]
async fn without_a_daemon_all_domains_are_restored_by_one_connection() {
    let dir = tempfile::tempdir().unwrap();
    let records = Records::new(Journal::open(dir.path()).unwrap());
    let socket = dir.path().join(SOCKET_NAME);
    let own = Identity::own().unwrap();
    let record = UndoRecord {
        balloon: Some(Bytes::mib(512)),
        stats_interval_s: Some(5),
        ..UndoRecord::untouched(
            "a".into(),
            place_of(&socket, &domain("a", own.pid)),
            identity::of_process(own),
        )
    };
    records.keep(record.clone()).await.unwrap();
    // Nothing answers there yet.
    let released = undo::restore_all(&records, std::slice::from_ref(&record), Undo::Now).await;
    let [(_, Err(RestoreError::Libvirt(why)))] = released.as_slice() else {
        panic!("{released:?}")
    };
    assert!(why.starts_with("overbook-libvirt: "), "{why}");
    assert_eq!(records.all().await, std::slice::from_ref(&record));
    let process = DomainProcess { pid: own.pid, start_ticks: own.start_ticks };
    let changed = LibvirtDomain {
        process: Some(process),
        current: Some(Bytes::mib(300)),
        stats_period_s: 1,
        ..domain("a", own.pid)
    };
    // It accepts one connection only.
    tokio::spawn(serve(UnixListener::bind(&socket).unwrap(), changed, Balloon::Follows));
    let released = undo::restore_all(&records, &[record], Undo::Now).await;
    let [(name, Ok(done))] = released.as_slice() else { panic!("{released:?}") };
    assert_eq!(*name, VmName::from("a"));
    assert_eq!(done.words, "statistics every 5 s again, balloon back to 512 MiB");
    assert_eq!(records.all().await, []);
}

#[tokio::test]
async fn nothing_is_set_in_a_job_of_libvirt_nor_without_a_record() {
    let on_record = async |shared: &DriverState| {
        let life = identity::of_process(process(7));
        let place = place_of(&shared.domains.socket, &domain("a", 7));
        let undo = UndoRecord {
            balloon: Some(Bytes::mib(512)),
            ..UndoRecord::untouched("a".into(), place, life)
        };
        shared.records.keep(undo).await.unwrap();
    };
    for (is_busy, why) in [(Some(true), "not while a migration"), (None, "not while")] {
        let (_dir, shared, slot) = stage(LibvirtDomain { is_busy, ..domain("a", 7) });
        on_record(&shared).await;
        let guest = DomainGuest::new(&shared, &slot, process(7));
        let error = guest.set_balloon(take(Bytes::mib(256))).await.unwrap_err();
        assert!(error.starts_with(why), "{error}");
    }
    // Nothing answers at the socket.
    let (_dir, shared, slot) = stage(domain("a", 7));
    on_record(&shared).await;
    let guest = DomainGuest::new(&shared, &slot, process(7));
    let error = guest.set_balloon(take(Bytes::mib(256))).await.unwrap_err();
    assert_eq!(error, "overbook-libvirt: not connected");
}
