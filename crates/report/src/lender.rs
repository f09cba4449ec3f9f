//! The status of a lender.

use crate::{Confined, Pool, measured, words};
use serde::{Deserialize, Serialize};

words! {
    /// A lender's reaction to memory pressure.
    pub enum Pressure {
        /// There is none.
        None = "none",
        /// It does not grow.
        Hold = "hold",
        /// It gives memory back.
        Shrink = "shrink",
    }
}

/// A lender.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lend {
    /// The process.
    pub pid: u32,
    /// The version of the program.
    pub version: String,
    /// Where it listens.
    pub listen: String,
    /// Its rights.
    pub confined: Confined,
    /// How connections are protected.
    pub security: Option<String>,
    /// Where its metrics are served.
    pub metrics: Option<String>,
    /// The lent memory.
    pub lender: Lender,
    /// Discovery, if it takes part in a pool.
    pub pool: Option<Pool>,
}

/// The part of one borrower in a lender. No metric: sessions have new names each time, so that time
/// series would pile up; the numbers of the lender are their sums.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LentTo {
    /// The first 8 hexadecimal digits of the name of its session.
    pub name: String,
    /// Its connections.
    pub connections: u64,
    /// Time since its main connection ended, if it has.
    pub kept_ms: Option<u64>,
    /// Its pages, those of zeros not counted.
    pub stored_pages: u64,
    /// Its pages of zeros.
    pub zero_pages: u64,
    /// Processor time that its connections used, if that is measured.
    pub cpu_ms: Option<u64>,
    /// Time that its connections waited for their turn, together.
    pub rate_limited_ms: u64,
    /// Pages that it asked for and was not sent because it was too far behind its share.
    pub rate_limited_misses: u64,
    /// Pages that it put, stored or not.
    pub puts: u64,
    /// Pages that it put and that were not stored, for want of memory.
    pub puts_refused: u64,
    /// Pages that it asked for.
    pub gets: u64,
    /// Pages that it asked for and was sent, those of zeros among them.
    pub hits: u64,
    /// Pages that it asked for and that were not here.
    pub misses: u64,
    /// Pages that it had dropped.
    pub drops: u64,
    /// Its pages that were given up for newer ones.
    pub replaced: u64,
    /// Its pages that were given up under memory pressure.
    pub shrunk: u64,
    /// Its pages that the kernel took.
    pub reclaimed_by_kernel: u64,
    /// Notices of lost pages that it did not fetch in time.
    pub notices_forgotten: u64,
}

measured! {
    /// The info metric of a lender on the Prometheus page.
    pub struct LenderInfo, "Lenders" of ["lend", "join"] by ["lender"]
        info "pumapool_lender_info" with [version]: "a lender: the program's version"
    {
        /// The version of the program.
        version: String,
    }
}

measured! {
    /// The state and counters of a lender. The counters include borrowers that have left.
    pub struct Lender, "Lenders" of ["lend", "join"] by ["lender"] {
        /// Where it listens.
        address: String,
        /// A number that is new at each start, in hexadecimal.
        incarnation: String,
        /// whether it takes pages; 0 while its node borrows
        lending: bool = gauge Count "pumapool_lender_lending",
        /// what it keeps at the most
        capacity_pages: u64 = gauge Pages "pumapool_lender_capacity_bytes",
        /// what it keeps
        stored_pages: u64 = gauge Pages "pumapool_lender_stored_bytes",
        /// pages of zeros that it keeps, which take no memory
        zero_pages: u64 = gauge Count "pumapool_lender_zero_pages",
        /// free slots that likely still have memory, which the next puts will use
        free_resident_pages: u64 = gauge Pages "pumapool_lender_free_resident_bytes",
        /// memory that it may still take, as of the last look
        available_bytes: u64 = gauge Bytes "pumapool_lender_available_bytes",
        /// free memory that it never takes
        reserve_bytes: u64 = gauge Bytes "pumapool_lender_reserve_bytes",
        /// what the machine, or the memory cgroup, has in all
        memory_total_bytes: u64 = gauge Bytes "pumapool_lender_memory_total_bytes",
        /// what memory pressure has it do: none; hold: not grow; shrink: give memory back
        pressure: Pressure = state Count "pumapool_lender_pressure",
        /// pages put, stored or not
        puts: u64 = counter Count "pumapool_lender_put_pages_total",
        /// pages put and not stored, for want of memory
        puts_refused: u64 = counter Count "pumapool_lender_refused_pages_total",
        /// pages asked for
        gets: u64 = counter Count "pumapool_lender_asked_pages_total",
        /// pages asked for and returned, those of zeros among them
        hits: u64 = counter Count "pumapool_lender_hit_pages_total",
        /// pages asked for and not here
        misses: u64 = counter Count "pumapool_lender_missed_pages_total",
        /// pages dropped on their borrower's word
        drops: u64 = counter Count "pumapool_lender_dropped_pages_total",
        /// pages given up for newer ones
        replaced: u64 = counter Count "pumapool_lender_replaced_pages_total",
        /// pages given up under memory pressure
        shrunk: u64 = counter Count "pumapool_lender_shrunk_pages_total",
        /// pages that the kernel took
        reclaimed_by_kernel: u64 = counter Count "pumapool_lender_reclaimed_pages_total",
        /// pages given back before others had to take them: what others took of the reserve
        demanded_pages: u64 = counter Count "pumapool_lender_demanded_pages_total",
        /// notices of lost pages that their borrower did not fetch in time
        notices_forgotten: u64 = counter Count "pumapool_lender_forgotten_notices_total",
        /// notices of lost pages that were sent
        lost_notices_sent: u64 = counter Count "pumapool_lender_sent_notices_total",
        /// searches for pages that the kernel took
        scans: u64 = counter Count "pumapool_lender_scans_total",
        /// frames that broke the protocol; each ended its connection
        malformed_frames: u64 = counter Count "pumapool_lender_malformed_frames_total",
        /// connections that were refused, for whatever reason
        refused_connections: u64 = counter Count "pumapool_lender_refused_connections_total",
        /// of those, without the pool's key, or with one where none is wanted
        refused_keys: u64 = counter Count "pumapool_lender_refused_keys_total",
        /// connections ended before they had said who they are, because too many others came
        crowded_out_connections: u64 = counter Count "pumapool_lender_crowded_out_connections_total",
        /// connections ended because the peer did not send or take a frame in time
        stuck_connections: u64 = counter Count "pumapool_lender_stuck_connections_total",
        /// connections now
        connections: u64 = gauge Count "pumapool_lender_connections",
        /// borrowers connected now
        borrowers: u64 = gauge Count "pumapool_lender_borrowers",
        /// borrowers that lost their connection and whose pages are kept for a while
        kept_sessions: u64 = gauge Count "pumapool_lender_kept_sessions",
        /// of those, did not come back in time
        expired_sessions: u64 = counter Count "pumapool_lender_expired_sessions_total",
        /// times one did come back, or took over from a connection that was still there
        resumed_sessions: u64 = counter Count "pumapool_lender_resumed_sessions_total",
        /// what it may use of processors, 1 being one of them; missing if that is not limited
        cpu_percent: Option<u32> = gauge Percent "pumapool_lender_cpu_limit_ratio",
        /// bytes a second that it may receive and send; missing if that is not limited
        rate_bytes: Option<u64> = gauge Bytes "pumapool_lender_rate_limit_bytes",
        /// time of processors that borrowers' connections used; missing if that is not limited
        cpu_ms: Option<u64> = counter Milliseconds "pumapool_lender_cpu_seconds_total",
        /// time that borrowers' connections waited for their turn, together
        rate_limited_ms: u64 = counter Milliseconds "pumapool_lender_rate_limited_seconds_total",
        /// pages asked for and not sent because their borrower was too far behind its share
        rate_limited_misses: u64 = counter Count "pumapool_lender_rate_limited_missed_pages_total",
        /// Each borrower, connected or kept.
        borrower_list: Vec<LentTo>,
    }
}
