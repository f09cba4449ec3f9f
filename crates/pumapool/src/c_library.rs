//! How the C library is set, for daemons that run for months and for a program that brings its own.
//!
//! **Memory.** Left alone, glibc learns from the first large buffer that is freed to serve such
//! buffers from its arenas, of which there are several for each processor, and which keep what is
//! freed: after some hours a lender held 20 MiB of buffers that no connection had any more. A
//! threshold that is set is not learned anew. And what one thread frees another one cannot have, if
//! it has another arena: a mount whose workers made and forgot 14,000 files had 70 MiB in ten
//! arenas, and grew with each round of that. So there is one.
//!
//! **Names.** What /etc/nsswitch.conf names beside files and DNS are modules for the machine's own
//! C library. A program that is linked statically (`make static`) would load them, and another
//! version of that library with them.

/// From this size on a buffer is memory of its own, which goes back to the kernel when it is freed:
/// glibc's first threshold.
#[cfg(target_env = "gnu")]
const LARGE_BYTES: libc::c_int = 128 << 10;

/// Small buffers come from a cache of each thread first, so that one arena is enough.
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 1;

/// Sets it, before any thread is started.
pub fn set_up() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [(libc::M_MMAP_THRESHOLD, LARGE_BYTES), (libc::M_ARENA_MAX, ARENAS)] {
        // SAFETY: the call sets a number of the allocator; no other thread runs yet.
        let _refused_at_worst = unsafe { libc::mallopt(parameter, value) };
    }
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
