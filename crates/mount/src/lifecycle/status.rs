//! Counters of a mount's work.

use fuse::abi::opcode;
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
    pub(crate) fn requests(&self) -> BTreeMap<String, u64> {
        let mut requests = BTreeMap::new();
        for (code, counter) in self.requests.iter().enumerate().filter(|(_, counter)| counter.get() > 0) {
            *requests.entry(opcode::name(code as u32).to_owned()).or_default() += counter.get();
        }
        requests
    }
}
