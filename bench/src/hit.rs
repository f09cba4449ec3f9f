//! The basis of the benches of lender hits: a mount whose lender has all pages of its file, and
//! passes over that file in which every read misses locally and hits the lender.
//!
//! Two policies differ from the default. The strategy is non-inclusive, so that the lender keeps
//! returned pages and all passes are alike. And the gate is off, as in the demo: it compares with
//! the disk's present speed. A disk that the kernel slows down is fast between two delays, so the
//! gate would bypass the lender on a fast disk. It takes no part in a read. The disk is slow from
//! the beginning, so that the borrower's record of the disk is slow, and it races few gets. A pass
//! with too many pages from elsewhere gives no figure and ends the bench.

use crate::worker::{Order, Report};
use crate::world::{Extent, Lender, Security, Side, Worker, World, grown};
use page::PAGE_SIZE;
use std::cell::Cell;
use std::time::Duration;
use testbed::{Failure, wait_until};

/// Reads of the disk in a second.
pub const DISK_READS_PER_S: u32 = 2000;
/// Threads that read the disk while a lender is filled, so that it is always busy.
const FILL_THREADS: usize = 8;
/// Passes, until the lender has everything.
const FILLINGS_MAX: u32 = 4;
/// The minimum share of pages from the lender. With few processors and many readers, gets are late;
/// then some are raced by a read of the disk, and others that find no free connection are read
/// there at once.
const HIT_SHARE_MIN: f64 = 0.8;
/// Pages that may be missing from the lender after it was filled: one in that many.
const MISSING_ONE_IN: u64 = 200;
/// Evicted at once while the lender is filled: a quarter of the tap's ring.
const EVICT_BYTES: u64 = 8 << 20;
/// Time limit until evicted pages are at the lender.
const SETTLE_MAX: Duration = Duration::from_secs(20);
/// Memory of the lender and its group beyond the file.
const LENDER_ROOM_BYTES: u64 = 128 << 20;
const LENDER_RESERVE_BYTES: u64 = 32 << 20;

/// A mount and its lender.
pub struct Lent {
    // Drop order: the mount before its lender.
    /// The mount.
    pub side: Side,
    /// The lender.
    pub lender: Lender,
    len_bytes: u64,
    /// Whether the figures are meaningless anyway.
    tiny: bool,
    /// The minimum share of a pass's pages that came from the lender.
    hit_share: Cell<f64>,
}

impl Lent {
    /// Makes both, and fills the lender with every page of the file: the worker reads at random,
    /// then the pages are evicted.
    pub fn fill(
        world: &World,
        worker: &mut Worker<'_>,
        security: Security,
        name: &str,
        len_bytes: u64,
    ) -> Result<Lent, Failure> {
        Lent::fill_beside(world, worker, security, name, len_bytes, 0)
    }

    /// Lends a file, with so many bytes of the lender for pages of other files. Then the lender
    /// gets every single page.
    pub fn fill_beside(
        world: &World,
        worker: &mut Worker<'_>,
        security: Security,
        name: &str,
        len_bytes: u64,
        others_bytes: u64,
    ) -> Result<Lent, Failure> {
        let capacity_bytes = len_bytes + others_bytes;
        let lender =
            world.lend_with(security, capacity_bytes + LENDER_ROOM_BYTES, capacity_bytes, LENDER_RESERVE_BYTES)?;
        let options = ["--strategy", "non-inclusive", "--gate", "off"];
        let side = world.mount_with(security, name, len_bytes, Some(lender.address), &options)?;
        let lent = Lent { side, lender, len_bytes, tiny: world.extent == Extent::Tiny, hit_share: Cell::new(1.0) };
        let pages = len_bytes / PAGE_SIZE as u64;
        let missing_most = if others_bytes == 0 || lent.tiny { pages / MISSING_ONE_IN } else { 0 };
        for _ in 0..FILLINGS_MAX {
            worker.obey(&lent.pass(PAGE_SIZE, FILL_THREADS, world.seed))?;
            for at in (0..len_bytes).step_by(EVICT_BYTES as usize) {
                lent.side.evict(at, EVICT_BYTES)?;
                let settled = || lent.side.status().is_ok_and(|status| is_settled(&status));
                if !wait_until(SETTLE_MAX, settled) {
                    let message = format!("what was evicted is not with the lender after {SETTLE_MAX:?}");
                    return Err(Failure::Problem(message));
                }
            }
            if lent.lender.stored_pages()? >= pages - missing_most {
                return Ok(lent);
            }
        }
        let stored = lent.lender.stored_pages()?;
        Err(Failure::Problem(format!("the lender has only {stored} of {pages} pages after {FILLINGS_MAX} fillings")))
    }

    /// The order for a pass.
    fn pass(&self, block_bytes: usize, threads: usize, seed: u64) -> Order {
        Order::Once { path: self.side.file.clone(), len_bytes: self.len_bytes, block_bytes, threads, seed }
    }

    /// The minimum share of pages that came from the lender, of all passes so far.
    pub fn hit_share(&self) -> f64 {
        self.hit_share.get()
    }

    /// A pass of single pages by one thread, from any source.
    pub fn reads(&self, worker: &mut Worker<'_>, seed: u64) -> Result<Report, Failure> {
        self.side.drop_cached()?;
        worker.obey(&self.pass(PAGE_SIZE, 1, seed))
    }

    /// A pass in which every read should be a hit.
    pub fn hits(
        &self,
        worker: &mut Worker<'_>,
        block_bytes: usize,
        threads: usize,
        seed: u64,
    ) -> Result<Report, Failure> {
        self.side.drop_cached()?;
        let before = self.side.status()?.borrower;
        let report = worker.obey(&self.pass(block_bytes, threads, seed))?;
        let status = self.side.status()?;
        let has_grown = |number: fn(&report::Borrower) -> u64| grown(number(&before), number(&status.borrower));
        let lender_pages = has_grown(|of| of.lender_pages)?;
        let pages = self.len_bytes / PAGE_SIZE as u64;
        let share = lender_pages as f64 / pages as f64;
        self.hit_share.set(self.hit_share.get().min(share));
        if share < HIT_SHARE_MIN && !self.tiny {
            let state = status.lenders.first().map_or(report::LinkState::Unknown, |link| link.state);
            let message = format!(
                "of {pages} pages {lender_pages} came from the lender, which is {state}; {} from below, {} from put \
                 buffers; {} misses, {} failures, {} hedges won",
                has_grown(|of| of.backing_pages)?,
                has_grown(|of| of.buffer_pages)?,
                has_grown(|of| of.get_misses)?,
                has_grown(|of| of.get_failures)?,
                has_grown(|of| of.hedges_won)?,
            );
            return Err(Failure::Problem(message));
        }
        Ok(report)
    }
}

/// Whether everything that the tap has captured was taken, and everything that was sent has
/// arrived.
fn is_settled(status: &report::Mount) -> bool {
    let captured_pages = status.tap.as_ref().map_or(0, |tap| tap.captured_pages);
    captured_pages == status.borrower.evictions && status.puts_under_way == 0
}
