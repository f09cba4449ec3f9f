//! The status of a guest, a virtual machine that gives its evictions to its host.

use crate::measured;

measured! {
    /// A file system whose evictions are given to the host.
    pub struct Guest, "Host caches: in the guest" of ["guest"] by ["fs"]
        info "pumapool_guest_info" with [host, version]: "a file system whose evictions are given to the host"
    {
        /// The process.
        pid: u32,
        /// The version of the program.
        version: String,
        /// Where its metrics are served.
        metrics: Option<String>,
        /// Where it is mounted.
        fs: String,
        /// Where the host listens.
        host: String,
        /// whether the host is there
        connected: bool = gauge Count "pumapool_guest_connected",
        /// Its counters.
        guest: GuestCounts,
    }
}

measured! {
    /// Counters of a guest since its start, in pages except for `connects`.
    pub struct GuestCounts, "Host caches: in the guest" of ["guest"] by ["fs"] {
        /// times the host was reached
        connects: u64 = counter Count "pumapool_guest_connects_total",
        /// evictions captured
        evicted_pages: u64 = counter Count "pumapool_guest_evicted_pages_total",
        /// evictions left out because too many were waiting
        ring_full_pages: u64 = counter Count "pumapool_guest_ring_full_pages_total",
        /// of those captured, sent to the host
        sent_pages: u64 = counter Count "pumapool_guest_sent_pages_total",
        /// of those, the host caches now
        stored_pages: u64 = counter Count "pumapool_guest_stored_pages_total",
        /// it did already
        cached_pages: u64 = counter Count "pumapool_guest_cached_pages_total",
        /// it does not know what its image holds there
        unknown_pages: u64 = counter Count "pumapool_guest_unknown_pages_total",
        /// its image holds something else: the page has moved or changed since
        differing_pages: u64 = counter Count "pumapool_guest_differing_pages_total",
        /// it had no room for
        missed_pages: u64 = counter Count "pumapool_guest_missed_pages_total",
        /// captured, but the file is deleted
        deleted_pages: u64 = counter Count "pumapool_guest_deleted_pages_total",
        /// captured, but not on the disk as they are: delayed, unwritten, encrypted, inline or
        /// shared extents, and holes
        unsettled_pages: u64 = counter Count "pumapool_guest_unsettled_pages_total",
        /// captured, but not in one page of the disk
        unaligned_pages: u64 = counter Count "pumapool_guest_unaligned_pages_total",
        /// read into the page cache, and the host was told
        held_pages: u64 = counter Count "pumapool_guest_held_pages_total",
    }
}
