//! The pages of a file in the page cache.

use rustix::mm::{MapFlags, ProtFlags};
use std::fs::File;
use std::io;
use std::path::Path;

/// Bytes of a page.
const PAGE_SIZE: usize = 4096;

/// The number of a file's pages in the page cache under that path: the backing file and the file
/// through the mount are two. This reads nothing.
///
/// # Errors
/// Fails if the file cannot be opened or mapped; an empty one cannot.
pub fn cached_pages(path: &Path, len_bytes: u64) -> io::Result<u64> {
    let file = File::open(path)?;
    let len = usize::try_from(len_bytes).map_err(io::Error::other)?;
    let mut resident = vec![0u8; len.div_ceil(PAGE_SIZE)];
    // SAFETY: a new mapping at an address that the kernel chooses; it is never read, so it does not
    // matter if the file shrinks. mincore writes one byte for each of its pages into `resident`,
    // which has that many. It is unmapped once.
    unsafe {
        let map = rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, &file, 0)?;
        let counted = mincore(map, len, &mut resident);
        rustix::mm::munmap(map, len)?;
        counted?;
    }
    Ok(resident.iter().filter(|page| **page & 1 == 1).count() as u64)
}

/// # Safety
/// `map..map + len` must be mapped.
unsafe fn mincore(map: *mut std::ffi::c_void, len: usize, resident: &mut [u8]) -> io::Result<()> {
    assert!(resident.len() >= len.div_ceil(PAGE_SIZE));
    // SAFETY: the caller guarantees for the mapping, the assertion for the vector.
    match unsafe { libc::mincore(map, len, resident.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
