//! The worker's measurements of writes.

use crate::worker::Report;
use crate::world::STAMP_BYTES;
use page::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

/// The places of the writes, and how often they are synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern {
    /// Bytes of a write.
    pub block_bytes: usize,
    /// At random, or one after the other.
    pub random: bool,
    /// Writes between two fsyncs; there is always one at the end.
    pub sync_every: u64,
}

/// Overwrites that many blocks of a file.
pub fn write(path: &Path, len_bytes: u64, pattern: Pattern, count: u64, seed: u64) -> Result<Report, String> {
    let problem = |error: io::Error| format!("writing {}: {error}", path.display());
    let file = File::options().write(true).open(path).map_err(problem)?;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut block = vec![0; pattern.block_bytes];
    random.fill(&mut block);
    let (blocks, pages) = (len_bytes / pattern.block_bytes as u64, (pattern.block_bytes / PAGE_SIZE) as u64);
    let begin = Instant::now();
    for number in 0..count {
        let at = if pattern.random { random.u64(..blocks) } else { number % blocks };
        // The pages keep their numbers.
        for (page, content) in (at * pages..).zip(block.chunks_exact_mut(PAGE_SIZE)) {
            content[..STAMP_BYTES].copy_from_slice(&page.to_le_bytes());
        }
        file.write_all_at(&block, at * pattern.block_bytes as u64).map_err(problem)?;
        if (number + 1) % pattern.sync_every == 0 {
            file.sync_data().map_err(problem)?;
        }
    }
    file.sync_all().map_err(problem)?;
    let bytes = count * pattern.block_bytes as u64;
    Ok(Report { operations: count, bytes, seconds: begin.elapsed().as_secs_f64(), ..Report::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use testbed::Scratch;

    #[test]
    fn pages_keep_their_numbers() {
        let scratch = Scratch::new("bench-writing").unwrap();
        let path = scratch.path().join("data");
        let len_bytes = 32 * PAGE_SIZE as u64;
        crate::world::write_stamped(&path, len_bytes, 1).unwrap();
        let before = std::fs::read(&path).unwrap();
        for (block_pages, random) in [(1, true), (8, false)] {
            let pattern = Pattern { block_bytes: block_pages * PAGE_SIZE, random, sync_every: 3 };
            let report = write(&path, len_bytes, pattern, 10, 1).unwrap();
            assert_eq!(report.bytes, 10 * pattern.block_bytes as u64);
            crate::reading::once(&path, len_bytes, PAGE_SIZE, 1, 1).unwrap();
        }
        assert!(std::fs::read(&path).unwrap() != before);
    }
}
