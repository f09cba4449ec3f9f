//! The metrics of all daemons. Each is declared once, here: its name, what it is, its meaning, and
//! where it stands in the daemon's status. `status --json`, the Prometheus page, `top` and
//! docs/user/metrics.md all say what stands here.
//!
//! What the crates below declare themselves, with its meaning, is taken from there ([`registry`]).
//!
//! Names are Prometheus' way: `pumapool_`, what it is of, what it is, the base unit, and `_total`
//! of what only grows. Amounts of memory are in bytes; what happens to single pages is counted in
//! pages.

use std::borrow::Cow;
use std::sync::LazyLock;

/// What kind of number it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, as long as the daemon runs.
    Counter,
    /// Goes up and down. What is true or false is 1 or 0.
    Gauge,
    /// One of these words: 1 for the one that it is, 0 for the others, told apart by the label
    /// `state`.
    State(&'static [&'static str]),
    /// How long something took: [`borrower::Times`].
    Histogram,
    /// Always 1; what there is to say is in further labels, each with its place in the status.
    Info(&'static [(&'static str, &'static str)]),
}

/// What the number in the status is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum In {
    /// Things, or pages that something happened to.
    Count,
    /// Pages that take memory: told in bytes.
    Pages,
    /// Bytes.
    Bytes,
    /// Milliseconds: told in seconds.
    Milliseconds,
    /// Microseconds: told in seconds.
    Microseconds,
    /// Percent: told as a ratio.
    Percent,
}

impl In {
    /// What a number of these is to be multiplied with.
    pub fn factor(self) -> f64 {
        match self {
            In::Count | In::Bytes => 1.0,
            In::Pages => page::PAGE_SIZE as f64,
            In::Milliseconds => 1e-3,
            In::Microseconds => 1e-6,
            In::Percent => 1e-2,
        }
    }

    /// The base unit that it is told in, as it stands in names. None: it has none.
    pub fn unit(self) -> Option<&'static str> {
        match self {
            In::Count => None,
            In::Pages | In::Bytes => Some("bytes"),
            In::Milliseconds | In::Microseconds => Some("seconds"),
            In::Percent => Some("ratio"),
        }
    }
}

/// A metric.
#[derive(Clone, Debug)]
pub struct Metric {
    /// Its name on the Prometheus page.
    pub name: Cow<'static, str>,
    /// What kind of number it is.
    pub kind: Kind,
    /// What it is in, in the status.
    pub is_in: In,
    /// Where it stands, below its section.
    pub at: &'static str,
    /// What it says.
    pub meaning: &'static str,
}

/// Metrics that stand together in a status, and have the same labels.
#[derive(Clone, Debug)]
pub struct Section {
    /// What it is about.
    pub title: &'static str,
    /// The kinds of daemon that have it.
    pub daemons: &'static [&'static str],
    /// Where it stands in their status: a JSON pointer, in which `*` is each element of an array or
    /// each value of an object.
    pub at: &'static str,
    /// Labels, and where their values stand: a pointer into the whole status, with the `*` of `at`;
    /// or `*` alone, the name of the last one.
    pub labels: &'static [(&'static str, &'static str)],
    /// The metrics.
    pub metrics: Cow<'static, [Metric]>,
}

/// Numbers of a status that are no metrics, and why.
pub const LEFT_OUT: &[(&str, &str)] = &[
    ("/pid", "a name, not an amount"),
    ("/daemon_pid", "a name, not an amount"),
    ("/targets/*/pid", "a name, not an amount"),
    ("/lenders/*/number", "a name, not an amount"),
    ("/pool/members/*/incarnation", "a name, not an amount"),
    ("/curve", "a curve for readers; its sizes move with what is seen, so that series would pile up"),
    (
        "/lender/borrower_list/*",
        "sessions have new names each time, so that series would pile up; the lender's own numbers are their sums",
    ),
];

/// All of them.
pub fn registry() -> &'static [Section] {
    static REGISTRY: LazyLock<Vec<Section>> = LazyLock::new(|| {
        let mut sections = DECLARED.to_vec();
        sections.extend([borrower(), host(), guest()]);
        sections.sort_by_key(|section| ORDER.iter().position(|title| *title == section.title));
        sections
    });
    &REGISTRY
}

/// In the order of a reader's interest.
const ORDER: &[&str] = &[
    MOUNT,
    BORROWER,
    CATALOG,
    CGROUPS,
    TAP,
    FILES,
    LINKS,
    LENDER,
    NODE,
    NODE_MOUNTS,
    POOL,
    MEMBERS,
    HOST,
    GUEST,
    NUMA,
];

const MOUNT: &str = "Mounts";
const BORROWER: &str = "Mounts: reads, evictions and what became of pages";
const CATALOG: &str = "Mounts: the catalog";
const CGROUPS: &str = "Mounts: control groups, where they are told apart";
const TAP: &str = "Mounts: the eviction tap";
const FILES: &str = "Mounts: the file system";
const LINKS: &str = "Mounts: each of their lenders";
const LENDER: &str = "Lenders";
const NODE: &str = "Nodes that lend and borrow by need";
const NODE_MOUNTS: &str = "Nodes: their mounts";
const POOL: &str = "Discovery by gossip";
const MEMBERS: &str = "Discovery: the lenders that were found";
const HOST: &str = "Host caches: on the host, each guest";
const GUEST: &str = "Host caches: in the guest";
const NUMA: &str = "NUMA placement: each target";

/// By its mountpoint.
const OF_MOUNT: &[(&str, &str)] = &[("mount", "/mountpoint")];

const fn metric(name: &'static str, kind: Kind, is_in: In, at: &'static str, meaning: &'static str) -> Metric {
    Metric { name: Cow::Borrowed(name), kind, is_in, at, meaning }
}

const fn counter(name: &'static str, is_in: In, at: &'static str, meaning: &'static str) -> Metric {
    metric(name, Kind::Counter, is_in, at, meaning)
}

const fn gauge(name: &'static str, is_in: In, at: &'static str, meaning: &'static str) -> Metric {
    metric(name, Kind::Gauge, is_in, at, meaning)
}

/// What the borrower declares.
fn borrower() -> Section {
    let counters = borrower::Metrics::default().all();
    let counter = |(at, meaning, _): (&'static str, &'static str, u64)| named("mount", at, Kind::Counter, meaning);
    Section {
        title: BORROWER,
        daemons: &["mount"],
        at: "/borrower",
        labels: OF_MOUNT,
        metrics: counters.into_iter().map(counter).collect(),
    }
}

/// What the host of guests declares.
fn host() -> Section {
    let declared = hostcache::host::Status::MEANINGS.iter();
    let metric = |(at, meaning): &(&'static str, &'static str)| match *at {
        "placed_pages" => metric("pumapool_host_placed_bytes", Kind::Gauge, In::Pages, at, meaning),
        at => named("host", at, Kind::Counter, meaning),
    };
    let connected = gauge("pumapool_host_connected", In::Count, "connected", "whether the guest is connected");
    Section {
        title: HOST,
        daemons: &["mount"],
        at: "/guests/list/*",
        labels: &[("mount", "/mountpoint"), ("image", "/guests/list/*/image")],
        metrics: declared.map(metric).chain([connected]).collect(),
    }
}

/// What a guest declares.
fn guest() -> Section {
    let declared = hostcache::guest::Counts::MEANINGS.iter();
    let counter = |(at, meaning): &(&'static str, &'static str)| named("guest", at, Kind::Counter, meaning);
    let info = metric(
        "pumapool_guest_info",
        Kind::Info(&[("host", "/host"), ("version", "/version")]),
        In::Count,
        "",
        "a file system whose evictions are given to the host",
    );
    Section {
        title: GUEST,
        daemons: &["guest"],
        at: "/guest",
        labels: &[("fs", "/fs")],
        metrics: [info].into_iter().chain(declared.map(counter)).collect(),
    }
}

fn named(of: &str, at: &'static str, kind: Kind, meaning: &'static str) -> Metric {
    Metric { name: format!("pumapool_{of}_{at}_total").into(), kind, is_in: In::Count, at, meaning }
}

#[rustfmt::skip] // a line each
const DECLARED: &[Section] = &[
    Section { title: MOUNT, daemons: &["mount"], at: "", labels: OF_MOUNT, metrics: Cow::Borrowed(&[
        metric("pumapool_mount_info", Kind::Info(&[("source", "/source"), ("version", "/version"), ("strategy", "/strategy"), ("write", "/write"), ("fill", "/fill")]), In::Count, "", "a mount: the directory below, the program's version, and how it is served"),
        counter("pumapool_mount_takeovers_total", In::Count, "mount/takeovers", "how often a new daemon has taken the mount over; survives the daemon, as no other counter does"),
        gauge("pumapool_mount_serving", In::Count, "mount/serving", "whether requests are served"),
        gauge("pumapool_mount_borrowing", In::Count, "borrowing", "whether what is evicted is put at lenders; 0 while its node lends"),
        gauge("pumapool_mount_lender_up", In::Count, "lender_is_up", "whether at least one lender is there"),
        gauge("pumapool_mount_puts_under_way", In::Count, "puts_under_way", "Put messages that are being filled, wait to be sent, or wait for their answer"),
        metric("pumapool_mount_get_seconds", Kind::Histogram, In::Microseconds, "latencies/get", "what gets took until they were answered, or until the directory below was faster"),
        metric("pumapool_mount_below_read_seconds", Kind::Histogram, In::Microseconds, "latencies/below", "what reads of the directory below took, but for those that raced a get"),
        gauge("pumapool_mount_below_read_recent_seconds", In::Microseconds, "disk/read_us", "what short reads of the directory below took lately, on average: what lenders are compared with"),
        gauge("pumapool_mount_get_late_seconds", In::Microseconds, "disk/get_is_late_us", "after how long a get is late, and raced by a read of the directory below"),
    ]) },
    Section { title: CATALOG, daemons: &["mount"], at: "/catalog", labels: OF_MOUNT, metrics: Cow::Borrowed(&[
        gauge("pumapool_mount_lent_bytes", In::Pages, "live_pages", "pages that lenders have, as far as is known"),
        gauge("pumapool_mount_lent_files", In::Count, "files", "files that are known"),
        gauge("pumapool_mount_catalog_bytes", In::Bytes, "entry_bytes", "memory of the catalog's entries"),
    ]) },
    Section { title: CGROUPS, daemons: &["mount"], at: "/cgroups/*", labels: &[("mount", "/mountpoint"), ("cgroup", "/cgroups/*/cgroup")], metrics: Cow::Borrowed(&[
        gauge("pumapool_cgroup_takes_part", In::Count, "takes_part", "whether its pages are lent"),
        gauge("pumapool_cgroup_quota_bytes", In::Pages, "quota_pages", "how much of it is lent at the most; missing if that is not limited"),
        gauge("pumapool_cgroup_share", In::Count, "share", "its part of a full pool, in proportion to those of others; missing if it has none"),
        gauge("pumapool_cgroup_lent_bytes", In::Pages, "lent_pages", "what lenders have of it"),
        counter("pumapool_cgroup_evicted_pages_total", In::Count, "evicted_pages", "evictions in its name"),
        counter("pumapool_cgroup_put_pages_total", In::Count, "put_pages", "of those, sent to a lender"),
        counter("pumapool_cgroup_got_pages_total", In::Count, "got_pages", "pages of it asked back from lenders"),
        counter("pumapool_cgroup_given_up_pages_total", In::Count, "given_up_pages", "pages given up at lenders, as it had more than its quota"),
        counter("pumapool_cgroup_over_share_pages_total", In::Count, "over_share_pages", "evictions not sent, as all lenders were full and it had more than its share"),
        counter("pumapool_cgroup_apart_pages_total", In::Count, "apart_pages", "evictions not sent, as it has no part in it"),
    ]) },
    Section { title: TAP, daemons: &["mount"], at: "/tap", labels: OF_MOUNT, metrics: Cow::Borrowed(&[
        counter("pumapool_mount_tap_captured_pages_total", In::Count, "captured_pages", "evictions told in the ring"),
        counter("pumapool_mount_tap_omitted_pages_total", In::Count, "omitted_pages", "of those, evictions whose bytes were not copied, as nothing was to be sent"),
        counter("pumapool_mount_tap_ring_full_pages_total", In::Count, "ring_full_pages", "evictions lost because the ring was full"),
        counter("pumapool_mount_tap_invalidated_pages_total", In::Count, "invalidated_pages", "pages that left the page cache because they were dropped, not evicted: nothing captured"),
        counter("pumapool_mount_tap_unreadable_pages_total", In::Count, "unreadable_pages", "evictions whose page could not be copied"),
    ]) },
    Section { title: FILES, daemons: &["mount"], at: "/mount", labels: OF_MOUNT, metrics: Cow::Borrowed(&[
        counter("pumapool_mount_direct_reads_total", In::Count, "direct_reads", "READs that went past the borrower because of O_DIRECT"),
        counter("pumapool_mount_passed_opens_total", In::Count, "passed_opens", "opens of files that the kernel reads below by itself, because the pool is of no use to them"),
        counter("pumapool_mount_requested_drops_total", In::Count, "requested_drops", "times that the kernel was to drop what it caches of a file, which had changed beside the mount, or may have"),
        counter("pumapool_mount_read_bytes_total", In::Bytes, "read_bytes", "bytes answered to READs"),
        counter("pumapool_mount_written_bytes_total", In::Bytes, "written_bytes", "bytes written by WRITEs"),
        gauge("pumapool_mount_workers", In::Count, "workers", "threads that answer requests now"),
        gauge("pumapool_mount_deferred_requests", In::Count, "deferred_requests", "requests that wait because others of their user hold as many threads as one user may"),
        gauge("pumapool_mount_waiting_opens", In::Count, "waiting_opens", "opens that wait because another process has a lease on the file, and are tried again"),
        gauge("pumapool_mount_open_handles", In::Count, "open_handles", "files and directories open now"),
        gauge("pumapool_mount_inodes", In::Count, "inodes", "inodes that the kernel knows now"),
        gauge("pumapool_mount_inodes_with_descriptor", In::Count, "inodes_with_descriptor", "of those, held by a descriptor; the others are held by a file handle"),
        gauge("pumapool_mount_descriptors", In::Count, "descriptors", "descriptors that open files and inodes hold"),
        gauge("pumapool_mount_descriptors_max", In::Count, "descriptors_max", "descriptors that the daemon may have (RLIMIT_NOFILE), some of which are reserved for itself"),
        gauge("pumapool_mount_files_told_of", In::Count, "files_told_of", "files of which changes made beside the mount are told"),
        gauge("pumapool_mount_pending_files", In::Count, "written_files_pending", "files with pages that were written below and not yet dropped there"),
        gauge("pumapool_mount_pending_bytes", In::Bytes, "written_bytes_pending", "bytes of those pages whose writeback has not begun"),
        gauge("pumapool_mount_undelivered_descriptors", In::Count, "undelivered_descriptors", "descriptors that the supervisor has not taken yet, or let go of: it is stopped, or busy"),
    ]) },
    Section { title: FILES, daemons: &["mount"], at: "/mount/requests/*", labels: &[("mount", "/mountpoint"), ("request", "*")], metrics: Cow::Borrowed(&[
        counter("pumapool_mount_requests_total", In::Count, "", "requests from the kernel, by kind"),
    ]) },
    Section { title: LINKS, daemons: &["mount"], at: "/lenders/*", labels: &[("mount", "/mountpoint"), ("lender", "/lenders/*/address")], metrics: Cow::Borrowed(&[
        metric("pumapool_link_state", Kind::State(&["used", "shunned", "away", "down"]), In::Count, "state", "how the lender stands: used; shunned: there, but too slow; away: it may come back with its pages; down"),
        gauge("pumapool_link_state_age_seconds", In::Milliseconds, "since_ms", "how long this has been so"),
        gauge("pumapool_link_ping_seconds", In::Microseconds, "ping_us", "round-trip time of pings now"),
        gauge("pumapool_link_ping_15s_seconds", In::Microseconds, "ping_short_us", "their average over 15 seconds"),
        gauge("pumapool_link_ping_1m_seconds", In::Microseconds, "ping_long_us", "their average over a minute"),
        gauge("pumapool_link_get_recent_seconds", In::Microseconds, "get_us", "what gets took lately, on average; missing if there were none"),
        gauge("pumapool_link_weight", In::Count, "weight", "its weight in the placement of pages"),
        gauge("pumapool_link_capacity_bytes", In::Pages, "capacity_pages", "what it keeps at the most"),
        gauge("pumapool_link_free_bytes", In::Pages, "free_pages", "what it could take without forgetting other pages"),
        gauge("pumapool_link_puts_under_way", In::Count, "puts_under_way", "Put messages that are being filled, wait to be sent, or wait for their answer"),
        counter("pumapool_link_put_pages_total", In::Count, "put_pages", "pages sent to it"),
        counter("pumapool_link_get_pages_total", In::Count, "get_pages", "pages got from it"),
        counter("pumapool_link_get_misses_total", In::Count, "get_misses", "pages asked for that it no longer had"),
        counter("pumapool_link_bad_pages_total", In::Count, "bad_pages", "pages from it that did not verify"),
        counter("pumapool_link_hedges_total", In::Count, "hedges", "gets that were late and raced"),
        counter("pumapool_link_connects_total", In::Count, "connects", "times that it was reached"),
        counter("pumapool_link_losses_total", In::Count, "losses", "times that the connection was lost"),
        counter("pumapool_link_shuns_total", In::Count, "shuns", "times that it was found too slow"),
    ]) },
    Section { title: LENDER, daemons: &["lend", "join"], at: "/lender", labels: &[("lender", "/listen")], metrics: Cow::Borrowed(&[
        metric("pumapool_lender_info", Kind::Info(&[("version", "/version")]), In::Count, "", "a lender: the program's version"),
        gauge("pumapool_lender_lending", In::Count, "lending", "whether it takes pages; 0 while its node borrows"),
        gauge("pumapool_lender_capacity_bytes", In::Pages, "capacity_pages", "what it keeps at the most"),
        gauge("pumapool_lender_stored_bytes", In::Pages, "stored_pages", "what it keeps"),
        gauge("pumapool_lender_zero_pages", In::Count, "zero_pages", "pages of zeros that it keeps, which take no memory"),
        gauge("pumapool_lender_free_resident_bytes", In::Pages, "free_resident_pages", "free slots that likely still have memory, which the next puts will use"),
        gauge("pumapool_lender_headroom_bytes", In::Bytes, "headroom_bytes", "memory that it may still take, as of the last look"),
        gauge("pumapool_lender_reserve_bytes", In::Bytes, "reserve_bytes", "free memory that it never takes"),
        gauge("pumapool_lender_memory_total_bytes", In::Bytes, "memory_total_bytes", "what the machine, or the memory cgroup, has in all"),
        metric("pumapool_lender_pressure", Kind::State(&["none", "hold", "shrink"]), In::Count, "pressure", "what memory pressure has it do: none; hold: not grow; shrink: give memory back"),
        counter("pumapool_lender_put_pages_total", In::Count, "puts", "pages put, stored or not"),
        counter("pumapool_lender_refused_pages_total", In::Count, "puts_refused", "pages put and not stored, for want of memory"),
        counter("pumapool_lender_asked_pages_total", In::Count, "gets", "pages asked for"),
        counter("pumapool_lender_hit_pages_total", In::Count, "hits", "pages asked for and returned, those of zeros among them"),
        counter("pumapool_lender_missed_pages_total", In::Count, "misses", "pages asked for and not here"),
        counter("pumapool_lender_dropped_pages_total", In::Count, "drops", "pages dropped on their borrower's word"),
        counter("pumapool_lender_replaced_pages_total", In::Count, "replaced", "pages given up for newer ones"),
        counter("pumapool_lender_shrunk_pages_total", In::Count, "shrunk", "pages given up under memory pressure"),
        counter("pumapool_lender_reclaimed_pages_total", In::Count, "reclaimed_by_kernel", "pages that the kernel took"),
        counter("pumapool_lender_demanded_pages_total", In::Count, "demanded_pages", "pages given back before others had to take them: what others took of the reserve"),
        counter("pumapool_lender_forgotten_notices_total", In::Count, "notices_forgotten", "notices of lost pages that their borrower did not fetch in time"),
        counter("pumapool_lender_sent_notices_total", In::Count, "lost_notices_sent", "notices of lost pages that were sent"),
        counter("pumapool_lender_scans_total", In::Count, "scans", "searches for pages that the kernel took"),
        counter("pumapool_lender_malformed_frames_total", In::Count, "malformed_frames", "frames that broke the protocol; each ended its connection"),
        counter("pumapool_lender_refused_connections_total", In::Count, "refused_connections", "connections that were refused, for whatever reason"),
        counter("pumapool_lender_refused_keys_total", In::Count, "refused_keys", "of those, without the pool's key, or with one where none is wanted"),
        counter("pumapool_lender_crowded_out_connections_total", In::Count, "crowded_out_connections", "connections ended before they had said who they are, because too many others came"),
        counter("pumapool_lender_stuck_connections_total", In::Count, "stuck_connections", "connections ended because the peer did not send or take a frame in time"),
        gauge("pumapool_lender_connections", In::Count, "connections", "connections now"),
        gauge("pumapool_lender_borrowers", In::Count, "borrowers", "borrowers connected now"),
        gauge("pumapool_lender_kept_sessions", In::Count, "kept_sessions", "borrowers that lost their connection and whose pages are kept for a while"),
        counter("pumapool_lender_expired_sessions_total", In::Count, "expired_sessions", "of those, did not come back in time"),
        counter("pumapool_lender_resumed_sessions_total", In::Count, "resumed_sessions", "times one did come back, or took over from a connection that was still there"),
        gauge("pumapool_lender_cpu_limit_ratio", In::Percent, "cpu_percent", "what it may use of processors, 1 being one of them; missing if that is not limited"),
        gauge("pumapool_lender_rate_limit_bytes", In::Bytes, "rate_bytes", "bytes a second that it may receive and send; missing if that is not limited"),
        counter("pumapool_lender_cpu_seconds_total", In::Milliseconds, "cpu_ms", "time of processors that borrowers' connections used; missing if that is not limited"),
        counter("pumapool_lender_paced_seconds_total", In::Milliseconds, "paced_ms", "time that borrowers' connections waited for their turn, together"),
        counter("pumapool_lender_paced_missed_pages_total", In::Count, "paced_misses", "pages asked for and not sent because their borrower was too far behind its share"),
    ]) },
    Section { title: NODE, daemons: &["join"], at: "/role", labels: &[("node", "/listen")], metrics: Cow::Borrowed(&[
        metric("pumapool_node_role", Kind::State(&["lend", "borrow"]), In::Count, "role", "what it does"),
        gauge("pumapool_node_role_age_seconds", In::Milliseconds, "since_ms", "how long this has been so"),
        counter("pumapool_node_role_changes_total", In::Count, "changes", "how often that has changed"),
        gauge("pumapool_node_calm_seconds", In::Milliseconds, "calm_ms", "how long it must be calm now before it lends"),
        gauge("pumapool_node_evicted_pages_per_second", In::Count, "evicted_pages_per_second", "what its mounts have evicted lately, which the role is decided by"),
    ]) },
    Section { title: NODE_MOUNTS, daemons: &["join"], at: "/mounts/*", labels: &[("node", "/listen"), ("mount", "/mounts/*/mountpoint")], metrics: Cow::Borrowed(&[
        metric("pumapool_node_mount_state", Kind::State(&["borrows", "does not borrow", "does not answer", "gone"]), In::Count, "state", "what its mount does"),
        gauge("pumapool_node_mount_sees_evictions", In::Count, "sees_evictions", "whether its evictions are seen"),
    ]) },
    Section { title: POOL, daemons: &["mount", "lend", "join"], at: "/pool", labels: &[("gossip", "/pool/advertise")], metrics: Cow::Borrowed(&[
        gauge("pumapool_pool_live_nodes", In::Count, "live_nodes", "other nodes that are alive, lenders and borrowers"),
        gauge("pumapool_pool_dead_nodes", In::Count, "dead_nodes", "nodes that are gone, and not yet forgotten"),
        gauge("pumapool_pool_nonsense_nodes", In::Count, "nonsense", "nodes whose value makes no sense"),
        counter("pumapool_pool_restarts_total", In::Count, "restarts", "times that gossip failed and began again"),
        counter("pumapool_pool_sent_datagrams_total", In::Count, "sent_datagrams", "datagrams that were sent"),
        counter("pumapool_pool_sent_bytes_total", In::Bytes, "sent_bytes", "their bytes, without the network's headers"),
        counter("pumapool_pool_received_datagrams_total", In::Count, "received_datagrams", "datagrams that were good"),
        counter("pumapool_pool_received_bytes_total", In::Bytes, "received_bytes", "their bytes"),
        counter("pumapool_pool_refused_foreign_total", In::Count, "refused_foreign", "datagrams of something else, or of nodes that protect them in another way"),
        counter("pumapool_pool_refused_unopened_total", In::Count, "refused_unopened", "datagrams of another key or checksum"),
        counter("pumapool_pool_refused_untimely_total", In::Count, "refused_untimely", "datagrams from a time that is not ours"),
        counter("pumapool_pool_refused_replayed_total", In::Count, "refused_replayed", "datagrams that had been here before"),
        counter("pumapool_pool_refused_malformed_total", In::Count, "refused_malformed", "datagrams with a message that no node of ours sends"),
        counter("pumapool_pool_refused_nodes_total", In::Count, "refused_nodes", "messages with more nodes than there is room for"),
        counter("pumapool_pool_unsent_too_long_total", In::Count, "unsent_too_long", "messages not sent, for being too long"),
        counter("pumapool_pool_unsent_failed_total", In::Count, "unsent_failed", "datagrams that the system did not take"),
    ]) },
    Section { title: MEMBERS, daemons: &["mount", "lend", "join"], at: "/pool/members/*", labels: &[("gossip", "/pool/advertise"), ("lender", "/pool/members/*/address")], metrics: Cow::Borrowed(&[
        gauge("pumapool_pool_lender_free_bytes", In::Bytes, "free_bytes", "what it says that it has left"),
        gauge("pumapool_pool_lender_capacity_bytes", In::Bytes, "capacity_bytes", "what it says that it lends at the most"),
    ]) },
    Section { title: GUEST, daemons: &["guest"], at: "", labels: &[("fs", "/fs")], metrics: Cow::Borrowed(&[
        gauge("pumapool_guest_connected", In::Count, "connected", "whether the host is there"),
    ]) },
    Section { title: NUMA, daemons: &["numa"], at: "/targets/*", labels: &[("target", "/targets/*/who")], metrics: Cow::Borrowed(&[
        metric("pumapool_numa_info", Kind::Info(&[("policy", "/targets/*/policy")]), In::Count, "", "a process or machine whose memory is placed"),
        counter("pumapool_numa_samples_total", In::Count, "samples", "accesses that were seen of it"),
        counter("pumapool_numa_moved_pages_total", In::Count, "moved_pages", "pages of it that were moved"),
    ]) },
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_say_kind_and_unit() {
        let mut names = HashSet::new();
        for metric in registry().iter().flat_map(|section| section.metrics.iter()) {
            let name = &metric.name;
            assert!(names.insert(name.clone()), "{name} is declared twice");
            assert!(
                name.starts_with("pumapool_")
                    && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'),
                "{name}"
            );
            assert_eq!(name.ends_with("_total"), metric.kind == Kind::Counter, "{name}");
            assert_eq!(name.ends_with("_info"), matches!(metric.kind, Kind::Info(_)), "{name}");
            if let Some(unit) = metric.is_in.unit() {
                assert!(name.trim_end_matches("_total").ends_with(&format!("_{unit}")), "{name} is in {unit}");
            }
            assert!(!metric.meaning.is_empty() && !metric.meaning.contains('\n'), "{name}");
            for suffix in ["_count", "_sum", "_bucket", "_created"] {
                assert!(!name.ends_with(suffix), "{name} would be taken for a part of another one");
            }
        }
    }

    #[test]
    fn every_section_has_its_place() {
        for section in registry() {
            assert!(ORDER.contains(&section.title), "{}", section.title);
        }
    }
}
