//! What a mount takes of the memory of its control group, or of the machine.

use crate::cli::mount::Ring;

/// A ring of [`Ring::Auto`] takes this part of the memory at the most. The ring counts as memory of
/// the control group.
const RING_SHARE: u64 = 16;
/// A ring of [`Ring::Auto`] has at least 256 pages, however little memory there is. With fewer
/// pages next to nothing would be lent.
const RING_BYTES_MIN: u64 = 1 << 20;
/// Written pages of backing files take this part of the memory at the most.
const WRITTEN_SHARE: u64 = 16;

/// The memory of the daemon's cgroup, or of the machine. The largest number if the kernel does not
/// report it.
pub(super) fn total_bytes() -> u64 {
    lender::available_memory::AvailableMemory::default().read().map_or(u64::MAX, |memory| memory.total_bytes)
}

/// The size of the ring of evicted pages.
pub(super) fn ring_bytes(ring: Ring) -> usize {
    match ring {
        Ring::Auto => auto_ring_bytes(total_bytes()),
        Ring::Bytes(bytes) => bytes,
    }
}

fn auto_ring_bytes(memory_bytes: u64) -> usize {
    let share_bytes = (memory_bytes / RING_SHARE).max(RING_BYTES_MIN);
    tap::BpfTap::RING_BYTES.min(1 << share_bytes.ilog2())
}

/// Limit on the bytes in the page cache of backing files that were written and not yet dropped. If
/// a group is full of them, the kernel writes them back page by page, and readers and writers wait.
pub(super) fn written_bytes(memory_bytes: u64) -> u64 {
    (memory_bytes / WRITTEN_SHARE).min(mount::Config::WRITTEN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_does_not_fill_a_small_memory() {
        assert_eq!(
            [0, 92, 512, 1 << 20].map(|memory_mib| written_bytes(memory_mib << 20)),
            [0, 92 << 16, 32 << 20, 64 << 20]
        );
    }

    #[test]
    fn a_small_memory_has_a_small_ring() {
        let auto_mib = |memory_mib: u64| auto_ring_bytes(memory_mib << 20) >> 20;
        assert_eq!([4, 92, 128, 500, 512, 1 << 20].map(auto_mib), [1, 4, 8, 16, 32, 32]);
    }
}
