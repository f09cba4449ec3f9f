//! Sets the policy for memory that this process, and any program that it starts or becomes, takes
//! from now on (set_mempolicy(2)).

use crate::NodeId;
use std::io;

const INTERLEAVE: libc::c_int = 3;
const LOCAL: libc::c_int = 4;

/// Places page after page on these nodes in turn.
///
/// # Errors
/// Fails if the kernel refuses it: none of the nodes is permitted.
pub fn interleave(nodes: &[NodeId]) -> io::Result<()> {
    let mut mask = [0u64; (NodeId::MAX as usize + 1) / 64];
    for node in nodes {
        mask[usize::from(*node) / 64] |= 1 << (node % 64);
    }
    let words = mask.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
    set(INTERLEAVE, &mask[..words])
}

/// Places memory where it is touched first, whatever policy was inherited.
///
/// # Errors
/// Fails if the kernel has no policies.
pub fn local() -> io::Result<()> {
    set(LOCAL, &[])
}

fn set(mode: libc::c_int, mask: &[u64]) -> io::Result<()> {
    let mask_at = if mask.is_empty() { std::ptr::null() } else { mask.as_ptr() };
    // The kernel uses one bit less than the given number.
    let bits = if mask.is_empty() { 0 } else { mask.len() * 64 + 1 };
    // SAFETY: the mask has the given length, and is only read. (The bit beyond is not read: the
    // kernel subtracts it.)
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
        // For this thread only.
        let policy = || std::fs::read_to_string("/proc/thread-self/numa_maps").unwrap();
        interleave(&[0]).unwrap();
        assert!(policy().contains("interleave:0"), "{}", policy());
        local().unwrap();
        assert!(!policy().contains("interleave:0"), "{}", policy());
        assert!(interleave(&[NodeId::MAX]).is_err() && interleave(&[]).is_err());
    }
}
