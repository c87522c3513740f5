//! The client's side of the negotiation: from the server's greeting until it has its export.

use super::negotiation::Session;
use super::request::Export;
use super::wire::{
    self, ALLOCATION, Bytes, MAX_OPTION, MAX_STRING, export_flag, info, option, option_reply,
    push_text,
};
use super::{HandshakeRequest, ProtocolError};

/// Maximum number of replies in a negotiation.
const MAX_REPLIES: u32 = 4096;

/// A client's wishes for its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Name of the export.
    pub name: String,
    /// Whether TLS is required.
    pub tls: bool,
    /// Whether block status is wanted, if the server supports it.
    pub status: bool,
}

/// The next step of the negotiation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send `out`, then read the server's next message.
    Next,
    /// Start TLS. Any other received bytes must be dropped.
    StartTls,
    /// Send requests, or stop here if the export was only asked about.
    Ready(Session),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    Greeting,
    Tls,
    /// For [`Dialogue::secured`].
    Handshake,
    Structured,
    Status,
    Go,
}

/// State of the negotiation.
#[derive(Debug)]
pub struct Dialogue {
    wanted: Wanted,
    /// The option that asks for the export.
    choice: u32,
    waits: Waits,
    structured: bool,
    status: bool,
    known_as: String,
    export: Option<Export>,
    block: u32,
    replies: u32,
}

impl Dialogue {
    /// A dialogue that chooses an export; the server speaks first.
    #[must_use]
    pub fn new(wanted: Wanted) -> Self {
        let waits = Waits::Greeting;
        Self {
            known_as: wanted.name.clone(),
            wanted,
            choice: option::GO,
            waits,
            structured: false,
            status: false,
            export: None,
            block: 1,
            replies: 0,
        }
    }

    /// A dialogue that only asks about an export, without choosing it.
    #[must_use]
    pub fn about(wanted: Wanted) -> Self {
        Self { choice: option::INFO, ..Self::new(wanted) }
    }

    /// Continues after the TLS handshake.
    pub fn secured(&mut self, out: &mut Vec<u8>) {
        self.ask_structured(out);
    }

    /// Parses one message at the front of `input`, and appends the answer to `out`. Returns the
    /// message's length and the next step; `None`: the message is incomplete.
    ///
    /// # Errors
    ///
    /// The server breaks the protocol, or refuses the export or TLS.
    pub fn advance(
        &mut self,
        input: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<(usize, Step)>, ProtocolError> {
        let mut bytes = Bytes::new(input);
        if self.waits == Waits::Greeting {
            let (Some(first), Some(second), Some(flags)) = (bytes.u64(), bytes.u64(), bytes.u16())
            else {
                return Ok(None);
            };
            wire::magic("the server", first, wire::NBDMAGIC)?;
            wire::magic("the server's second word", second, wire::IHAVEOPT)?;
            self.greet(flags, out)?;
            return Ok(Some((18, Step::Next)));
        }
        let (Some(magic), Some(asked), Some(kind), Some(length)) =
            (bytes.u64(), bytes.u32(), bytes.u32(), bytes.u32())
        else {
            return Ok(None);
        };
        wire::magic("a reply to an option", magic, wire::OPTION_REPLY)?;
        if length > MAX_OPTION {
            let (length, most) = (length.into(), MAX_OPTION.into());
            return Err(ProtocolError::TooLong { what: "a reply to an option", length, most });
        }
        let Some(data) = bytes.take(length as usize) else { return Ok(None) };
        self.replies += 1;
        if Some(asked) != self.asked() || self.replies > MAX_REPLIES {
            return Err(ProtocolError::Broken("the server answers what was not asked"));
        }
        let step = self.hear(kind, data, out)?;
        Ok(Some((20 + data.len(), step)))
    }

    fn greet(&mut self, flags: u16, out: &mut Vec<u8>) -> Result<(), ProtocolError> {
        if flags & wire::FIXED_NEWSTYLE == 0 {
            return Err(ProtocolError::Broken("the server does not know fixed newstyle"));
        }
        let no_zeroes = flags & wire::NO_ZEROES;
        out.extend_from_slice(&u32::from(wire::FIXED_NEWSTYLE | no_zeroes).to_be_bytes());
        if self.wanted.tls {
            self.waits = Waits::Tls;
            ask(out, option::STARTTLS, &[]);
        } else {
            self.ask_structured(out);
        }
        Ok(())
    }

    fn asked(&self) -> Option<u32> {
        match self.waits {
            Waits::Greeting | Waits::Handshake => None,
            Waits::Tls => Some(option::STARTTLS),
            Waits::Structured => Some(option::STRUCTURED_REPLY),
            Waits::Status => Some(option::SET_META_CONTEXT),
            Waits::Go => Some(self.choice),
        }
    }

    fn hear(&mut self, kind: u32, data: &[u8], out: &mut Vec<u8>) -> Result<Step, ProtocolError> {
        let is_error = kind & option_reply::ERROR != 0;
        match self.waits {
            Waits::Tls if kind == option_reply::ACK => {
                self.waits = Waits::Handshake;
                return Ok(Step::StartTls);
            }
            Waits::Tls if is_error => return Err(refused(HandshakeRequest::Tls, kind, data)),
            Waits::Structured if kind == option_reply::ACK && self.wanted.status => {
                self.structured = true;
                self.ask_status(out);
            }
            Waits::Structured if kind == option_reply::ACK || is_error => {
                self.structured = !is_error;
                self.ask_go(out);
            }
            Waits::Status if kind == option_reply::META_CONTEXT => {
                self.status |= data.get(4..) == Some(ALLOCATION.as_bytes());
            }
            Waits::Status if kind == option_reply::ACK || is_error => {
                self.status &= !is_error;
                self.ask_go(out);
            }
            Waits::Go if kind == option_reply::INFO => self.learn(data)?,
            Waits::Go if kind == option_reply::ACK => {
                let export =
                    self.export.ok_or(ProtocolError::Broken("the server tells no size"))?;
                return Ok(Step::Ready(Session {
                    name: self.known_as.clone(),
                    export: Export { block: self.block, ..export },
                    structured: self.structured,
                    status: self.status,
                }));
            }
            Waits::Go if is_error => return Err(refused(HandshakeRequest::Export, kind, data)),
            _ => return Err(ProtocolError::Broken("the server's answer is of another kind")),
        }
        Ok(Step::Next)
    }

    fn learn(&mut self, data: &[u8]) -> Result<(), ProtocolError> {
        const CUT_OFF: ProtocolError =
            ProtocolError::Broken("what is told of the export is cut off");
        let mut bytes = Bytes::new(data);
        match bytes.u16().ok_or(CUT_OFF)? {
            info::EXPORT => {
                let (size, flags) = (bytes.u64().ok_or(CUT_OFF)?, bytes.u16().ok_or(CUT_OFF)?);
                let read_only = flags & export_flag::READ_ONLY != 0;
                self.export = Some(Export { size, read_only, block: 1 });
            }
            info::NAME => {
                let name = std::str::from_utf8(bytes.rest()).ok();
                let name = name.filter(|name| name.len() <= MAX_STRING as usize);
                self.known_as = name.ok_or(CUT_OFF)?.to_owned();
            }
            info::BLOCK_SIZE => {
                let block = bytes.u32().ok_or(CUT_OFF)?;
                if !block.is_power_of_two() || block > 64 << 10 {
                    return Err(ProtocolError::Broken("the smallest request makes no sense"));
                }
                self.block = block;
            }
            _ => {}
        }
        Ok(())
    }

    fn ask_structured(&mut self, out: &mut Vec<u8>) {
        self.waits = Waits::Structured;
        ask(out, option::STRUCTURED_REPLY, &[]);
    }

    fn ask_status(&mut self, out: &mut Vec<u8>) {
        self.waits = Waits::Status;
        let mut data = Vec::new();
        push_text(&mut data, &self.wanted.name);
        data.extend_from_slice(&1_u32.to_be_bytes());
        push_text(&mut data, ALLOCATION);
        ask(out, option::SET_META_CONTEXT, &data);
    }

    fn ask_go(&mut self, out: &mut Vec<u8>) {
        self.waits = Waits::Go;
        let mut data = Vec::new();
        push_text(&mut data, &self.wanted.name);
        data.extend_from_slice(&1_u16.to_be_bytes());
        data.extend_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        ask(out, self.choice, &data);
    }
}

fn ask(out: &mut Vec<u8>, number: u32, data: &[u8]) {
    out.extend_from_slice(&wire::IHAVEOPT.to_be_bytes());
    out.extend_from_slice(&number.to_be_bytes());
    out.extend_from_slice(&wire::length(data.len()).to_be_bytes());
    out.extend_from_slice(data);
}

fn refused(what: HandshakeRequest, kind: u32, data: &[u8]) -> ProtocolError {
    let name = match kind {
        option_reply::UNSUPPORTED => "it does not know that",
        option_reply::POLICY => "it may not",
        option_reply::INVALID => "the question makes no sense to it",
        option_reply::TLS_REQUIRED => "TLS comes first",
        option_reply::UNKNOWN => "it has none of that name",
        _ => "error",
    };
    let words = model::words::plain(&String::from_utf8_lossy(data));
    let why = if words.is_empty() { name.to_owned() } else { format!("{name} ({words})") };
    ProtocolError::Refused { what, kind, why }
}
