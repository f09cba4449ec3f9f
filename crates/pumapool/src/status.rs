//! `pumapool status`: what the daemons of this machine are doing.

use crate::{control, size};
use anyhow::Result;
use serde_json::Value;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

/// Misses that must have been looked at before a curve is shown.
const CURVE_MISSES_MIN: u64 = 500;
/// Sizes of pools that are shown.
const CURVE_POINTS: usize = 5;

/// Options of `status`.
#[derive(clap::Args)]
pub struct Options {
    /// Everything, as one JSON object: {"mounts": […], "lenders": […], "nodes": […], "guests": […],
    /// "numa": […], "silent": […]}; nodes are those that have joined a pool, guests the file
    /// systems whose evictions are given to this machine's host, numa what places memory on NUMA
    /// nodes, silent the daemons that do not answer.
    #[arg(long)]
    json: bool,

    /// Of each mount that tells control groups apart (`mount --cgroup`), what each of them has.
    #[arg(long, conflicts_with = "json")]
    by_cgroup: bool,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let (all, silent) = control::ask_all_and_silent();
    let (mounts, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|status| status["kind"] == "mount");
    let (lenders, mut nodes): (Vec<_>, Vec<_>) = others.into_iter().partition(|status| status["kind"] == "lend");
    let guests: Vec<_> = nodes.extract_if(.., |status| status["kind"] == "guest").collect();
    let placing: Vec<_> = nodes.extract_if(.., |status| status["kind"] == "numa").collect();
    nodes.retain(|status| status["kind"] == "join");
    if options.json {
        let silent: Vec<_> = silent.iter().map(control::Silent::json).collect();
        let all = serde_json::json!({"mounts": mounts, "lenders": lenders, "nodes": nodes, "guests": guests, "numa": placing, "silent": silent});
        writeln!(std::io::stdout(), "{all}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = std::io::stdout().lock();
    if options.by_cgroup {
        let printed = mounts.iter().try_for_each(|status| print_cgroups(&mut out, status));
        seen_enough(printed)?;
        return Ok(ExitCode::SUCCESS);
    }
    for silent in &silent {
        let printed = writeln!(out, "{} (pid {}) does not answer: {}", silent.kind, silent.pid, silent.reason);
        seen_enough(printed)?;
    }
    let is_empty = [&mounts, &lenders, &nodes, &guests, &placing].iter().all(|statuses| statuses.is_empty());
    let printed = if is_empty && !silent.is_empty() {
        Ok(())
    } else if is_empty {
        writeln!(out, "no lender and no mount of yours runs on this machine")
    } else {
        let nodes = nodes.iter().try_for_each(|status| print_node(&mut out, status));
        let lenders = nodes.and_then(|()| lenders.iter().try_for_each(|status| print_lender(&mut out, status)));
        let mounts = lenders.and_then(|()| mounts.iter().try_for_each(|status| print_mount(&mut out, status)));
        let guests = mounts.and_then(|()| guests.iter().try_for_each(|status| print_guest(&mut out, status)));
        guests.and_then(|()| placing.iter().try_for_each(|status| print_placing(&mut out, status)))
    };
    seen_enough(printed)?;
    Ok(ExitCode::SUCCESS)
}

/// An error of printing: the reader may have seen enough.
pub(crate) fn seen_enough(printed: io::Result<()>) -> io::Result<()> {
    printed.or_else(|error| if error.kind() == ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

fn count(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

fn pages(value: &Value, name: &str) -> String {
    size::display(count(value, name).saturating_mul(4096))
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "–".into() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

/// A node that has joined: its role, its mounts in a line each, and its lender.
fn print_node(out: &mut impl Write, status: &Value) -> io::Result<()> {
    let role = &status["role"];
    let text = |value: &Value, name: &str| value[name].as_str().unwrap_or("?").to_owned();
    writeln!(out, "node {} (pid {})", text(status, "listen"), status["pid"])?;
    writeln!(
        out,
        "  role        {} for {} s ({}), wanted: {}; {} changes, lends again after {} s of calm",
        text(role, "role"),
        count(role, "since_ms") / 1000,
        text(role, "reason"),
        text(role, "wanted"),
        count(role, "changes"),
        count(role, "calm_ms") / 1000,
    )?;
    writeln!(out, "  evictions   {} pages a second by its mounts", count(role, "evicted_pages_per_second"))?;
    for mount in status["mounts"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let blind = if mount["sees_evictions"] == true { "" } else { "; its evictions are not seen" };
        writeln!(out, "  mount       {}: {}{blind}", text(mount, "mountpoint"), text(mount, "state"))?;
    }
    print_pool(out, status)?;
    print_lender(out, status)
}

pub(crate) fn print_lender(out: &mut impl Write, status: &Value) -> io::Result<()> {
    let lender = &status["lender"];
    let unused_bytes =
        count(lender, "capacity_pages").saturating_sub(count(lender, "stored_pages")).saturating_mul(4096);
    writeln!(out, "lender {} (pid {})", status["listen"].as_str().unwrap_or("?"), status["pid"])?;
    writeln!(
        out,
        "  lent        {} of {} to {} borrowers and {} that may come back; room to grow {}, ready for reuse {}",
        pages(lender, "stored_pages"),
        pages(lender, "capacity_pages"),
        count(lender, "borrowers"),
        count(lender, "kept_sessions"),
        size::display(count(lender, "headroom_bytes").min(unused_bytes)),
        pages(lender, "free_resident_pages"),
    )?;
    writeln!(
        out,
        "  gets        {}, of which {} hits; puts {}",
        count(lender, "gets"),
        percent(count(lender, "hits"), count(lender, "gets")),
        count(lender, "puts"),
    )?;
    writeln!(
        out,
        "  given up    {} replaced, {} given back, {} reclaimed by the kernel",
        pages(lender, "replaced"),
        pages(lender, "shrunk"),
        pages(lender, "reclaimed_by_kernel"),
    )?;
    print_pace(out, lender)?;
    print_confined(out, &status["confined"])
}

/// How a lender that may use a part of the machine only has got along with it, and with whom.
fn print_pace(out: &mut impl Write, lender: &Value) -> io::Result<()> {
    let (rate, cpu) = (lender["rate_bytes"].as_u64(), lender["cpu_percent"].as_u64());
    if rate.is_none() && cpu.is_none() {
        return Ok(());
    }
    let rate = rate.map(|rate| format!("{}/s", size::display(rate)));
    let cpu = cpu.map(|percent| format!("{percent} % of a processor"));
    let limits: Vec<_> = rate.into_iter().chain(cpu).collect();
    writeln!(out, "  limits      {}: {}", limits.join(", "), paced(lender))?;
    for borrower in lender["borrower_list"].as_array().into_iter().flatten() {
        let name = borrower["name"].as_str().unwrap_or("?");
        writeln!(out, "  borrower    {name}, has {}: {}", pages(borrower, "stored_pages"), paced(borrower))?;
    }
    Ok(())
}

fn paced(value: &Value) -> String {
    let seconds = |name: &str| count(value, name) as f64 / 1000.0;
    let used = value["cpu_ms"].as_u64().map(|_| format!("used {:.1} s, ", seconds("cpu_ms")));
    let (used, misses) = (used.unwrap_or_default(), pages(value, "paced_misses"));
    format!("{used}waited {:.1} s, {misses} not sent", seconds("paced_ms"))
}

pub(crate) fn print_mount(out: &mut impl Write, status: &Value) -> io::Result<()> {
    let borrower = &status["borrower"];
    let text = |name: &str| status[name].as_str().unwrap_or("?").to_owned();
    writeln!(out, "mount {} at {} (pid {})", text("source"), text("mountpoint"), status["pid"])?;
    writeln!(
        out,
        "  daemon      process {}, after {} takeovers",
        status["daemon_pid"],
        count(&status["mount"], "takeovers")
    )?;
    for problem in status["problems"].as_array().into_iter().flatten() {
        writeln!(out, "  problem     {}", problem.as_str().unwrap_or("?"))?;
    }
    if !status["guests"].is_null() {
        print_guests(out, &status["guests"])?;
        return print_confined(out, &status["confined"]);
    }
    print_lenders(out, status)?;
    print_pool(out, status)?;
    writeln!(out, "  policy      {}, filled on {}, write {}", text("strategy"), text("fill"), text("write"))?;
    if status["borrowing"] == false {
        writeln!(out, "  borrows     nothing now: its node lends")?;
    }
    writeln!(
        out,
        "  lent        {} of {} files",
        pages(&status["catalog"], "live_pages"),
        count(&status["catalog"], "files")
    )?;
    let remote: u64 = ["lender_pages", "buffer_pages", "zero_pages"]
        .iter()
        .map(|name| count(borrower, name))
        .fold(0, u64::saturating_add);
    writeln!(
        out,
        "  misses      {} pages, of which {} from the pool, the others from the directory below",
        remote.saturating_add(count(borrower, "below_pages")),
        percent(remote, remote.saturating_add(count(borrower, "below_pages"))),
    )?;
    print_curve(out, &status["curve"])?;
    writeln!(
        out,
        "  evictions   {} pages seen, {} sent, {} sequential, {} not trusted, {} lost (ring full); streams: {}",
        count(borrower, "evictions"),
        count(borrower, "put_pages"),
        count(borrower, "evictions_sequential"),
        count(borrower, "evictions_not_trusted"),
        count(&status["tap"], "ring_full_pages"),
        status["streams"].as_str().unwrap_or("?"),
    )?;
    print_confined(out, &status["confined"])
}

/// What each control group has of a mount.
fn print_cgroups(out: &mut impl Write, status: &Value) -> io::Result<()> {
    let text = |name: &str| status[name].as_str().unwrap_or("?").to_owned();
    writeln!(out, "mount {} at {} (pid {})", text("source"), text("mountpoint"), status["pid"])?;
    let Some(groups) = status["cgroups"].as_array() else {
        return writeln!(out, "  all control groups alike; `mount --cgroup` tells them apart");
    };
    writeln!(
        out,
        "  {:>9} {:>9} {:>5}  {:>9} {:>9} {:>9} {:>9}  CGROUP",
        "LENT", "QUOTA", "SHARE", "EVICTED", "PUT", "GOT BACK", "NOT PUT"
    )?;
    for group in groups {
        let quota = match (&group["takes_part"], &group["quota_pages"]) {
            (Value::Bool(false), _) => "no part".to_owned(),
            (_, Value::Null) => "–".to_owned(),
            _ => pages(group, "quota_pages"),
        };
        let share = group["share"].as_u64().map_or("–".to_owned(), |share| share.to_string());
        let not_put = count(group, "over_share_pages").saturating_add(count(group, "apart_pages"));
        writeln!(
            out,
            "  {:>9} {quota:>9} {share:>5}  {:>9} {:>9} {:>9} {:>9}  {}",
            pages(group, "lent_pages"),
            pages(group, "evicted_pages"),
            pages(group, "put_pages"),
            pages(group, "got_pages"),
            size::display(not_put.saturating_mul(4096)),
            group["cgroup"].as_str().unwrap_or("?"),
        )?;
    }
    Ok(())
}

/// What pools of other sizes would answer: the largest few.
fn print_curve(out: &mut impl Write, curve: &Value) -> io::Result<()> {
    let points = curve["points"].as_array().map(Vec::as_slice).unwrap_or_default();
    if count(curve, "sampled_misses") < CURVE_MISSES_MIN || points.is_empty() {
        return Ok(());
    }
    let size = |point: &Value| {
        let ratio = point["hit_ratio"].as_f64().unwrap_or(0.0);
        format!("{:.0} % with {}", 100.0 * ratio, size::display(count(point, "bytes")))
    };
    let sizes: Vec<_> = points[points.len().saturating_sub(CURVE_POINTS)..].iter().map(size).collect();
    writeln!(out, "  pool sizes  of the misses would be answered {}", sizes.join(", "))
}

/// The virtual machines whose images a mount serves.
fn print_guests(out: &mut impl Write, guests: &Value) -> io::Result<()> {
    writeln!(out, "  guests      listened to at {}", guests["listen"].as_str().unwrap_or("?"))?;
    for guest in guests["list"].as_array().into_iter().flatten() {
        let useless = ["unknown_pages", "differing_pages", "missed_pages"].iter().map(|name| count(guest, name));
        writeln!(
            out,
            "  guest       {}, {}: {} in the page cache because it had evicted them; {} stored, {} of them read again, {} of no use",
            guest["image"].as_str().unwrap_or("?"),
            match guest["problem"].as_str() {
                Some(problem) => problem,
                None if guest["connected"] == true => "connected",
                None => "away",
            },
            pages(guest, "placed_pages"),
            pages(guest, "stored_pages"),
            pages(guest, "hit_pages"),
            size::display(useless.fold(0, u64::saturating_add).saturating_mul(4096)),
        )?;
    }
    Ok(())
}

/// A file system whose evictions are given to the host.
fn print_guest(out: &mut impl Write, status: &Value) -> io::Result<()> {
    let guest = &status["guest"];
    let text = |name: &str| status[name].as_str().unwrap_or("?").to_owned();
    let state = if status["connected"] == true { "connected" } else { "no host" };
    writeln!(out, "guest {} of {} (pid {}): {state}", text("fs"), text("host"), status["pid"])?;
    writeln!(
        out,
        "  evictions   {} seen, {} sent, of which the host has stored {}; {} had no settled place on the disk",
        pages(guest, "evicted_pages"),
        pages(guest, "sent_pages"),
        pages(guest, "stored_pages"),
        pages(guest, "unsettled_pages"),
    )
}

/// What places memory on NUMA nodes.
fn print_placing(out: &mut impl Write, status: &Value) -> io::Result<()> {
    writeln!(out, "numa (pid {})", status["pid"])?;
    for target in status["targets"].as_array().into_iter().flatten() {
        let text = |name: &str| target[name].as_str().unwrap_or("?").to_owned();
        writeln!(
            out,
            "  {} {}: {}; {} moved",
            text("who"),
            text("policy"),
            text("state"),
            pages(target, "moved_pages")
        )?;
    }
    Ok(())
}

/// What a daemon may do.
fn print_confined(out: &mut impl Write, confined: &Value) -> io::Result<()> {
    let Some(capabilities) = confined["capabilities"].as_array() else { return Ok(()) };
    writeln!(
        out,
        "  rights      {} capabilities{}; files it opens: {}",
        capabilities.len(),
        if confined["no_new_privs"] == true { ", and no way to more" } else { "" },
        confined["files"].as_str().unwrap_or("?"),
    )
}

fn print_lenders(out: &mut impl Write, status: &Value) -> io::Result<()> {
    let lenders = status["lenders"].as_array().map(Vec::as_slice).unwrap_or_default();
    if lenders.is_empty() {
        return writeln!(out, "  lenders     none: reading from the directory below");
    }
    for lender in lenders {
        let text = |name: &str| lender[name].as_str().unwrap_or_default();
        let reason = if text("reason").is_empty() { String::new() } else { format!(" ({})", text("reason")) };
        writeln!(
            out,
            "  lender      {}, {}{reason}, ping {} µs, {} put, {} got, weight {}",
            text("address"),
            text("state"),
            count(lender, "ping_us"),
            pages(lender, "put_pages"),
            pages(lender, "get_pages"),
            count(lender, "weight"),
        )?;
    }
    Ok(())
}

/// What `status` shows of it.
fn print_pool(out: &mut impl Write, status: &Value) -> io::Result<()> {
    let pool = &status["pool"];
    if pool.is_null() {
        return Ok(());
    }
    let count = |name: &str| pool[name].as_u64().unwrap_or(0);
    let refused: u64 = pool.as_object().map_or(0, |pool| {
        let refused = pool.iter().filter(|(name, _)| name.starts_with("refused_"));
        refused.filter_map(|(_, value)| value.as_u64()).fold(0, u64::saturating_add)
    });
    let members = pool["members"].as_array().map(Vec::as_slice).unwrap_or_default();
    writeln!(
        out,
        "  pool        gossip at {}: {} nodes beside this one, {} gone; {} datagrams sent, {} received, {refused} refused",
        pool["advertise"].as_str().unwrap_or("?"),
        count("live_nodes"),
        count("dead_nodes"),
        count("sent_datagrams"),
        count("received_datagrams"),
    )?;
    for member in members {
        writeln!(
            out,
            "  member      {} ({}), {} left of {}",
            member["address"].as_str().unwrap_or("?"),
            member["node"].as_str().unwrap_or("?"),
            size::display(member["free_bytes"].as_u64().unwrap_or(0)),
            size::display(member["capacity_bytes"].as_u64().unwrap_or(0)),
        )?;
    }
    Ok(())
}
