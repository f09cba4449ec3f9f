//! The borrower's counters: each metric is declared once, with its unit and meaning.

use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A number that only grows.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// Adds one.
    pub fn one(&self) {
        self.add(1);
    }

    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds of a [`Histogram`]'s buckets, in microseconds: from less than a round trip in a
/// nearby network to more than the time limit of a get.
pub const BOUNDS_US: [u64; 16] =
    [10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000];

/// The distribution of all times of an operation since the start. (Recent times are in
/// `policy/latencies.rs`.)
#[derive(Default)]
pub struct Histogram {
    /// The count for each bound, and the count of times above the last one.
    counts: [AtomicU64; BOUNDS_US.len() + 1],
    sum_ns: AtomicU64,
}

/// A snapshot of a histogram.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Times {
    /// Upper bounds of the buckets, in microseconds.
    pub bounds_us: Vec<u64>,
    /// For each bound, the number of times up to this bound and above the previous one. The last
    /// number: times above all bounds.
    pub counts: Vec<u64>,
    /// The sum of all times, in nanoseconds.
    pub sum_ns: u64,
}

impl Histogram {
    /// Records one time.
    pub fn note(&self, took: Duration) {
        let ns = took.as_nanos() as u64;
        let bucket = BOUNDS_US.partition_point(|bound| bound * 1000 < ns);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Returns a snapshot.
    pub fn read(&self) -> Times {
        Times {
            bounds_us: BOUNDS_US.to_vec(),
            counts: self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect(),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }
}

macro_rules! metrics {
    ($($name:ident: $meaning:literal,)*) => {
        /// The counters of a borrower.
        #[derive(Default)]
        pub struct Metrics { $(#[doc = $meaning] pub $name: Counter,)* }

        impl Metrics {
            /// Returns the name, meaning and value of each counter.
            pub fn all(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), $meaning, self.$name.get()),)*]
            }
        }
    };
}

metrics! {
    reads: "READ requests out of the page cache",
    read_pages: "pages that they asked for, before the end of the file",
    lender_pages: "pages answered from a lender",
    buffer_pages: "pages answered from a put buffer",
    demoted_pages: "pages answered with what a guest has evicted",
    zero_pages: "pages answered as zeros known to the catalog",
    below_pages: "pages answered from the directory below",
    get_messages: "Get messages sent",
    get_misses: "pages asked for that the lender no longer had",
    get_failures: "Get messages that failed: time-out, lost connection or malformed answer",
    bad_pages: "pages from a lender whose checksum was wrong",
    reads_repeated: "READ requests done again because the file changed meanwhile",
    evictions: "evictions seen",
    evictions_known: "evictions of pages that a lender had already: nothing sent",
    evictions_not_copied: "evictions whose bytes were not copied, as nothing was to be sent, and should have been",
    evictions_zero: "evictions of pages of zeros: nothing sent",
    evictions_sequential: "evictions of pages that were read in a sequential stream: nothing sent",
    evictions_not_trusted: "evictions dropped because the page may have changed since",
    evictions_unknown_file: "evictions of files that are no longer known",
    evictions_no_lender: "evictions dropped because no lender was there",
    evictions_not_admitted: "evictions in the name of a control group that has no part in it, or more than its share",
    evictions_no_room: "evictions dropped because all put buffers were taken, or the catalog was full",
    put_pages: "pages sent to a lender",
    put_messages: "Put messages sent",
    put_pages_refused: "pages that the lender did not take",
    put_pages_outdated: "pages sent that had changed by the time the lender had them",
    drop_pages: "pages of which a lender was told that they are of no more use",
    lost_pages: "pages of which a lender said that it no longer has them",
    catalog_reclaimed_pages: "pages forgotten because the catalog was full",
    hedges: "gets that were late and raced by a read of the directory below",
    hedges_won: "of those, how many the directory below answered first",
    changes: "changes of files",
    changes_beside: "changes of files made beside the mount that were found",
    lender_connects: "times a lender was reached",
    lender_resumes: "times a lender was reached again that had kept what was put before",
    lender_losses: "times the connection to a lender was lost",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_their_buckets() {
        let histogram = Histogram::default();
        for us in [0, 10, 11, 1_000_000, 1_000_001] {
            histogram.note(Duration::from_micros(us));
        }
        let times = histogram.read();
        assert_eq!((times.counts[0], times.counts[1], times.counts[15], times.counts[16]), (2, 1, 1, 1));
        assert_eq!((times.counts.iter().sum::<u64>(), times.sum_ns), (5, 2_000_022_000));
    }
}
