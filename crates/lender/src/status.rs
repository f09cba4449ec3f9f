//! The status of a lender.

use crate::store::Counters;
use serde::Serialize;

/// A lender's state and counters. Counters run since its start, and include borrowers that have
/// gone.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The address that it listens on.
    pub address: String,
    /// [`wire::Welcome::incarnation`], in hexadecimal.
    pub incarnation: String,
    /// Whether it takes pages. If not, it gives back those that it has.
    pub lending: bool,
    /// The maximum number of pages.
    pub capacity_pages: u64,
    /// Stored pages, without those of zeros.
    pub stored_pages: u64,
    /// Stored pages of zeros, which take no memory.
    pub zero_pages: u64,
    /// Free slots that likely still have memory, which the next puts will use.
    pub free_resident_pages: u64,
    /// Memory that it may still take, as of the last check.
    pub headroom_bytes: u64,
    /// Free memory that it never takes.
    pub reserve_bytes: u64,
    /// Total memory of the machine or the memory cgroup.
    pub memory_total_bytes: u64,
    /// Reaction to memory pressure: `none`, `hold` (not grow) or `shrink`.
    pub pressure: &'static str,
    /// Puts, gets and the outcomes of pages.
    #[serde(flatten)]
    pub counters: Counters,
    /// Notices of lost pages that were sent.
    pub lost_notices_sent: u64,
    /// Searches for pages that the kernel took.
    pub scans: u64,
    /// Pages that were given back before others had to take them: as much as others took of the
    /// reserve.
    pub demanded_pages: u64,
    /// Frames that broke the protocol; each ended its connection.
    pub malformed_frames: u64,
    /// Connections that were refused, for any reason.
    pub refused_connections: u64,
    /// Of these, connections without the pool's key, or with one although the lender has none.
    pub refused_keys: u64,
    /// Connections ended before their handshake had ended, because too many others came.
    pub crowded_out_connections: u64,
    /// Connections ended because the peer did not send or take a frame in time.
    pub stuck_connections: u64,
    /// Connections now.
    pub connections: u64,
    /// Borrowers connected now.
    pub borrowers: u64,
    /// Borrowers that lost their connection and whose pages are kept for a while.
    pub kept_sessions: u64,
    /// Of these, borrowers that did not come back in time.
    pub expired_sessions: u64,
    /// Number of times that a borrower came back, or replaced a connection that still existed.
    pub resumed_sessions: u64,
    /// Limit for processors, in percent of one, if there is one.
    pub cpu_percent: Option<u32>,
    /// Limit for bytes a second, received and sent, if there is one.
    pub rate_bytes: Option<u64>,
    /// Processor time that connections of borrowers used, if that is limited, and so measured.
    pub cpu_ms: Option<u64>,
    /// Time that connections of borrowers waited for their share, together.
    pub paced_ms: u64,
    /// Pages that borrowers asked for and did not get because they were too far behind their share.
    pub paced_misses: u64,
    /// Each borrower, connected or kept.
    pub borrower_list: Vec<BorrowerStatus>,
}

/// Status of a borrower.
#[derive(Clone, Debug, Serialize)]
pub struct BorrowerStatus {
    /// The first 8 hexadecimal digits of its session's name.
    pub name: String,
    /// Its connections.
    pub connections: u64,
    /// Time since its main connection ended, if it has.
    pub kept_ms: Option<u64>,
    /// Its pages, without those of zeros.
    pub stored_pages: u64,
    /// Its pages of zeros.
    pub zero_pages: u64,
    /// Processor time that its connections used, if that is measured.
    pub cpu_ms: Option<u64>,
    /// Time that its connections waited for their share, together.
    pub paced_ms: u64,
    /// Pages that it asked for and did not get because it was too far behind its share.
    pub paced_misses: u64,
    /// Its puts, gets and the outcomes of its pages.
    #[serde(flatten)]
    pub counters: Counters,
}
