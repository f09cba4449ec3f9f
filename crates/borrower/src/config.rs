//! The borrower's configuration, the status of lenders, and the sessions that a successor takes
//! over.

use crate::BAD_PAGES_MAX;
use crate::catalog::ENTRY_BYTES_MAX;
use crate::core::Strategy;
use crate::policy::gate;
use crate::put::cgroups::Cgroups;
use page::Version;
use wire::address::Address;
use wire::secure::Security;

/// The configuration of a borrower.
#[derive(Clone, Debug)]
pub struct Config {
    /// The initial lenders. Without any, all reads come from the backing directory.
    /// [`crate::Borrower::set_lenders`] changes the list.
    pub lenders: Vec<LenderAddress>,
    /// Whether there are lenders, or may be soon.
    pub expects_lenders: bool,
    /// Whether a lender keeps a page when it is read.
    pub strategy: Strategy,
    /// The number of connections to each lender for gets: as many as there are threads that read,
    /// within [`wire::SESSION_CONNECTIONS_MAX`].
    pub get_connections: usize,
    /// Whether pages that are read in a sequential stream are left to the disk.
    pub filter: bool,
    /// The thresholds beyond which a lender is bypassed; None: never.
    pub gate: Option<gate::Config>,
    /// Whether a read of the backing directory races a late get.
    pub hedge: bool,
    /// The number of pages that do not verify after which a lender is not used any more.
    pub bad_pages_max: u64,
    /// The maximum memory of the catalog's entries, in bytes.
    pub catalog_bytes_max: u64,
    /// The sessions that an earlier daemon has left at the lenders
    /// ([`crate::Borrower::stop_for_successor`]).
    pub session: Option<Session>,
    /// The pool's key if connections and pages are sealed.
    pub security: Security,
    /// Whether guests give back the pages that they evict ([`crate::Borrower::demote`]). Then there
    /// are no lenders.
    pub has_guests: bool,
    /// The control groups for which pages are lent, if evictions name their groups. None: all
    /// groups alike.
    pub cgroups: Option<Cgroups>,
    /// Whether pages are lent when they are read if evictions are not seen any more. Otherwise no
    /// further page is lent then.
    pub may_populate_on_read: bool,
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
            may_populate_on_read: true,
        }
    }
}

/// A lender in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LenderAddress {
    /// The address at which it is reached.
    pub address: Address,
    /// Its name in the pool, if it is known from there. A lender that comes back under another name
    /// has no earlier pages.
    pub id: Option<String>,
}

impl From<Address> for LenderAddress {
    fn from(address: Address) -> LenderAddress {
        LenderAddress { address, id: None }
    }
}

/// The sessions at the lenders that one daemon leaves to the next. Their names are secrets: a peer
/// that knows one can access its pages.
#[derive(Clone, PartialEq, Eq)]
pub struct Session {
    /// The key of the checksums or the seals of its pages.
    pub checksum_key: [u8; 32],
    /// The next version to give out. A lower one could name older bytes that a lender still has.
    pub next_version: Version,
    /// The session at each lender.
    pub lenders: Vec<LeftLender>,
}

/// A session at one lender.
#[derive(Clone, PartialEq, Eq)]
pub struct LeftLender {
    /// The lender.
    pub lender: LenderAddress,
    /// The lender's number in entries.
    pub number: u8,
    /// The lender's epoch. Entries of this epoch are valid again once the lender reports that it
    /// has kept the session.
    pub epoch: u8,
    /// The session's name.
    pub name: [u8; 16],
}

impl std::fmt::Debug for Session {
    /// Omits names and key, which must not get into a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("next_version", &self.next_version).finish_non_exhaustive()
    }
}
