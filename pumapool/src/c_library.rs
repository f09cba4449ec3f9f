//! How the C library is set, for daemons that run for months and for a program that brings its own.
//!
//! **Memory.** Left alone, glibc learns from the first large buffer that is freed to serve such buffers from its arenas, of which there are
//! several for each processor, and which keep what is freed: after some hours a lender held 20 MiB of buffers that no connection
//! had any more. A threshold that is set is not learned anew.
//!
//! **Names.** What /etc/nsswitch.conf names beside files and DNS are modules for the machine's own C library. A program that is linked statically
//! (`make static`) would load them, and another version of that library with them.

/// From this size on a buffer is memory of its own, which goes back to the kernel when it is freed: glibc's first threshold.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: libc::c_int = 128 << 10;

/// Sets it, before any thread is started.
pub fn set_up() {
    // SAFETY: the call sets a number of the allocator; no other thread runs yet.
    #[cfg(target_env = "gnu")]
    let _refused_at_worst = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE_BYTES) };
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    look_names_up_without_modules();
}

#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
fn look_names_up_without_modules() {
    unsafe extern "C" {
        // <nss.h>
        fn __nss_configure_lookup(database: *const libc::c_char, service: *const libc::c_char) -> libc::c_int;
    }
    // SAFETY: both are strings, which glibc copies; no other thread runs yet.
    let _refused_at_worst = unsafe { __nss_configure_lookup(c"hosts".as_ptr(), c"files dns".as_ptr()) };
}
