//! The layout of the state memory, which a daemon writes for its successor, and the decoder that
//! the successor uses.
//!
//! It is a sparse file in memory (memfd) of fixed slots, so only used slots cost memory. It has
//! 64-bit words in native byte order, because writer and reader are processes of one machine. A
//! daemon can be killed between any two stores. So a writer stores single words in an order that
//! leaves every slot readable after each store. A slot is valid if its first word is set. That word
//! is stored last when the slot is filled, and cleared first.
//!
//! | at | what | size |
//! |---|---|---|
//! | [`HEADER_AT`] | numbers of the whole ([`header`]) | 4 KiB |
//! | [`SOURCE_AT`], [`MOUNTPOINT_AT`] | the two paths | 4 KiB each |
//! | [`INTENTS_AT`] | what workers are about to do ([`intent`]) | [`INTENTS`] slots of 64 bytes |
//! | [`OPENS_AT`] | what is open ([`open`]) | [`OPENS_MAX`] slots of 32 bytes |
//! | [`NODES_AT`] | what the kernel knows ([`node`]) | [`NODES_MAX`] slots of 512 bytes |
//!
//! [`decode`] depends only on the bytes. It must never panic, or allocate more memory than the size
//! of the bytes justifies.

use borrower::{FileIdentity, Stamp};
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The first word: "PumaKeep".
pub const MAGIC: u64 = u64::from_be_bytes(*b"PumaKeep");
/// Version of the layout; incremented with every change of it. A daemon takes over only from its
/// own version.
pub const VERSION: u64 = 2;

/// Bytes of a word.
pub const WORD: usize = 8;
/// Offset of the header.
pub const HEADER_AT: usize = 0;
/// Offset of the path of the backing directory.
pub const SOURCE_AT: usize = 4096;
/// Offset of the path of the mountpoint.
pub const MOUNTPOINT_AT: usize = 8192;
/// Longest path, in bytes.
pub const PATH_BYTES_MAX: usize = 4096;
/// Offset of the intents.
pub const INTENTS_AT: usize = 16384;
/// Number of intents: those of the present workers, and those that previous daemons left
/// unfinished.
pub const INTENTS: usize = 1024;
/// Bytes of an intent.
pub const INTENT_BYTES: usize = 64;
/// Offset of the open files and directories.
pub const OPENS_AT: usize = 1 << 20;
/// Limit on the open files and directories that survive. More than the default limit of descriptors
/// of a process (`fs.nr_open`).
pub const OPENS_MAX: usize = 1 << 20;
/// Bytes of an open file.
pub const OPEN_BYTES: usize = 32;
/// Offset of the nodes.
pub const NODES_AT: usize = 64 << 20;
/// Limit on the nodes that survive: 1 GiB of slots. The kernel needs some 6 GiB for as many inodes.
pub const NODES_MAX: usize = 1 << 21;
/// Bytes of a node.
pub const NODE_BYTES: usize = 512;
/// Size of the file in bytes, most of it holes.
pub const TOTAL_BYTES: usize = NODES_AT + NODES_MAX * NODE_BYTES;
/// Limit on the backing devices whose numbers are recorded.
pub const DEVICES_MAX: usize = 256;
/// Longest name of a file that is recorded, in bytes. The kernel may not cache longer names for
/// long, so they need not be recorded.
pub const NAME_BYTES_MAX: usize = 240;
/// Longest file handle (the kernel's MAX_HANDLE_SZ).
pub const HANDLE_BYTES_MAX: usize = 128;

/// Words of the header.
pub mod header {
    #![allow(missing_docs)] // Named for what they hold.
    pub const MAGIC: usize = 0;
    pub const VERSION: usize = 1;
    pub const MINOR: usize = 2;
    pub const CAPABILITIES: usize = 3;
    /// 1: `--write back`.
    pub const WRITE_BACK: usize = 4;
    /// 1: root.
    pub const ROOT: usize = 5;
    pub const OWN_DEVICE: usize = 6;
    pub const NEXT_NODE: usize = 7;
    pub const LAST_HANDLE: usize = 8;
    pub const NEXT_KEY: usize = 9;
    pub const NODES_USED: usize = 10;
    pub const OPENS_USED: usize = 11;
    pub const TAKEOVERS: usize = 12;
    /// 1: the present daemon has answered a request.
    pub const SERVED: usize = 13;
    pub const DEVICES: usize = 14;
    pub const SOURCE_BYTES: usize = 15;
    pub const MOUNTPOINT_BYTES: usize = 16;
    /// 1: all of the above is there.
    pub const COMPLETE: usize = 17;
    pub const FIRST_DEVICE: usize = 64;
}

/// Words of a node.
pub mod node {
    #![allow(missing_docs)] // Named for what they hold.
    /// 0: the slot is free.
    pub const NODE: usize = 0;
    pub const LOOKUPS: usize = 1;
    pub const DEVICE: usize = 2;
    pub const INODE: usize = 3;
    pub const GENERATION: usize = 4;
    /// File key in the lower half, kind (the type bits of a mode) in the upper.
    pub const KEY_AND_KIND: usize = 5;
    pub const FLAGS: usize = 6;
    /// Even and not 0: the stamp is whole.
    pub const STAMP_SEQUENCE: usize = 7;
    /// Five words: size, and the two times in halves.
    pub const STAMP: usize = 8;
    /// Type in the lower half, length in the upper.
    pub const HANDLE: usize = 13;
    pub const HANDLE_BYTES: usize = 14;
    /// The kernel's id of the backing file that opens are passed through to. 0: none.
    pub const BACKING: usize = 30;
    /// 0: no name.
    pub const NAME_PARENT: usize = 32;
    pub const NAME_LEN: usize = 33;
    pub const NAME_BYTES: usize = 34;

    /// Flag: the file has no name left.
    pub const DELETED: u64 = 1;
    /// Flag: a write out of the page cache has arrived for the file.
    pub const MAPPED_WRITES: u64 = 2;
    /// Flag: the kernel may still zero a part of a page at the edge of a hole.
    pub const EDGES: u64 = 4;
    /// Flag: the kernel has not yet dropped pages that it must drop.
    pub const DROP_PENDING: u64 = 8;
    /// Flag: the supervisor has a descriptor of the file.
    pub const KEPT: u64 = 16;
    /// Flag: the file was passed through at some time, so the kernel's cache of it may be outdated.
    pub const PASSED: u64 = 32;
    /// Flag: a name of the file has become stale, and a task that has used this name may still send
    /// a request.
    pub const STALE_NAME: u64 = 64;
    /// Flag: the kernel's size or times of the file are wrong.
    pub const MISBELIEVED: u64 = 128;
}

/// Words of an open file.
pub mod open {
    #![allow(missing_docs)] // Named for what they hold.
    /// 0: the slot is free.
    pub const HANDLE: usize = 0;
    pub const NODE: usize = 1;
    /// 1: a directory.
    pub const IS_DIRECTORY: usize = 2;
    /// The id of the user who opened the file, plus 1. From bit [`FLAGS_SHIFT`] on, the 23 bits of
    /// its open flags. 0: an older daemon has not recorded them.
    pub const USER: usize = 3;
    pub const FLAGS_SHIFT: u32 = 40;
}

/// Words of an intent.
pub mod intent {
    #![allow(missing_docs)] // Named for what they hold.
    /// [`NONE`], [`BEGUN`] or [`DONE`].
    pub const PHASE: usize = 0;
    pub const REQUEST: usize = 1;
    pub const OPCODE: usize = 2;
    /// A value that shows later whether the operation was done: an inode number or a size in bytes,
    /// depending on the operation.
    pub const SUBJECT: usize = 3;
    /// If the operation is done: 0 or the errno.
    pub const ERRNO: usize = 4;
    /// If the operation is done: the file handle that it opened, or the number of bytes that it
    /// wrote.
    pub const VALUE: usize = 5;

    pub const NONE: u64 = 0;
    pub const BEGUN: u64 = 1;
    pub const DONE: u64 = 2;
}

/// Reasons why state cannot be taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// There are fewer bytes than the header requires.
    #[error("the state memory is cut off")]
    Short,
    /// Not a state memory, or one that was never completed.
    #[error("this is no complete state memory")]
    NotState,
    /// Written by a daemon of another layout: that version.
    #[error("the state memory has layout {0}, this program knows {VERSION}: unmount and mount again")]
    Version(u64),
    /// A number beyond its bound.
    #[error("the state memory holds a number beyond its bound")]
    OutOfBounds,
}

/// The decoded state of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Named for what they are; the layout says more.
pub struct State {
    pub minor: u32,
    pub capabilities: u64,
    pub write_back: bool,
    pub root: bool,
    pub own_device: u64,
    pub next_node: u64,
    pub last_handle: u64,
    pub next_key: u32,
    pub takeovers: u64,
    pub devices: Vec<u64>,
    pub source: PathBuf,
    pub mountpoint: PathBuf,
    pub nodes: Vec<Node>,
    pub opens: Vec<Open>,
    pub intents: Vec<Intent>,
    pub nodes_used: u32,
    pub opens_used: u32,
}

/// A node that the kernel knows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Node {
    pub slot: u32,
    pub nodeid: u64,
    pub lookups: u64,
    pub identity: FileIdentity,
    /// Not 0: a regular file.
    pub key: u32,
    /// The type bits of its mode.
    pub kind: u32,
    /// Bits of [`node`].
    pub flags: u64,
    pub stamp: Option<Stamp>,
    pub handle: Option<(i32, Vec<u8>)>,
    pub backing: Option<u32>,
    pub name: Option<(u64, CString)>,
}

/// An open file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Open {
    pub slot: u32,
    pub handle: u64,
    pub nodeid: u64,
    pub is_directory: bool,
    pub uid: Option<u32>,
    pub flags: u32,
}

/// An operation that a worker was about to apply, or had applied and not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Intent {
    pub slot: u32,
    pub request: u64,
    pub opcode: u32,
    pub subject: u64,
    /// The result, if the operation was done: an errno or 0, and a value.
    pub done: Option<(i32, u64)>,
}

/// Words out of bytes, checked.
#[derive(Clone, Copy)]
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn slot(self, at: usize, len: usize) -> Result<Words<'a>, DecodeError> {
        let end = at.checked_add(len).ok_or(DecodeError::Short)?;
        self.0.get(at..end).map(Words).ok_or(DecodeError::Short)
    }

    /// A word of a slot; 0 behind its end.
    fn get(self, index: usize) -> u64 {
        let bytes = self.0.get(index * WORD..(index + 1) * WORD).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    }

    fn bytes(self, index: usize, len: usize) -> Option<&'a [u8]> {
        self.0.get(index * WORD..(index * WORD).checked_add(len)?)
    }

    fn path(self, at: usize, len: u64) -> Result<PathBuf, DecodeError> {
        let len = bounded(len, PATH_BYTES_MAX)?;
        Ok(PathBuf::from(OsStr::from_bytes(self.slot(at, len)?.0)))
    }
}

fn bounded(number: u64, max: usize) -> Result<usize, DecodeError> {
    usize::try_from(number).ok().filter(|number| *number <= max).ok_or(DecodeError::OutOfBounds)
}

/// Reads the state out of the memory's bytes.
///
/// # Errors
/// Fails if the bytes are not a state memory, or of another version, or inconsistent. An invalid
/// slot is skipped.
pub fn decode(bytes: &[u8]) -> Result<State, DecodeError> {
    let all = Words(bytes);
    let head = all.slot(HEADER_AT, SOURCE_AT - HEADER_AT)?;
    if head.get(header::MAGIC) != MAGIC {
        return Err(DecodeError::NotState);
    }
    if head.get(header::VERSION) != VERSION {
        return Err(DecodeError::Version(head.get(header::VERSION)));
    }
    if head.get(header::COMPLETE) != 1 {
        return Err(DecodeError::NotState);
    }
    let devices = bounded(head.get(header::DEVICES), DEVICES_MAX)?;
    let nodes_used = bounded(head.get(header::NODES_USED), NODES_MAX)?;
    let opens_used = bounded(head.get(header::OPENS_USED), OPENS_MAX)?;
    let mut nodes = Vec::new();
    for slot in 0..nodes_used {
        nodes.extend(decode_node(slot as u32, all.slot(NODES_AT + slot * NODE_BYTES, NODE_BYTES)?));
    }
    let mut opens = Vec::new();
    for slot in 0..opens_used {
        let words = all.slot(OPENS_AT + slot * OPEN_BYTES, OPEN_BYTES)?;
        let (handle, nodeid) = (words.get(open::HANDLE), words.get(open::NODE));
        if handle != 0 && nodeid != 0 {
            let is_directory = words.get(open::IS_DIRECTORY) == 1;
            let (user, flags) = (words.get(open::USER), (words.get(open::USER) >> open::FLAGS_SHIFT) as u32);
            let uid = user & ((1 << open::FLAGS_SHIFT) - 1);
            let uid = uid.checked_sub(1).and_then(|uid| u32::try_from(uid).ok());
            opens.push(Open { slot: slot as u32, handle, nodeid, is_directory, uid, flags });
        }
    }
    let mut intents = Vec::new();
    for slot in 0..INTENTS {
        intents.extend(decode_intent(slot as u32, all.slot(INTENTS_AT + slot * INTENT_BYTES, INTENT_BYTES)?));
    }
    Ok(State {
        minor: head.get(header::MINOR) as u32,
        capabilities: head.get(header::CAPABILITIES),
        write_back: head.get(header::WRITE_BACK) == 1,
        root: head.get(header::ROOT) == 1,
        own_device: head.get(header::OWN_DEVICE),
        next_node: head.get(header::NEXT_NODE),
        last_handle: head.get(header::LAST_HANDLE),
        next_key: u32::try_from(head.get(header::NEXT_KEY)).map_err(|_| DecodeError::OutOfBounds)?,
        takeovers: head.get(header::TAKEOVERS),
        devices: (0..devices).map(|index| head.get(header::FIRST_DEVICE + index)).collect(),
        source: all.path(SOURCE_AT, head.get(header::SOURCE_BYTES))?,
        mountpoint: all.path(MOUNTPOINT_AT, head.get(header::MOUNTPOINT_BYTES))?,
        nodes,
        opens,
        intents,
        nodes_used: nodes_used as u32,
        opens_used: opens_used as u32,
    })
}

/// The content of the header, for a process that only holds the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// Whether the present daemon has answered a request.
    pub has_served: bool,
    /// Where the mount is.
    pub mountpoint: PathBuf,
}

/// Reads the beginning of the memory, up to [`INTENTS_AT`].
///
/// # Errors
/// As for [`decode`].
pub fn about(bytes: &[u8]) -> Result<About, DecodeError> {
    let all = Words(bytes);
    let head = all.slot(HEADER_AT, SOURCE_AT - HEADER_AT)?;
    if head.get(header::MAGIC) != MAGIC || head.get(header::COMPLETE) != 1 {
        return Err(DecodeError::NotState);
    }
    let mountpoint = all.path(MOUNTPOINT_AT, head.get(header::MOUNTPOINT_BYTES))?;
    Ok(About { has_served: head.get(header::SERVED) == 1, mountpoint })
}

fn decode_node(slot: u32, words: Words<'_>) -> Option<Node> {
    let nodeid = words.get(node::NODE);
    let (key_and_kind, flags) = (words.get(node::KEY_AND_KIND), words.get(node::FLAGS));
    let sequence = words.get(node::STAMP_SEQUENCE);
    let half = |index: usize| u128::from(words.get(node::STAMP + index));
    let stamp = (sequence != 0 && sequence.is_multiple_of(2)).then(|| Stamp {
        size_bytes: words.get(node::STAMP),
        mtime_ns: (half(1) | half(2) << 64) as i128,
        ctime_ns: (half(3) | half(4) << 64) as i128,
    });
    let handle = words.get(node::HANDLE);
    let handle_len = (handle >> 32) as usize;
    let handle = (1..=HANDLE_BYTES_MAX).contains(&handle_len).then(|| {
        let bytes = words.bytes(node::HANDLE_BYTES, handle_len).unwrap_or_default();
        (handle as u32 as i32, bytes.to_vec())
    });
    let name_len = usize::try_from(words.get(node::NAME_LEN)).ok().filter(|len| (1..=NAME_BYTES_MAX).contains(len));
    let name = name_len.and_then(|len| CString::new(words.bytes(node::NAME_BYTES, len)?).ok());
    (nodeid != 0).then(|| Node {
        slot,
        nodeid,
        lookups: words.get(node::LOOKUPS),
        identity: FileIdentity {
            device: words.get(node::DEVICE),
            inode: words.get(node::INODE),
            generation: words.get(node::GENERATION),
        },
        key: key_and_kind as u32,
        kind: (key_and_kind >> 32) as u32,
        flags,
        stamp,
        handle,
        backing: u32::try_from(words.get(node::BACKING)).ok().filter(|backing| *backing != 0),
        name: name.map(|name| (words.get(node::NAME_PARENT), name)),
    })
}

fn decode_intent(slot: u32, words: Words<'_>) -> Option<Intent> {
    let done = match words.get(intent::PHASE) {
        intent::BEGUN => None,
        intent::DONE => Some((words.get(intent::ERRNO) as i32, words.get(intent::VALUE))),
        _ => return None,
    };
    let (request, opcode) = (words.get(intent::REQUEST), words.get(intent::OPCODE) as u32);
    Some(Intent { slot, request, opcode, subject: words.get(intent::SUBJECT), done })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Vec<u8> {
        let mut bytes = vec![0; NODES_AT + 4 * NODE_BYTES];
        let mut put = |at: usize, index: usize, value: u64| {
            bytes[at + index * WORD..][..WORD].copy_from_slice(&value.to_ne_bytes());
        };
        for (index, value) in [
            (header::MAGIC, MAGIC),
            (header::VERSION, VERSION),
            (header::COMPLETE, 1),
            (header::NODES_USED, 3),
            (header::OPENS_USED, 1),
            (header::DEVICES, 2),
            (header::SOURCE_BYTES, 4),
        ] {
            put(HEADER_AT, index, value);
        }
        for slot in [0, 2] {
            let at = NODES_AT + slot * NODE_BYTES;
            put(at, node::NODE, slot as u64 + 1);
            put(at, node::STAMP_SEQUENCE, slot as u64 + 1);
            put(at, node::NAME_LEN, 3);
            put(at, node::NAME_BYTES, 0x41_4141);
        }
        put(NODES_AT + 2 * NODE_BYTES, node::STAMP_SEQUENCE, 2);
        put(OPENS_AT, open::HANDLE, 7);
        put(OPENS_AT, open::NODE, 3);
        put(INTENTS_AT, intent::PHASE, intent::DONE);
        bytes
    }

    #[test]
    fn what_is_torn_or_free_is_not_read() {
        let state = decode(&sample()).unwrap();
        assert_eq!(state.nodes.iter().map(|node| node.nodeid).collect::<Vec<_>>(), [1, 3]);
        assert_eq!((state.nodes[0].stamp.is_some(), state.nodes[1].stamp.is_some()), (false, true));
        assert_eq!(state.nodes[0].name.as_ref().unwrap().1.as_c_str(), c"AAA");
        assert_eq!((state.opens.len(), state.intents.len()), (1, 1));
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let mut bytes = sample();
        bytes[header::VERSION * WORD] = 99;
        assert_eq!(decode(&bytes), Err(DecodeError::Version(99)));
        assert!(DecodeError::Version(99).to_string().contains("99"));
        bytes[0] ^= 1;
        assert_eq!(decode(&bytes), Err(DecodeError::NotState));
    }

    /// Words may have any value, and the bytes may end anywhere: the result is a state or an error,
    /// never a panic.
    #[test]
    fn no_bytes_panic() {
        let mut bytes = sample();
        let places: Vec<usize> = [HEADER_AT, INTENTS_AT, OPENS_AT, NODES_AT, NODES_AT + 2 * NODE_BYTES]
            .into_iter()
            .flat_map(|at| (0..64).map(move |word| at + word * WORD))
            .collect();
        for place in places {
            let before: [u8; WORD] = bytes[place..][..WORD].try_into().unwrap();
            for value in [0, 1, 255, 1 << 20, 1 << 32, 129 << 32, u64::MAX, u64::MAX / 2] {
                bytes[place..][..WORD].copy_from_slice(&u64::to_ne_bytes(value));
                let _ = decode(&bytes);
                let _ = about(&bytes[..INTENTS_AT]);
            }
            bytes[place..][..WORD].copy_from_slice(&before);
        }
        for len in [0, 7, 8, 4095, 4096, INTENTS_AT, OPENS_AT, NODES_AT, NODES_AT + 600] {
            assert!(decode(&bytes[..len]).is_err());
        }
    }
}
