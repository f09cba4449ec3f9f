//! `pumapool status`: shows the state of the daemons of this machine.

use crate::cli::size;
use crate::cli::status::Options;
use crate::daemon::control;
use anyhow::Result;
use report::{
    All, Cgroup, Confined, Curve, CurvePoint, Guest, Guests, Join, Lend, Lender, LentTo, Link, Mount, Numa, Pool,
};
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// A curve is shown only if it is based on at least so many misses.
const CURVE_MISSES_MIN: u64 = 500;
/// Number of pool sizes that are shown.
const CURVE_POINTS: usize = 5;

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let (statuses, silent) = control::ask_all_and_silent();
    let has_unknown = statuses.iter().any(|status| status.daemon == report::Daemon::Unknown);
    let all = All::new(statuses, silent);
    let mut out = std::io::stdout().lock();
    if options.json {
        writeln!(out, "{all}")?;
    } else if options.by_cgroup {
        seen_enough(all.mounts.iter().try_for_each(|mount| print_cgroups(&mut out, &mount.status)))?;
    } else {
        seen_enough(print_all(&mut out, &all, has_unknown))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Ignores the error of a closed pipe: the reader needs no more output. Returns all other errors.
pub(crate) fn seen_enough(printed: io::Result<()>) -> io::Result<()> {
    printed.or_else(|error| if error.kind() == ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

fn print_all(out: &mut impl Write, all: &All, has_unknown: bool) -> io::Result<()> {
    for silent in &all.silent {
        writeln!(out, "{} (pid {}) does not answer: {}", silent.kind, silent.pid, silent.reason)?;
    }
    if has_unknown {
        writeln!(out, "a daemon of a newer version runs here; use the newer program to see it")?;
    }
    all.nodes.iter().try_for_each(|node| print_node(out, &node.status))?;
    all.lenders.iter().try_for_each(|lender| print_lender(out, &lender.status))?;
    all.mounts.iter().try_for_each(|mount| print_mount(out, &mount.status))?;
    all.guests.iter().try_for_each(|guest| print_guest(out, &guest.status))?;
    all.numa.iter().try_for_each(|numa| print_placing(out, &numa.status))?;
    if !has_unknown && *all == All::default() {
        writeln!(out, "no lender and no mount of yours runs on this machine")?;
    }
    Ok(())
}

fn pages(count: u64) -> String {
    size::display(count.saturating_mul(4096))
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "–".into() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

/// Prints a node that has joined: its role, its mounts in a line each, and its lender.
fn print_node(out: &mut impl Write, node: &Join) -> io::Result<()> {
    let role = &node.role;
    writeln!(out, "node {} (pid {})", node.lend.listen, node.lend.pid)?;
    writeln!(
        out,
        "  role        {} for {} s ({}), wanted: {}; {} changes, lends again after {} s of calm",
        role.role,
        role.since_ms / 1000,
        role.reason,
        role.wanted,
        role.changes,
        role.calm_ms / 1000,
    )?;
    writeln!(out, "  evictions   {} pages a second by its mounts", role.evicted_pages_per_second)?;
    for mount in &node.mounts {
        let blind = if mount.sees_evictions { "" } else { "; its evictions are not seen" };
        writeln!(out, "  mount       {}: {}{blind}", mount.mountpoint, mount.state)?;
    }
    print_pool(out, node.lend.pool.as_ref())?;
    print_lender(out, &node.lend)
}

pub(crate) fn print_lender(out: &mut impl Write, lend: &Lend) -> io::Result<()> {
    print_lending(out, &lend.listen, lend.pid, &lend.lender)?;
    print_confined(out, &lend.confined)
}

fn print_lending(out: &mut impl Write, listen: &str, pid: u32, lender: &Lender) -> io::Result<()> {
    let unused_bytes = lender.capacity_pages.saturating_sub(lender.stored_pages).saturating_mul(4096);
    writeln!(out, "lender {listen} (pid {pid})")?;
    writeln!(
        out,
        "  lent        {} of {} to {} borrowers and {} that may come back; room to grow {}, ready for reuse {}",
        pages(lender.stored_pages),
        pages(lender.capacity_pages),
        lender.borrowers,
        lender.kept_sessions,
        size::display(lender.available_bytes.min(unused_bytes)),
        pages(lender.free_resident_pages),
    )?;
    writeln!(
        out,
        "  gets        {}, of which {} hits; puts {}",
        lender.gets,
        percent(lender.hits, lender.gets),
        lender.puts,
    )?;
    writeln!(
        out,
        "  given up    {} replaced, {} given back, {} reclaimed by the kernel",
        pages(lender.replaced),
        pages(lender.shrunk),
        pages(lender.reclaimed_by_kernel),
    )?;
    print_pace(out, lender)
}

/// Prints the limits of a lender (--cpu, --rate), and the delays and misses that they caused.
fn print_pace(out: &mut impl Write, lender: &Lender) -> io::Result<()> {
    if lender.rate_bytes.is_none() && lender.cpu_percent.is_none() {
        return Ok(());
    }
    let rate = lender.rate_bytes.map(|rate| format!("{}/s", size::display(rate)));
    let cpu = lender.cpu_percent.map(|percent| format!("{percent} % of a processor"));
    let limits: Vec<_> = rate.into_iter().chain(cpu).collect();
    let paced_all = paced(lender.cpu_ms, lender.rate_limited_ms, lender.rate_limited_misses);
    writeln!(out, "  limits      {}: {paced_all}", limits.join(", "))?;
    for LentTo { name, stored_pages, cpu_ms, rate_limited_ms, rate_limited_misses, .. } in &lender.borrower_list {
        let paced = paced(*cpu_ms, *rate_limited_ms, *rate_limited_misses);
        writeln!(out, "  borrower    {name}, has {}: {paced}", pages(*stored_pages))?;
    }
    Ok(())
}

fn paced(cpu_ms: Option<u64>, rate_limited_ms: u64, rate_limited_misses: u64) -> String {
    let used = cpu_ms.map(|ms| format!("used {:.1} s, ", ms as f64 / 1000.0)).unwrap_or_default();
    format!("{used}waited {:.1} s, {} not sent", rate_limited_ms as f64 / 1000.0, pages(rate_limited_misses))
}

pub(crate) fn print_mount(out: &mut impl Write, mount: &Mount) -> io::Result<()> {
    let borrower = &mount.borrower;
    writeln!(out, "mount {} at {} (pid {})", mount.source, mount.mountpoint, mount.pid)?;
    writeln!(out, "  daemon      process {}, after {} takeovers", mount.daemon_pid, mount.mount.takeovers)?;
    for problem in &mount.problems {
        writeln!(out, "  problem     {problem}")?;
    }
    if let Some(guests) = &mount.guests {
        print_guests(out, guests)?;
        return print_confined(out, &mount.confined);
    }
    print_links(out, &mount.lenders)?;
    print_pool(out, mount.pool.as_ref())?;
    writeln!(out, "  policy      {}, filled on {}, write {}", mount.strategy, mount.fill, mount.write)?;
    if !mount.borrowing {
        writeln!(out, "  borrows     nothing now: its node lends")?;
    }
    writeln!(out, "  lent        {} of {} files", pages(mount.catalog.live_pages), mount.catalog.files)?;
    let remote = borrower.lender_pages.saturating_add(borrower.buffer_pages).saturating_add(borrower.zero_pages);
    let misses = remote.saturating_add(borrower.backing_pages);
    writeln!(
        out,
        "  misses      {misses} pages, of which {} from the pool, the others from the backing directory",
        percent(remote, misses),
    )?;
    print_curve(out, &mount.curve)?;
    writeln!(
        out,
        "  evictions   {} pages seen, {} sent, {} sequential, {} not trusted, {} lost (ring full); streams: {}",
        borrower.evictions,
        borrower.put_pages,
        borrower.evictions_sequential,
        borrower.evictions_not_trusted,
        mount.tap.as_ref().map_or(0, |tap| tap.ring_full_pages),
        mount.streams,
    )?;
    print_confined(out, &mount.confined)
}

/// Prints the use of each control group of a mount.
fn print_cgroups(out: &mut impl Write, mount: &Mount) -> io::Result<()> {
    writeln!(out, "mount {} at {} (pid {})", mount.source, mount.mountpoint, mount.pid)?;
    let Some(groups) = &mount.cgroups else {
        return writeln!(out, "  does not distinguish control groups; see `mount --cgroup`");
    };
    writeln!(
        out,
        "  {:>9} {:>9} {:>5}  {:>9} {:>9} {:>9} {:>9}  CGROUP",
        "LENT", "QUOTA", "SHARE", "EVICTED", "PUT", "GOT BACK", "NOT PUT"
    )?;
    for group in groups {
        print_cgroup(out, group)?;
    }
    Ok(())
}

fn print_cgroup(out: &mut impl Write, group: &Cgroup) -> io::Result<()> {
    let quota = match group.quota_pages {
        _ if !group.takes_part => "no part".to_owned(),
        None => "–".to_owned(),
        Some(quota) => pages(quota),
    };
    let share = group.share.map_or("–".to_owned(), |share| share.to_string());
    writeln!(
        out,
        "  {:>9} {quota:>9} {share:>5}  {:>9} {:>9} {:>9} {:>9}  {}",
        pages(group.lent_pages),
        pages(group.evicted_pages),
        pages(group.put_pages),
        pages(group.got_pages),
        pages(group.over_share_pages.saturating_add(group.apart_pages)),
        group.cgroup,
    )
}

/// Prints the hit ratios of pools of other sizes, for the largest [`CURVE_POINTS`] sizes.
fn print_curve(out: &mut impl Write, curve: &Curve) -> io::Result<()> {
    let points = &curve.points;
    if curve.sampled_misses < CURVE_MISSES_MIN || points.is_empty() {
        return Ok(());
    }
    let size = |point: &CurvePoint| format!("{:.0} % with {}", 100.0 * point.hit_ratio, size::display(point.bytes));
    let sizes: Vec<_> = points[points.len().saturating_sub(CURVE_POINTS)..].iter().map(size).collect();
    writeln!(out, "  pool sizes  of the misses would be answered {}", sizes.join(", "))
}

/// Prints the virtual machines whose images a mount serves.
fn print_guests(out: &mut impl Write, guests: &Guests) -> io::Result<()> {
    writeln!(out, "  guests      connect at {}", guests.listen)?;
    for guest in &guests.list {
        let useless = [guest.unknown_pages, guest.differing_pages, guest.missed_pages];
        writeln!(
            out,
            "  guest       {}, {}: {} in the page cache because it had evicted them; {} stored, {} of them read again, {} of no use",
            guest.image,
            match &guest.problem {
                Some(problem) => problem,
                None if guest.connected => "connected",
                None => "disconnected",
            },
            pages(guest.placed_pages),
            pages(guest.stored_pages),
            pages(guest.hit_pages),
            pages(useless.into_iter().fold(0, u64::saturating_add)),
        )?;
    }
    Ok(())
}

/// Prints a file system whose evictions go to the host.
fn print_guest(out: &mut impl Write, status: &Guest) -> io::Result<()> {
    let guest = &status.guest;
    let state = if status.connected { "connected" } else { "no host" };
    writeln!(out, "guest {} of {} (pid {}): {state}", status.fs, status.host, status.pid)?;
    writeln!(
        out,
        "  evictions   {} seen, {} sent, of which the host has stored {}; {} had no settled place on the disk",
        pages(guest.evicted_pages),
        pages(guest.sent_pages),
        pages(guest.stored_pages),
        pages(guest.unsettled_pages),
    )
}

/// Prints a daemon that places memory on NUMA nodes.
fn print_placing(out: &mut impl Write, numa: &Numa) -> io::Result<()> {
    writeln!(out, "numa (pid {})", numa.pid)?;
    for target in &numa.targets {
        writeln!(out, "  {} {}: {}; {} moved", target.who, target.policy, target.state, pages(target.moved_pages))?;
    }
    Ok(())
}

/// Prints the rights of a daemon, if its status has them.
fn print_confined(out: &mut impl Write, confined: &Confined) -> io::Result<()> {
    if confined.files.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "  rights      {} capabilities{}; files it opens: {}",
        confined.capabilities.len(),
        if confined.no_new_privs { ", and no way to more" } else { "" },
        confined.files,
    )
}

fn print_links(out: &mut impl Write, links: &[Link]) -> io::Result<()> {
    if links.is_empty() {
        return writeln!(out, "  lenders     none: reading from the backing directory");
    }
    for link in links {
        let reason = if link.reason.is_empty() { String::new() } else { format!(" ({})", link.reason) };
        writeln!(
            out,
            "  lender      {}, {}{reason}, ping {} µs, {} put, {} got, weight {}",
            link.address,
            link.state,
            link.ping_us,
            pages(link.put_pages),
            pages(link.get_pages),
            link.weight,
        )?;
    }
    Ok(())
}

/// Prints a daemon's part in a pool.
fn print_pool(out: &mut impl Write, pool: Option<&Pool>) -> io::Result<()> {
    let Some(pool) = pool else { return Ok(()) };
    writeln!(
        out,
        "  pool        gossip at {}: {} nodes beside this one, {} gone; {} datagrams sent, {} received, {} refused",
        pool.advertise,
        pool.live_nodes,
        pool.dead_nodes,
        pool.sent_datagrams,
        pool.received_datagrams,
        pool.refused(),
    )?;
    for member in &pool.members {
        writeln!(
            out,
            "  member      {} ({}), {} left of {}",
            member.address,
            member.node,
            size::display(member.free_bytes),
            size::display(member.capacity_bytes),
        )?;
    }
    Ok(())
}
