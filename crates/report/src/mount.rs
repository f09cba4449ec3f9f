//! The status of a mount.

use crate::{Confined, Pool, measured, words};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

words! {
    /// When writes reach the backing directory.
    pub enum Write {
        /// Before they are answered.
        Through = "through",
        /// Later, from the kernel's page cache.
        Back = "back",
    }
}

words! {
    /// Whether lenders keep the pages that they return.
    pub enum Strategy {
        /// A page is either here or at a lender.
        Exclusive = "exclusive",
        /// A lender keeps a page that it has returned.
        NonInclusive = "non-inclusive",
    }
}

words! {
    /// When pages are put at lenders.
    pub enum Populate {
        /// When the kernel evicts them.
        Eviction = "eviction",
        /// When they are read from the backing directory.
        Read = "read",
    }
}

words! {
    /// The state of a lender.
    pub enum LinkState {
        /// Connected, and used.
        Used = "used",
        /// Connected, but too slow to be used.
        Bypassed = "bypassed",
        /// Disconnected; it may come back with its pages.
        Suspended = "suspended",
        /// Disconnected, and its pages are lost.
        Down = "down",
    }
}

/// A distribution of times since the daemon began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Times {
    /// Upper bounds of the buckets, in microseconds.
    pub bounds_us: Vec<u64>,
    /// Number of times up to this bound and above the previous one. The last number is of times
    /// above all bounds.
    pub counts: Vec<u64>,
    /// The sum of all, in nanoseconds.
    pub sum_ns: u64,
}

/// A point of a [`Curve`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CurvePoint {
    /// Size of the pool.
    pub bytes: u64,
    /// Share of the misses that it would have answered.
    pub hit_ratio: f64,
    /// Share of the misses that the estimate is based on. 0: the pool was never filled, and the
    /// last misses were used.
    pub seen: f64,
}

/// Estimated hit ratios of pools of other sizes. It is not a metric: the sizes change, so time
/// series would accumulate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Curve {
    /// Number of sampled misses; older ones count less.
    pub sampled_misses: u64,
    /// Pages that were evicted and not read again, in bytes: the largest amount that a pool could
    /// hold.
    pub evicted_bytes: u64,
    /// Estimates for sizes, each twice the previous one, until everything would fit.
    pub points: Vec<CurvePoint>,
}

/// The virtual machines whose images a mount serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Guests {
    /// The address at which guests connect.
    pub listen: String,
    /// Each of them.
    pub list: Vec<HostGuest>,
}

measured! {
    /// A mount.
    pub struct Mount, "Mounts" of ["mount"] by ["mount"]
        info "pumapool_mount_info" with [source, version, strategy, write, fill]: "a mount: the backing directory, the program's version, and how it is served"
    {
        /// The process that represents the mount: the supervisor while it runs.
        pid: u32,
        /// The process that serves.
        daemon_pid: u32,
        /// The version of the program.
        version: String,
        /// The backing directory.
        source: String,
        /// Where it is mounted.
        mountpoint: String,
        /// When writes reach the backing directory.
        write: Write,
        /// Whether lenders keep the pages that they return.
        strategy: Strategy,
        /// When pages are put at lenders.
        fill: Populate,
        /// The rights of the daemon.
        confined: Confined,
        /// How connections to lenders are protected; none without lenders.
        security: Option<String>,
        /// Where its metrics are served.
        metrics: Option<String>,
        /// Discovery, if it takes part in a pool.
        pool: Option<Pool>,
        /// The present problems, with advice for each.
        problems: Vec<String>,
        /// The virtual machines whose images it serves, if it serves any.
        guests: Option<Guests>,
        /// whether at least one lender is there
        lender_is_up: bool = gauge Count "pumapool_mount_lender_up",
        /// whether what is evicted is put at lenders; 0 while its node lends
        borrowing: bool = gauge Count "pumapool_mount_borrowing",
        /// Put messages that are being filled, wait to be sent, or wait for their answer
        puts_under_way: u64 = gauge Count "pumapool_mount_puts_under_way",
        /// Its lenders.
        lenders: Vec<Link>,
        /// Latency of reads of the backing directory.
        disk: Disk,
        /// The handling of pages that are read in sequential streams.
        streams: String,
        /// Estimated hit ratios of pools of other sizes.
        curve: Curve,
        /// Reads, evictions and what became of pages.
        borrower: Borrower,
        /// Its control groups, if it tells them apart.
        cgroups: Option<Vec<Cgroup>>,
        /// Latencies of gets and of backing reads.
        latencies: Latencies,
        /// The catalog.
        catalog: Catalog,
        /// The eviction tap, if there is one.
        tap: Option<Tap>,
        /// The file system.
        mount: Files,
    }
}

measured! {
    /// Latencies of gets and of backing reads of a mount.
    pub struct Latencies, "Mounts" of ["mount"] by ["mount"] {
        /// what gets took until they were answered, or until the backing directory was faster
        get: Times = times Microseconds "pumapool_mount_get_seconds",
        /// what reads of the backing directory took, but for those that raced a get
        backing: Times = times Microseconds "pumapool_mount_backing_read_seconds",
    }
}

measured! {
    /// The recent latency of reads of the backing directory.
    pub struct Disk, "Mounts" of ["mount"] by ["mount"] {
        /// what short reads of the backing directory took lately, on average: what lenders are
        /// compared with
        read_us: Option<u64> = gauge Microseconds "pumapool_mount_backing_read_recent_seconds",
        /// after how long a get is late, and raced by a read of the backing directory
        get_is_late_us: u64 = gauge Microseconds "pumapool_mount_get_late_seconds",
    }
}

measured! {
    /// The counters of a borrower.
    pub struct Borrower, "Mounts: reads, evictions and what became of pages" of ["mount"] by ["mount"] {
        /// READ requests out of the page cache
        reads: u64 = counter Count "pumapool_mount_reads_total",
        /// pages that they asked for, before the end of the file
        read_pages: u64 = counter Count "pumapool_mount_read_pages_total",
        /// pages answered from a lender
        lender_pages: u64 = counter Count "pumapool_mount_lender_pages_total",
        /// pages answered from a put buffer
        buffer_pages: u64 = counter Count "pumapool_mount_buffer_pages_total",
        /// pages answered with what a guest has evicted
        demoted_pages: u64 = counter Count "pumapool_mount_demoted_pages_total",
        /// pages answered as zeros known to the catalog
        zero_pages: u64 = counter Count "pumapool_mount_zero_pages_total",
        /// pages answered from the backing directory
        backing_pages: u64 = counter Count "pumapool_mount_backing_pages_total",
        /// Get messages sent
        get_messages: u64 = counter Count "pumapool_mount_get_messages_total",
        /// pages asked for that the lender no longer had
        get_misses: u64 = counter Count "pumapool_mount_get_misses_total",
        /// Get messages that failed: time-out, lost connection or malformed answer
        get_failures: u64 = counter Count "pumapool_mount_get_failures_total",
        /// pages from a lender whose checksum was wrong
        bad_pages: u64 = counter Count "pumapool_mount_bad_pages_total",
        /// READ requests done again because the file changed meanwhile
        reads_repeated: u64 = counter Count "pumapool_mount_reads_repeated_total",
        /// evictions seen
        evictions: u64 = counter Count "pumapool_mount_evictions_total",
        /// evictions of pages that a lender had already: nothing sent
        evictions_already_lent: u64 = counter Count "pumapool_mount_evictions_already_lent_total",
        /// evictions whose bytes were not copied, as nothing was to be sent, and should have been
        evictions_not_copied: u64 = counter Count "pumapool_mount_evictions_not_copied_total",
        /// evictions of pages of zeros: nothing sent
        evictions_zero: u64 = counter Count "pumapool_mount_evictions_zero_total",
        /// evictions of pages that were read in a sequential stream: nothing sent
        evictions_sequential: u64 = counter Count "pumapool_mount_evictions_sequential_total",
        /// evictions dropped because the page may have changed since
        evictions_not_trusted: u64 = counter Count "pumapool_mount_evictions_not_trusted_total",
        /// evictions of files that are no longer known
        evictions_unknown_file: u64 = counter Count "pumapool_mount_evictions_unknown_file_total",
        /// evictions dropped because no lender was there
        evictions_no_lender: u64 = counter Count "pumapool_mount_evictions_no_lender_total",
        /// evictions in the name of a control group that has no part in it, or more than its share
        evictions_not_admitted: u64 = counter Count "pumapool_mount_evictions_not_admitted_total",
        /// evictions dropped because all put buffers were taken, or the catalog was full
        evictions_no_room: u64 = counter Count "pumapool_mount_evictions_no_room_total",
        /// pages sent to a lender
        put_pages: u64 = counter Count "pumapool_mount_put_pages_total",
        /// Put messages sent
        put_messages: u64 = counter Count "pumapool_mount_put_messages_total",
        /// pages that the lender did not take
        put_pages_refused: u64 = counter Count "pumapool_mount_put_pages_refused_total",
        /// pages sent that had changed by the time the lender had them
        put_pages_outdated: u64 = counter Count "pumapool_mount_put_pages_outdated_total",
        /// pages of which a lender was told that they are of no more use
        drop_pages: u64 = counter Count "pumapool_mount_drop_pages_total",
        /// pages of which a lender said that it no longer has them
        lost_pages: u64 = counter Count "pumapool_mount_lost_pages_total",
        /// pages forgotten because the catalog was full
        catalog_reclaimed_pages: u64 = counter Count "pumapool_mount_catalog_reclaimed_pages_total",
        /// gets that were late and raced by a read of the backing directory
        hedges: u64 = counter Count "pumapool_mount_hedges_total",
        /// of those, how many the backing directory answered first
        hedges_won: u64 = counter Count "pumapool_mount_hedges_won_total",
        /// changes of files
        changes: u64 = counter Count "pumapool_mount_changes_total",
        /// changes of files made beside the mount that were found
        external_changes: u64 = counter Count "pumapool_mount_external_changes_total",
        /// times a lender was reached
        lender_connects: u64 = counter Count "pumapool_mount_lender_connects_total",
        /// times a lender was reached again that had kept what was put before
        lender_resumes: u64 = counter Count "pumapool_mount_lender_resumes_total",
        /// times the connection to a lender was lost
        lender_losses: u64 = counter Count "pumapool_mount_lender_losses_total",
    }
}

measured! {
    /// A borrower's catalog of lent pages.
    pub struct Catalog, "Mounts: the catalog" of ["mount"] by ["mount"] {
        /// files that are known
        files: u64 = gauge Count "pumapool_mount_lent_files",
        /// pages that lenders have, as far as is known
        live_pages: u64 = gauge Pages "pumapool_mount_lent_bytes",
        /// memory of the catalog's entries
        entry_bytes: u64 = gauge Bytes "pumapool_mount_catalog_bytes",
    }
}

measured! {
    /// A control group's use of a mount.
    pub struct Cgroup, "Mounts: control groups, where they are told apart" of ["mount"] by ["mount", "cgroup"] {
        /// Its directory, relative to that of the hierarchy; or `others`.
        cgroup: String,
        /// whether its pages are lent
        takes_part: bool = gauge Count "pumapool_cgroup_takes_part",
        /// how much of it is lent at the most; missing if that is not limited
        quota_pages: Option<u64> = gauge Pages "pumapool_cgroup_quota_bytes",
        /// its part of a full pool, in proportion to those of others; missing if it has none
        share: Option<u32> = gauge Count "pumapool_cgroup_share",
        /// what lenders have of it
        lent_pages: u64 = gauge Pages "pumapool_cgroup_lent_bytes",
        /// evictions in its name
        evicted_pages: u64 = counter Count "pumapool_cgroup_evicted_pages_total",
        /// of those, sent to a lender
        put_pages: u64 = counter Count "pumapool_cgroup_put_pages_total",
        /// pages of it asked back from lenders
        got_pages: u64 = counter Count "pumapool_cgroup_got_pages_total",
        /// pages given up at lenders, as it had more than its quota
        given_up_pages: u64 = counter Count "pumapool_cgroup_given_up_pages_total",
        /// evictions not sent, as all lenders were full and it had more than its share
        over_share_pages: u64 = counter Count "pumapool_cgroup_over_share_pages_total",
        /// evictions not sent, as it has no part in it
        apart_pages: u64 = counter Count "pumapool_cgroup_apart_pages_total",
    }
}

measured! {
    /// The counters of the eviction tap.
    pub struct Tap, "Mounts: the eviction tap" of ["mount"] by ["mount"] {
        /// evictions told in the ring
        captured_pages: u64 = counter Count "pumapool_mount_tap_captured_pages_total",
        /// of those, evictions whose bytes were not copied, as nothing was to be sent
        skipped_pages: u64 = counter Count "pumapool_mount_tap_skipped_pages_total",
        /// evictions lost because the ring was full
        ring_full_pages: u64 = counter Count "pumapool_mount_tap_ring_full_pages_total",
        /// pages that left the page cache because they were dropped, not evicted: nothing captured
        invalidated_pages: u64 = counter Count "pumapool_mount_tap_invalidated_pages_total",
        /// evictions whose page could not be copied
        unreadable_pages: u64 = counter Count "pumapool_mount_tap_unreadable_pages_total",
    }
}

measured! {
    /// The file system of a mount.
    pub struct Files, "Mounts: the file system" of ["mount"] by ["mount"] {
        /// The backing directory.
        source: String,
        /// Where it is mounted.
        mountpoint: String,
        /// whether requests are served
        serving: bool = gauge Count "pumapool_mount_serving",
        /// threads that answer requests now
        workers: u64 = gauge Count "pumapool_mount_workers",
        /// requests that wait because others of their user hold as many threads as one user may
        deferred_requests: u64 = gauge Count "pumapool_mount_deferred_requests",
        /// opens that wait because another process has a lease on the file, and are tried again
        waiting_opens: u64 = gauge Count "pumapool_mount_waiting_opens",
        /// how often a new daemon has taken the mount over; survives the daemon, as no other
        /// counter does
        takeovers: u64 = counter Count "pumapool_mount_takeovers_total",
        /// Requests from the kernel, by kind ([`RequestCount`]).
        requests: BTreeMap<String, u64>,
        /// READs that went past the borrower because of O_DIRECT
        direct_reads: u64 = counter Count "pumapool_mount_direct_reads_total",
        /// opens of files that the kernel reads in the backing directory by itself, because the
        /// pool is of no use to them
        passed_opens: u64 = counter Count "pumapool_mount_passed_opens_total",
        /// times that the kernel was to drop what it caches of a file, which had changed beside the
        /// mount, or may have
        requested_drops: u64 = counter Count "pumapool_mount_requested_drops_total",
        /// bytes answered to READs
        read_bytes: u64 = counter Bytes "pumapool_mount_read_bytes_total",
        /// bytes written by WRITEs
        written_bytes: u64 = counter Bytes "pumapool_mount_written_bytes_total",
        /// files and directories open now
        open_handles: u64 = gauge Count "pumapool_mount_open_handles",
        /// inodes that the kernel knows now
        inodes: u64 = gauge Count "pumapool_mount_inodes",
        /// of those, held by a descriptor; the others are held by a file handle
        inodes_with_descriptor: u64 = gauge Count "pumapool_mount_inodes_with_descriptor",
        /// descriptors that open files and inodes hold
        descriptors: u64 = gauge Count "pumapool_mount_descriptors",
        /// descriptors that the daemon may have (RLIMIT_NOFILE), some of which are reserved for
        /// itself
        descriptors_max: u64 = gauge Count "pumapool_mount_descriptors_max",
        /// files of which changes made beside the mount are told
        watched_files: u64 = gauge Count "pumapool_mount_watched_files",
        /// files with pages that were written to the backing file and not yet dropped there
        written_files_pending: u64 = gauge Count "pumapool_mount_pending_files",
        /// bytes of those pages whose writeback has not begun
        written_bytes_pending: u64 = gauge Bytes "pumapool_mount_pending_bytes",
        /// descriptors that the supervisor has not taken yet, or let go of: it is stopped, or busy
        undelivered_descriptors: u64 = gauge Count "pumapool_mount_undelivered_descriptors",
    }
}

measured! {
    /// One element of [`Files::requests`].
    pub struct RequestCount, "Mounts: the file system" of ["mount"] by ["mount", "request"] {
        /// requests from the kernel, by kind
        count: u64 = counter Count "pumapool_mount_requests_total",
    }
}

measured! {
    /// A lender, as a mount sees it.
    pub struct Link, "Mounts: each of their lenders" of ["mount"] by ["mount", "lender"] {
        /// Its number in the catalog.
        number: u8,
        /// Its address.
        address: String,
        /// Its id in the pool.
        id: Option<String>,
        /// how the lender stands: used; bypassed: there, but too slow; suspended: it may come back
        /// with its pages; down
        state: LinkState = state Count "pumapool_link_state",
        /// Why it is not used.
        reason: String,
        /// how long this has been so
        since_ms: u64 = gauge Milliseconds "pumapool_link_state_age_seconds",
        /// round-trip time of pings now
        ping_us: u64 = gauge Microseconds "pumapool_link_ping_seconds",
        /// their average over 15 seconds
        ping_short_us: u64 = gauge Microseconds "pumapool_link_ping_15s_seconds",
        /// their average over a minute
        ping_long_us: u64 = gauge Microseconds "pumapool_link_ping_1m_seconds",
        /// what gets took lately, on average; missing if there were none
        get_us: Option<u64> = gauge Microseconds "pumapool_link_get_recent_seconds",
        /// its weight in the placement of pages
        weight: u32 = gauge Count "pumapool_link_weight",
        /// what it keeps at the most
        capacity_pages: u64 = gauge Pages "pumapool_link_capacity_bytes",
        /// what it could take without forgetting other pages
        free_pages: u64 = gauge Pages "pumapool_link_free_bytes",
        /// Put messages that are being filled, wait to be sent, or wait for their answer
        puts_under_way: u64 = gauge Count "pumapool_link_puts_under_way",
        /// pages sent to it
        put_pages: u64 = counter Count "pumapool_link_put_pages_total",
        /// pages got from it
        get_pages: u64 = counter Count "pumapool_link_get_pages_total",
        /// pages asked for that it no longer had
        get_misses: u64 = counter Count "pumapool_link_get_misses_total",
        /// pages from it that did not verify
        bad_pages: u64 = counter Count "pumapool_link_bad_pages_total",
        /// gets that were late and raced
        hedges: u64 = counter Count "pumapool_link_hedges_total",
        /// times that it was reached
        connects: u64 = counter Count "pumapool_link_connects_total",
        /// times that the connection was lost
        losses: u64 = counter Count "pumapool_link_losses_total",
        /// times that it was found too slow
        bypasses: u64 = counter Count "pumapool_link_bypasses_total",
    }
}

measured! {
    /// A virtual machine whose image a mount serves.
    pub struct HostGuest, "Host caches: on the host, each guest" of ["mount"] by ["mount", "image"] {
        /// Its image.
        image: String,
        /// Why it is not served, if it is not.
        problem: Option<String>,
        /// whether the guest is connected
        connected: bool = gauge Count "pumapool_host_connected",
        /// pages in the page cache because it had evicted them, when it was last heard; the kernel
        /// may have evicted some
        placed_pages: u64 = gauge Pages "pumapool_host_placed_bytes",
        /// times it connected
        connects: u64 = counter Count "pumapool_host_connects_total",
        /// pages that it has evicted and sent
        demoted_pages: u64 = counter Count "pumapool_host_demoted_pages_total",
        /// of those, put into the page cache
        stored_pages: u64 = counter Count "pumapool_host_stored_pages_total",
        /// were there already
        cached_pages: u64 = counter Count "pumapool_host_cached_pages_total",
        /// dropped, as it is not known what the image holds there
        unknown_pages: u64 = counter Count "pumapool_host_unknown_pages_total",
        /// dropped, as the image holds something else
        differing_pages: u64 = counter Count "pumapool_host_differing_pages_total",
        /// dropped, as too many waited or the kernel did not take them
        missed_pages: u64 = counter Count "pumapool_host_missed_pages_total",
        /// pages that it said to have read
        held_pages: u64 = counter Count "pumapool_host_held_pages_total",
        /// of those, were in the page cache because it had evicted them, or had been since
        hit_pages: u64 = counter Count "pumapool_host_hit_pages_total",
        /// pages taken from the page cache because it had as many as it may
        limited_pages: u64 = counter Count "pumapool_host_limited_pages_total",
    }
}
