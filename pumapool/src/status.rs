//! `pumapool status`: what the daemons of this machine are doing.

use crate::{control, size};
use anyhow::Result;
use serde_json::Value;
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
        println!("{}", serde_json::json!({"mounts": mounts, "lenders": lenders}));
        return Ok(ExitCode::SUCCESS);
    }
    if mounts.is_empty() && lenders.is_empty() {
        println!("no lender and no mount of yours runs on this machine");
    }
    lenders.iter().for_each(print_lender);
    mounts.iter().for_each(print_mount);
    Ok(ExitCode::SUCCESS)
}

fn count(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

fn pages(value: &Value, name: &str) -> String {
    size::display(count(value, name) * 4096)
}

fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "–".into() } else { format!("{:.1} %", 100.0 * part as f64 / whole as f64) }
}

fn print_lender(status: &Value) {
    let lender = &status["lender"];
    println!("lender {} (pid {})", status["listen"].as_str().unwrap_or("?"), status["pid"]);
    println!(
        "  lent        {} of {} to {} borrowers; room to grow {}",
        pages(lender, "stored_pages"),
        pages(lender, "capacity_pages"),
        count(lender, "borrowers"),
        size::display(count(lender, "headroom_bytes")),
    );
    println!(
        "  gets        {}, of which {} hits; puts {}",
        count(lender, "gets"),
        percent(count(lender, "hits"), count(lender, "gets")),
        count(lender, "puts"),
    );
    println!(
        "  given up    {} replaced, {} reclaimed by the kernel",
        pages(lender, "replaced"),
        pages(lender, "reclaimed_by_kernel"),
    );
}

fn print_mount(status: &Value) {
    let borrower = &status["borrower"];
    let text = |name: &str| status[name].as_str().unwrap_or("?").to_owned();
    println!("mount {} at {} (pid {})", text("source"), text("mountpoint"), status["pid"]);
    let lender = match (status["lender"].as_str(), status["lender_is_up"].as_bool()) {
        (None, _) => "none".to_owned(),
        (Some(address), Some(true)) => format!("{address}, up"),
        (Some(address), _) => format!("{address}, AWAY: reading from the directory below"),
    };
    println!("  lender      {lender}");
    println!("  policy      {}, filled on {}, write {}", text("strategy"), text("fill"), text("write"));
    println!(
        "  lent        {} of {} files",
        pages(&status["catalog"], "live_pages"),
        count(&status["catalog"], "files")
    );
    let remote: u64 = ["lender_pages", "buffer_pages", "zero_pages"].iter().map(|name| count(borrower, name)).sum();
    println!(
        "  misses      {} pages, of which {} from the pool, the others from the directory below",
        remote + count(borrower, "below_pages"),
        percent(remote, remote + count(borrower, "below_pages")),
    );
    println!(
        "  evictions   {} pages seen, {} sent, {} not trusted, {} lost (ring full)",
        count(borrower, "evictions"),
        count(borrower, "put_pages"),
        count(borrower, "evictions_not_trusted"),
        count(&status["tap"], "ring_full_pages"),
    );
}
