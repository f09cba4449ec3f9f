//! Samples of accesses to memory: they show which processor uses which page (perf_event_open(2)).
//!
//! If processors sample data addresses themselves (AMD's IBS, Intel's PEBS), these samples are
//! used. Elsewhere, as in virtual machines, the samples are page faults. With NUMA balancing on,
//! the kernel unmaps pages for a moment, bit by bit, to see which processors use them (NUMA hinting
//! faults, kernel/sched/fair.c, task_numa_work). With it off, a process's pages are protected
//! against writing now and then, as for following a process's changes (/proc/PID/clear_refs,
//! fs/proc/task_mmu.c), so that the first write to each faults; pages that are only read are not
//! seen then. First uses of memory are among the faults, and count as uses.

use crate::topology::Node;
use crate::{NodeId, PAGE_BYTES};
use perf_event::data::Record;
use perf_event::events::{Dynamic, Software};
use perf_event::{Builder, SampleFlag, SampleSkid, Sampler};
use std::fmt;
use std::io;
use std::os::unix::fs::FileExt;

/// The kernel's switch for hinting faults.
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
/// Operations between two samples of IBS; for PEBS loads between two samples, of loads with at
/// least so many cycles.
const IBS_PERIOD: u64 = 250_000;
const PEBS_PERIOD: u64 = 2_000;
const PEBS_CYCLES_MIN: u64 = 30;
/// For each processor: some 12,000 samples. If they are not taken in time, further ones are lost.
const RING_BYTES: usize = 512 << 10;
/// A bit of an entry of /proc/PID/pagemap: the page was written since pages were protected last.
const SOFT_DIRTY: u64 = 1 << 55;
/// Addresses beyond it are the kernel's.
const USER_END: u64 = 1 << 56;

/// The source of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// AMD's processors.
    Ibs,
    /// Intel's.
    Pebs,
    /// The kernel, which makes pages fault to see their users.
    Hints,
    /// Writes to pages that this process has protected.
    Writes,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Ibs => "hardware samples (IBS)",
            Source::Pebs => "hardware samples (PEBS)",
            Source::Hints => "NUMA hinting faults",
            Source::Writes => "first writes to protected pages",
        })
    }
}

/// An access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The process.
    pub pid: u32,
    /// Number of the page.
    pub page: u64,
    /// The node of the processor.
    pub node: NodeId,
}

/// Samples of the whole machine, until it is dropped.
pub struct Sampling {
    source: Source,
    samplers: Vec<(NodeId, Sampler)>,
}

impl Sampling {
    /// Begins, with the best available source.
    ///
    /// # Errors
    /// Fails, with one line that contains the next step.
    pub fn begin(nodes: &[Node]) -> Result<Sampling, String> {
        let hardware = [Source::Ibs, Source::Pebs].into_iter().find_map(|source| open(source, nodes).ok());
        if let Some(sampling) = hardware {
            return Ok(sampling);
        }
        let hints = std::fs::read_to_string(BALANCING).is_ok_and(|balancing| balancing.trim() == "1");
        if !hints && !tells_writes() {
            return Err(format!(
                "neither the processors nor this kernel report accesses to pages: let the kernel sample them, sysctl kernel.numa_balancing=1 ({BALANCING})"
            ));
        }
        open(if hints { Source::Hints } else { Source::Writes }, nodes).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => format!("accesses may not be sampled: {error}; run as root"),
            _ => format!("accesses cannot be sampled (perf_event_open): {error}; choose another policy"),
        })
    }

    /// The source.
    pub fn source(&self) -> Source {
        self.source
    }

    /// Passes new samples to `take`. Returns how many were lost.
    pub fn take(&mut self, take: &mut dyn FnMut(Access)) -> u64 {
        let mut lost = 0;
        for (node, sampler) in &mut self.samplers {
            while let Some(record) = sampler.next_record() {
                match record.parse_record() {
                    Ok(Record::Sample(sample)) => {
                        if let (Some(pid), Some(address)) = (sample.pid(), sample.addr())
                            && (PAGE_BYTES..USER_END).contains(&address)
                        {
                            take(Access { pid, page: address / PAGE_BYTES, node: *node });
                        }
                    }
                    Ok(Record::Lost(some)) => lost += some.lost,
                    _ => {}
                }
            }
        }
        lost
    }
}

/// Whether the kernel marks written pages (CONFIG_MEM_SOFT_DIRTY): a page that was just written is
/// marked then.
fn tells_writes() -> bool {
    let page = vec![1u8; 2 * PAGE_BYTES as usize];
    std::hint::black_box(&page);
    let number = page.as_ptr() as u64 / PAGE_BYTES + 1;
    let mut entry = [0; 8];
    let read = std::fs::File::open("/proc/self/pagemap").and_then(|file| file.read_at(&mut entry, number * 8));
    read.is_ok_and(|read| read == 8) && u64::from_le_bytes(entry) & SOFT_DIRTY != 0
}

fn open(source: Source, nodes: &[Node]) -> io::Result<Sampling> {
    let other = io::Error::other::<String>;
    let mut builder = match source {
        Source::Ibs => {
            let event =
                Dynamic::builder("ibs_op")?.field("cnt_ctl", 1).map_err(|error| other(error.to_string()))?.build();
            let mut builder = Builder::new(event.map_err(|error| other(error.to_string()))?);
            // It cannot distinguish user from kernel.
            builder.include_kernel().include_hv().sample_period(IBS_PERIOD);
            builder
        }
        Source::Pebs => {
            let mut event = Dynamic::builder("cpu")?;
            event.event("mem-loads")?.field("ldlat", PEBS_CYCLES_MIN).map_err(|error| other(error.to_string()))?;
            let mut builder = Builder::new(event.build().map_err(|error| other(error.to_string()))?);
            builder.sample_period(PEBS_PERIOD).precise_ip(SampleSkid::RequestZero);
            builder
        }
        Source::Hints | Source::Writes => {
            let mut builder = Builder::new(Software::PAGE_FAULTS);
            builder.sample_period(1);
            builder
        }
    };
    builder.any_pid().sample(SampleFlag::TID).sample(SampleFlag::ADDR);
    let mut samplers = Vec::new();
    for node in nodes {
        for cpu in &node.cpus {
            let mut sampler = builder.one_cpu(*cpu as usize).build()?.sampled(RING_BYTES)?;
            sampler.as_counter_mut().enable()?;
            samplers.push((node.id, sampler));
        }
    }
    Ok(Sampling { source, samplers })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_accesses_are_sampled() {
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        let mut sampling = match open(Source::Writes, &nodes) {
            Ok(sampling) => sampling,
            Err(error) => return testbed::skip("own_accesses_are_sampled", error),
        };
        let len = 4 << 20;
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping that nobody has touched, with the given size; it stays until the
        // process ends.
        let memory = unsafe {
            let at = libc::mmap(std::ptr::null_mut(), len, rights, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            std::slice::from_raw_parts(at.cast::<u8>(), len)
        };
        let pages = memory.as_ptr() as u64 / PAGE_BYTES..(memory.as_ptr() as u64 + len as u64) / PAGE_BYTES;
        let mut seen = 0;
        // Other tests fault, too: the ring must not overflow.
        for some in memory.chunks(PAGE_BYTES as usize * 64) {
            some.chunks(PAGE_BYTES as usize).for_each(|page| assert_eq!(std::hint::black_box(page[0]), 0));
            sampling.take(&mut |access| {
                if access.pid == std::process::id() && pages.contains(&access.page) {
                    assert!(nodes.iter().any(|node| node.id == access.node));
                    seen += 1;
                }
            });
        }
        // A fault may map several pages (fault-around), or a huge one.
        assert!(seen > 0, "no access of {} was seen", pages.end - pages.start);
    }

    #[test]
    fn missing_things_are_reported_in_one_line() {
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        if let Err(problem) = Sampling::begin(&nodes) {
            assert!(!problem.contains('\n') && !problem.contains("  ") && problem.len() > 30, "{problem:?}");
        }
    }
}
