//! What this process says the kernel is to do with memory that it, and whatever it becomes or
//! starts, takes from now on (set_mempolicy(2)).

use crate::NodeId;
use std::io;

const INTERLEAVE: libc::c_int = 3;
const LOCAL: libc::c_int = 4;

/// Page by page on these nodes in turn.
///
/// # Errors
/// When the kernel does not take it: none of the nodes is allowed.
pub fn interleave(nodes: &[NodeId]) -> io::Result<()> {
    let mut mask = [0u64; (NodeId::MAX as usize + 1) / 64];
    for node in nodes {
        mask[usize::from(*node) / 64] |= 1 << (node % 64);
    }
    let words = mask.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
    set(INTERLEAVE, &mask[..words])
}

/// Where it is touched first, whatever was inherited.
///
/// # Errors
/// When the kernel has no policies.
pub fn local() -> io::Result<()> {
    set(LOCAL, &[])
}

fn set(mode: libc::c_int, mask: &[u64]) -> io::Result<()> {
    let mask_at = if mask.is_empty() { std::ptr::null() } else { mask.as_ptr() };
    // The kernel takes one bit less than it is told.
    let bits = if mask.is_empty() { 0 } else { mask.len() * 64 + 1 };
    // SAFETY: the mask is as long as it is said to be, and is only read. (The bit beyond is not
    // read: the kernel counts it away.)
    match unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, mask_at, bits) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_takes_what_is_said() {
        // Of this thread only.
        let policy = || std::fs::read_to_string("/proc/thread-self/numa_maps").unwrap();
        interleave(&[0]).unwrap();
        assert!(policy().contains("interleave:0"), "{}", policy());
        local().unwrap();
        assert!(!policy().contains("interleave:0"), "{}", policy());
        assert!(interleave(&[NodeId::MAX]).is_err() && interleave(&[]).is_err());
    }
}
