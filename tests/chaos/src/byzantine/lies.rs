//! The lies: the answers of a byzantine lender. Pure logic: randomness comes from a seed, and
//! nothing is sent here.
//!
//! There are two sorts, and a lender has one of several moods, because a lie that breaks the
//! protocol ends the session and leaves no time for subtler ones.
//! - *About pages*, in well-formed answers: an older version, another page, a flipped bit, another
//!   page's checksum, a forged one, "all zeros", "not here", "stored" for a page that was thrown
//!   away and the reverse, false notices of lost pages, false resumptions of sessions.
//! - *About frames*: cut short, too long, of the wrong kind or number, of absurd lengths, late,
//!   trickled, or none at all; absurd handshakes.

use super::replay_store::{Content, ReplayStore};
use page::{ChecksumKey, PAGE_SIZE};
use std::time::Duration;
use wire::{GetItem, Header, ITEMS_MAX, Kind, PutItem, WireKey};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The number of moods: the seed's remainder is the mood. The first seven lie about pages, those
/// from the sixth on about frames.
pub const MOODS: u64 = 10;
/// One get item in so many is a lie, in moods about pages.
const PAGE_LIE_ONE_IN: usize = 4;
/// One answer in so many is broken, in moods about frames.
const FRAME_LIE_ONE_IN: usize = 30;
/// One connection in so many has an absurd handshake.
const HANDSHAKE_LIE_ONE_IN: usize = 24;
/// The longest delay of an answer: longer than any borrower waits.
const LATE_MAX_MS: u64 = 1500;

/// Actions, in this order.
#[derive(Debug)]
pub enum Answer {
    /// Send these bytes.
    Bytes(Vec<u8>),
    /// Send these bytes, one by one.
    Trickle(Vec<u8>),
    /// Wait.
    Wait(Duration),
    /// Close the connection.
    Close,
}

/// A byzantine lender on one connection.
pub struct Byzantine {
    random: fastrand::Rng,
    about_pages: bool,
    about_frames: bool,
}

impl Byzantine {
    /// For a lender with that seed, on its connection with that number. The seed determines whether
    /// all its connections lie about pages or frames.
    pub fn new(seed: u64, connection: u64) -> Byzantine {
        let mood = seed % MOODS;
        Byzantine {
            random: fastrand::Rng::with_seed(seed ^ connection << 32),
            about_pages: mood < 7,
            about_frames: mood >= 5,
        }
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.random.usize(..count) == 0
    }

    /// Answers a frame.
    pub fn answer(&mut self, replay_store: &mut ReplayStore, kind: Kind, header: &Header, body: &[u8]) -> Vec<Answer> {
        let request = header.request.get();
        let (kind, items, body) = match kind {
            Kind::Hello => return self.handshake(),
            Kind::Put => {
                let statuses = self.put(replay_store, body, header.items.get().into());
                (Kind::PutReply, statuses.len(), statuses)
            }
            Kind::Get => (Kind::GetReply, header.items.get().into(), self.get(replay_store, body)),
            Kind::Ping => (Kind::Pong, 0, self.random.u64(..).to_le_bytes().to_vec()),
            // Drops need no answer, and a borrower sends no other kinds.
            _ => return Vec::new(),
        };
        let mut header = Header::new(kind, items, body.len(), request);
        let mut answers = Vec::new();
        if kind == Kind::PutReply && self.about_pages && self.one_in(4) {
            answers.extend(self.lost(replay_store));
        }
        if self.about_frames && self.one_in(FRAME_LIE_ONE_IN) {
            answers.extend(self.broken(&mut header, body));
        } else {
            answers.push(Answer::Bytes([header.as_bytes(), &body].concat()));
        }
        answers
    }

    fn handshake(&mut self) -> Vec<Answer> {
        let mut welcome = wire::Welcome::new_zeroed();
        welcome.protocol = U32::new(wire::PROTOCOL);
        welcome.incarnation = U64::new(self.random.u64(..));
        welcome.capacity_pages = U64::new(1 << 14);
        // A claim that it still has the session's pages, for any session.
        if self.about_pages && self.random.bool() {
            welcome.flags = U32::new(wire::WELCOME_RESUMED);
        }
        let mut header = Header::new(Kind::Welcome, 0, size_of_val(&welcome), 0);
        if self.one_in(HANDSHAKE_LIE_ONE_IN) {
            match self.random.u32(..6) {
                // Numbers that no honest lender has, in every field after the version.
                0 => welcome.as_mut_bytes()[4..].fill(0xff),
                1 => welcome.capacity_pages = U64::ZERO,
                2 => welcome.protocol = U32::new(u32::MAX),
                3 => header.body_bytes = U32::new(u32::MAX),
                4 => {
                    let refused = wire::Refused::new(wire::REFUSED_BUSY, "\u{1b}[31mno\nand no");
                    let header = Header::new(Kind::Refused, 0, size_of_val(&refused), 0);
                    return vec![Answer::Bytes([header.as_bytes(), refused.as_bytes()].concat()), Answer::Close];
                }
                _ => return vec![Answer::Wait(Duration::from_millis(self.random.u64(..LATE_MAX_MS))), Answer::Close],
            }
        }
        vec![Answer::Bytes([header.as_bytes(), welcome.as_bytes()].concat())]
    }

    /// Stores pages, or not, and reports the truth, or the contrary.
    fn put(&mut self, replay_store: &mut ReplayStore, body: &[u8], count: usize) -> Vec<u8> {
        let Ok((items, pages)) = <[PutItem]>::ref_from_prefix_with_elems(body, count) else { return vec![0; count] };
        let (pages, _) = pages.as_chunks::<PAGE_SIZE>();
        let mut one = |(item, page)| {
            let lies = self.about_pages && self.one_in(PAGE_LIE_ONE_IN);
            if !lies || self.random.bool() {
                replay_store.keep(item, page);
                // "Not stored" for a stored page, or the truth.
                return u8::from(!lies);
            }
            // "Stored", or an invalid status, for a page that it threw away.
            if self.random.bool() { 1 } else { self.random.u8(..) }
        };
        items.iter().zip(pages).map(&mut one).collect()
    }

    fn get(&mut self, replay_store: &ReplayStore, body: &[u8]) -> Vec<u8> {
        let Ok(keys) = <[WireKey]>::ref_from_bytes(body) else { return Vec::new() };
        let (mut items, mut pages) = (Vec::new(), Vec::new());
        for key in keys {
            let mut item = GetItem::new_zeroed();
            let mut found = replay_store.exact(key).cloned();
            if self.about_pages && self.one_in(PAGE_LIE_ONE_IN) {
                found = self.twist(replay_store, key, found, &mut item);
            }
            if let Some(content) = found {
                item.status = wire::STATUS_PAGE;
                item.checksum = U64::new(content.checksum);
                pages.extend_from_slice(&*content.page);
            }
            items.extend_from_slice(item.as_bytes());
        }
        items.extend(pages);
        items
    }

    /// Replaces the right answer by another one.
    fn twist(
        &mut self,
        replay_store: &ReplayStore,
        key: &WireKey,
        right: Option<Content>,
        item: &mut GetItem,
    ) -> Option<Content> {
        let right_checksum = right.as_ref().map_or(0, |content| content.checksum);
        match self.random.u32(..9) {
            // An older version, with its own checksum or that of the right one.
            0 => replay_store.versions(key).find(|content| content.key != *key).cloned(),
            1 => {
                let older = replay_store.versions(key).find(|content| content.key != *key).cloned();
                older.map(|older| Content { checksum: right_checksum, ..older })
            }
            // Another page.
            2 => replay_store.any(&mut self.random).cloned(),
            3 => replay_store.any(&mut self.random).cloned().map(|other| Content { checksum: right_checksum, ..other }),
            // A flipped bit.
            4 => right.map(|mut content| {
                content.page[self.random.usize(..PAGE_SIZE)] ^= 1 << self.random.u32(..8);
                content
            }),
            // The right bytes with a wrong checksum.
            5 => right.map(|content| Content { checksum: self.random.u64(..), ..content }),
            // Zeros, with a checksum that was valid for other bytes; or an invalid status.
            6 => {
                item.status = if self.random.bool() { wire::STATUS_ZERO } else { self.random.u8(3..) };
                item.checksum = U64::new(right_checksum);
                None
            }
            // Other bytes, with a checksum made as a borrower makes it, but without the key, which
            // no lender has.
            7 => {
                let mut page = [0; PAGE_SIZE];
                self.random.fill(&mut page);
                let forger = ChecksumKey::new(std::array::from_fn(|_| self.random.u8(..)));
                let checksum = forger.checksum(key.id(), key.version(), &page);
                Some(Content { key: *key, checksum, page: Box::new(page) })
            }
            // Not here.
            _ => None,
        }
    }

    /// A false notice of lost pages, which it still has.
    fn lost(&mut self, replay_store: &ReplayStore) -> Option<Answer> {
        let count = self.random.usize(1..8);
        let keys: Vec<WireKey> = (0..count).filter_map(|_| Some(replay_store.any(&mut self.random)?.key)).collect();
        let header = Header::new(Kind::Lost, keys.len().clamp(1, ITEMS_MAX), size_of_val(&*keys), 0);
        (!keys.is_empty()).then(|| Answer::Bytes([header.as_bytes(), keys.as_bytes()].concat()))
    }

    /// A malformed answer.
    fn broken(&mut self, header: &mut Header, mut body: Vec<u8>) -> Vec<Answer> {
        let whole = |header: &Header, body: &[u8]| [header.as_bytes(), body].concat();
        let late = Answer::Wait(Duration::from_millis(self.random.u64(50..LATE_MAX_MS)));
        match self.random.u32(..10) {
            0 => {
                let bytes = whole(header, &body);
                let cut = self.random.usize(..bytes.len());
                vec![Answer::Bytes(bytes[..cut].to_vec()), Answer::Close]
            }
            1 => {
                let bytes = whole(header, &body);
                let cut = self.random.usize(..bytes.len());
                vec![Answer::Bytes(bytes[..cut].to_vec()), late, Answer::Bytes(bytes[cut..].to_vec())]
            }
            2 => {
                // More than the answer, and more than the stated length.
                let more = self.random.usize(1..2 * PAGE_SIZE);
                body.resize(body.len() + more, 0x5a);
                vec![Answer::Bytes(whole(header, &body))]
            }
            3 => {
                header.request = U64::new(header.request.get().wrapping_add(self.random.u64(..3)).wrapping_sub(1));
                vec![Answer::Bytes(whole(header, &body))]
            }
            4 => {
                header.body_bytes = U32::new(self.random.u32(..));
                vec![Answer::Bytes(whole(header, &body))]
            }
            5 => {
                header.kind = self.random.u8(..);
                vec![Answer::Bytes(whole(header, &body))]
            }
            6 => {
                header.items = U16::new(self.random.u16(..));
                vec![Answer::Bytes(whole(header, &body))]
            }
            7 => vec![Answer::Trickle(whole(header, &body))],
            8 => vec![Answer::Close],
            _ => vec![late, Answer::Bytes(whole(header, &body))],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use page::{FileKey, PageId, Version};

    /// All lies about pages are well-formed, and each kind occurs.
    #[test]
    fn lies_about_pages_are_well_formed() {
        let seed = (0..).find(|seed| fastrand::Rng::with_seed(*seed).u32(..10) < 5).unwrap();
        let (mut byzantine, mut replay_store) = (Byzantine::new(seed, 1), ReplayStore::default());
        let key = |index, version| WireKey::new(PageId { file: FileKey(1), index }, Version(version));
        for version in 1..=3 {
            for index in 0..64 {
                let page = [version as u8; PAGE_SIZE];
                replay_store.keep(&PutItem { key: key(index, version), checksum: version.into() }, &page);
            }
        }
        let keys: Vec<WireKey> = (0..64).map(|index| key(index, 3)).collect();
        let header = Header::new(Kind::Get, keys.len(), size_of_val(&*keys), 9);
        let (mut right, mut wrong, mut none) = (0, 0, 0);
        for _ in 0..50 {
            let answers = byzantine.answer(&mut replay_store, Kind::Get, &header, keys.as_bytes());
            let [Answer::Bytes(bytes)] = &answers[..] else { panic!("{answers:?}") };
            let (header, body) = Header::read_from_prefix(bytes).unwrap();
            assert_eq!((header.validate(), header.request.get()), (Ok(Kind::GetReply), 9));
            let (items, pages) = <[GetItem]>::ref_from_prefix_with_elems(body, keys.len()).unwrap();
            let mut pages = pages.as_chunks::<PAGE_SIZE>().0.iter();
            for item in items {
                let page = (item.status == wire::STATUS_PAGE).then(|| pages.next().unwrap());
                match page {
                    Some(page) if *page == [3; PAGE_SIZE] && item.checksum.get() == 3 => right += 1,
                    Some(_) => wrong += 1,
                    None => none += 1,
                }
            }
            assert_eq!(pages.count(), 0);
        }
        assert!(right > 1600 && wrong > 200 && none > 100, "{right} {wrong} {none}");
    }
}
