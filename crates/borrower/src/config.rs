//! These types hold what a borrower is told, says of lenders, and leaves to a successor.

use crate::BAD_PAGES_MAX;
use crate::catalog::ENTRY_BYTES_MAX;
use crate::core::Strategy;
use crate::policy::gate;
use crate::put::cgroups::Cgroups;
use page::Version;
use serde::Serialize;
use wire::address::Address;
use wire::secure::Security;

/// How a borrower is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// The lenders, at first; without any, everything is read from below.
    /// [`crate::Borrower::set_lenders`] changes them.
    pub lenders: Vec<LenderAddress>,
    /// Whether there are any, or may be soon.
    pub expects_lenders: bool,
    /// What happens to a page at the lender when it is read.
    pub strategy: Strategy,
    /// Connections to each lender for gets: as many as there are threads that read, within
    /// [`wire::SESSION_CONNECTIONS_MAX`].
    pub get_connections: usize,
    /// Whether what is read in a sequential stream is not lent.
    pub filter: bool,
    /// When a lender is too slow to be used; without it, never.
    pub gate: Option<gate::Config>,
    /// Whether gets that are late are raced by reads of the directory below.
    pub hedge: bool,
    /// A lender that has returned that many pages that do not verify is not used any more.
    pub bad_pages_max: u64,
    /// Memory that the catalog's entries may take, in bytes.
    pub catalog_bytes_max: u64,
    /// What a daemon before this one has left at the lenders
    /// ([`crate::Borrower::stop_for_successor`]).
    pub session: Option<Session>,
    /// Whether connections and pages are sealed, and with which pool's key.
    pub security: Security,
    /// Whether guests give back what they evict ([`crate::Borrower::demote`]). Then there are no
    /// lenders.
    pub has_guests: bool,
    /// For which control groups pages are lent, where evictions say whose they are. None: for all
    /// alike.
    pub cgroups: Option<Cgroups>,
    /// Whether pages are lent when they are read, should evictions not be seen any more. Else
    /// nothing more is lent then.
    pub may_fill_on_read: bool,
}

impl Default for Config {
    /// No lenders, all policies on, and nothing sealed.
    fn default() -> Config {
        Config {
            lenders: Vec::new(),
            expects_lenders: true,
            strategy: Strategy::Exclusive,
            get_connections: 4,
            filter: true,
            gate: Some(gate::Config::default()),
            hedge: true,
            bad_pages_max: BAD_PAGES_MAX,
            catalog_bytes_max: ENTRY_BYTES_MAX,
            session: None,
            security: Security::Trusting,
            has_guests: false,
            cgroups: None,
            may_fill_on_read: true,
        }
    }
}

/// A lender, as it is told to the borrower.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LenderAddress {
    /// Where it is reached.
    pub address: Address,
    /// What it is called in the pool, if it is known from there: one that comes back under another
    /// name has nothing of before.
    pub id: Option<String>,
}

impl From<Address> for LenderAddress {
    fn from(address: Address) -> LenderAddress {
        LenderAddress { address, id: None }
    }
}

/// What there is to say of a lender.
#[derive(Clone, Debug, Serialize)]
pub struct LenderStatus {
    /// Its number here.
    pub number: u8,
    /// Where it is reached.
    pub address: String,
    /// What it is called in the pool.
    pub id: Option<String>,
    /// `used`, `shunned` (there, but too slow), `away` (it may come back with its pages) or `down`.
    pub state: &'static str,
    /// Why it is not used.
    pub reason: String,
    /// How long this has been so.
    pub since_ms: u64,
    /// Round-trip time of pings now.
    pub ping_us: u64,
    /// Their average over 15 seconds.
    pub ping_short_us: u64,
    /// Their average over a minute.
    pub ping_long_us: u64,
    /// What gets take on average, if there were any lately.
    pub get_us: Option<u64>,
    /// Its weight in the placement.
    pub weight: u32,
    /// Pages that it keeps at the most.
    pub capacity_pages: u64,
    /// Pages that it could take without forgetting others.
    pub free_pages: u64,
    /// Put messages that are being filled, wait to be sent, or wait for their answer.
    pub puts_under_way: u64,
    /// Pages sent to it.
    pub put_pages: u64,
    /// Pages got from it.
    pub get_pages: u64,
    /// Pages asked for that it no longer had.
    pub get_misses: u64,
    /// Pages from it whose checksum was wrong.
    pub bad_pages: u64,
    /// Its gets that were late and raced.
    pub hedges: u64,
    /// Times that it was reached.
    pub connects: u64,
    /// Times that the connection was lost.
    pub losses: u64,
    /// Times that it was found too slow.
    pub shuns: u64,
}

/// The sessions at the lenders, as one daemon leaves them to the next. Their names are secrets: a
/// peer that knows one reaches its pages.
#[derive(Clone, PartialEq, Eq)]
pub struct Session {
    /// What the checksums or the seals of its pages are keyed with.
    pub checksum_key: [u8; 32],
    /// The version to go on with. A lower one could name older bytes that a lender still has.
    pub next_version: Version,
    /// Each lender's part.
    pub lenders: Vec<LeftLender>,
}

/// A session at one lender.
#[derive(Clone, PartialEq, Eq)]
pub struct LeftLender {
    /// The lender.
    pub lender: LenderAddress,
    /// The lender's number in entries.
    pub number: u8,
    /// The lender's epoch: entries of it are valid again once the lender says that it has kept the
    /// session.
    pub epoch: u8,
    /// The session's name.
    pub name: [u8; 16],
}

impl std::fmt::Debug for Session {
    /// Without names and key, which must not get into a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("next_version", &self.next_version).finish_non_exhaustive()
    }
}
