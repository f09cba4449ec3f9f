//! The status of the program that places memory on NUMA nodes.

use crate::measured;
use serde::{Deserialize, Serialize};

/// The program that places memory on NUMA nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Numa {
    /// The process.
    pub pid: u32,
    /// The version of the program.
    pub version: String,
    /// Where its metrics are served.
    pub metrics: Option<String>,
    /// Where guests ask for advice, if they may.
    pub listen: Option<String>,
    /// Where samples of accesses come from, once that is known.
    pub source: Option<String>,
    /// The targets.
    pub targets: Vec<Target>,
}

measured! {
    /// A process or virtual machine whose memory is placed.
    pub struct Target, "NUMA placement: each target" of ["numa"] by ["target"]
        info "pumapool_numa_info" with [policy]: "a process or machine whose memory is placed"
    {
        /// As it was asked for.
        who: String,
        /// Its policy.
        policy: String,
        /// Its process, if it is there.
        pid: Option<u32>,
        /// The state of its placement.
        state: String,
        /// accesses that were seen of it
        samples: u64 = counter Count "pumapool_numa_samples_total",
        /// pages of it that were moved
        moved_pages: u64 = counter Count "pumapool_numa_moved_pages_total",
    }
}
