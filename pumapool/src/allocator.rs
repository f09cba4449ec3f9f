//! How the C library's allocator is set, for daemons that run for months.
//!
//! Left alone, glibc learns from the first large buffer that is freed to serve such buffers from its arenas, of which there are
//! several for each processor, and which keep what is freed: after some hours a lender held 20 MiB of buffers that no connection
//! had any more. A threshold that is set is not learned anew.

/// From this size on a buffer is memory of its own, which goes back to the kernel when it is freed: glibc's first threshold.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: libc::c_int = 128 << 10;

/// Has large buffers go back to the kernel when they are freed. Before any thread is started.
pub fn give_large_buffers_back() {
    // SAFETY: the call sets a number of the allocator; no other thread runs yet.
    #[cfg(target_env = "gnu")]
    let _refused_at_worst = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES) };
}
