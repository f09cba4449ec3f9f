//! `pumapool status`: what the daemons of this machine are doing.

use crate::{control, size};
use anyhow::Result;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

/// Options of `status`.
#[derive(clap::Args)]
pub struct Options {
    /// Everything, as one JSON object: {"mounts": […], "lenders": […]}.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let (mounts, others): (Vec<_>, Vec<_>) =
        control::ask_all().into_iter().partition(|status| status["kind"] == "mount");
    let lenders: Vec<_> = others.into_iter().filter(|status| status["kind"] == "lend").collect();
    if options.json {
        writeln!(std::io::stdout(), "{}", serde_json::json!({"mounts": mounts, "lenders": lenders}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = std::io::stdout().lock();
    let printed = if mounts.is_empty() && lenders.is_empty() {
        writeln!(out, "no lender and no mount of yours runs on this machine")
    } else {
        let lenders = lenders.iter().try_for_each(|status| print_lender(&mut out, status));
        lenders.and_then(|()| mounts.iter().try_for_each(|status| print_mount(&mut out, status)))
    };
    // Who reads may have seen enough.
    printed.or_else(|error| if error.kind() == ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })?;
    Ok(ExitCode::SUCCESS)
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

pub(crate) fn print_lender(out: &mut impl Write, status: &Value) -> std::io::Result<()> {
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
        "  given up    {} replaced, {} reclaimed by the kernel",
        pages(lender, "replaced"),
        pages(lender, "reclaimed_by_kernel"),
    )?;
    Ok(())
}

pub(crate) fn print_mount(out: &mut impl Write, status: &Value) -> std::io::Result<()> {
    let borrower = &status["borrower"];
    let text = |name: &str| status[name].as_str().unwrap_or("?").to_owned();
    writeln!(out, "mount {} at {} (pid {})", text("source"), text("mountpoint"), status["pid"])?;
    let lender = match (status["lender"].as_str(), status["lender_is_up"].as_bool()) {
        (None, _) => "none".to_owned(),
        (Some(address), Some(true)) => format!("{address}, up"),
        (Some(address), _) => format!("{address}, AWAY: reading from the directory below"),
    };
    writeln!(
        out,
        "  daemon      process {}, after {} takeovers",
        status["daemon_pid"],
        count(&status["mount"], "takeovers")
    )?;
    writeln!(out, "  lender      {lender}")?;
    writeln!(out, "  policy      {}, filled on {}, write {}", text("strategy"), text("fill"), text("write"))?;
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
    writeln!(
        out,
        "  evictions   {} pages seen, {} sent, {} not trusted, {} lost (ring full)",
        count(borrower, "evictions"),
        count(borrower, "put_pages"),
        count(borrower, "evictions_not_trusted"),
        count(&status["tap"], "ring_full_pages"),
    )?;
    Ok(())
}
