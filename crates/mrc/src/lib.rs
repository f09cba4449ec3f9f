//! Miss-ratio curves: what caches of all sizes would have answered, from one look at what happened.
//!
//! Pages are sampled as in SHARDS (Waldspurger et al., FAST 2015): a page is in the sample if the
//! hash of its name is below a threshold, so that of a page everything is seen or nothing.
//! Distances in the sample are those of all pages, scaled down. The sample has a fixed size: when
//! it is full, the threshold is lowered, and the pages above it are forgotten.
//!
//! - [`Lru`]: a cache that sees every access. Distance: how many other pages were accessed since.
//! - [`Victims`]: a cache that is filled by another one's evictions and asked for its misses, as a
//!   pool of remote memory is. Distance: how many pages were evicted later and have not come back.
//!   Nothing need be known of the policy of the cache before it, and no hit need be seen.
//!
//! No clocks, no I/O, no randomness. Memory is bounded by [`SAMPLES_MAX`], or by what a caller asks
//! for.

mod buckets;
mod lru;
mod order;
mod victims;

pub use lru::Lru;
pub use victims::{Point, Victims};

/// Pages in a sample. At 8192 SHARDS is within about a point of the whole; one takes less than 2
/// MiB.
pub const SAMPLES_MAX: usize = 8192;

/// A threshold under which every page is sampled. Hashes have 32 bits.
pub const EVERY_PAGE: u64 = 1 << 32;

/// A page's name: its file and its index there. The file is anything that names it, such as device
/// and inode mixed ([`file()`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    // First, as the samples are ordered by it.
    hash: u32,
    file: u64,
    index: u64,
}

impl Key {
    /// Of a page.
    pub fn new(file: u64, index: u64) -> Key {
        Key { hash: (mix(mix(file) ^ index) >> 32) as u32, file, index }
    }

    /// Whether it belongs to the sample with that threshold.
    pub fn is_below(self, threshold: u64) -> bool {
        u64::from(self.hash) < threshold
    }
}

/// Names a file by device and inode.
pub fn file(device: u64, inode: u64) -> u64 {
    mix(device) ^ inode
}

/// Spreads: each bit depends on all (the finalizer of SplitMix64). crates/tap/src/bpf/watch.bpf.c
/// has the same.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Which pages are sampled.
#[derive(Clone, Copy, Debug)]
struct Sampling {
    threshold: u64,
}

impl Sampling {
    /// Share of all pages that is sampled.
    fn rate(self) -> f64 {
        self.threshold as f64 / EVERY_PAGE as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_devices_with_the_same_minor_number_are_told_apart() {
        // sda1 and dm-1, as the kernel numbers them.
        assert_ne!(file(8 << 20 | 1, 12), file(253 << 20 | 1, 12));
    }
}
