//! The borrower's counters. [`report::Borrower`] declares them, with their meanings and the names
//! of their metrics.

use report::Times;
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
    ($($name:ident,)*) => {
        /// The counters of a borrower.
        #[derive(Default)]
        pub struct Metrics {
            $(
                #[doc = concat!("Counts [`report::Borrower::", stringify!($name), "`].")]
                pub $name: Counter,
            )*
        }

        impl Metrics {
            /// Returns the values.
            pub fn read(&self) -> report::Borrower {
                report::Borrower { $($name: self.$name.get(),)* }
            }
        }
    };
}

metrics! {
    reads,
    read_pages,
    lender_pages,
    buffer_pages,
    demoted_pages,
    zero_pages,
    backing_pages,
    get_messages,
    get_misses,
    get_failures,
    bad_pages,
    reads_repeated,
    evictions,
    evictions_already_lent,
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
    external_changes,
    lender_connects,
    lender_resumes,
    lender_losses,
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
