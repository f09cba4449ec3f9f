//! Configuration of a lender, and the errors at its start.

use crate::available_memory::Memory;
use crate::rate_limit::Limits;
use crate::store::CAPACITY_PAGES_MAX;
use page::PAGE_SIZE;
use std::io;
use std::time::Duration;
use wire::address::Address;
use wire::secure::Security;

/// The maximum number of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// As many pages as take this memory.
    Bytes(u64),
    /// All memory of the machine or the memory cgroup, less the reserve.
    Auto,
}

/// Configuration of a lender.
#[derive(Clone, Debug)]
pub struct Config {
    /// The address to listen on.
    pub listen: Address,
    /// The maximum of lent memory. The lender takes memory only when it is used, and only free
    /// memory.
    pub capacity: Capacity,
    /// Free memory that the lender never takes.
    pub reserve_bytes: u64,
    /// How long the lender keeps the pages of a borrower that lost its connection. Zero: not at
    /// all. The maximum is [`wire::GRACE_SECONDS_MAX`].
    pub grace: Duration,
    /// Limits for the use of network and processors.
    pub limits: Limits,
    /// The security of connections: it decides which borrowers may connect.
    pub security: Security,
}

/// Default of [`Config::grace`]: a switch or a daemon restarts in this time, and pages that nobody
/// claims use memory only for a short time.
pub const GRACE_DEFAULT: Duration = Duration::from_secs(30);

/// The reason why a lender does not start, in one line with a remedy.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the text that Display makes of each says what it is
pub enum Error {
    #[error(transparent)]
    Listen(wire::listener::Error),
    #[error("cannot lend {}: this machine or memory cgroup has {}; choose less, or `auto`", mib(*capacity_bytes), mib(*total_bytes))]
    CapacityTooLarge { capacity_bytes: u64, total_bytes: u64 },
    #[error("cannot lend {capacity_bytes} bytes: that is less than a page of {PAGE_SIZE}; choose more")]
    CapacityTooSmall { capacity_bytes: u64 },
    #[error("nothing to lend: the reserve is {}, and all there is {}; choose a smaller reserve", mib(*reserve_bytes), mib(*total_bytes))]
    NothingToLend { reserve_bytes: u64, total_bytes: u64 },
    #[error("cannot learn how much memory there is: reading /proc/meminfo: {source}; mount /proc")]
    UnknownMemory { source: io::Error },
    #[error("cannot set up a store of {}: {source}; choose a smaller capacity or raise `ulimit -v`", mib(*capacity_bytes))]
    NoMemory { capacity_bytes: u64, source: io::Error },
    #[error("cannot start the lender: {source}; raise the limits on open files and threads (`ulimit -n -u`)")]
    Start { source: io::Error },
}

/// A size for a message, in MiB with one decimal.
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

impl Config {
    /// The capacity in pages, on a machine with this memory.
    pub(crate) fn capacity_pages(&self, memory: Memory) -> Result<u32, Error> {
        let (total_bytes, reserve_bytes) = (memory.total_bytes, self.reserve_bytes);
        let capacity_bytes = match self.capacity {
            Capacity::Bytes(capacity_bytes) if capacity_bytes > total_bytes => {
                return Err(Error::CapacityTooLarge { capacity_bytes, total_bytes });
            }
            Capacity::Bytes(capacity_bytes) if capacity_bytes < PAGE_SIZE as u64 => {
                return Err(Error::CapacityTooSmall { capacity_bytes });
            }
            Capacity::Bytes(capacity_bytes) => capacity_bytes,
            Capacity::Auto => match total_bytes.saturating_sub(reserve_bytes) {
                0..4096 => return Err(Error::NothingToLend { reserve_bytes, total_bytes }),
                capacity_bytes => capacity_bytes,
            },
        };
        Ok((capacity_bytes / PAGE_SIZE as u64).min(u64::from(CAPACITY_PAGES_MAX)) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_fits_the_memory() {
        let memory = Memory { total_bytes: 100 << 20, free_bytes: 0 };
        let config = |capacity, reserve_bytes| Config {
            listen: "unix:/x".parse().unwrap(),
            capacity,
            reserve_bytes,
            grace: GRACE_DEFAULT,
            limits: Limits::default(),
            security: Security::Trusting,
        };
        assert_eq!(config(Capacity::Auto, 60 << 20).capacity_pages(memory).unwrap(), 40 << 8);
        assert_eq!(config(Capacity::Bytes(8192), u64::MAX).capacity_pages(memory).unwrap(), 2);
        for (config, text) in [
            (config(Capacity::Auto, 100 << 20), "smaller reserve"),
            (config(Capacity::Bytes(101 << 20), 0), "choose less"),
            (config(Capacity::Bytes(4095), 0), "choose more"),
        ] {
            let error = config.capacity_pages(memory).unwrap_err().to_string();
            assert!(error.contains(text) && !error.contains('\n'), "{error}");
        }
    }
}
