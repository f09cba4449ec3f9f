//! What a lender tells about itself.

use crate::store::Counters;
use serde::Serialize;

/// A lender's state and counters. Counters run since its start, and include borrowers that left.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Where it listens.
    pub address: String,
    /// [`wire::Welcome::incarnation`], in hexadecimal.
    pub incarnation: String,
    /// Whether it takes pages. If not, it gives back those that it has.
    pub lending: bool,
    /// Pages it keeps at the most.
    pub capacity_pages: u64,
    /// Pages it keeps, those of zeros not counted.
    pub stored_pages: u64,
    /// Pages of zeros it keeps, which take no memory.
    pub zero_pages: u64,
    /// Free slots that likely still have memory, which the next puts will use.
    pub free_resident_pages: u64,
    /// Memory that it may still take, as of the last look.
    pub headroom_bytes: u64,
    /// Free memory that it never takes.
    pub reserve_bytes: u64,
    /// What the machine or the memory cgroup has in all.
    pub memory_total_bytes: u64,
    /// What memory pressure has it do: `none`, `hold` (not grow) or `shrink`.
    pub pressure: &'static str,
    /// Puts, gets and what became of pages.
    #[serde(flatten)]
    pub counters: Counters,
    /// Notices of lost pages that were sent.
    pub lost_notices_sent: u64,
    /// Searches for pages that the kernel took.
    pub scans: u64,
    /// Pages given back before others had to take them themselves: what others took of the reserve.
    pub demanded_pages: u64,
    /// Frames that broke the protocol; each ended its connection.
    pub malformed_frames: u64,
    /// Connections that were refused, for whatever reason.
    pub refused_connections: u64,
    /// Of those, how many did not have the pool's key, or had one where none is wanted.
    pub refused_keys: u64,
    /// Connections ended before they had said who they are, because too many others came.
    pub crowded_out_connections: u64,
    /// Connections ended because the peer did not send or take a frame in time.
    pub stuck_connections: u64,
    /// Connections now.
    pub connections: u64,
    /// Borrowers connected now.
    pub borrowers: u64,
    /// Borrowers that lost their connection and whose pages are kept for a while.
    pub kept_sessions: u64,
    /// Of those, how many did not come back in time.
    pub expired_sessions: u64,
    /// How often one did come back, or took over from a connection that was still there.
    pub resumed_sessions: u64,
    /// What it may use of processors, in percent of one, if that is limited.
    pub cpu_percent: Option<u32>,
    /// Bytes a second that it may receive and send, if that is limited.
    pub rate_bytes: Option<u64>,
    /// Time of processors that connections of borrowers used, if that is limited, hence measured.
    pub cpu_ms: Option<u64>,
    /// Time that connections of borrowers waited for their turn, together.
    pub paced_ms: u64,
    /// Pages asked for and not sent because their borrower was too far behind its share.
    pub paced_misses: u64,
    /// Each borrower, connected or kept.
    pub borrower_list: Vec<BorrowerStatus>,
}

/// A borrower's part.
#[derive(Clone, Debug, Serialize)]
pub struct BorrowerStatus {
    /// The first 8 hexadecimal digits of its session's name.
    pub name: String,
    /// Its connections.
    pub connections: u64,
    /// Time since its main connection ended, if that was.
    pub kept_ms: Option<u64>,
    /// Its pages, those of zeros not counted.
    pub stored_pages: u64,
    /// Its pages of zeros.
    pub zero_pages: u64,
    /// Time of processors that its connections used, if that is measured.
    pub cpu_ms: Option<u64>,
    /// Time that its connections waited for their turn, together.
    pub paced_ms: u64,
    /// Pages that it asked for and was not sent because it was too far behind its share.
    pub paced_misses: u64,
    /// Its puts, gets and what became of its pages.
    #[serde(flatten)]
    pub counters: Counters,
}
