//! Feeds messages of a hostile peer to the protocol's parts.
//!
//! Each function takes bytes that an attacker may have chosen, and panics if a part violates its
//! guarantees. The fuzz targets (`fuzz/`) call them with bytes that a fuzzer finds,
//! `tests/fuzz_smoke.rs` with random ones.
//!
//! Idea: half of all inputs are used as they are. In the other half, every few bytes choose a
//! message with valid headers, so that the code after the check of the magic numbers is covered,
//! too. Input that arrives in pieces must lead to the same result as the whole.

#![allow(clippy::unwrap_used, reason = "what fails has failed")]

mod serving;

use pageserver::nbd::dialogue::{self, Dialogue, Wanted};
use pageserver::nbd::in_flight::{Brought, Finished, InFlight};
use pageserver::nbd::negotiation::{self, Exports, Negotiation, Refusal, Session, Tls};
use pageserver::nbd::reply::{CHUNK, SIMPLE};
use pageserver::nbd::request::{Command, Export, HEADER, Request};
use pageserver::nbd::wire::{self, MAX_PAYLOAD, option};
use pageserver::nbd::{Errno, ProtocolError};

pub(crate) use serving::serving;

/// Bytes that choose the messages.
struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn short(&mut self) -> u16 {
        u16::from(self.byte()) << 8 | u16::from(self.byte())
    }

    fn take(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::from(self.byte()) % all.len()]
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Passes `bytes` on in pieces. Returns the results, and the error at the end.
fn feed<T>(
    bytes: &[u8],
    piece: usize,
    mut advance: impl FnMut(&[u8]) -> Result<Option<(usize, T)>, Option<ProtocolError>>,
) -> (Vec<T>, Option<ProtocolError>) {
    let (mut begin, mut end, mut all) = (0, 0, Vec::new());
    loop {
        match advance(&bytes[begin..end]) {
            Ok(Some((length, step))) => {
                assert!(length > 0 && length <= end - begin, "{length} of {} bytes", end - begin);
                begin += length;
                all.push(step);
            }
            Ok(None) if end == bytes.len() => return (all, None),
            Ok(None) => end = end.saturating_add(piece).min(bytes.len()),
            Err(why) => return (all, why),
        }
    }
}

/// The exports: a disk, and one that is read-only.
struct Two;

const DISK: Export = Export { size: 1 << 20, read_only: false, block: 512 };
const NAMES: [&str; 4] = ["disk", "fixed", "new", ""];

impl Exports for Two {
    fn list(&self) -> Vec<String> {
        vec!["disk".to_owned(), "fixed".to_owned()]
    }

    fn find(&self, name: &str) -> Option<Export> {
        match name {
            "disk" | "new" => Some(DISK),
            "fixed" => Some(Export { read_only: true, ..DISK }),
            _ => None,
        }
    }

    fn choose(&self, name: &str) -> Result<(String, Export), Refusal> {
        let known_as = if name == "new" { "a capability" } else { name };
        let export = self.find(name).ok_or(Refusal::Unknown)?;
        let is_free = known_as != "fixed";
        is_free.then(|| (known_as.to_owned(), export)).ok_or(Refusal::Policy("busy".to_owned()))
    }
}

/// Tests a server's negotiation with a client's messages.
pub(crate) fn negotiation(data: &[u8]) {
    let mut choices = Choices(data);
    let choice = choices.byte();
    let messages = if choice & 1 == 0 { choices.0.to_vec() } else { options(&mut choices) };
    let tls = if choice & 2 == 0 { Tls::Absent } else { Tls::Required };
    let whole = negotiate(tls, &messages, usize::MAX);
    let pieces = negotiate(tls, &messages, 1 + usize::from(choice >> 2));
    assert_eq!(whole, pieces, "it matters in which pieces options come");
}

fn push_text(out: &mut Vec<u8>, text: &[u8]) {
    out.extend_from_slice(&u32::try_from(text.len()).unwrap().to_be_bytes());
    out.extend_from_slice(text);
}

fn options(choices: &mut Choices<'_>) -> Vec<u8> {
    let mut all = u32::from(choices.byte() & 3 | 1).to_be_bytes().to_vec();
    while !choices.is_empty() {
        let number = u32::from(choices.byte() % 12);
        let mut data = Vec::new();
        let wellformed = choices.byte();
        if wellformed & 1 == 0 {
            data.extend_from_slice(choices.take(usize::from(wellformed >> 1)));
        } else if matches!(number, option::GO | option::INFO) {
            push_text(&mut data, choices.of(&NAMES).as_bytes());
            let wants = u16::from(wellformed >> 1 & 7);
            data.extend_from_slice(&wants.to_be_bytes());
            data.extend_from_slice(choices.take(usize::from(wants) * 2));
        } else if matches!(number, option::SET_META_CONTEXT | option::LIST_META_CONTEXT) {
            push_text(&mut data, choices.of(&NAMES).as_bytes());
            let queries = u32::from(wellformed >> 1 & 3);
            data.extend_from_slice(&queries.to_be_bytes());
            for _ in 0..queries {
                push_text(
                    &mut data,
                    choices.of(&["base:allocation", "base:", "qemu:x"]).as_bytes(),
                );
            }
        } else if number == option::EXPORT_NAME {
            data.extend_from_slice(choices.of(&NAMES).as_bytes());
        }
        all.extend_from_slice(&wire::IHAVEOPT.to_be_bytes());
        all.extend_from_slice(&number.to_be_bytes());
        push_text(&mut all, &data);
    }
    all
}

type Negotiated = (Vec<negotiation::Step>, Option<ProtocolError>, Vec<u8>);

fn negotiate(tls: Tls, messages: &[u8], piece: usize) -> Negotiated {
    let mut out = Vec::new();
    let mut negotiation = Negotiation::new(tls, &mut out);
    let (mut is_open, mut is_over) = (tls == Tls::Absent, false);
    let (steps, error) = feed(messages, piece, |input| {
        if is_over {
            return Err(None);
        }
        let before = out.len();
        let step = negotiation.advance(input, &Two, &mut out).map_err(Some)?;
        assert!(out.len() - before < 1024, "a long answer to one option");
        match step.as_ref().map(|(_, step)| step) {
            None => assert_eq!(out.len(), before, "an answer to half an option"),
            Some(negotiation::Step::Next) => {}
            Some(negotiation::Step::End) => is_over = true,
            Some(negotiation::Step::StartTls) => {
                assert!(!is_open, "TLS begins twice, or unasked");
                is_open = true;
                negotiation.secured();
            }
            Some(negotiation::Step::Chosen(session)) => {
                assert!(is_open, "an export without TLS");
                assert!(!session.status || session.structured, "block status without chunks");
                let known = ["disk", "fixed", "a capability"].contains(&&*session.name);
                assert!(known, "an export that is not there");
                is_over = true;
            }
        }
        Ok(step)
    });
    assert!(steps.len() < 300, "options without an end");
    (steps, error, out)
}

/// Tests a request against an export.
pub(crate) fn requests(data: &[u8]) {
    let mut choices = Choices(data);
    let (size, choice) = (choices.short(), choices.byte());
    let (block, read_only, status) = (1 << (choice & 15), choice & 16 != 0, choice & 32 != 0);
    let size = u64::from(size) << (choice >> 4);
    let export = Export { size, read_only, block };
    let mut bytes = wire::REQUEST.to_be_bytes().to_vec();
    if choice & 64 != 0 {
        bytes.clear();
    }
    bytes.extend_from_slice(choices.0);
    let Ok(Some(request)) = Request::parse(&bytes) else { return };
    assert!(request.payload() <= MAX_PAYLOAD as usize, "a payload too long");
    let mut again = Vec::new();
    request.encode(&mut again);
    assert!(request.command.is_none() || again == bytes[..HEADER], "another request");
    for cut in 0..HEADER {
        assert_eq!(Request::parse(&bytes[..cut]), Ok(None), "half a request is one");
    }
    let command = match request.check(export, status) {
        Ok(Command::Disconnect | Command::Flush) | Err(_) => return,
        Ok(command) => command,
    };
    let writes = matches!(command, Command::Write | Command::WriteZeroes | Command::Trim);
    assert!(!writes || !read_only, "a write to what cannot be written");
    assert!(command != Command::BlockStatus || status, "block status that nobody agreed on");
    assert!(command != Command::Read || request.length <= MAX_PAYLOAD, "a read too long");
    assert!(request.length > 0, "nothing is asked for");
    let end = request.offset.checked_add(request.length.into()).unwrap();
    assert!(end <= size, "beyond the end");
    let edges = request.offset | u64::from(request.length);
    assert!(edges.is_multiple_of(block.into()), "a part of a block");
}

/// Tests a client's negotiation with a server's messages.
pub(crate) fn dialogue(data: &[u8]) {
    let mut choices = Choices(data);
    let choice = choices.byte();
    let (tls, status) = (choice & 2 != 0, choice & 4 != 0);
    let wanted = Wanted { name: "disk".to_owned(), tls, status };
    let bytes =
        if choice & 1 == 0 { choices.0.to_vec() } else { answers(&mut choices, wanted.clone()) };
    let whole = talk(wanted.clone(), &bytes, usize::MAX);
    let pieces = talk(wanted, &bytes, 1 + usize::from(choice >> 3));
    assert_eq!(whole, pieces, "it matters in which pieces answers come");
}

/// Answers to a client's options, most of them of the right form.
fn answers(choices: &mut Choices<'_>, wanted: Wanted) -> Vec<u8> {
    const KINDS: [u32; 8] =
        [1, 3, 4, 2, wire::option_reply::UNSUPPORTED, wire::option_reply::ERROR + 77, 1, 3];
    let mut dialogue = Dialogue::new(wanted);
    let mut said = Vec::new();
    let mut all = wire::NBDMAGIC.to_be_bytes().to_vec();
    all.extend_from_slice(&wire::IHAVEOPT.to_be_bytes());
    all.extend_from_slice(&u16::from(choices.byte() | 1).to_be_bytes());
    let mut message = all.clone();
    while let Ok(Some((_, step))) = dialogue.advance(&message, &mut said) {
        if step == dialogue::Step::StartTls {
            dialogue.secured(&mut said);
        }
        if choices.is_empty() || matches!(step, dialogue::Step::Ready(_)) {
            break;
        }
        let (kind, choice) = (choices.of(&KINDS), choices.byte());
        let mut content = Vec::new();
        match kind {
            3 if choice & 1 == 0 => {
                content.extend_from_slice(&0_u16.to_be_bytes());
                content.extend_from_slice(choices.take(10));
            }
            3 => {
                content.extend_from_slice(&u16::from(choice >> 1 & 3).to_be_bytes());
                content.extend_from_slice(choices.take(usize::from(choice >> 3)));
            }
            4 => {
                content.extend_from_slice(&u32::from(choice & 1).to_be_bytes());
                content.extend_from_slice(choices.of(&["base:allocation", "base:x"]).as_bytes());
            }
            1 => {}
            _ => content.extend_from_slice(choices.take(choice.into())),
        }
        message.clear();
        message.extend_from_slice(&wire::OPTION_REPLY.to_be_bytes());
        message.extend_from_slice(&last_option(&said).to_be_bytes());
        message.extend_from_slice(&kind.to_be_bytes());
        push_text(&mut message, &content);
        all.extend_from_slice(&message);
    }
    all.extend_from_slice(choices.0);
    all
}

/// Number of the last option that a client has sent.
fn last_option(said: &[u8]) -> u32 {
    let (mut rest, mut last) = (said.get(4..).unwrap_or_default(), 0);
    while let Some(header) = rest.get(..16) {
        last = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let length = u32::from_be_bytes(header[12..].try_into().unwrap());
        rest = &rest[16 + length as usize..];
    }
    last
}

type Talked = (Vec<dialogue::Step>, Option<ProtocolError>, Vec<u8>);

fn talk(wanted: Wanted, bytes: &[u8], piece: usize) -> Talked {
    let mut dialogue = Dialogue::new(wanted.clone());
    let (mut said, mut is_secured, mut is_over) = (Vec::new(), false, false);
    let (steps, error) = feed(bytes, piece, |input| {
        if is_over {
            return Err(None);
        }
        let step = dialogue.advance(input, &mut said).map_err(Some)?;
        assert!(said.len() < 1024, "a client that talks and talks");
        let without = said.len() >= 4 && last_option(&said) != option::STARTTLS;
        assert!(!without || is_secured || !wanted.tls, "something is asked without TLS");
        match step.as_ref().map(|(_, step)| step) {
            None | Some(dialogue::Step::Next) => {}
            Some(dialogue::Step::StartTls) => {
                assert!(wanted.tls && !is_secured, "TLS begins twice, or unasked");
                is_secured = true;
                dialogue.secured(&mut said);
            }
            Some(dialogue::Step::Ready(Session { name, export, structured, status })) => {
                assert!(is_secured || !wanted.tls, "an export without TLS");
                assert!(!status || (*structured && wanted.status), "block status unasked");
                assert!(export.block.is_power_of_two(), "blocks of {}", export.block);
                assert!(name.len() <= wire::MAX_STRING as usize, "a long name");
                is_over = true;
            }
        }
        Ok(step)
    });
    (steps, error, said)
}

/// A client's request in a target; a byte or two encode its offset and length.
struct FuzzedRequest {
    command: Command,
    offset: u64,
    length: u32,
}

/// Tests a client's requests in flight with a server's replies.
pub(crate) fn in_flight(data: &[u8]) {
    const COMMANDS: [Command; 4] =
        [Command::Read, Command::BlockStatus, Command::Write, Command::Read];
    let mut choices = Choices(data);
    let choice = choices.byte();
    let mut questions = Vec::new();
    for _ in 0..=(choice >> 1 & 7) {
        let (command, offset) = (choices.of(&COMMANDS), choices.byte().into());
        questions.push(FuzzedRequest { command, offset, length: u32::from(choices.byte()) + 1 });
    }
    let bytes =
        if choice & 1 == 0 { choices.0.to_vec() } else { replies(&mut choices, &questions) };
    let whole = hear(&questions, &bytes, usize::MAX);
    let pieces = hear(&questions, &bytes, 1 + usize::from(choice >> 4));
    assert_eq!(whole, pieces, "it matters in which pieces replies come");
}

fn replies(choices: &mut Choices<'_>, questions: &[FuzzedRequest]) -> Vec<u8> {
    let mut all = Vec::new();
    while !choices.is_empty() {
        let choice = choices.byte();
        let cookie = usize::from(choice & 7);
        let question = questions.get(cookie);
        let (offset, length) = question.map_or((0, 1), |q| (q.offset, q.length));
        if choice & 8 == 0 {
            all.extend_from_slice(&wire::SIMPLE_REPLY.to_be_bytes());
            all.extend_from_slice(&u32::from(choice >> 4).to_be_bytes());
            all.extend_from_slice(&(cookie as u64).to_be_bytes());
            if choice >> 4 == 0 && question.is_some_and(|q| q.command == Command::Read) {
                all.resize(all.len() + length as usize, choices.byte());
            }
            continue;
        }
        let kind = choices.of(&[1_u16, 2, 5, 1, 0, wire::chunk::ERROR, wire::chunk::ERROR + 6, 9]);
        let mut content = Vec::new();
        let part = choices.byte();
        match kind {
            1 => {
                content.extend_from_slice(&(offset + u64::from(part)).to_be_bytes());
                let length = if part == 0 { length as usize } else { choices.byte().into() };
                content.resize(8 + length, 0xaa);
            }
            2 => {
                content.extend_from_slice(&(offset + u64::from(part)).to_be_bytes());
                content.extend_from_slice(&u32::from(choices.byte()).to_be_bytes());
            }
            5 => {
                content.extend_from_slice(&u32::from(part != 7).to_be_bytes());
                for _ in 0..part & 7 {
                    content.extend_from_slice(&u32::from(choices.byte()).to_be_bytes());
                    content.extend_from_slice(&u32::from(choices.byte()).to_be_bytes());
                }
            }
            _ => content.extend_from_slice(choices.take(part.into())),
        }
        all.extend_from_slice(&wire::STRUCTURED_REPLY.to_be_bytes());
        all.extend_from_slice(&u16::from(choice >> 4 & 1).to_be_bytes());
        all.extend_from_slice(&kind.to_be_bytes());
        all.extend_from_slice(&(cookie as u64).to_be_bytes());
        push_text(&mut all, &content);
    }
    all
}

type Heard = (Vec<Option<Finished>>, Option<ProtocolError>);

fn hear(questions: &[FuzzedRequest], bytes: &[u8], piece: usize) -> Heard {
    let mut in_flight = InFlight::default();
    let mut open: Vec<Option<&FuzzedRequest>> = Vec::new();
    for question in questions {
        let FuzzedRequest { command, offset, length } = *question;
        assert_eq!(in_flight.ask(command, offset, length), open.len() as u64);
        open.push(Some(question));
    }
    feed(bytes, piece, |input| {
        let advanced = in_flight.advance(input).map_err(Some)?;
        if advanced.is_none() {
            let expected = in_flight.expects(input);
            assert!(expected == 0 || expected > input.len(), "what is whole is not taken");
            let most = SIMPLE.max(CHUNK) + MAX_PAYLOAD as usize + 4096;
            assert!(expected <= most, "{expected} bytes are waited for");
        }
        if let Some((_, Some(finished))) = &advanced {
            let open = open.get_mut(usize::try_from(finished.cookie).unwrap()).unwrap();
            let question = open.take().expect("a request is answered twice");
            fits(question, &finished.result);
        }
        assert_eq!(in_flight.len(), open.iter().flatten().count());
        Ok(advanced)
    })
}

fn fits(question: &FuzzedRequest, result: &Result<Brought, Errno>) {
    match (question.command, result) {
        (_, Err(_)) => {}
        (Command::Read, Ok(Brought::Data(data))) => {
            assert_eq!(data.len(), question.length as usize, "more or less than asked for");
        }
        (Command::BlockStatus, Ok(Brought::Extents(extents))) => {
            let mut at = 0;
            for extent in extents {
                assert!(at < question.length.into(), "an extent that nobody asked for");
                assert!(extent.length > 0, "an empty extent");
                at += u64::from(extent.length);
            }
            assert!(at > 0, "no extent");
        }
        (Command::Write, Ok(Brought::Done)) => {}
        (command, brought) => panic!("{command:?} brings {brought:?}"),
    }
}
