//! Lenders, and the network to them. The lender's page store is the real one. The model has the
//! parts between it and the borrower's logic: sessions, lies, and messages that are delayed, lost
//! or truncated.

use crate::rates::Rates;
use borrower::put::buffers::Batch;
use borrower::read::state::PageResult;
use fastrand::Rng;
use lender::store::{self, Key, Store, Tenant};
use page::{PAGE_SIZE, Page, PageId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use wire::WireKey;

/// The number of pages that a lender can store: few, so it has to replace some.
const CAPACITY_PAGES: u32 = 48;

/// The number of answers that a byzantine lender stores, to replay them.
const REMEMBERED_MAX: usize = 32;

/// A message from a borrower to a lender on its main connection.
pub enum Message {
    /// Store these pages.
    Put(u64, Arc<Batch>),
    /// These pages are of no more use.
    Drop(Vec<WireKey>),
}

/// A message from a lender to a borrower on its main connection.
pub enum Said {
    /// The answer to a put.
    PutReply(u64, Vec<u8>),
    /// These pages are gone.
    Lost(Vec<WireKey>),
}

/// A request on a connection for gets.
pub struct Asked {
    /// The number of the request, by which its answer is found.
    pub number: u64,
    /// The session.
    pub session: u64,
    /// The requested pages.
    pub keys: Vec<WireKey>,
    /// Whether the lender must forget the pages that it answers.
    pub exclusive: bool,
}

/// The answer to a request.
pub struct Answer {
    /// The result for each page.
    pub got: Vec<PageResult>,
    /// The bytes of each page, arbitrary if there are none.
    pub pages: Vec<Page>,
    /// The connection broke in the middle of it.
    pub cut: bool,
}

/// One lender.
pub struct Lender {
    store: Store,
    /// The tenants, by session.
    tenants: BTreeMap<u64, Tenant>,
    alive: bool,
    remembered: VecDeque<(WireKey, u64, Page)>,
}

/// A borrower's side of one lender.
#[derive(Default)]
pub struct Link {
    /// The session, while there is one.
    pub session: Option<u64>,
    /// The session that was lost, and may be resumed.
    pub suspended: Option<u64>,
    /// Messages on their way to the lender, with their sessions.
    pub messages: VecDeque<(u64, Message)>,
    /// Messages on their way back.
    pub said: VecDeque<(u64, Said)>,
    /// Requests on their way.
    pub asked: Vec<Asked>,
    /// Answers that have arrived, by the number of the request.
    pub answers: BTreeMap<u64, Answer>,
}

fn key(key: &WireKey) -> Key {
    Key { id: key.id(), version: key.version() }
}

impl Lender {
    /// Returns an empty lender that runs.
    pub fn running() -> Lender {
        Lender { store: new_store(), tenants: BTreeMap::new(), alive: true, remembered: VecDeque::new() }
    }

    /// Returns whether it runs.
    pub fn is_alive(&self) -> bool {
        self.alive
    }

    /// The lender dies, or comes back without pages.
    pub fn toggle(&mut self) {
        self.alive = !self.alive;
        if self.alive {
            self.store = new_store();
            self.tenants.clear();
        }
    }

    /// Returns whether it has kept a session.
    pub fn has(&self, session: u64) -> bool {
        self.alive && self.tenants.contains_key(&session)
    }

    /// A borrower connects. Returns whether the lender accepts.
    pub fn join(&mut self, session: u64) -> bool {
        if !self.alive {
            return false;
        }
        if !self.tenants.contains_key(&session) {
            let Some(tenant) = self.store.add_tenant() else { return false };
            self.tenants.insert(session, tenant);
        }
        true
    }

    /// The lender detects that a session has ended.
    pub fn leave(&mut self, session: u64) {
        if let Some(tenant) = self.tenants.remove(&session) {
            while !self.store.remove_tenant(tenant, 16) {}
        }
    }

    /// Returns its sessions.
    pub fn sessions(&self) -> impl Iterator<Item = u64> {
        self.tenants.keys().copied()
    }

    /// The next message on a main connection arrives.
    pub fn receive(&mut self, link: &mut Link, rates: &Rates, random: &mut Rng) {
        let Some((session, message)) = link.messages.pop_front() else { return };
        let Some(tenant) = self.tenants.get(&session).copied().filter(|_| self.alive) else { return };
        match message {
            Message::Drop(keys) => keys.iter().for_each(|wire_key| self.store.drop_page(tenant, key(wire_key))),
            Message::Put(request, batch) => {
                let mut statuses = Vec::new();
                for (item, page) in batch.items().iter().zip(batch.pages()) {
                    self.remember(item.key, item.checksum.get(), page);
                    // A byzantine lender claims to have pages that it has discarded.
                    let lie = rates.lies(random);
                    let stored = lie || self.store.put(tenant, key(&item.key), item.checksum.get(), page);
                    statuses.push(stored.into());
                }
                // The store is not told to mark pages reclaimable (`mark_reclaimable`). The seed
                // decides which pages the kernel takes, so that every run is the same.
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

    /// Answers a request.
    pub fn answer(&mut self, asked: &Asked, rates: &Rates, random: &mut Rng) -> Answer {
        let mut answer = Answer { got: Vec::new(), pages: Vec::new(), cut: rates.cuts(random) };
        let tenant = self.tenants.get(&asked.session).copied().filter(|_| self.alive);
        for wire_key in &asked.keys {
            let mut bytes = Vec::new();
            let mut got = match tenant.map(|tenant| self.store.get(tenant, key(wire_key), asked.exclusive, &mut bytes))
            {
                None | Some(store::GetResult::Miss) => PageResult::Miss,
                Some(store::GetResult::Page { checksum } | store::GetResult::Zero { checksum }) => {
                    PageResult::Page { checksum }
                }
            };
            // A miss or a page of zeros has no bytes.
            let mut page = bytes.first_chunk().copied().unwrap_or([0; PAGE_SIZE]);
            if rates.lies(random) {
                got = self.lie(wire_key, got, &mut page, random);
            }
            answer.got.push(got);
            answer.pages.push(page);
        }
        if tenant.is_none() {
            answer.cut = true;
        }
        answer
    }

    /// Returns a wrong result: an older page with the same identity, another page, or damaged
    /// bytes.
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

    /// The kernel takes a page, silently; or memory becomes scarce; or the lender checks which
    /// pages are gone.
    pub fn apply_memory_pressure(&mut self, random: &mut Rng) {
        match random.u32(0..6) {
            0 => drop(self.store.scan(0..u32::MAX)),
            1 => {
                self.store.shrink(random.usize(1..8));
                self.store.set_available_pages(random.u64(0..CAPACITY_PAGES.into()));
            }
            _ => {
                let used = self.store.used_slots();
                if used > 0 {
                    self.store.take_slot_silently(random.u32(0..used));
                }
            }
        }
    }

    /// Reports to a session its lost pages.
    pub fn notify(&mut self, session: u64, link: &mut Link) {
        let Some(tenant) = self.tenants.get(&session).copied() else { return };
        let mut keys = Vec::new();
        self.store.take_notices(tenant, 16, &mut keys);
        if !keys.is_empty() {
            let keys = keys.iter().map(|lost| WireKey::new(lost.id, lost.version)).collect();
            link.said.push_back((session, Said::Lost(keys)));
        }
    }
}

fn new_store() -> Store {
    let mut store = Store::new(CAPACITY_PAGES).expect("a small mapping");
    store.set_available_pages(CAPACITY_PAGES.into());
    store
}
