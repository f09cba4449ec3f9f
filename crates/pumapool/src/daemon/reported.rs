//! Fills the structures of the crate `report` from the statuses of other crates.
//!
//! Each function destructures all fields of its source. So a new field does not compile here until
//! it is reported, or left out on purpose.

use ::pool::{Gossip, role};
use borrower::Borrower;
use report::{LinkState, Pressure, RoleName, RoleWanted};
use std::sync::Arc;

/// The file system of a mount.
pub fn files(from: mount::Status) -> report::Files {
    let mount::Status {
        source,
        mountpoint,
        serving,
        workers,
        deferred_requests,
        waiting_opens,
        takeovers,
        requests,
        direct_reads,
        passed_opens,
        requested_drops,
        read_bytes,
        written_bytes,
        open_handles,
        inodes,
        inodes_with_descriptor,
        descriptors,
        descriptors_max,
        files_told_of,
        written_files_pending,
        written_bytes_pending,
        undelivered_descriptors,
    } = from;
    report::Files {
        source,
        mountpoint,
        serving,
        workers: workers as u64,
        deferred_requests: deferred_requests as u64,
        waiting_opens: waiting_opens as u64,
        takeovers,
        requests: requests.into_iter().map(|(name, count)| (name.to_owned(), count)).collect(),
        direct_reads,
        passed_opens,
        requested_drops,
        read_bytes,
        written_bytes,
        open_handles: open_handles as u64,
        inodes: inodes as u64,
        inodes_with_descriptor: inodes_with_descriptor as u64,
        descriptors: descriptors as u64,
        descriptors_max: descriptors_max as u64,
        files_told_of: files_told_of as u64,
        written_files_pending: written_files_pending as u64,
        written_bytes_pending,
        undelivered_descriptors: undelivered_descriptors as u64,
    }
}

/// A lender, as a mount sees it.
pub fn link(from: borrower::LenderStatus) -> report::Link {
    let borrower::LenderStatus {
        number,
        address,
        id,
        state,
        reason,
        since_ms,
        ping_us,
        ping_short_us,
        ping_long_us,
        get_us,
        weight,
        capacity_pages,
        free_pages,
        puts_under_way,
        put_pages,
        get_pages,
        get_misses,
        bad_pages,
        hedges,
        connects,
        losses,
        shuns,
    } = from;
    report::Link {
        number,
        address,
        id,
        state: LinkState::of(state),
        reason,
        since_ms,
        ping_us,
        ping_short_us,
        ping_long_us,
        get_us,
        weight,
        capacity_pages,
        free_pages,
        puts_under_way,
        put_pages,
        get_pages,
        get_misses,
        bad_pages,
        hedges,
        connects,
        losses,
        shuns,
    }
}

/// A control group's use of a mount.
pub fn cgroup(from: borrower::cgroups::CgroupStatus) -> report::Cgroup {
    let borrower::cgroups::CgroupStatus {
        cgroup,
        takes_part,
        quota_pages,
        share,
        lent_pages,
        evicted_pages,
        put_pages,
        got_pages,
        given_up_pages,
        over_share_pages,
        apart_pages,
    } = from;
    report::Cgroup {
        cgroup,
        takes_part,
        quota_pages,
        share,
        lent_pages,
        evicted_pages,
        put_pages,
        got_pages,
        given_up_pages,
        over_share_pages,
        apart_pages,
    }
}

/// The counters of a borrower.
pub fn borrower(from: &borrower::Metrics) -> report::Borrower {
    let borrower::Metrics {
        reads,
        read_pages,
        lender_pages,
        buffer_pages,
        demoted_pages,
        zero_pages,
        below_pages,
        get_messages,
        get_misses,
        get_failures,
        bad_pages,
        reads_repeated,
        evictions,
        evictions_known,
        evictions_not_copied,
        evictions_zero,
        evictions_sequential,
        evictions_not_trusted,
        evictions_unknown_file,
        evictions_no_lender,
        evictions_not_admitted,
        evictions_no_room,
        put_pages,
        put_messages,
        put_pages_refused,
        put_pages_outdated,
        drop_pages,
        lost_pages,
        catalog_reclaimed_pages,
        hedges,
        hedges_won,
        changes,
        changes_beside,
        lender_connects,
        lender_resumes,
        lender_losses,
    } = from;
    report::Borrower {
        reads: reads.get(),
        read_pages: read_pages.get(),
        lender_pages: lender_pages.get(),
        buffer_pages: buffer_pages.get(),
        demoted_pages: demoted_pages.get(),
        zero_pages: zero_pages.get(),
        below_pages: below_pages.get(),
        get_messages: get_messages.get(),
        get_misses: get_misses.get(),
        get_failures: get_failures.get(),
        bad_pages: bad_pages.get(),
        reads_repeated: reads_repeated.get(),
        evictions: evictions.get(),
        evictions_known: evictions_known.get(),
        evictions_not_copied: evictions_not_copied.get(),
        evictions_zero: evictions_zero.get(),
        evictions_sequential: evictions_sequential.get(),
        evictions_not_trusted: evictions_not_trusted.get(),
        evictions_unknown_file: evictions_unknown_file.get(),
        evictions_no_lender: evictions_no_lender.get(),
        evictions_not_admitted: evictions_not_admitted.get(),
        evictions_no_room: evictions_no_room.get(),
        put_pages: put_pages.get(),
        put_messages: put_messages.get(),
        put_pages_refused: put_pages_refused.get(),
        put_pages_outdated: put_pages_outdated.get(),
        drop_pages: drop_pages.get(),
        lost_pages: lost_pages.get(),
        catalog_reclaimed_pages: catalog_reclaimed_pages.get(),
        hedges: hedges.get(),
        hedges_won: hedges_won.get(),
        changes: changes.get(),
        changes_beside: changes_beside.get(),
        lender_connects: lender_connects.get(),
        lender_resumes: lender_resumes.get(),
        lender_losses: lender_losses.get(),
    }
}

/// A distribution of times.
fn times(from: borrower::Times) -> report::Times {
    let borrower::Times { bounds_us, counts, sum_ns } = from;
    report::Times { bounds_us, counts, sum_ns }
}

/// Latencies of gets and of backing reads of a mount.
pub fn latencies(borrower: &Borrower) -> report::Latencies {
    report::Latencies { get: times(borrower.get_times()), below: times(borrower.below_times()) }
}

/// Estimated hit ratios of pools of other sizes.
pub fn curve(borrower: &Borrower) -> report::Curve {
    let borrower::CurveStatus { sampled_misses, evicted_bytes, points } = borrower.curve();
    let point = |from| {
        let borrower::CurvePoint { bytes, hit_ratio, seen } = from;
        report::CurvePoint { bytes, hit_ratio, seen }
    };
    report::Curve { sampled_misses, evicted_bytes, points: points.into_iter().map(point).collect() }
}

/// A borrower's catalog of lent pages.
pub fn catalog(borrower: &Borrower) -> report::Catalog {
    let borrower::Census { files, live_pages, entry_bytes } = borrower.census();
    report::Catalog { files, live_pages, entry_bytes }
}

/// The counters of the eviction tap.
pub fn tap(from: tap::Counters) -> report::Tap {
    let tap::Counters { captured, omitted, ring_full, invalidated, unreadable } = from;
    report::Tap {
        captured_pages: captured,
        omitted_pages: omitted,
        ring_full_pages: ring_full,
        invalidated_pages: invalidated,
        unreadable_pages: unreadable,
    }
}

/// The state of a lender.
pub fn lender(from: lender::Status) -> report::Lender {
    let lender::Status {
        address,
        incarnation,
        lending,
        capacity_pages,
        stored_pages,
        zero_pages,
        free_resident_pages,
        headroom_bytes,
        reserve_bytes,
        memory_total_bytes,
        pressure,
        counters,
        lost_notices_sent,
        scans,
        demanded_pages,
        malformed_frames,
        refused_connections,
        refused_keys,
        crowded_out_connections,
        stuck_connections,
        connections,
        borrowers,
        kept_sessions,
        expired_sessions,
        resumed_sessions,
        cpu_percent,
        rate_bytes,
        cpu_ms,
        paced_ms,
        paced_misses,
        borrower_list,
    } = from;
    let lender::store::Counters {
        puts,
        puts_refused,
        gets,
        hits,
        misses,
        drops,
        replaced,
        shrunk,
        reclaimed_by_kernel,
        notices_forgotten,
    } = counters;
    report::Lender {
        address,
        incarnation,
        lending,
        capacity_pages,
        stored_pages,
        zero_pages,
        free_resident_pages,
        headroom_bytes,
        reserve_bytes,
        memory_total_bytes,
        pressure: Pressure::of(pressure),
        lost_notices_sent,
        scans,
        demanded_pages,
        malformed_frames,
        refused_connections,
        refused_keys,
        crowded_out_connections,
        stuck_connections,
        connections,
        borrowers,
        kept_sessions,
        expired_sessions,
        resumed_sessions,
        cpu_percent,
        rate_bytes,
        cpu_ms,
        paced_ms,
        paced_misses,
        borrower_list: borrower_list.into_iter().map(lent_to).collect(),
        puts,
        puts_refused,
        gets,
        hits,
        misses,
        drops,
        replaced,
        shrunk,
        reclaimed_by_kernel,
        notices_forgotten,
    }
}

/// The part of one borrower in a lender.
fn lent_to(from: lender::BorrowerStatus) -> report::LentTo {
    let lender::BorrowerStatus {
        name,
        connections,
        kept_ms,
        stored_pages,
        zero_pages,
        cpu_ms,
        paced_ms,
        paced_misses,
        counters,
    } = from;
    let lender::store::Counters {
        puts,
        puts_refused,
        gets,
        hits,
        misses,
        drops,
        replaced,
        shrunk,
        reclaimed_by_kernel,
        notices_forgotten,
    } = counters;
    report::LentTo {
        name,
        connections,
        kept_ms,
        stored_pages,
        zero_pages,
        cpu_ms,
        paced_ms,
        paced_misses,
        puts,
        puts_refused,
        gets,
        hits,
        misses,
        drops,
        replaced,
        shrunk,
        reclaimed_by_kernel,
        notices_forgotten,
    }
}

/// The state and counters of gossip.
fn gossip(from: ::pool::Status) -> report::Pool {
    let ::pool::Status { node, listen, advertise, live_nodes, dead_nodes, nonsense, restarts, traffic, members } = from;
    let ::pool::gate::Traffic {
        sent_datagrams,
        sent_bytes,
        received_datagrams,
        received_bytes,
        refused_foreign,
        refused_unopened,
        refused_untimely,
        refused_replayed,
        refused_malformed,
        refused_nodes,
        unsent_too_long,
        unsent_failed,
    } = traffic;
    report::Pool {
        node,
        listen,
        advertise,
        live_nodes: live_nodes as u64,
        dead_nodes: dead_nodes as u64,
        nonsense: nonsense as u64,
        restarts,
        members: members.into_iter().map(member).collect(),
        sent_datagrams,
        sent_bytes,
        received_datagrams,
        received_bytes,
        refused_foreign,
        refused_unopened,
        refused_untimely,
        refused_replayed,
        refused_malformed,
        refused_nodes,
        unsent_too_long,
        unsent_failed,
    }
}

/// A lender that was found.
fn member(from: ::pool::Member) -> report::Member {
    let ::pool::Member { node, incarnation, lender } = from;
    let ::pool::Lender { address, free_bytes, capacity_bytes } = lender;
    report::Member { node, incarnation, address: address.to_string(), free_bytes, capacity_bytes }
}

/// A daemon's part in a pool, if it takes part in one.
pub fn pool(gossip: Option<&Arc<Gossip>>) -> Option<report::Pool> {
    gossip.map(|running| self::gossip(running.status()))
}

/// The role of a node, with the reason.
pub fn role(from: role::Status) -> report::Role {
    let role::Status { role, wanted, reason, since_ms, changes, calm_ms, evicted_pages_per_second } = from;
    let role = match role {
        role::Role::Lend => RoleName::Lend,
        role::Role::Borrow => RoleName::Borrow,
    };
    report::Role { role, wanted: role_wanted(wanted), reason, since_ms, changes, calm_ms, evicted_pages_per_second }
}

/// The role that an administrator has set.
pub fn role_wanted(from: role::Wanted) -> RoleWanted {
    match from {
        role::Wanted::Auto => RoleWanted::Auto,
        role::Wanted::Lend => RoleWanted::Lend,
        role::Wanted::Borrow => RoleWanted::Borrow,
    }
}

/// A virtual machine whose image a mount serves.
pub fn host_guest(from: hostcache::host::Status) -> report::HostGuest {
    let hostcache::host::Status {
        image,
        problem,
        connected,
        placed_pages,
        connects,
        demoted_pages,
        stored_pages,
        cached_pages,
        unknown_pages,
        differing_pages,
        missed_pages,
        held_pages,
        hit_pages,
        limited_pages,
    } = from;
    report::HostGuest {
        image,
        problem,
        connected,
        placed_pages,
        connects,
        demoted_pages,
        stored_pages,
        cached_pages,
        unknown_pages,
        differing_pages,
        missed_pages,
        held_pages,
        hit_pages,
        limited_pages,
    }
}

/// The counters of a guest.
pub fn guest(from: hostcache::guest::Counts) -> report::GuestCounts {
    let hostcache::guest::Counts {
        connects,
        evicted_pages,
        ring_full_pages,
        sent_pages,
        stored_pages,
        cached_pages,
        unknown_pages,
        differing_pages,
        missed_pages,
        deleted_pages,
        unsettled_pages,
        unaligned_pages,
        held_pages,
    } = from;
    report::GuestCounts {
        connects,
        evicted_pages,
        ring_full_pages,
        sent_pages,
        stored_pages,
        cached_pages,
        unknown_pages,
        differing_pages,
        missed_pages,
        deleted_pages,
        unsettled_pages,
        unaligned_pages,
        held_pages,
    }
}

/// A process or virtual machine whose memory is placed.
pub fn target(from: numa::placing::Status) -> report::Target {
    let numa::placing::Status { who, policy, pid, state, samples, moved_pages } = from;
    report::Target { who, policy: policy.to_owned(), pid, state, samples, moved_pages }
}

#[cfg(test)]
mod tests {
    use report::metric::Measured;

    /// Other crates declare the meaning of some counters, too. Both texts must be equal.
    #[test]
    fn counters_mean_what_their_crates_say() {
        let helps = |section: report::metric::Section| -> Vec<&'static str> {
            section.metrics().map(|metric| metric.help()).collect()
        };
        let borrower = borrower::Metrics::default().all();
        assert_eq!(helps(report::Borrower::SECTION), borrower.iter().map(|one| one.1).collect::<Vec<_>>());
        let host: Vec<_> = hostcache::host::Status::MEANINGS.iter().map(|one| one.1).collect();
        let helps_of_host = helps(report::HostGuest::SECTION);
        assert_eq!(helps_of_host[1..], host, "the first is whether the guest is connected");
        let guest = hostcache::guest::Counts::MEANINGS.iter().map(|one| one.1);
        assert!(guest.eq(helps(report::GuestCounts::SECTION)));
    }
}
