//! Computes the findings and the advice from the observations. Uses no clocks and no I/O.

use super::observed::Observed;
use page::PAGE_SIZE;
use serde::Serialize;
use tap::{AccessTraceCounters, ReadsSource};

/// Time of a get without the round trip to the lender, in microseconds: the READ through FUSE, the
/// lender, and the verification of the seal (ARCHITECTURE.md, "The way of a hit").
const MOUNT_US: f64 = 60.0;
/// Assumed round trip if no lender is given, in microseconds: to a machine in the same data centre.
const ASSUMED_PING_US: f64 = 150.0;

/// Without at least so many missed pages there is no advice.
const MISSED_MIN: u64 = 2000;
/// Everything fits into the page cache if it had at least this share of the pages read, and ...
const FITS_RATIO: f64 = 0.99;
/// ... if at most so many pages were missed in a second.
const FITS_MISSED_PER_S: f64 = 50.0;
/// If at least this share of the missed pages is in sequential streams, the load counts as streams
/// only.
const STREAMS_SHARE: f64 = 0.8;
/// Streams count as repeated if at least this share of their pages was evicted during the watch.
/// The share is low because a part of the watch may precede the first evictions.
const RETURN_SHARE: f64 = 0.3;
/// The disk counts as fast as the pool if its latency is less than so many times the pool's.
const AS_FAST: f64 = 1.3;
/// Puma is advised if a pool would answer at least this share of the misses.
const WORTHWHILE: f64 = 0.1;
/// The advised size has at least this share of the largest pool's hit ratio.
const ENOUGH: f64 = 0.9;
/// Number of pool sizes in the table, unless sizes are given. Each is half of the next.
const SIZES: u32 = 4;
/// The largest of these sizes has room for all evicted pages, and is at least so large.
const LARGEST_MIN_BYTES: u64 = 64 << 20;
/// Factor on the evicted bytes, for pages that were not evicted yet during the watch.
const ROOM: f64 = 1.1;
/// Points of the curve that is drawn.
const CURVE_POINTS: u32 = 64;
/// The smallest pool of the curve, in bytes.
const CURVE_LEAST_BYTES: f64 = (1u64 << 20) as f64;

/// Latency of a read of the disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Disk {
    /// In microseconds.
    pub us: f64,
    /// Whether this is the time that programs waited. Otherwise it was measured by reads of
    /// existing files.
    pub is_waited: bool,
}

/// Latency of a page from the pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pool {
    /// In microseconds.
    pub us: f64,
    /// Whether a lender was pinged. Otherwise the latency is assumed.
    pub is_measured: bool,
}

impl Pool {
    /// The latency with a lender whose pings take `ping_us`, in microseconds.
    pub(super) fn measured(ping_us: f64) -> Pool {
        Pool { us: ping_us + MOUNT_US, is_measured: true }
    }

    /// The assumed latency without a lender.
    pub(super) fn assumed() -> Pool {
        Pool { us: ASSUMED_PING_US + MOUNT_US, is_measured: false }
    }
}

/// Estimated results of a pool of one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Size {
    /// Size of the pool.
    pub bytes: u64,
    /// Share of the misses that it would have answered.
    pub hit_ratio: f64,
    /// Share of the misses that this estimate is based on. 0: no pool of that size would have been
    /// filled.
    pub seen: f64,
    /// Pages a second that would not have been read from the disk.
    pub saved_pages_per_s: f64,
    /// Average time of a miss, in microseconds. `None` if the disk's latency is unknown.
    pub miss_us: Option<f64>,
    /// Waiting time saved, for all programs together, in seconds for each second.
    pub saved_s_per_s: Option<f64>,
}

/// The advice.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "advice", rename_all = "kebab-case")]
pub(super) enum Advice {
    /// Use Puma, with so much remote memory.
    Use { bytes: u64 },
    /// Do not use Puma.
    DoNot { why: String },
    /// The observations do not suffice for advice.
    Unclear { why: String },
}

/// All findings of a watch.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Findings {
    /// Duration of the watch, in seconds.
    pub seconds: f64,
    /// How reads were observed.
    pub reads_seen_by: &'static str,
    /// Pages that programs read.
    pub read_pages: u64,
    /// Pages brought from the disk to be read.
    pub missed_pages: u64,
    /// Missed pages in sequential streams. A mount leaves them to the disk, unless they fit.
    pub sequential_pages: u64,
    /// Share of the sequential pages that had been evicted during the watch. The next field is the
    /// size of a pool that would have held them.
    pub sequential_return_share: f64,
    pub sequential_pool_bytes: u64,
    /// Pages added to the page cache to be written.
    pub written_pages: u64,
    /// Pages that were mapped into programs when they were cached. The watch does not see all of
    /// their uses.
    pub mapped_pages: u64,
    /// Records that were lost because the ring was full.
    pub lost_records: u64,
    /// Share of the pages read that the page cache had. `None` if no reads were observed.
    pub page_cache_hit_ratio: Option<f64>,
    /// Bytes that were evicted and not read again.
    pub evicted_bytes: u64,
    /// Latency of a read of the disk, in microseconds.
    pub disk_us: Option<f64>,
    /// Whether programs waited for this time; see [`Disk::is_waited`].
    pub disk_is_waited: bool,
    /// Latency of a page from the pool, in microseconds.
    pub pool_us: f64,
    /// Whether a lender was pinged; see [`Pool::is_measured`].
    pub pool_is_measured: bool,
    /// Estimates for the pool sizes of the table.
    pub sizes: Vec<Size>,
    /// Estimates for the pool sizes of the curve.
    pub curve: Vec<Size>,
    /// Miss ratios of LRU caches for all reads, as pairs of the total size (local and remote, in
    /// bytes) and the share of reads that miss.
    pub lru_miss_ratio: Vec<(u64, f64)>,
    /// The advice.
    #[serde(flatten)]
    pub advice: Advice,
}

impl Findings {
    /// Computes the findings from the observations. `sizes` are the sizes of the table, in bytes;
    /// if empty, they are chosen to suit the evictions.
    pub(super) fn new(
        observed: &Observed,
        seconds: f64,
        source: ReadsSource,
        counters: AccessTraceCounters,
        disk: Option<Disk>,
        pool: Pool,
        sizes: &[u64],
    ) -> Findings {
        let (counts, returning) = (observed.counts(), observed.returning());
        let per_second = |pages: f64| pages / seconds.max(1e-3);
        let evicted_bytes = (observed.victims.pages() * PAGE_SIZE as f64) as u64;
        // Programs wait for a READ, not for each of its pages.
        let pages_per_read = ((counts.missed - counts.streamed) as f64 / counts.reads.max(1) as f64).max(1.0);
        let size = |bytes: u64| {
            let point = observed.victims.point(bytes as f64 / PAGE_SIZE as f64);
            let saved_pages_per_s = point.hit_ratio * per_second(counts.missed as f64);
            Size {
                bytes,
                hit_ratio: point.hit_ratio,
                seen: point.seen,
                saved_pages_per_s,
                miss_us: disk.map(|disk| point.hit_ratio * pool.us + (1.0 - point.hit_ratio) * disk.us),
                saved_s_per_s: disk.map(|disk| saved_pages_per_s / pages_per_read * (disk.us - pool.us) / 1e6),
            }
        };
        let largest = ((evicted_bytes as f64 * ROOM) as u64).max(LARGEST_MIN_BYTES).next_power_of_two();
        let mut chosen: Vec<u64> = if sizes.is_empty() {
            (0..SIZES).rev().map(|halvings| largest >> halvings).collect()
        } else {
            sizes.to_vec()
        };
        chosen.sort_unstable();
        chosen.dedup();
        let end = chosen.last().copied().unwrap_or(largest).max(largest) as f64;
        let step = (end / CURVE_LEAST_BYTES).powf(1.0 / f64::from(CURVE_POINTS - 1));
        let spaced: Vec<u64> =
            (0..CURVE_POINTS).map(|nth| (CURVE_LEAST_BYTES * step.powf(nth.into())) as u64).collect();
        let curve: Vec<Size> = spaced.iter().map(|bytes| size(*bytes)).collect();
        let lru = |bytes: &u64| (*bytes, observed.lru.miss_ratio(*bytes as f64 / PAGE_SIZE as f64));
        let mut findings = Findings {
            seconds,
            reads_seen_by: match source {
                ReadsSource::PageCache => "page cache",
                ReadsSource::SystemCalls => "system calls read and pread64",
            },
            read_pages: counts.read as u64,
            missed_pages: counts.missed,
            sequential_pages: counts.streamed,
            sequential_return_share: returning.share(),
            sequential_pool_bytes: (returning.pool_pages * ROOM * PAGE_SIZE as f64) as u64,
            written_pages: counts.written,
            mapped_pages: counts.mapped,
            lost_records: counters.ring_full,
            page_cache_hit_ratio: (counts.read > 0.0).then(|| (1.0 - counts.missed as f64 / counts.read).max(0.0)),
            evicted_bytes,
            disk_us: disk.map(|disk| disk.us),
            disk_is_waited: disk.is_some_and(|disk| disk.is_waited),
            pool_us: pool.us,
            pool_is_measured: pool.is_measured,
            sizes: chosen.into_iter().map(size).collect(),
            curve,
            lru_miss_ratio: spaced.iter().map(lru).collect(),
            advice: Advice::Unclear { why: String::new() },
        };
        findings.advice = findings.advise();
        findings
    }

    fn advise(&self) -> Advice {
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let do_not = |why: String| Advice::DoNot { why };
        let fits = self.page_cache_hit_ratio.is_some_and(|ratio| ratio >= FITS_RATIO)
            && self.missed_pages as f64 / self.seconds <= FITS_MISSED_PER_S;
        if fits && self.read_pages >= MISSED_MIN {
            return do_not(format!(
                "all fits: the page cache had {} of what was read",
                self.page_cache_hit_ratio.map_or_else(String::new, |ratio| format!("{:.1} %", ratio * 100.0))
            ));
        }
        if self.missed_pages < MISSED_MIN {
            let why = format!(
                "too little was seen: {} pages came from the disk in {:.0} s; watch longer (--for), under the machine's normal load",
                self.missed_pages, self.seconds
            );
            return Advice::Unclear { why };
        }
        let streams = self.sequential_pages as f64 / self.missed_pages as f64;
        if streams >= STREAMS_SHARE && self.sequential_return_share >= RETURN_SHARE {
            let why = format!(
                "{} of what came from the disk was read in long sequential streams, over and over: lenders with room for {} would have had it, which is \
                 of use if they are faster in that than the disk. A mount finds out by itself (its status: streams)",
                percent(streams),
                crate::cli::size::display(rounded(self.sequential_pool_bytes)),
            );
            return Advice::Unclear { why };
        }
        if streams >= STREAMS_SHARE {
            return do_not(format!(
                "{} of what came from the disk was read in long sequential streams, in which a disk reads ahead faster than a network",
                percent(streams)
            ));
        }
        if let Some(us) = self.disk_us.filter(|us| *us < self.pool_us * AS_FAST) {
            let assumed = if self.pool_is_measured { "" } else { " (assumed)" };
            return do_not(format!(
                "the disk is as fast as the network: {us:.0} µs a read, against {:.0} µs a page from the pool{assumed}",
                self.pool_us
            ));
        }
        let best = self.curve.last().copied();
        let ratio = best.map_or(0.0, |best| best.hit_ratio);
        if ratio >= WORTHWHILE {
            // The smallest size that is nearly as good as the largest, rounded up.
            let enough = self.curve.iter().find(|size| size.hit_ratio >= ratio * ENOUGH).or(best.as_ref());
            return Advice::Use { bytes: rounded(enough.map_or(0, |size| size.bytes)) };
        }
        // A pool might hold more than the pages evicted during the watch; earlier evictions are
        // unknown.
        let largest_filled = self.curve.iter().filter(|size| size.seen > 0.0).map(|size| size.bytes).max().unwrap_or(0);
        let why = format!(
            "of what came from the disk {} had been evicted while it was watched, the last {} of it",
            percent(ratio),
            crate::cli::size::display(largest_filled.max(self.evicted_bytes)),
        );
        Advice::Unclear { why: format!("{why}: it is read once only, or seldom; watch longer (--for) to know which") }
    }
}

/// Rounds up to MiB, with three significant bits.
fn rounded(bytes: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    let mib = bytes.div_ceil(MIB).max(1);
    let step = 1u64 << (u64::BITS - mib.leading_zeros()).saturating_sub(3);
    mib.next_multiple_of(step) * MIB
}

#[cfg(test)]
mod tests {
    use super::*;
    use tap::{Seen, SeenKind};

    const DISK: Option<Disk> = Some(Disk { us: 5000.0, is_waited: true });

    fn findings(observed: &Observed, disk: Option<Disk>) -> Findings {
        let counters = AccessTraceCounters::default();
        Findings::new(observed, 10.0, ReadsSource::PageCache, counters, disk, Pool::measured(100.0), &[])
    }

    /// Observations of reads of these pages through a page cache of `cached` pages.
    fn watched(indexes: impl Iterator<Item = u64>, cached: usize) -> Observed {
        let mut observed = Observed::default();
        let mut cache = std::collections::VecDeque::new();
        for index in indexes {
            let seen = |kind, index| Seen { kind, device: 1, inode: 1, index, pages: 1 };
            if !cache.contains(&index) {
                observed.note(&[seen(SeenKind::Added, index)]);
                cache.push_back(index);
            }
            if cache.len() > cached {
                let evicted = cache.pop_front().unwrap();
                observed.note(&[seen(SeenKind::Evicted, evicted)]);
            }
            observed.note(&[seen(SeenKind::Read, index)]);
        }
        observed
    }

    #[test]
    fn each_reason_is_found() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        // 64 MiB at random through 1 MiB.
        let at_random: Vec<u64> = (0..100_000).map(|_| random.u64(0..16_384) * 1000).collect();
        let observed = watched(at_random.iter().copied(), 256);
        let found = findings(&observed, DISK);
        let Advice::Use { bytes } = found.advice else { panic!("{found:?}") };
        assert!((48 << 20..=68 << 20).contains(&bytes), "{bytes}");
        let half = found.sizes.iter().find(|size| size.bytes == 32 << 20).unwrap();
        assert!((half.hit_ratio - 0.5).abs() < 0.03, "{half:?}");
        assert!((found.page_cache_hit_ratio.unwrap() - 1.0 / 64.0).abs() < 0.02, "{found:?}");

        let why = |found: Findings| match found.advice {
            Advice::DoNot { why } => format!("not: {why}"),
            Advice::Unclear { why } => format!("unclear: {why}"),
            Advice::Use { bytes } => format!("use {bytes}"),
        };
        let fast = Some(Disk { us: 150.0, is_waited: true });
        assert!(why(findings(&observed, fast)).starts_with("not: the disk is as fast"));
        let once = why(findings(&watched(0..30_000, 256), DISK));
        assert!(once.starts_with("not:") && once.contains("sequential streams"), "{once}");
        let thrice = findings(&watched((0..3).flat_map(|_| 0..30_000), 256), DISK);
        let file_bytes = 30_000 * PAGE_SIZE as u64;
        assert!((file_bytes..file_bytes * 5 / 4).contains(&thrice.sequential_pool_bytes), "{thrice:?}");
        let thrice = why(thrice);
        assert!(thrice.starts_with("unclear:") && thrice.contains("over and over"), "{thrice}");
        let fits = watched(at_random.iter().map(|index| index % 100), 256);
        assert!(why(findings(&fits, DISK)).starts_with("not: all fits"));
        assert!(why(findings(&Observed::default(), DISK)).starts_with("unclear: too little"));
        let once = watched((0..30_000).map(|index| index * 1000), 256);
        assert!(why(findings(&once, None)).contains("read once only"));
    }

    #[test]
    fn sizes_are_easily_said() {
        for (mib, said) in [(0, 1), (1, 1), (5, 5), (9, 10), (100, 112), (1000, 1024), (1100, 1280)] {
            assert_eq!(rounded(mib << 20), said << 20, "{mib}");
        }
    }
}
