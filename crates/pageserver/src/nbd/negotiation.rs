//! The server's side of the negotiation: from the greeting until an export is chosen.
//!
//! If TLS is required, only STARTTLS is answered before the handshake, and all input from before
//! it is dropped. So an attacker on the network can neither strip TLS nor inject options before
//! it.

use super::ProtocolError;
use super::request::Export;
use super::wire::{
    self, ALLOCATION, ALLOCATION_ID, Bytes, MAX_OPTION, MAX_PAYLOAD, export_flag, info, option,
    option_reply, push_text,
};

/// Maximum number of options of one client.
const MAX_OPTIONS: u32 = 256;
/// Maximum number of queries in one option about metadata contexts.
const MAX_QUERIES: u32 = 64;
/// Preferred block size of an export, in bytes: a page.
const PREFERRED: u32 = 4096;

/// The exports of a server.
pub trait Exports {
    /// Names that any client may know.
    fn list(&self) -> Vec<String>;
    /// The export of this name.
    fn find(&self, name: &str) -> Option<Export>;
    /// Chooses the export of this name for a client. From now on the export may have another
    /// name.
    ///
    /// # Errors
    ///
    /// The reason for refusing it.
    fn choose(&self, name: &str) -> Result<(String, Export), Refusal> {
        Ok((name.to_owned(), self.find(name).ok_or(Refusal::Unknown)?))
    }
}

/// Why a client cannot have an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no export of that name.
    Unknown,
    /// It is not for this client now, for this reason.
    Policy(String),
}

/// Whether a client has to use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tls {
    /// The server has no TLS.
    Absent,
    /// TLS is required and not set up yet.
    Required,
    /// TLS is set up.
    Done,
}

/// Result of a negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    /// Name of the export.
    pub name: String,
    /// The export.
    pub export: Export,
    /// Whether reads are answered in chunks.
    pub structured: bool,
    /// Whether block status may be asked for.
    pub status: bool,
}

/// The next step of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read the next option.
    Next,
    /// Send `out`, then start TLS. Any other received bytes must be dropped.
    StartTls,
    /// Serve requests.
    Chosen(Session),
    /// Send `out`, then close the connection.
    End,
}

/// State of the negotiation.
#[derive(Debug)]
pub struct Negotiation {
    tls: Tls,
    greeted: bool,
    no_zeroes: bool,
    structured: bool,
    /// The export for which block status was agreed on.
    status: Option<String>,
    options: u32,
}

/// An option that the client sent.
struct ClientOption<'a> {
    number: u32,
    data: &'a [u8],
}

impl Negotiation {
    /// Begins a negotiation by writing the greeting.
    pub fn new(tls: Tls, out: &mut Vec<u8>) -> Self {
        out.extend_from_slice(&wire::NBDMAGIC.to_be_bytes());
        out.extend_from_slice(&wire::IHAVEOPT.to_be_bytes());
        out.extend_from_slice(&(wire::FIXED_NEWSTYLE | wire::NO_ZEROES).to_be_bytes());
        Self { tls, greeted: false, no_zeroes: false, structured: false, status: None, options: 0 }
    }

    /// Continues after the TLS handshake, and drops all earlier agreements.
    pub fn secured(&mut self) {
        (self.tls, self.structured, self.status) = (Tls::Done, false, None);
    }

    /// Parses one message at the front of `input`, and appends the answer to `out`. Returns the
    /// message's length and the next step; `None`: the message is incomplete.
    ///
    /// # Errors
    ///
    /// The client violates the protocol.
    pub fn advance(
        &mut self,
        input: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Option<(usize, Step)>, ProtocolError> {
        let mut bytes = Bytes::new(input);
        if !self.greeted {
            let Some(flags) = bytes.u32() else { return Ok(None) };
            self.greet(flags)?;
            return Ok(Some((4, Step::Next)));
        }
        let (Some(magic), Some(number), Some(length)) = (bytes.u64(), bytes.u32(), bytes.u32())
        else {
            return Ok(None);
        };
        wire::magic("an option", magic, wire::IHAVEOPT)?;
        if length > MAX_OPTION {
            let (length, most) = (length.into(), MAX_OPTION.into());
            return Err(ProtocolError::TooLong { what: "an option", length, most });
        }
        let Some(data) = bytes.take(length as usize) else { return Ok(None) };
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Err(ProtocolError::Broken("the client sends options without an end"));
        }
        let step = self.answer(&ClientOption { number, data }, exports, out)?;
        Ok(Some((16 + data.len(), step)))
    }

    fn greet(&mut self, flags: u32) -> Result<(), ProtocolError> {
        let (newstyle, no_zeroes) = (u32::from(wire::FIXED_NEWSTYLE), u32::from(wire::NO_ZEROES));
        if flags & !(newstyle | no_zeroes) != 0 {
            return Err(ProtocolError::Broken("the client has unknown flags"));
        }
        if flags & newstyle == 0 {
            return Err(ProtocolError::Broken("the client does not know fixed newstyle"));
        }
        (self.greeted, self.no_zeroes) = (true, flags & no_zeroes != 0);
        Ok(())
    }

    fn answer(
        &mut self,
        asked: &ClientOption<'_>,
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, ProtocolError> {
        let is_first = matches!(asked.number, option::STARTTLS | option::ABORT);
        if self.tls == Tls::Required && !is_first {
            if asked.number == option::EXPORT_NAME {
                return Err(ProtocolError::Broken("the client asks for an export without TLS"));
            }
            asked.reply(out, option_reply::TLS_REQUIRED, b"");
            return Ok(Step::Next);
        }
        match asked.number {
            option::ABORT => {
                asked.reply(out, option_reply::ACK, b"");
                return Ok(Step::End);
            }
            option::STARTTLS => return Ok(self.start_tls(asked, out)),
            option::EXPORT_NAME => return self.export_name(asked, exports, out),
            option::GO | option::INFO => return Ok(self.go(asked, exports, out)),
            option::LIST if asked.data.is_empty() => {
                for name in exports.list() {
                    let mut entry = Vec::new();
                    push_text(&mut entry, &name);
                    asked.reply(out, option_reply::SERVER, &entry);
                }
                asked.reply(out, option_reply::ACK, b"");
            }
            option::STRUCTURED_REPLY if asked.data.is_empty() => {
                self.structured = true;
                asked.reply(out, option_reply::ACK, b"");
            }
            option::LIST | option::STRUCTURED_REPLY => {
                asked.reply(out, option_reply::INVALID, b"this option takes no data");
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(asked, exports, out);
            }
            _ => asked.reply(out, option_reply::UNSUPPORTED, b""),
        }
        Ok(Step::Next)
    }

    fn start_tls(&self, asked: &ClientOption<'_>, out: &mut Vec<u8>) -> Step {
        let kind = match self.tls {
            _ if !asked.data.is_empty() => option_reply::INVALID,
            Tls::Required => option_reply::ACK,
            Tls::Absent => option_reply::POLICY,
            Tls::Done => option_reply::INVALID,
        };
        asked.reply(out, kind, b"");
        if kind == option_reply::ACK { Step::StartTls } else { Step::Next }
    }

    fn export_name(
        &self,
        asked: &ClientOption<'_>,
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Step, ProtocolError> {
        let name = std::str::from_utf8(asked.data).ok();
        let Some((name, export)) = name.and_then(|name| exports.choose(name).ok()) else {
            return Err(ProtocolError::Broken("the client asks for an export that is not there"));
        };
        out.extend_from_slice(&export.size.to_be_bytes());
        out.extend_from_slice(&export.flags().to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; 124]);
        }
        // A client that chooses in this old way cannot have agreed on block status.
        let (structured, status) = (self.structured, false);
        Ok(Step::Chosen(Session { name, export, structured, status }))
    }

    fn go(&self, asked: &ClientOption<'_>, exports: &dyn Exports, out: &mut Vec<u8>) -> Step {
        let mut data = Bytes::new(asked.data);
        let name = data.text();
        let wants_are_whole =
            data.u16().is_some_and(|wants| data.rest().len() == wants as usize * 2);
        let Some(name) = name.filter(|_| wants_are_whole) else {
            asked.reply(out, option_reply::INVALID, b"the option's data are cut off");
            return Step::Next;
        };
        let goes = asked.number == option::GO;
        let found = if goes {
            exports.choose(name)
        } else {
            let found = exports.find(name).map(|export| (name.to_owned(), export));
            found.ok_or(Refusal::Unknown)
        };
        let (known_as, export) = match found {
            Ok(found) => found,
            Err(Refusal::Unknown) => {
                asked.reply(out, option_reply::UNKNOWN, b"there is no such export");
                return Step::Next;
            }
            Err(Refusal::Policy(why)) => {
                asked.reply(out, option_reply::POLICY, why.as_bytes());
                return Step::Next;
            }
        };
        if known_as != name {
            let mut told = info::NAME.to_be_bytes().to_vec();
            told.extend_from_slice(known_as.as_bytes());
            asked.reply(out, option_reply::INFO, &told);
        }
        let mut told = info::EXPORT.to_be_bytes().to_vec();
        told.extend_from_slice(&export.size.to_be_bytes());
        told.extend_from_slice(&export.flags().to_be_bytes());
        asked.reply(out, option_reply::INFO, &told);
        let mut told = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [export.block, export.block.max(PREFERRED), MAX_PAYLOAD] {
            told.extend_from_slice(&size.to_be_bytes());
        }
        asked.reply(out, option_reply::INFO, &told);
        asked.reply(out, option_reply::ACK, b"");
        if !goes {
            return Step::Next;
        }
        let status = self.structured && self.status.as_deref() == Some(name);
        Step::Chosen(Session { name: known_as, export, structured: self.structured, status })
    }

    fn meta_context(&mut self, asked: &ClientOption<'_>, exports: &dyn Exports, out: &mut Vec<u8>) {
        let sets = asked.number == option::SET_META_CONTEXT;
        if sets {
            self.status = None;
        }
        if !self.structured {
            asked.reply(out, option_reply::INVALID, b"structured replies come first");
            return;
        }
        let mut data = Bytes::new(asked.data);
        let (Some(name), Some(queries)) = (data.text(), data.u32()) else {
            asked.reply(out, option_reply::INVALID, b"the option's data are cut off");
            return;
        };
        if queries > MAX_QUERIES {
            asked.reply(out, option_reply::TOO_BIG, b"too many questions");
            return;
        }
        let mut is_asked_for = queries == 0 && !sets;
        for _ in 0..queries {
            let Some(query) = data.text() else {
                asked.reply(out, option_reply::INVALID, b"a question is cut off");
                return;
            };
            is_asked_for |= query == ALLOCATION || (query == "base:" && !sets);
        }
        if !data.rest().is_empty() {
            asked.reply(out, option_reply::INVALID, b"something stands behind the questions");
            return;
        }
        if exports.find(name).is_none() {
            asked.reply(out, option_reply::UNKNOWN, b"there is no such export");
            return;
        }
        if is_asked_for {
            let mut told = ALLOCATION_ID.to_be_bytes().to_vec();
            told.extend_from_slice(ALLOCATION.as_bytes());
            asked.reply(out, option_reply::META_CONTEXT, &told);
            if sets {
                self.status = Some(name.to_owned());
            }
        }
        asked.reply(out, option_reply::ACK, b"");
    }
}

impl ClientOption<'_> {
    fn reply(&self, out: &mut Vec<u8>, kind: u32, data: &[u8]) {
        out.extend_from_slice(&wire::OPTION_REPLY.to_be_bytes());
        out.extend_from_slice(&self.number.to_be_bytes());
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&wire::length(data.len()).to_be_bytes());
        out.extend_from_slice(data);
    }
}

impl Export {
    /// The flags in their wire format.
    #[must_use]
    pub fn flags(&self) -> u16 {
        use export_flag::{DF, FLUSH, FUA, HAS_FLAGS, MULTI_CONN, READ_ONLY, TRIM, WRITE_ZEROES};
        let always = HAS_FLAGS | FLUSH | FUA | DF | MULTI_CONN;
        always | if self.read_only { READ_ONLY } else { TRIM | WRITE_ZEROES }
    }
}
