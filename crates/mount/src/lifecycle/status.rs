//! Counters of a mount's work, and a snapshot of them for `status`.

use fuse::abi::opcode;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Opcodes counted one by one. Larger ones, should the kernel have any, share the last counter.
const OPCODES: usize = 64;

/// A number that only grows.
#[derive(Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The counters.
pub(crate) struct Counters {
    requests: [Counter; OPCODES],
    pub(crate) direct_reads: Counter,
    pub(crate) passed_opens: Counter,
    pub(crate) read_bytes: Counter,
    pub(crate) written_bytes: Counter,
}

impl Default for Counters {
    fn default() -> Counters {
        Counters {
            requests: [const { Counter(AtomicU64::new(0)) }; OPCODES],
            direct_reads: Counter::default(),
            passed_opens: Counter::default(),
            read_bytes: Counter::default(),
            written_bytes: Counter::default(),
        }
    }
}

impl Counters {
    pub(crate) fn count(&self, opcode: u32) {
        self.requests[(opcode as usize).min(OPCODES - 1)].add(1);
    }

    /// Requests by name: those that there were.
    pub(crate) fn requests(&self) -> BTreeMap<&'static str, u64> {
        let mut requests = BTreeMap::new();
        for (code, counter) in self.requests.iter().enumerate().filter(|(_, counter)| counter.get() > 0) {
            *requests.entry(opcode::name(code as u32)).or_default() += counter.get();
        }
        requests
    }
}

/// A snapshot. The counts are since this daemon began.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The backing directory.
    pub source: String,
    /// Where it is mounted.
    pub mountpoint: String,
    /// Whether requests are still served.
    pub serving: bool,
    /// Threads that answer requests now.
    pub workers: usize,
    /// Requests that wait because others of their user hold as many workers as one user may.
    pub deferred_requests: usize,
    /// Opens that wait because another process has a lease on the file, and are tried again.
    pub waiting_opens: usize,
    /// How often a new daemon has taken the mount over from one before it.
    pub takeovers: u64,
    /// Requests from the kernel, by kind.
    pub requests: BTreeMap<&'static str, u64>,
    /// READs that went past the borrower because of O_DIRECT.
    pub direct_reads: u64,
    /// Opens of files whose backing files the kernel reads by itself, because the pool is of no use
    /// to them.
    pub passed_opens: u64,
    /// Number of requests to the kernel to drop its cache of a file, or of a part of it, because of
    /// a possible external change.
    pub requested_drops: u64,
    /// Bytes answered to READs.
    pub read_bytes: u64,
    /// Bytes written by WRITEs.
    pub written_bytes: u64,
    /// Files and directories open now.
    pub open_handles: usize,
    /// Inodes the kernel knows now.
    pub inodes: usize,
    /// Those of them that are held by a descriptor; the others are held by a file handle.
    pub inodes_with_descriptor: usize,
    /// Descriptors that open files and inodes hold.
    pub descriptors: usize,
    /// Descriptors that the daemon may have (RLIMIT_NOFILE), its reserve among them.
    pub descriptors_max: usize,
    /// Files whose external changes fanotify reports.
    pub files_told_of: usize,
    /// Files with written pages that may still be in the page cache of the backing file.
    pub written_files_pending: usize,
    /// Bytes of those pages whose writeback has not begun.
    pub written_bytes_pending: u64,
    /// Descriptors that the supervisor has not taken yet, or let go of: it is stopped, or busy.
    pub undelivered_descriptors: usize,
}
