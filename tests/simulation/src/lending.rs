//! Lenders, and the network to them. The lender's page store is the real one; what stands here is
//! what lies between it and the borrower's logic: sessions, messages that are delayed, lost or cut
//! in the middle, and lies.

use crate::weather::Weather;
use borrower::put::buffers::Batch;
use borrower::read::state::PageResult;
use fastrand::Rng;
use lender::store::{self, Key, Owner, Store};
use page::{PAGE_SIZE, Page, PageId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use wire::WireKey;

/// Pages that a lender can keep: few, so that it has to choose.
const CAPACITY_PAGES: u32 = 48;

/// Answers that a lying lender remembers, to give them again.
const REMEMBERED_MAX: usize = 32;

/// What a borrower tells a lender on its main connection.
pub enum Told {
    /// Keep these.
    Put(u64, Arc<Batch>),
    /// These are of no more use.
    Drop(Vec<WireKey>),
}

/// What a lender tells a borrower on its main connection.
pub enum Said {
    /// The answer to a put.
    PutReply(u64, Vec<u8>),
    /// These are gone.
    Lost(Vec<WireKey>),
}

/// A question on a connection of its own.
pub struct Asked {
    /// The asker: the answer is filed under it.
    pub number: u64,
    /// In which session.
    pub session: u64,
    /// For what.
    pub keys: Vec<WireKey>,
    /// Whether the lender is to forget what it answers.
    pub exclusive: bool,
}

/// The answer to a question.
pub struct Answer {
    /// Of each page.
    pub got: Vec<PageResult>,
    /// Its bytes, also where there are none.
    pub pages: Vec<Page>,
    /// The connection broke in the middle of it.
    pub cut: bool,
}

/// One lender.
pub struct Lender {
    store: Store,
    /// By session.
    owners: BTreeMap<u64, Owner>,
    alive: bool,
    remembered: VecDeque<(WireKey, u64, Page)>,
}

/// A borrower's side of one lender.
#[derive(Default)]
pub struct Link {
    /// The session, while there is one.
    pub session: Option<u64>,
    /// The session that was lost, and may be resumed.
    pub away: Option<u64>,
    /// On the way to the lender, of the sessions they belong to.
    pub told: VecDeque<(u64, Told)>,
    /// On the way back.
    pub said: VecDeque<(u64, Said)>,
    /// Questions on the way.
    pub asked: Vec<Asked>,
    /// Answers that have arrived, by question.
    pub answers: BTreeMap<u64, Answer>,
}

fn key(key: &WireKey) -> Key {
    Key { id: key.id(), version: key.version() }
}

impl Lender {
    /// An empty one, running.
    pub fn running() -> Lender {
        Lender { store: new_store(), owners: BTreeMap::new(), alive: true, remembered: VecDeque::new() }
    }

    /// Whether it runs.
    pub fn is_alive(&self) -> bool {
        self.alive
    }

    /// It dies, or comes back with nothing.
    pub fn toggle(&mut self) {
        self.alive = !self.alive;
        if self.alive {
            self.store = new_store();
            self.owners.clear();
        }
    }

    /// Whether it has kept a session.
    pub fn has(&self, session: u64) -> bool {
        self.alive && self.owners.contains_key(&session)
    }

    /// A borrower connects. Whether it is let in.
    pub fn join(&mut self, session: u64) -> bool {
        if !self.alive {
            return false;
        }
        if !self.owners.contains_key(&session) {
            let Some(owner) = self.store.add_owner() else { return false };
            self.owners.insert(session, owner);
        }
        true
    }

    /// The lender notices that a session is over.
    pub fn leave(&mut self, session: u64) {
        if let Some(owner) = self.owners.remove(&session) {
            while !self.store.remove_owner(owner, 16) {}
        }
    }

    /// Its sessions.
    pub fn sessions(&self) -> impl Iterator<Item = u64> {
        self.owners.keys().copied()
    }

    /// The next message on a main connection arrives.
    pub fn receive(&mut self, link: &mut Link, weather: &Weather, random: &mut Rng) {
        let Some((session, told)) = link.told.pop_front() else { return };
        let Some(owner) = self.owners.get(&session).copied().filter(|_| self.alive) else { return };
        match told {
            Told::Drop(keys) => keys.iter().for_each(|wire_key| self.store.drop_page(owner, key(wire_key))),
            Told::Put(request, batch) => {
                let mut statuses = Vec::new();
                for (item, page) in batch.items().iter().zip(batch.pages()) {
                    self.remember(item.key, item.checksum.get(), page);
                    // A liar says that it has what it has thrown away.
                    let lie = weather.lies(random);
                    let stored = lie || self.store.put(owner, key(&item.key), item.checksum.get(), page);
                    statuses.push(stored.into());
                }
                // The store is not told to let the kernel have the pages (`settle`): what the
                // kernel takes is drawn from the seed, so that a run repeats itself.
                link.said.push_back((session, Said::PutReply(request, statuses)));
            }
        }
    }

    fn remember(&mut self, key: WireKey, checksum: u64, page: &Page) {
        self.remembered.push_back((key, checksum, *page));
        if self.remembered.len() > REMEMBERED_MAX {
            self.remembered.pop_front();
        }
    }

    /// Answers a question.
    pub fn answer(&mut self, asked: &Asked, weather: &Weather, random: &mut Rng) -> Answer {
        let mut answer = Answer { got: Vec::new(), pages: Vec::new(), cut: weather.cuts(random) };
        let owner = self.owners.get(&asked.session).copied().filter(|_| self.alive);
        for wire_key in &asked.keys {
            let mut bytes = Vec::new();
            let mut got = match owner.map(|owner| self.store.get(owner, key(wire_key), asked.exclusive, &mut bytes)) {
                None | Some(store::Got::Miss) => PageResult::Miss,
                Some(store::Got::Page { checksum } | store::Got::Zero { checksum }) => PageResult::Page { checksum },
            };
            // Nothing for a miss or zeros.
            let mut page = bytes.first_chunk().copied().unwrap_or([0; PAGE_SIZE]);
            if weather.lies(random) {
                got = self.lie(wire_key, got, &mut page, random);
            }
            answer.got.push(got);
            answer.pages.push(page);
        }
        if owner.is_none() {
            answer.cut = true;
        }
        answer
    }

    /// Something else than what was asked for: an older page of the same name, another page, or
    /// damaged bytes.
    fn lie(&self, asked: &WireKey, got: PageResult, page: &mut Page, random: &mut Rng) -> PageResult {
        let same = |other: &&(WireKey, u64, Page)| PageId::eq(&other.0.id(), &asked.id());
        let other = match random.u32(0..4) {
            0 => return PageResult::Miss,
            1 => {
                page[random.usize(0..PAGE_SIZE / 512) * 512] ^= 1 << random.u32(0..8);
                return got;
            }
            2 => self.remembered.iter().find(same),
            _ => self.remembered.get(random.usize(0..REMEMBERED_MAX)),
        };
        match other {
            Some((_, checksum, bytes)) => {
                *page = *bytes;
                PageResult::Page { checksum: *checksum }
            }
            None => got,
        }
    }

    /// The kernel takes a page, silently; or memory becomes scarce; or the lender looks what is
    /// gone.
    pub fn squeeze(&mut self, random: &mut Rng) {
        match random.u32(0..6) {
            0 => drop(self.store.scan(0..u32::MAX)),
            1 => {
                self.store.shrink(random.usize(1..8));
                self.store.set_headroom_pages(random.u64(0..CAPACITY_PAGES.into()));
            }
            _ => {
                let used = self.store.used_slots();
                if used > 0 {
                    self.store.take_slot_silently(random.u32(0..used));
                }
            }
        }
    }

    /// Tells a session of its lost pages.
    pub fn notify(&mut self, session: u64, link: &mut Link) {
        let Some(owner) = self.owners.get(&session).copied() else { return };
        let mut keys = Vec::new();
        self.store.take_notices(owner, 16, &mut keys);
        if !keys.is_empty() {
            let keys = keys.iter().map(|lost| WireKey::new(lost.id, lost.version)).collect();
            link.said.push_back((session, Said::Lost(keys)));
        }
    }
}

fn new_store() -> Store {
    let mut store = Store::new(CAPACITY_PAGES).expect("a small mapping");
    store.set_headroom_pages(CAPACITY_PAGES.into());
    store
}
