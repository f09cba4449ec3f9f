//! The protocol between borrower and lender. This file *is* its specification.
//!
//! # Connections
//! A borrower makes a random 16-byte name for its session. It opens, to each lender, one *main*
//! connection and then several *get* connections, all under that name. All share one namespace of
//! pages at the lender, which no other name can reach. Nobody else has the name, so it identifies
//! the borrower: it is the token by which a session is resumed (see below).
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
//! A *guest* that sends its host evicted pages opens one connection, with a name that is never used
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
//! Its key determines the image that is its disk: each guest has a key of its own. Positions are
//! those on the virtual disk.
//!
//! A guest that requests a placement of its memory on the host's nodes sends one Advise after the
//! Welcome, and receives one Advised.
//!
//! # Frames
//! A frame is a [`Header`] and `body_bytes` bytes of body. All integers are little-endian, all
//! structures packed without gaps. The header contains the kind, the number of items and a request
//! number, which the reply repeats (except that of a Hello). The sizes must match the kind exactly
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
//! | Demoted | items × one byte, a [`DemotionOutcome`] |
//! | Held | items × [`PageSpan`] |
//! | Advise | [`Advice`] |
//! | Advised | [`Refused`]; code 0: granted |
//! | Ping, Bye | nothing |
//!
//! # Keys
//! A lender either has the pool's key or trusts its network, and so does a borrower. With the key,
//! a connection begins with Handshake1 and Handshake2, and from then on each frame is sealed, in
//! both directions ([`secure`] has the layout). Without it, a connection begins with Hello. A peer
//! that begins in the other way or with another key is answered with [`REFUSED_KEY`], in clear.
//! With a key, only such a refusal is ever sent in clear.
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
//!    has no flags. Under a known name it resumes that session with all pages that the lender still
//!    has of it, and its Welcome has [`WELCOME_RESUMED`]. Its Hello contains the next version that
//!    the borrower will use, which a listener must not see (0: none). If a Put of the session had
//!    that version or a later one, the borrower is behind its session: its machine was set back to
//!    an earlier state, or is a copy of one. The lender refuses it ([`REFUSED_BEHIND`]), because it
//!    would use versions again for other contents. It begins a new session under another name; the
//!    old session stays as it is.
//! 2. *The newest main takes over.* The borrower may have seen a time-out while the lender still
//!    sees a connection. So a main connection under the name of a session with connections ends
//!    these first. It is welcomed when the lender has processed everything that it had received
//!    from them. So no Put of an old connection is applied after the session was resumed.
//!    Correctness of bytes does not depend on that, because a version names them. But a late Put
//!    would replace the newer version of its page, which would be a miss, and a useless page would
//!    stay. If the old connections take longer than the lender waits, it answers [`REFUSED_BUSY`],
//!    and the borrower tries again.
//! 3. *Gets follow main.* A get connection under a name without a main connection is refused
//!    ([`REFUSED_SESSION`]): it could not learn whether the pages are there. When the main
//!    connection ends, the lender ends the get connections.
//! 4. *Kept.* When the main connection ends, for any reason except Bye, the lender keeps the
//!    session for its grace time, if it has pages. These are normal pages: memory pressure, the
//!    kernel and newer pages replace them as before. The lender reports replaced pages (Lost) when
//!    the session is resumed, as far as it has room for such notes. If a new session has no place,
//!    kept ones are removed, the oldest first.
//! 5. *Bye* ends the session at once and frees its pages. A borrower that stops for good sends it.
//!    One that stops for a successor, which has the name, closes the connection without it.
//! 6. *Silence.* A borrower sends Ping when it has nothing else to send, at least every
//!    [`PING_SECONDS_MAX`]. If the lender has no place for another session or connection, it may
//!    end a session that never put a page and that was silent for several times as long. Otherwise
//!    silent peers could shut others out.
//!
//! *Conclusions of the borrower.* After a lost connection it uses nothing at this lender. It
//! continues to record the pages that it would have dropped there. A Welcome with
//! [`WELCOME_RESUMED`] means that it may ask for earlier pages again, by the same versions. If its
//! catalog still has the current version of a page, this version is current, because changes in
//! between have removed their pages from the catalog. A Welcome without the flag means that all
//! pages are gone. A lender that reports this falsely causes misses. A successor in a session must
//! use no version that its predecessor has used.
//!
//! # What a page is called
//! [`WireKey`]: file, index and version. A version stands for one content for ever. So a message
//! that comes late, twice or not at all can cause a miss but never wrong bytes: Drop and Lost are
//! housekeeping, not coherence. A lender keeps at most one version of a page; a Put replaces it. A
//! Get of another version than the stored one is a miss.
//!
//! # Compatibility
//! [`Hello`] and [`Refused`] never change their layout while nothing is sealed, nor does the place
//! of the version in Handshake1. A lender that does not support the requested version answers
//! Refused with [`REFUSED_PROTOCOL`] and its own version in the text, before it checks for a key.

pub mod address;
pub mod confined;
pub mod frames;
pub mod key;
pub mod listener;
pub mod peers;
pub mod pre_authentication;
pub mod rate_limited_log;
pub mod secure;

use page::{FileKey, PAGE_SIZE, PageId, Version};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The version of this protocol.
pub const PROTOCOL: u32 = 4;

/// First bytes of a [`Hello`].
pub const MAGIC: [u8; 8] = *b"PUMAPOOL";

/// The maximum number of connections of a session. More would not make the network faster.
pub const SESSION_CONNECTIONS_MAX: usize = 16;

/// The maximum grace time of a lender in seconds, and the time for which a borrower keeps entries
/// of a disconnected lender: each would be useless beyond the other.
pub const GRACE_SECONDS_MAX: u64 = 600;

/// The maximum time in seconds between two Pings of a borrower that sends nothing else.
pub const PING_SECONDS_MAX: u64 = 10;

/// The maximum number of items in a frame: the pages of a 1 MiB read-ahead window.
pub const ITEMS_MAX: usize = 256;

/// The maximum length of a frame's body in bytes: a full Put.
pub const BODY_BYTES_MAX: usize = ITEMS_MAX * (size_of::<PutItem>() + PAGE_SIZE);

/// The maximum length of the first frame's body in bytes, before anything is known of the peer.
pub const FIRST_BODY_BYTES_MAX: usize = 512;

/// The kind of a frame.
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

/// Precedes every body.
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
    /// Chosen by the sender of the request, repeated by the response.
    pub request: U64,
}

/// The reason why a frame is malformed. Its receiver closes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// There is no such kind of frame.
    #[error("frame of unknown kind {0}")]
    Kind(u8),
    /// More items than [`ITEMS_MAX`], or none although some are required.
    #[error("frame with {0} items")]
    Items(u16),
    /// The body's length does not match kind and items.
    #[error("frame whose length of {0} bytes does not fit its kind")]
    Length(u32),
    /// The other side of this connection has not sealed it, or not as the next frame.
    #[error("frame whose seal does not open")]
    Seal,
}

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

    /// Checks that kind, items and length match, before a byte of the body is read.
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

    /// The number of bytes of the body in front of its pages. For a valid header.
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
/// The connection carries a guest's evicted pages.
pub const ROLE_GUEST: u32 = 3;
/// The connection carries a guest's request for the placement of its memory.
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
    /// The first frame of a connection and its request number. A sealed connection sends the next
    /// version (0: none) in a place that no listener sees.
    pub fn frame(&self, next_version: u64, is_sealed: bool) -> (u64, Vec<u8>) {
        let mut body = self.as_bytes().to_vec();
        if !is_sealed || next_version == 0 {
            return (next_version, body);
        }
        body.extend(next_version.to_le_bytes());
        (0, body)
    }

    /// Parses the result of [`Hello::frame`]: the Hello, and the next version if there is one.
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

/// [`Welcome::flags`] on a main connection: the session existed already, with those of its pages
/// that the lender still has.
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
    /// The maximum number of pages in the lender.
    pub capacity_pages: U64,
}

/// The answer to a Ping, by which the borrower chooses among lenders.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Room {
    /// Pages that the lender could store now without replacing others.
    pub free_pages: U64,
}

/// [`Refused::code`]: the lender has another version of the protocol.
pub const REFUSED_PROTOCOL: u32 = 1;
/// [`Refused::code`]: too many connections or borrowers.
pub const REFUSED_BUSY: u32 = 2;
/// [`Refused::code`]: the first frame was no Hello, or had an unknown role.
pub const REFUSED_HELLO: u32 = 3;
/// [`Refused::code`]: a get connection of a session that has no main connection here.
pub const REFUSED_SESSION: u32 = 4;
/// [`Refused::code`]: the pool's key is required here, or is another one, or there is none.
pub const REFUSED_KEY: u32 = 5;

/// The lender does not accept; it closes the connection after this frame.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Refused {
    /// The reason.
    pub code: U32,
    /// The reason as text for a person: UTF-8, padded with zeros.
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

    /// The text, with unprintable characters replaced.
    pub fn text(&self) -> String {
        let end = self.text.iter().position(|byte| *byte == 0).unwrap_or(self.text.len());
        String::from_utf8_lossy(&self.text[..end]).replace(|c: char| c.is_control(), "?")
    }
}

/// A guest's request for the placement of its memory. The answer is a [`Refused`], whose code is 0
/// if the request is granted.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Advice {
    /// The policy's name: ASCII, padded with zeros.
    pub policy: [u8; 16],
}

/// [`Refused::code`] of an answer to an [`Advice`]: not granted.
pub const REFUSED_ADVICE: u32 = 6;
/// [`Refused::code`]: the session has continued without this borrower.
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

/// A page to store.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PutItem {
    /// Its name.
    pub key: WireKey,
    /// The result of [`page::seal::Sealing::seal`]: made by the borrower, kept and returned by the
    /// lender.
    pub checksum: U64,
}

/// [`GetItem::status`]: not here.
pub const STATUS_MISS: u8 = 0;
/// [`GetItem::status`]: here; its bytes follow the items.
pub const STATUS_PAGE: u8 = 1;
/// [`GetItem::status`]: here, and all its bytes are zero; nothing follows.
pub const STATUS_ZERO: u8 = 2;

/// The response for one page.
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

/// The maximum number of pages of a Demote: a sealed frame of them fits into one message of Noise,
/// 65,535 bytes.
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

/// Consecutive pages of a guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PageSpan {
    /// The first one's place on the disk, in pages.
    pub first: U64,
    /// The number of pages.
    pub pages: U32,
}

/// The result for a page that a guest has evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum DemotionOutcome {
    /// The host's kernel caches it now.
    Stored = 1,
    /// The host's kernel had cached it already.
    Cached = 2,
    /// The image's content of this page is not known: it was neither read nor written through the
    /// host.
    Unknown = 3,
    /// The image has another content.
    Differs = 4,
    /// The host had no room for it, or its kernel did not take it.
    Missed = 5,
}

impl DemotionOutcome {
    /// All of them.
    pub const ALL: [DemotionOutcome; 5] = [
        DemotionOutcome::Stored,
        DemotionOutcome::Cached,
        DemotionOutcome::Unknown,
        DemotionOutcome::Differs,
        DemotionOutcome::Missed,
    ];

    /// Parses a byte of a Demoted frame.
    pub fn from_wire(byte: u8) -> Option<DemotionOutcome> {
        DemotionOutcome::ALL.into_iter().find(|outcome| *outcome as u8 == byte)
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
