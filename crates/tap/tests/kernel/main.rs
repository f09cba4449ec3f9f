//! The tap against the real kernel.
//!
//! Needs root (BPF), a memory cgroup, and ext4 or XFS under /var/tmp; a test that lacks one of them
//! says so. Other files of that file system are evicted at the same time, so the tests look at
//! their own by its generation.

mod access_trace;
mod evictions;
mod rights;
mod setup;
