//! Entry points for the crate `fuzz`: the decoders of bytes from borrowers and of the kernel's
//! files. They are no part of the interface, and decide nothing.

use crate::available_memory::{self, Memory};
use crate::entry::Entry;
use crate::event_loop::EventLoop;
use crate::pressure;
use crate::sessions::Name;
use crate::shared::Shared;
use crate::store::Store;
use crate::{Capacity, Config, handshake, housekeeping};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use wire::address::Stream;
pub use wire::frames::{ConnectionError, FrameReader};
use wire::secure::Security;

/// A lender without a listener and without housekeeping. The caller passes connections to it.
pub struct Lender {
    shared: Arc<Shared>,
}

/// How long sessions are kept: longer than any input runs.
const GRACE: Duration = Duration::from_secs(3600);

/// A session's main connection, on which nothing arrives.
pub struct Held {
    _entry: Entry,
}

impl Lender {
    /// A lender of that capacity, for which there is memory.
    pub fn new(capacity_pages: u32, security: Security) -> io::Result<Lender> {
        let mut store = Store::new(capacity_pages)?;
        store.set_available_pages(u64::MAX);
        Ok(Lender { shared: Arc::new(Shared::new(store, GRACE, security)?) })
    }

    /// Joins a session; `stream` stands for the main connection. Returns `None` if there are too
    /// many.
    pub fn hold(&self, name: Name, stream: Stream) -> Option<Held> {
        let entry = self.shared.enter(&Arc::new(stream))?;
        entry.join_main(name, None).ok()?;
        Some(Held { _entry: entry })
    }

    /// Simulates the end of the grace time of all kept sessions.
    pub fn forget_kept(&self) {
        housekeeping::forget_left_behind(&self.shared, Instant::now() + GRACE);
    }

    /// Serves a connection until it ends.
    pub fn serve(&self, stream: Stream) {
        let stream = Arc::new(stream);
        let entry = self.shared.enter(&stream);
        if let Some(connection) = entry.and_then(|entry| handshake::receive(&self.shared, stream, entry)) {
            EventLoop::serve_alone(&self.shared, connection).expect("descriptors for an epoll");
        }
    }

    /// Returns stored pages (those of zeros too), sessions, connections, and connections that ended
    /// because of a broken frame.
    pub fn left(&self) -> (u32, usize, usize, u64) {
        let table = self.shared.table.lock();
        let store = self.shared.store.lock();
        let pages = store.stored_pages() + store.zero_pages();
        (pages, table.sessions().len(), table.connections(), self.shared.statistics.malformed_frames.load(Relaxed))
    }
}

/// Parses the texts of `/proc`, and makes the decisions that depend on them.
pub fn memory_files(
    meminfo: &str,
    membership: &str,
    mounts: &str,
    vmstat: &str,
    stalls: &str,
    zoneinfo: &str,
) -> Option<Memory> {
    os::cgroup::MemoryGroup::of(membership, mounts.as_bytes());
    available_memory::lazily_freed_pages(vmstat);
    available_memory::watermark_bytes(zoneinfo);
    let memory = available_memory::machine_memory(meminfo)?;
    let stalled_us = os::pressure::stalled_us(stalls).unwrap_or(0);
    pressure::judge(stalled_us, Duration::from_micros(stalled_us), memory, memory.free_bytes / 2);
    for capacity in [Capacity::Auto, Capacity::Bytes(stalled_us)] {
        let listen = "unix:/x".parse().ok()?;
        let config = Config {
            listen,
            capacity,
            reserve_bytes: memory.free_bytes,
            grace: GRACE,
            limits: crate::Limits::default(),
            security: Security::Trusting,
        };
        if let Ok(pages) = config.capacity_pages(memory) {
            assert!(pages > 0 && u64::from(pages) <= memory.total_bytes / page::PAGE_SIZE as u64);
        }
    }
    Some(memory)
}
