//! The protocol between borrower and lender. This file *is* its specification.
//!
//! # Connections
//! A borrower makes up a random 16-byte name for its session and opens, to each lender, one *main*
//! connection and then several *get* connections, all under that name. All share one namespace of
//! pages at the lender, which no other name can reach. The name is known to nobody else, so whoever
//! says it is that borrower: it is the token by which a session is resumed (see below).
//!
//! ```text
//! borrower                                   lender
//!    │ Hello{protocol, role, session} ─────────▶│   first frame on every connection
//!    │◀──────── Welcome{incarnation, capacity}  │   or Refused{code, text}, then close
//!
//!  main │ Put{items, pages} ───────────────────▶│   one PutReply for each Put, in order
//!       │◀───────────────── PutReply{statuses}  │
//!       │ Drop{keys} ──────────────────────────▶│   no reply
//!       │ Ping ────────────────────────────────▶│   on any connection
//!       │◀────────────────────────── Pong{room} │
//!       │◀─────────────────────── Lost{keys}    │   at any time: pages the lender no longer has
//!       │ Bye ─────────────────────────────────▶│   last frame of the session; no reply, the lender closes
//!
//!  get  │ Get{keys} ───────────────────────────▶│   one GetReply for each Get, in order
//!       │◀──────────── GetReply{items, pages}   │
//! ```
//!
//! A *guest* that gives its host what it evicts opens one connection, with a name that nobody uses
//! again:
//!
//! ```text
//! guest                                           host
//!    │ Hello{protocol, role, session} ─────────────▶│
//!    │◀───────────────────────────────── Welcome{}  │
//!    │ Demote{pages} ──────────────────────────────▶│   one Demoted for each Demote, in order
//!    │◀────────────────────────── Demoted{statuses} │
//!    │ Held{spans} ────────────────────────────────▶│   no reply: pages of its disk that the guest has read into its own cache
//! ```
//!
//! Its key says which image is its disk: each guest has one of its own. Positions are those on the
//! virtual disk.
//!
//! A guest that says how its memory is to be placed on the host's nodes sends one Advise behind the
//! Welcome, and is answered with one Advised.
//!
//! # Frames
//! A frame is a [`Header`] and `body_bytes` bytes of body. All integers are little-endian, all
//! structures packed without gaps. The header says kind, number of items and a request number which
//! the reply repeats (but that of a Hello). The sizes must match the kind exactly
//! ([`Header::validate`]); anything else ends the connection. A frame has at most [`ITEMS_MAX`]
//! items, which is a 1 MiB read-ahead window, so no frame is longer than [`BODY_BYTES_MAX`].
//!
//! | kind | body |
//! |---|---|
//! | Handshake1, Handshake2 | [`secure::HANDSHAKE_BYTES`] of Noise; the request number of the first is [`PROTOCOL`] |
//! | Hello | [`Hello`], and a main connection's next version: sealed 8 bytes, else the request number |
//! | Welcome | [`Welcome`] |
//! | Refused | [`Refused`] |
//! | Put | items × [`PutItem`], then items × page |
//! | PutReply | items × one byte, 1 stored, 0 not |
//! | Get | items × [`WireKey`] |
//! | GetReply | items × [`GetItem`], then a page for each item with status [`STATUS_PAGE`] |
//! | Drop, Lost | items × [`WireKey`] |
//! | Pong | [`Room`] |
//! | Demote | items × [`DemotedPage`]; at most [`DEMOTE_ITEMS_MAX`]. The pages are sealed as items are |
//! | Demoted | items × one byte, a [`Fate`] |
//! | Held | items × [`PageSpan`] |
//! | Advise | [`Advice`] |
//! | Advised | [`Refused`]; code 0: granted |
//! | Ping, Bye | nothing |
//!
//! # Keys
//! A lender either has the pool's key or trusts its network, and a borrower likewise. With the key,
//! a connection begins with Handshake1 and Handshake2, and from then on each frame is sealed, in
//! both directions ([`secure`] has the layout). Without it, a connection begins with Hello. A peer
//! that comes the wrong way or with another key is answered [`REFUSED_KEY`], in clear; nothing but
//! such a refusal is ever in clear where a key is used.
//!
//! # Sessions
//! A session lives at the lender as long as its main connection, and a grace time longer.
//!
//! ```text
//!             Welcome{}               main ends
//!   unknown ─────────────▶ connected ───────────────▶ kept
//!      ▲                     │   ▲                    │ │
//!      │ Bye, or no pages    │   │ Welcome{RESUMED}   │ │
//!      ├─────────────────────┘   └────────────────────┘ │
//!      │ the grace time is over, or the place is needed │
//!      └────────────────────────────────────────────────┘
//! ```
//!
//! 1. *Main opens it.* A main connection under an unknown name begins a session, and its Welcome
//!    has no flags. Under a known name it resumes that session with all pages the lender still has
//!    of it, and its Welcome says [`WELCOME_RESUMED`]. Its Hello says the version that the borrower
//!    will give out next, which a listener must not see; 0: it does not tell. If a Put of the
//!    session had that version or a later one, whoever says so is behind it: a machine that was set
//!    back to an earlier state, or a copy of one. It is refused ([`REFUSED_BEHIND`]) and begins
//!    anew under another name, as it would give out versions again that stand for something else;
//!    the session stays as it is.
//! 2. *The newest main takes over.* The borrower may have seen a time-out where the lender still
//!    sees a connection. So a main connection under the name of a session that has connections ends
//!    these first, and is welcomed when all they had sent and the lender had received was dealt
//!    with. So no Put of an old connection is applied after the session was resumed. Bytes do not
//!    depend on that, as a version names them; but a late Put would replace the newer version of
//!    its page, which would be a miss, and a page that is of no use to anybody would stay. If the
//!    old ones take longer than the lender likes to wait, it answers [`REFUSED_BUSY`], and the
//!    borrower tries again.
//! 3. *Gets follow main.* A get connection under a name that has no main connection is refused
//!    ([`REFUSED_SESSION`]): it could not learn whether the pages are there. When the main
//!    connection ends, the lender ends the get connections.
//! 4. *Kept.* When the main connection ends, for whatever reason but Bye, the lender keeps the
//!    session for its grace time, if it has pages. These are pages like all others: memory
//!    pressure, the kernel and newer pages take them as before, and what is taken is told (Lost)
//!    when the session is resumed, as far as the lender has room for such notes. A kept session
//!    makes room, the oldest one first, when a new one has no place.
//! 5. *Bye* ends the session at once and frees its pages. A borrower that stops for good says it.
//!    One that stops only for a successor, who knows the name, closes without it.
//! 6. *Silence.* A borrower sends Ping when it has nothing else to say, at least every
//!    [`PING_SECONDS_MAX`]. When the lender has no place for another session or connection, it may
//!    end a session that never put a page and from which nothing came for several times as long:
//!    else strangers that say nothing could shut the others out.
//!
//! *What the borrower may conclude.* After a lost connection it uses nothing at this lender. It
//! goes on noting what it would have dropped there. A Welcome with [`WELCOME_RESUMED`] says that
//! what was put before may be asked for again, by the same versions; what the borrower still has on
//! record as the current version of a page is current, because changes in between have taken their
//! pages off the record. A Welcome without it says that all is gone. A lender that says the one or
//! the other falsely costs misses. A successor in a session must give out no version that its
//! predecessor has given out.
//!
//! # What a page is called
//! [`WireKey`]: file, index and version. A version stands for one content for ever, so a message that comes late, twice or
//! not at all can cost a miss but never bring the wrong bytes: Drop and Lost are housekeeping, not
//! coherence. A lender keeps at most one version of a page; a Put replaces what it had. A Get of
//! another version than the one kept is a miss.
//!
//! # Compatibility
//! [`Hello`] and [`Refused`] never change their layout where nothing is sealed, nor does the place
//! of the version in Handshake1. A lender that does not speak the version it is asked for answers
//! Refused with [`REFUSED_PROTOCOL`] and the version it speaks in its text, before it looks for a
//! key.

pub mod address;
pub mod complaints;
pub mod confined;
pub mod frames;
pub mod key;
pub mod listener;
pub mod named;
pub mod secure;
pub mod strangers;

use page::{FileKey, PAGE_SIZE, PageId, Version};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of the protocol described here.
pub const PROTOCOL: u32 = 4;

/// First bytes of a [`Hello`].
pub const MAGIC: [u8; 8] = *b"PUMAPOOL";

/// Connections of a session at the most. More would not make the network faster.
pub const SESSION_CONNECTIONS_MAX: usize = 16;

/// The longest grace time that a lender may be told, in seconds, and the time for which a borrower
/// remembers what it has at a lender that is away: beyond it the one could not make use of the
/// other.
pub const GRACE_SECONDS_MAX: u64 = 600;

/// A borrower that has nothing to say sends a Ping at least this often, in seconds.
pub const PING_SECONDS_MAX: u64 = 10;

/// Items in a frame at the most: the pages of a 1 MiB read-ahead window.
pub const ITEMS_MAX: usize = 256;

/// Bytes of a frame's body at the most: a full Put.
pub const BODY_BYTES_MAX: usize = ITEMS_MAX * (size_of::<PutItem>() + PAGE_SIZE);

/// Bytes of body that the first frame of a connection may have, before anything is known of the
/// peer.
pub const FIRST_BODY_BYTES_MAX: usize = 512;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)] // the module's table says what each is
pub enum Kind {
    Hello = 1,
    Welcome = 2,
    Refused = 3,
    Put = 4,
    PutReply = 5,
    Get = 6,
    GetReply = 7,
    Drop = 8,
    Lost = 9,
    Ping = 10,
    Pong = 11,
    Bye = 12,
    Handshake1 = 13,
    Handshake2 = 14,
    Demote = 15,
    Demoted = 16,
    Held = 17,
    Advise = 18,
    Advised = 19,
}

impl Kind {
    fn from_wire(kind: u8) -> Option<Kind> {
        use Kind::*;
        const ALL: [Kind; 19] = [
            Hello, Welcome, Refused, Put, PutReply, Get, GetReply, Drop, Lost, Ping, Pong, Bye, Handshake1, Handshake2,
            Demote, Demoted, Held, Advise, Advised,
        ];
        ALL.into_iter().find(|known| *known as u8 == kind)
    }
}

/// [`Header::flags`] of a Get: the lender forgets the pages that it returns (exclusive strategy).
pub const GET_EXCLUSIVE: u8 = 1;

/// Before every body.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// Bytes that follow.
    pub body_bytes: U32,
    /// A [`Kind`].
    pub kind: u8,
    /// [`GET_EXCLUSIVE`], or 0.
    pub flags: u8,
    /// Number of items in the body.
    pub items: U16,
    /// Chosen by the asker, repeated by the answer.
    pub request: U64,
}

/// Why a frame was not understood. The receiver of one closes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// No such kind of frame.
    Kind(u8),
    /// More items than [`ITEMS_MAX`], or none where there must be some.
    Items(u16),
    /// The body's length does not fit kind and items.
    Length(u32),
    /// It was not sealed by the other side of this connection, or not as the next frame.
    Seal,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Malformed::Kind(kind) => write!(f, "frame of unknown kind {kind}"),
            Malformed::Items(items) => write!(f, "frame with {items} items"),
            Malformed::Seal => write!(f, "frame whose seal does not open"),
            Malformed::Length(bytes) => write!(f, "frame whose length of {bytes} bytes does not fit its kind"),
        }
    }
}

impl std::error::Error for Malformed {}

impl Header {
    /// A header for `items` items and `body_bytes` of body.
    pub fn new(kind: Kind, items: usize, body_bytes: usize, request: u64) -> Header {
        assert!(items <= ITEMS_MAX && body_bytes <= BODY_BYTES_MAX);
        Header {
            body_bytes: U32::new(body_bytes as u32),
            kind: kind as u8,
            flags: 0,
            items: U16::new(items as u16),
            request: U64::new(request),
        }
    }

    /// Checks that kind, items and length fit each other, before a byte of the body is read.
    pub fn validate(&self) -> Result<Kind, Malformed> {
        let kind = Kind::from_wire(self.kind).ok_or(Malformed::Kind(self.kind))?;
        let (items, body) = (self.items.get() as usize, self.body_bytes.get() as usize);
        let needs_items =
            matches!(kind, Kind::Put | Kind::PutReply | Kind::Get | Kind::GetReply | Kind::Drop | Kind::Lost)
                || matches!(kind, Kind::Demote | Kind::Demoted | Kind::Held);
        let items_max = if kind == Kind::Demote { DEMOTE_ITEMS_MAX } else { ITEMS_MAX };
        if items > items_max || needs_items != (items > 0) {
            return Err(Malformed::Items(self.items.get()));
        }
        let fits = match kind {
            Kind::Hello => body == size_of::<Hello>() || body == size_of::<Hello>() + size_of::<U64>(),
            Kind::Welcome => body == size_of::<Welcome>(),
            Kind::Refused => body == size_of::<Refused>(),
            Kind::Put => body == items * (size_of::<PutItem>() + PAGE_SIZE),
            Kind::PutReply => body == items,
            Kind::Get | Kind::Drop | Kind::Lost => body == items * size_of::<WireKey>(),
            Kind::GetReply => body
                .checked_sub(items * size_of::<GetItem>())
                .is_some_and(|pages| pages % PAGE_SIZE == 0 && pages <= items * PAGE_SIZE),
            Kind::Demote => body == items * size_of::<DemotedPage>(),
            Kind::Demoted => body == items,
            Kind::Held => body == items * size_of::<PageSpan>(),
            Kind::Advise => body == size_of::<Advice>(),
            Kind::Advised => body == size_of::<Refused>(),
            Kind::Pong => body == size_of::<Room>(),
            Kind::Ping | Kind::Bye => body == 0,
            Kind::Handshake1 | Kind::Handshake2 => body == secure::HANDSHAKE_BYTES,
        };
        if fits { Ok(kind) } else { Err(Malformed::Length(self.body_bytes.get())) }
    }

    /// How many bytes of the body are in front of its pages. For a header that is valid.
    pub fn items_bytes(&self) -> usize {
        let (items, body) = (self.items.get() as usize, self.body_bytes.get() as usize);
        let items_bytes = match self.kind {
            kind if kind == Kind::Put as u8 => items * size_of::<PutItem>(),
            kind if kind == Kind::GetReply as u8 => items * size_of::<GetItem>(),
            _ => body,
        };
        items_bytes.min(body)
    }
}

/// The connection carries puts and notices.
pub const ROLE_MAIN: u32 = 1;
/// The connection carries gets.
pub const ROLE_GET: u32 = 2;
/// The connection carries what a guest evicts.
pub const ROLE_GUEST: u32 = 3;
/// The connection carries what a guest advises on its memory.
pub const ROLE_ADVISER: u32 = 4;

/// The first frame of a connection.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`PROTOCOL`] of the borrower.
    pub protocol: U32,
    /// [`ROLE_MAIN`], [`ROLE_GET`], [`ROLE_GUEST`] or [`ROLE_ADVISER`].
    pub role: U32,
    /// The borrower's session.
    pub session: [u8; 16],
}

impl Hello {
    /// What a connection says first, and with which request number: a sealed one tells the next
    /// version (0: it does not) where no listener sees it.
    pub fn frame(&self, next_version: u64, is_sealed: bool) -> (u64, Vec<u8>) {
        let mut body = self.as_bytes().to_vec();
        if !is_sealed || next_version == 0 {
            return (next_version, body);
        }
        body.extend(next_version.to_le_bytes());
        (0, body)
    }

    /// Reads what [`Hello::frame`] has made: the Hello, and the next version if it is told.
    pub fn read(request: u64, body: &[u8], is_sealed: bool) -> Option<(Hello, Option<Version>)> {
        let (hello, rest) = Hello::read_from_prefix(body).ok()?;
        let next_version = match (is_sealed, U64::read_from_bytes(rest)) {
            (false, _) => request,
            (true, Ok(version)) => version.get(),
            (true, Err(_)) => 0,
        };
        Some((hello, Some(Version(next_version)).filter(|next| next.0 > 0)))
    }
}

/// [`Welcome::flags`] on a main connection: the session was here already, with what the lender
/// still has of its pages.
pub const WELCOME_RESUMED: u32 = 1;

/// The lender accepts.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// [`PROTOCOL`] of the lender.
    pub protocol: U32,
    /// [`WELCOME_RESUMED`], or 0.
    pub flags: U32,
    /// Random, new at each start of the lender.
    pub incarnation: U64,
    /// Pages that the lender keeps at the most.
    pub capacity_pages: U64,
}

/// The answer to a Ping: what the borrower chooses among lenders by.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Room {
    /// Pages that the lender could take now without forgetting others.
    pub free_pages: U64,
}

/// [`Refused::code`]: another version of the protocol is spoken here.
pub const REFUSED_PROTOCOL: u32 = 1;
/// [`Refused::code`]: too many connections or borrowers.
pub const REFUSED_BUSY: u32 = 2;
/// [`Refused::code`]: the first frame was no Hello, or had an unknown role.
pub const REFUSED_HELLO: u32 = 3;
/// [`Refused::code`]: a get connection of a session that has no main connection here.
pub const REFUSED_SESSION: u32 = 4;
/// [`Refused::code`]: the pool's key is wanted here, or is another one, or none is.
pub const REFUSED_KEY: u32 = 5;

/// The lender does not accept; it closes the connection behind this frame.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refused {
    /// Why.
    pub code: U32,
    /// Why, in words for a person: UTF-8, padded with zeros.
    pub text: [u8; 124],
}

impl Refused {
    /// A refusal; a text that is too long is cut.
    pub fn new(code: u32, text: &str) -> Refused {
        let mut refused = Refused { code: U32::new(code), text: [0; 124] };
        let cut = text.floor_char_boundary(refused.text.len());
        refused.text[..cut].copy_from_slice(&text.as_bytes()[..cut]);
        refused
    }

    /// The text, with whatever cannot be printed replaced.
    pub fn text(&self) -> String {
        let end = self.text.iter().position(|byte| *byte == 0).unwrap_or(self.text.len());
        String::from_utf8_lossy(&self.text[..end]).replace(|c: char| c.is_control(), "?")
    }
}

/// How a guest wants its memory to be placed. Answered by a [`Refused`] whose code is 0 where it is
/// granted.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Advice {
    /// The policy's name: ASCII, padded with zeros.
    pub policy: [u8; 16],
}

/// [`Refused::code`] of an answer to an [`Advice`]: not granted.
pub const REFUSED_ADVICE: u32 = 6;
/// [`Refused::code`]: the session has gone on without whoever says to be its borrower.
pub const REFUSED_BEHIND: u32 = 7;

/// Names one content of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct WireKey {
    /// The file's [`FileKey`].
    pub file: U32,
    /// The page's index.
    pub index: U32,
    /// The [`Version`].
    pub version: U64,
}

impl WireKey {
    /// The wire's form of a name.
    pub fn new(id: PageId, version: Version) -> WireKey {
        WireKey { file: U32::new(id.file.0), index: U32::new(id.index), version: U64::new(version.0) }
    }

    /// The page.
    pub fn id(&self) -> PageId {
        PageId { file: FileKey(self.file.get()), index: self.index.get() }
    }

    /// The version of its bytes.
    pub fn version(&self) -> Version {
        Version(self.version.get())
    }
}

/// A page to keep.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PutItem {
    /// Its name.
    pub key: WireKey,
    /// What [`page::seal::Sealing::seal`] has returned: made by the borrower, kept and returned by
    /// the lender.
    pub checksum: U64,
}

/// [`GetItem::status`]: not here.
pub const STATUS_MISS: u8 = 0;
/// [`GetItem::status`]: here; its bytes follow the items.
pub const STATUS_PAGE: u8 = 1;
/// [`GetItem::status`]: here, and all its bytes are zero; nothing follows.
pub const STATUS_ZERO: u8 = 2;

/// The answer for one page.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct GetItem {
    /// [`STATUS_MISS`], [`STATUS_PAGE`] or [`STATUS_ZERO`].
    pub status: u8,
    /// 0.
    pub reserved: [u8; 7],
    /// The checksum that came with the Put.
    pub checksum: U64,
}

/// Pages of a Demote at the most: a sealed frame of them fits into one message of Noise, 65,535
/// bytes.
pub const DEMOTE_ITEMS_MAX: usize = 15;

/// A page that a guest has evicted.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DemotedPage {
    /// Its place on the guest's disk, in pages.
    pub index: U64,
    /// Its bytes.
    pub bytes: [u8; PAGE_SIZE],
}

/// Pages of a guest's disk that lie one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PageSpan {
    /// The first one's place on the disk, in pages.
    pub first: U64,
    /// How many.
    pub pages: U32,
}

/// What became of a page that a guest has evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fate {
    /// The host's kernel caches it now.
    Stored = 1,
    /// It did already.
    Cached = 2,
    /// What the image holds of it is not known: it was neither read nor written through the host.
    Unknown = 3,
    /// The image holds something else.
    Differs = 4,
    /// The host had no room for it, or its kernel did not take it.
    Missed = 5,
}

impl Fate {
    /// All of them.
    pub const ALL: [Fate; 5] = [Fate::Stored, Fate::Cached, Fate::Unknown, Fate::Differs, Fate::Missed];

    /// Of a byte of a Demoted frame.
    pub fn from_wire(byte: u8) -> Option<Fate> {
        Fate::ALL.into_iter().find(|fate| *fate as u8 == byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_must_fit() {
        let good = [
            Header::new(Kind::Hello, 0, size_of::<Hello>(), 0),
            Header::new(Kind::Put, 2, 2 * (24 + 4096), 1),
            Header::new(Kind::Put, ITEMS_MAX, BODY_BYTES_MAX, 1),
            Header::new(Kind::GetReply, 3, 3 * 16 + 2 * 4096, 1),
            Header::new(Kind::Ping, 0, 0, 1),
            Header::new(Kind::Demote, DEMOTE_ITEMS_MAX, DEMOTE_ITEMS_MAX * (8 + 4096), 1),
            Header::new(Kind::Demoted, 2, 2, 1),
            Header::new(Kind::Held, 2, 2 * 12, 1),
            Header::new(Kind::Bye, 0, 0, 0),
            Header::new(Kind::Handshake1, 0, secure::HANDSHAKE_BYTES, PROTOCOL.into()),
        ];
        for header in good {
            assert!(header.validate().is_ok(), "{header:?}");
            let mut longer = header;
            longer.body_bytes = U32::new(header.body_bytes.get() + 1);
            assert!(matches!(longer.validate(), Err(Malformed::Length(_))), "{longer:?}");
        }
    }

    #[test]
    fn strangers_are_refused() {
        let mut header = Header::new(Kind::Get, 1, size_of::<WireKey>(), 0);
        header.items = U16::new(ITEMS_MAX as u16 + 1);
        assert_eq!(header.validate(), Err(Malformed::Items(257)));
        header.items = U16::new(0);
        assert_eq!(header.validate(), Err(Malformed::Items(0)));
        header.kind = 0;
        assert_eq!(header.validate(), Err(Malformed::Kind(0)));
        let http = Header::read_from_bytes(b"GET / HTTP/1.1\r\n").unwrap();
        assert!(http.validate().is_err());
    }

    #[test]
    fn refusal_text_survives() {
        assert_eq!(Refused::new(1, "no").text(), "no");
        let long = "é".repeat(200);
        assert!(long.starts_with(&Refused::new(1, &long).text()));
    }
}
