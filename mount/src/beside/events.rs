//! What the kernel tells of changes (fanotify(7), `struct fanotify_event_metadata` and the records behind it), decoded.

use crate::system::FileHandle;
use std::ffi::CStr;

/// Events were lost (FAN_Q_OVERFLOW).
const OVERFLOW: u64 = 0x4000;
/// Bytes of the fixed part: length, version, two lengths more, mask, descriptor, process.
const FIXED_BYTES: usize = 24;
/// The version of all kernels since 2.6.37.
const VERSION: u8 = 3;
/// Records that name a file by its handle: itself; the directory it is in, with its name there; a directory.
const FILE: u8 = 1;
const NAMED: u8 = 2;
const DIRECTORY: u8 = 3;
/// Bytes of a record before the handle: kind, padding, length, and the id of the file system.
const RECORD_BYTES: usize = 12;

/// An event.
pub(super) struct Event<'a> {
    mask: u64,
    /// The process that has made the change; 0 if it is none that we may know.
    pub process: i32,
    records: &'a [u8],
}

/// A file that an event is about: [`FileHandle::hash`] of its handle, and the name in it, if it is a directory in which that one is concerned.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Subject<'a> {
    pub handle: u64,
    pub name: Option<&'a CStr>,
}

impl<'a> Event<'a> {
    /// Whether there were others that are lost.
    pub(super) fn is_overflow(&self) -> bool {
        self.mask & OVERFLOW != 0
    }

    /// Whether names have changed.
    pub(super) fn changes_names(&self) -> bool {
        self.mask & super::NAMES != 0
    }

    /// The files it is about.
    pub(super) fn subjects(&self) -> impl Iterator<Item = Subject<'a>> + use<'a> {
        let mut left = self.records;
        std::iter::from_fn(move || {
            while let Some((record, rest)) = split(left, u16_at(left, 2)?.into()) {
                left = rest;
                if let Some(subject) = subject(record) {
                    return Some(subject);
                }
            }
            None
        })
    }
}

/// The events that one read(2) has brought. What cannot be understood, and all behind it, is left out: the kernel makes nothing like it.
pub(super) fn decode(mut left: &[u8]) -> impl Iterator<Item = Event<'_>> {
    std::iter::from_fn(move || {
        let (event, rest) = split(left, u32_at(left, 0)? as usize)?;
        left = rest;
        let records =
            event.get(u16_at(event, 6)?.into()..).filter(|_| event.len() >= FIXED_BYTES && event[4] == VERSION)?;
        Some(Event { mask: u64_at(event, 8)?, process: u32_at(event, 20)? as i32, records })
    })
}

fn subject(record: &[u8]) -> Option<Subject<'_>> {
    if !matches!(record[0], FILE | NAMED | DIRECTORY) {
        return None;
    }
    let len = u32_at(record, RECORD_BYTES)? as usize;
    let kind = u32_at(record, RECORD_BYTES + 4)? as i32;
    let behind = record.get(RECORD_BYTES + 8..)?;
    let (bytes, behind) = (behind.get(..len)?, behind.get(len..)?);
    let name = if record[0] == NAMED { CStr::from_bytes_until_nul(behind).ok() } else { None };
    // A directory that is told of itself has this name.
    let name = name.filter(|name| !matches!(name.to_bytes(), b"" | b"."));
    Some(Subject { handle: FileHandle::hash_of(kind, bytes), name })
}

/// The first `len` bytes, at least those of a record's head, and the rest.
fn split(bytes: &[u8], len: usize) -> Option<(&[u8], &[u8])> {
    if len < 4 { None } else { bytes.split_at_checked(len) }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u8, handle: (i32, &[u8]), name: &[u8]) -> Vec<u8> {
        let len = (RECORD_BYTES + 8 + handle.1.len() + name.len()).next_multiple_of(4);
        let mut record = vec![kind, 0];
        record.extend((len as u16).to_ne_bytes());
        record.extend([7; 8]);
        record.extend((handle.1.len() as u32).to_ne_bytes());
        record.extend(handle.0.to_ne_bytes());
        record.extend(handle.1);
        record.extend(name);
        record.resize(len, 0);
        record
    }

    fn event(mask: u64, process: i32, records: &[Vec<u8>]) -> Vec<u8> {
        let records = records.concat();
        let mut event = ((FIXED_BYTES + records.len()) as u32).to_ne_bytes().to_vec();
        event.extend([VERSION, 0]);
        event.extend((FIXED_BYTES as u16).to_ne_bytes());
        event.extend(mask.to_ne_bytes());
        event.extend((-1i32).to_ne_bytes());
        event.extend(process.to_ne_bytes());
        event.extend(records);
        event
    }

    fn two_events() -> Vec<u8> {
        let named = record(NAMED, (1, b"directory"), b"name\0");
        let file = record(FILE, (1, b"the file"), b"");
        let other = record(9, (1, b"of no concern"), b"");
        let itself = record(NAMED, (1, b"directory"), b".\0");
        [event(0x100, 5, &[named, other, file]), event(OVERFLOW, 0, &[]), event(4, 6, &[itself])].concat()
    }

    #[test]
    fn events_are_understood() {
        let bytes = two_events();
        let events: Vec<_> = decode(&bytes).collect();
        assert_eq!(events.iter().map(|event| event.process).collect::<Vec<_>>(), [5, 0, 6]);
        assert_eq!(events.iter().map(Event::is_overflow).collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(events.iter().map(Event::changes_names).collect::<Vec<_>>(), [true, false, false]);
        let of = |handle: &[u8], name| Subject { handle: FileHandle::hash_of(1, handle), name };
        let first: Vec<_> = events[0].subjects().collect();
        assert_eq!(first, [of(b"directory", Some(c"name")), of(b"the file", None)]);
        assert_eq!(events[2].subjects().collect::<Vec<_>>(), [of(b"directory", None)]);
    }

    #[test]
    fn what_is_cut_short_is_no_event() {
        let bytes = two_events();
        for len in 0..bytes.len() {
            let whole = decode(&bytes[..len]).map(|event| event.subjects().count()).sum::<usize>();
            assert!(whole < 3, "{len} bytes");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] = value;
                decode(&bytes).for_each(|event| assert!(event.subjects().count() < 8));
            }
        }
    }
}
