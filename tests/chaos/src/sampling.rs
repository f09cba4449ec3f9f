//! A daemon's use of the machine, as the kernel counts it.

use serde::Serialize;
use std::fs;
use std::io;

/// A daemon at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Seconds since the load began.
    pub at_s: f64,
    /// Its process, which changes with a restart.
    pub pid: u32,
    /// Resident memory (VmRSS), including its program.
    pub resident_bytes: u64,
    /// Its own memory: private pages without those under MADV_FREE. This leaves out lent memory,
    /// because the kernel may take it at any moment.
    pub own_bytes: u64,
    /// Open descriptors.
    pub descriptor_count: u64,
    /// Threads.
    pub thread_count: u64,
}

/// Measures a process.
///
/// # Errors
/// Fails if there is no such process any more.
pub fn look(pid: u32, at_s: f64) -> io::Result<Sample> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let memory = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let bytes = |text, name| os::fields::bytes(text, name).unwrap_or(0);
    let own_bytes = bytes(&memory, "Private_Clean") + bytes(&memory, "Private_Dirty");
    Ok(Sample {
        at_s,
        pid,
        resident_bytes: bytes(&status, "VmRSS"),
        own_bytes: own_bytes.saturating_sub(bytes(&memory, "LazyFree")),
        descriptor_count: fs::read_dir(format!("/proc/{pid}/fd"))?.count() as u64,
        thread_count: os::fields::count(&status, "Threads").unwrap_or(0),
    })
}

/// The fifth of a run with that number, 0 to 4.
pub fn fifth(samples: &[Sample], number: usize) -> &[Sample] {
    let bound = |number: usize| samples.len() * number / 5;
    &samples[bound(number)..bound(number + 1)]
}

/// The median of the daemon's own memory; `None` without samples.
pub fn median_own_bytes(samples: &[Sample]) -> Option<u64> {
    let mut bytes: Vec<u64> = samples.iter().map(|sample| sample.own_bytes).collect();
    bytes.sort_unstable();
    bytes.get(bytes.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_takes_something() {
        let sample = look(std::process::id(), 1.5).unwrap();
        assert!(sample.resident_bytes > 1 << 20 && sample.own_bytes > 100 << 10, "{sample:?}");
        assert!(sample.own_bytes <= sample.resident_bytes, "{sample:?}");
        assert!(sample.descriptor_count >= 3 && sample.thread_count >= 1, "{sample:?}");
        assert!(look(u32::MAX, 0.0).is_err());
    }

    #[test]
    fn fifths_and_medians() {
        let sample = |own_bytes| Sample { own_bytes, ..Sample::default() };
        let samples: Vec<Sample> = (0..10).map(sample).collect();
        assert_eq!(fifth(&samples, 1), [sample(2), sample(3)]);
        assert_eq!(fifth(&samples, 4), [sample(8), sample(9)]);
        assert_eq!((median_own_bytes(fifth(&samples, 4)), median_own_bytes(&[])), (Some(9), None));
        assert!(fifth(&samples[..2], 0).is_empty());
    }
}
