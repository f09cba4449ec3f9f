//! `advise --lend`: estimates how much memory this machine could lend, from the use of its memory.
//!
//! A lender grows into free memory only, and returns memory that others need. So the estimate is
//! the smallest amount of free memory during the watch, plus page cache that nobody used, which
//! makes room in time. A page cache is in use if its pages are evicted and read back from the disk;
//! it is not counted.

use super::Span;
use crate::cli::size;
use anyhow::{Context, Result};
use lender::available_memory::{AvailableMemory, Usage};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

/// Time between two samples.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The advised reserve is at least the default of `lend`, at least this share of the memory, ...
const RESERVE_MIN_BYTES: u64 = 256 << 20;
const RESERVE_PART: u64 = 32;
/// ... and at least this times the largest decrease of free memory between two samples.
const BURSTS: u64 = 2;
/// The page cache counts as idle if at most so many of its pages are read again in a second.
const REFAULTS_MAX_PER_S: f64 = 50.0;
/// If tasks wait for memory for at least this share of the time, the machine is short of memory.
const STALLED_MAX: f64 = 0.001;
/// Smallest capacity that is worth lending, in bytes.
const WORTHWHILE_BYTES: u64 = 64 << 20;

/// Observations of the memory.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    total_bytes: u64,
    free_min_bytes: u64,
    /// Smallest sum of free memory and page cache that was not used lately, in bytes.
    spare_min_bytes: u64,
    /// Largest decrease of free memory between two samples, in bytes.
    burst_bytes: u64,
    refaults_per_s: f64,
    /// Share of the time in which a task waited for memory. `None` if the kernel does not report
    /// it.
    stalled: Option<f64>,
    seconds: f64,
}

/// The advice.
#[derive(Debug, PartialEq, Serialize)]
struct Lending {
    seconds: f64,
    total_bytes: u64,
    free_min_bytes: u64,
    spare_min_bytes: u64,
    refaults_per_s: f64,
    stalled: Option<f64>,
    /// Advised capacity in bytes; 0: lend nothing.
    capacity_bytes: u64,
    reserve_bytes: u64,
    why: String,
}

/// Runs the command.
pub(super) fn run(span: &Span<'_>, json: bool) -> Result<ExitCode> {
    let lending = advise(watch(span)?);
    let mut out = std::io::stdout().lock();
    if json {
        writeln!(out, "{}", serde_json::to_string(&lending)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let Lending { seconds, total_bytes, free_min_bytes, spare_min_bytes, .. } = lending;
    writeln!(out, "memory, watched for {seconds:.0} s")?;
    writeln!(out, "  in all        {}", size::display(total_bytes))?;
    writeln!(out, "  free          {} at the least", size::display(free_min_bytes))?;
    writeln!(out, "  spare         {} at the least, with idle page cache", size::display(spare_min_bytes))?;
    writeln!(out, "  read again    {:.0} pages a second that had been evicted", lending.refaults_per_s)?;
    let stalled =
        lending.stalled.map_or_else(|| "not told".to_owned(), |share| format!("{:.2} % of the time", 100.0 * share));
    writeln!(out, "  waited for    {stalled}")?;
    writeln!(out, "\n{}", lending.why)?;
    if lending.capacity_bytes > 0 {
        let mib = |bytes: u64| bytes >> 20;
        let (capacity, reserve) = (mib(lending.capacity_bytes), mib(lending.reserve_bytes));
        writeln!(out, "  pumapool lend --listen HOST:PORT --capacity {capacity}MiB --reserve {reserve}MiB --key FILE")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn watch(span: &Span<'_>) -> Result<Seen> {
    let mut available_memory = AvailableMemory::default();
    let attempt = "cannot read how memory is used";
    let mut seen = Seen { free_min_bytes: u64::MAX, spare_min_bytes: u64::MAX, ..Seen::default() };
    let stalls = available_memory.stalls();
    let (mut first, mut last) = (None, None);
    let mut failed = None;
    seen.seconds = span.pass(LOOK_EVERY, || {
        let usage = match available_memory.usage() {
            Ok(usage) => usage,
            Err(error) => {
                failed = Some(error);
                return (false, String::new());
            }
        };
        let Usage { memory, spare_bytes, refaulted_pages } = usage;
        seen.total_bytes = memory.total_bytes;
        seen.free_min_bytes = seen.free_min_bytes.min(memory.free_bytes);
        seen.spare_min_bytes = seen.spare_min_bytes.min(spare_bytes);
        let free_before = last.replace(usage).map_or(0, |last: Usage| last.memory.free_bytes);
        seen.burst_bytes = seen.burst_bytes.max(free_before.saturating_sub(memory.free_bytes));
        first.get_or_insert(refaulted_pages);
        (true, format!("{} free", size::display(memory.free_bytes)))
    });
    if let Some(error) = failed {
        return Err(error).context(attempt);
    }
    let refaulted = last.zip(first).map_or(0, |(last, first)| last.refaulted_pages.saturating_sub(first));
    seen.refaults_per_s = refaulted as f64 / seen.seconds.max(0.001);
    let waited = available_memory.stalls().since(stalls).most_us();
    seen.stalled = waited.map(|us| us as f64 / 1e6 / seen.seconds.max(0.001));
    Ok(seen)
}

fn advise(seen: Seen) -> Lending {
    const MIB: u64 = 1 << 20;
    let burst = seen.burst_bytes.saturating_mul(BURSTS);
    let reserve_bytes = RESERVE_MIN_BYTES.max(seen.total_bytes / RESERVE_PART).max(burst).next_multiple_of(64 * MIB);
    let lacks = seen.stalled.is_some_and(|share| share > STALLED_MAX);
    let cache_is_used = seen.refaults_per_s > REFAULTS_MAX_PER_S;
    let could = if cache_is_used { seen.free_min_bytes } else { seen.spare_min_bytes };
    let capacity = could.saturating_sub(reserve_bytes) / (64 * MIB) * (64 * MIB);
    let (capacity_bytes, why) = if lacks {
        (0, "Lend nothing: programs here waited for memory.".to_owned())
    } else if capacity < WORTHWHILE_BYTES {
        (
            0,
            format!(
                "Lend nothing: less than {} is left beside a reserve of {}.",
                size::display(WORTHWHILE_BYTES),
                size::display(reserve_bytes)
            ),
        )
    } else if cache_is_used {
        (capacity, "Lend what stays free; the page cache is used, and should keep what it has.".to_owned())
    } else {
        let now = size::display(seen.free_min_bytes.saturating_sub(reserve_bytes).min(capacity));
        (capacity, format!("Lend what is spare: {now} of it at once, the rest as idle page cache makes room."))
    };
    let Seen { seconds, total_bytes, free_min_bytes, spare_min_bytes, refaults_per_s, stalled, .. } = seen;
    Lending {
        seconds,
        total_bytes,
        free_min_bytes,
        spare_min_bytes,
        refaults_per_s,
        stalled,
        capacity_bytes,
        reserve_bytes,
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn what_is_spare_is_lent_and_nothing_else() {
        let idle = Seen {
            total_bytes: 16 * GIB,
            free_min_bytes: 4 * GIB,
            spare_min_bytes: 10 * GIB,
            seconds: 60.0,
            stalled: Some(0.0),
            ..Seen::default()
        };
        let lending = advise(idle);
        assert_eq!((lending.capacity_bytes, lending.reserve_bytes), (19 * GIB / 2, GIB / 2));
        let used = advise(Seen { refaults_per_s: 1000.0, ..idle });
        assert_eq!(used.capacity_bytes, 7 * GIB / 2);
        let bursts = advise(Seen { burst_bytes: GIB, ..idle });
        assert_eq!((bursts.capacity_bytes, bursts.reserve_bytes), (8 * GIB, 2 * GIB));
        assert_eq!(advise(Seen { stalled: Some(0.01), ..idle }).capacity_bytes, 0);
        assert_eq!(advise(Seen { spare_min_bytes: GIB / 2, ..idle }).capacity_bytes, 0);
    }
}
