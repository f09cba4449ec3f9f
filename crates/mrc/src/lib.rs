//! Miss-ratio curves: the hits of caches of all sizes, computed from one pass over the events.
//!
//! Pages are sampled as in SHARDS (Waldspurger et al., FAST 2015): a page is in the sample if the
//! hash of its name is below a threshold. So either all events of a page are in the sample or none.
//! Distances in the sample are those of all pages, scaled down. The sample has a fixed size: when
//! it is full, the threshold is lowered, and the pages above it are forgotten.
//!
//! - [`Lru`]: a cache that sees every access. Distance: the number of other pages that were
//!   accessed since.
//! - [`Victims`]: a cache that another one's evictions fill and that its misses ask, as a pool of
//!   remote memory is. Distance: the number of pages that were evicted later and have not come
//!   back. This needs no knowledge of the first cache's policy, and no hits.
//!
//! No clocks, no I/O, no randomness. Memory is bounded by [`SAMPLES_MAX`], or by the caller's
//! bound.

mod buckets;
mod lru;
mod order;
mod victims;

pub use lru::Lru;
pub use victims::{Point, Victims};

/// Pages in a sample. With 8192 pages SHARDS is within about a point of the exact curve; a sample
/// takes less than 2 MiB.
pub const SAMPLES_MAX: usize = 8192;

/// A threshold under which every page is sampled. Hashes have 32 bits.
pub const EVERY_PAGE: u64 = 1 << 32;

/// A page's name: its file and its index in it. The file is any number that names it, such as
/// device and inode mixed ([`file()`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    // The first field, because it orders the samples.
    hash: u32,
    file: u64,
    index: u64,
}

impl Key {
    /// The key of a page.
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

/// Mixes the bits: each output bit depends on all input bits (the finalizer of SplitMix64).
/// crates/tap/src/bpf/access_trace.bpf.c has the same function.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The choice of sampled pages.
#[derive(Clone, Copy, Debug)]
struct Sampling {
    threshold: u64,
}

impl Sampling {
    /// The share of all pages that is sampled.
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
