//! Decodes fanotify(7) events: `struct fanotify_event_metadata` and the records behind it.

use crate::system::FileHandle;

/// Events were lost (FAN_Q_OVERFLOW).
const OVERFLOW: u64 = 0x4000;
/// Bytes of the fixed part: length, version, two lengths more, mask, descriptor, thread.
const FIXED_BYTES: usize = 24;
/// The version of the format, in all kernels since 2.6.37.
const VERSION: u8 = 3;
/// The kind of a record that names a file by its handle (FAN_EVENT_INFO_TYPE_FID).
const FILE: u8 = 1;
/// Bytes of such a record before the handle: kind, padding, length, and the id of the file system.
const RECORD_BYTES: usize = 12;

/// An event.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A thread has accessed a file; `handle` is the hash of its handle ([`FileHandle::hash`]). The
    /// thread is 0 if it is outside of the daemon's pid namespace.
    Done { thread: i32, handle: u64 },
    /// Events were lost.
    Lost,
}

/// Iterates over the events of one read(2). If an event cannot be decoded, it and all behind it
/// count as lost. The kernel never creates such events.
pub(super) fn decode(mut left: &[u8]) -> impl Iterator<Item = Event> {
    std::iter::from_fn(move || {
        if left.is_empty() {
            return None;
        }
        let len = u32_at(left, 0).map(|len| len as usize).filter(|len| *len >= FIXED_BYTES);
        let split = len.and_then(|len| left.split_at_checked(len));
        let (event, rest) = split.unwrap_or((&[], &[]));
        left = rest;
        Some(decode_one(event).unwrap_or(Event::Lost))
    })
}

fn decode_one(event: &[u8]) -> Option<Event> {
    let is_whole = *event.get(4)? == VERSION && u64_at(event, 8)? & OVERFLOW == 0;
    let record = event.get(u16_at(event, 6)?.into()..).filter(|record| is_whole && record.first() == Some(&FILE))?;
    let record = record.get(..u16_at(record, 2)?.into())?;
    let len = u32_at(record, RECORD_BYTES)? as usize;
    let kind = u32_at(record, RECORD_BYTES + 4)? as i32;
    let bytes = record.get(RECORD_BYTES + 8..)?.get(..len).filter(|bytes| !bytes.is_empty())?;
    Some(Event::Done { thread: u32_at(event, 20)? as i32, handle: FileHandle::hash_of(kind, bytes) })
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

    fn record(kind: u8, handle: (i32, &[u8])) -> Vec<u8> {
        let len = (RECORD_BYTES + 8 + handle.1.len()).next_multiple_of(4);
        let mut record = vec![kind, 0];
        record.extend((len as u16).to_ne_bytes());
        record.extend([7; 8]);
        record.extend((handle.1.len() as u32).to_ne_bytes());
        record.extend(handle.0.to_ne_bytes());
        record.extend(handle.1);
        record.resize(len, 0);
        record
    }

    fn event(mask: u64, thread: i32, record: &[u8]) -> Vec<u8> {
        let mut event = ((FIXED_BYTES + record.len()) as u32).to_ne_bytes().to_vec();
        event.extend([VERSION, 0]);
        event.extend((FIXED_BYTES as u16).to_ne_bytes());
        event.extend(mask.to_ne_bytes());
        event.extend((-1i32).to_ne_bytes());
        event.extend(thread.to_ne_bytes());
        event.extend(record);
        event
    }

    fn done(thread: i32, handle: &[u8]) -> Event {
        Event::Done { thread, handle: FileHandle::hash_of(1, handle) }
    }

    #[test]
    fn events_are_understood() {
        let (one, other) = (record(FILE, (1, b"one file")), record(FILE, (1, b"another")));
        let bytes = [event(2, 5, &one), event(OVERFLOW, 0, &[]), event(4, 6, &other)].concat();
        let events: Vec<_> = decode(&bytes).collect();
        assert_eq!(events, [done(5, b"one file"), Event::Lost, done(6, b"another")]);
    }

    #[test]
    fn what_is_not_understood_is_lost() {
        let one = record(FILE, (1, b"one file"));
        for strange in
            [event(2, 5, &[]), event(2, 5, &record(9, (1, b"one file"))), event(2, 5, &record(FILE, (1, b"")))]
        {
            let bytes = [event(2, 5, &one), strange, event(4, 6, &one)].concat();
            let events: Vec<_> = decode(&bytes).collect();
            assert_eq!(events, [done(5, b"one file"), Event::Lost, done(6, b"one file")]);
        }
        let bytes = [event(2, 5, &one), event(4, 6, &one)].concat();
        let whole = bytes.len() / 2;
        for len in 1..bytes.len() {
            let events: Vec<_> = decode(&bytes[..len]).collect();
            let lost = usize::from(len % whole != 0);
            assert_eq!(events.len(), len / whole + lost, "{len} bytes");
            assert_eq!(events.iter().filter(|event| **event == Event::Lost).count(), lost, "{len} bytes");
        }
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] = value;
                assert!((1..=2).contains(&decode(&bytes).count()));
            }
        }
    }
}
