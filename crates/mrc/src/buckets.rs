//! Cache sizes of the curves, in pages: a fixed number for each doubling.

/// The smallest cache size that differs from none.
const FIRST_PAGES: f64 = 16.0;
/// Adjacent sizes differ by a percent.
const PER_DOUBLING: f64 = 64.0;
/// Up to 4 TiB.
pub(crate) const COUNT: usize = 64 * 26 + 1;

/// The size of a bucket's cache.
#[cfg(test)]
fn pages(bucket: usize) -> f64 {
    FIRST_PAGES * (bucket as f64 / PER_DOUBLING).exp2()
}

/// The bucket of the smallest cache that holds so many pages.
pub(crate) fn holding(pages: f64) -> usize {
    let bucket = (PER_DOUBLING * (pages / FIRST_PAGES).log2()).ceil();
    // A negative one becomes 0.
    (bucket as usize).min(COUNT)
}

/// The bucket of the largest cache that so many pages fill.
pub(crate) fn filled_by(pages: f64) -> Option<usize> {
    let bucket = (PER_DOUBLING * (pages / FIRST_PAGES).log2()).floor();
    (bucket >= 0.0).then(|| (bucket as usize).min(COUNT - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_buckets_agree() {
        for bucket in 0..COUNT {
            let size = pages(bucket);
            assert_eq!((holding(size * 0.9999), filled_by(size * 1.0001)), (bucket, Some(bucket)));
        }
        assert_eq!((holding(0.0), holding(1.0), holding(1e30)), (0, 0, COUNT));
        assert_eq!((filled_by(0.0), filled_by(15.0), filled_by(1e30)), (None, None, Some(COUNT - 1)));
    }
}
