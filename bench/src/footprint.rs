//! `footprint`: the memory that borrower and lender need themselves, without the data.
//!
//! The borrower's memory is the growth of its two processes, supervisor and daemon, since a first
//! part was lent, when all buffers are in use. The lender's is its growth, less the stored pages.
//! Their memory after that first part is their start-up memory. The figure is the proportional
//! share of resident memory (Pss) that is not backed by a file. The tap's ring belongs to the
//! kernel, has a fixed size, and is left out.

use crate::worker::Order;
use crate::world::{Lender, Side, Worker, World};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::fs;
use testbed::Failure;

/// The maximum for each lent page.
const BORROWER_WANTED: f64 = 10.0;
const LENDER_WANTED: f64 = 32.0;
/// Page cache of the reader: lent pages must not be in memory a second time.
const CACHE_BYTES: u64 = 64 << 20;
/// Memory of the lender and its group beyond the data.
const LENDER_ROOM_BYTES: u64 = 192 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;
/// The part of the data that is lent first: one in so many.
const FIRST_ONE_IN: u64 = 32;
/// Readings, until all is lent.
const FILLINGS_MAX: u32 = 3;
/// Pages that may be missing at the end: one in that many.
const MISSING_ONE_IN: u64 = 50;

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let lent_bytes: u64 = world.extent.choose(4 << 30, 4 << 30, 32 << 20);
    // A sixteenth for the lender's own needs.
    let group_bytes = lent_bytes + lent_bytes / 16 + LENDER_ROOM_BYTES;
    let lender = world.lend(group_bytes, lent_bytes, LENDER_RESERVE_BYTES)?;
    // The quickest way to lend a whole file: it is read once.
    let options = ["--fill", "read", "--filter", "off", "--gate", "off"];
    let side = world.mount("lent", lent_bytes, Some(lender.address), &options)?;
    println!("{} MiB to be lent", lent_bytes >> 20);
    let mut worker = world.worker(CACHE_BYTES)?;
    let first = lend(&side, &lender, &mut worker, lent_bytes / FIRST_ONE_IN)?;
    let (borrower_before, lender_before) = (borrower(&side)?, Memory::of(lender.pid())?);
    let stored = lend(&side, &lender, &mut worker, lent_bytes)?;
    drop(worker);
    let (borrower_after, lender_after) = (borrower(&side)?, Memory::of(lender.pid())?);
    let grown = |before: &Memory, after: &Memory| after.own_bytes as f64 - before.own_bytes as f64;
    let borrower_bytes = grown(&borrower_before, &borrower_after) / (stored - first) as f64;
    let lender_bytes = grown(&lender_before, &lender_after) / (stored - first) as f64 - PAGE_SIZE as f64;
    let mib = |memory: &Memory| memory.all_bytes as f64 / f64::from(1 << 20);
    println!(
        "{stored} pages lent: the borrower has {borrower_bytes:.1} bytes for each (at most {BORROWER_WANTED} are wanted), the lender \
         {lender_bytes:.1} beyond it (at most {LENDER_WANTED})"
    );
    println!("at first: the borrower {:.1} MiB, the lender {:.1} MiB", mib(&borrower_before), mib(&lender_before));
    let figures = crate::members(json!({
        "borrower_bytes_per_page": borrower_bytes,
        "lender_bytes_per_page": lender_bytes,
        "borrower_base_mib": mib(&borrower_before),
        "lender_base_mib": mib(&lender_before),
        "borrower_bytes_per_page_wanted": BORROWER_WANTED,
        "lender_bytes_per_page_wanted": LENDER_WANTED,
        "lent_pages": stored,
    }));
    free(side, lender)?;
    Ok(figures)
}

/// Reads the beginning of the file through the mount until all of it is lent. Returns the number of
/// lent pages.
fn lend(side: &Side, lender: &Lender, worker: &mut Worker<'_>, len_bytes: u64) -> Result<u64, Failure> {
    let pages = len_bytes / PAGE_SIZE as u64;
    for _ in 0..FILLINGS_MAX {
        side.drop_cached()?;
        worker.obey(&Order::Pass { path: side.file.clone(), len_bytes })?;
        side.settle()?;
        if lender.stored_pages()? >= pages - pages / MISSING_ONE_IN {
            return lender.stored_pages();
        }
    }
    let stored = lender.stored_pages()?;
    Err(Failure::Problem(format!("only {stored} of {pages} pages could be lent; is there too little memory?")))
}

/// Gives the memory back at once.
fn free(side: Side, lender: Lender) -> Result<(), Failure> {
    side.end()?;
    drop(lender);
    Ok(())
}

/// Supervisor and daemon.
fn borrower(side: &Side) -> Result<Memory, Failure> {
    let status = side.status()?;
    let mut sum = Memory { all_bytes: 0, own_bytes: 0 };
    for pid in [status.pid, status.daemon_pid] {
        let memory = Memory::of(pid)?;
        sum.all_bytes += memory.all_bytes;
        sum.own_bytes += memory.own_bytes;
    }
    Ok(sum)
}

/// Resident memory.
struct Memory {
    /// With the program's share of files.
    all_bytes: u64,
    /// Without.
    own_bytes: u64,
}

impl Memory {
    fn of(pid: u32) -> Result<Memory, Failure> {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&path).map_err(Failure::attempted(format!("reading {path}")))?;
        let bytes = |name| os::fields::bytes(&text, name);
        let found = bytes("Pss").zip(bytes("Pss_Anon")).zip(bytes("Pss_Shmem"));
        let ((all_bytes, anonymous_bytes), shared_bytes) =
            found.ok_or_else(|| Failure::Problem(format!("{path} lacks a figure")))?;
        Ok(Memory { all_bytes, own_bytes: anonymous_bytes + shared_bytes })
    }
}
