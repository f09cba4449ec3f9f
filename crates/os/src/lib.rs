//! Reads the operating system: one parser for each format of the kernel's text files.
//!
//! - [`mountinfo`]: the table of mounts (`/proc/self/mountinfo`).
//! - [`cgroup`]: control groups of both versions: the groups of a process (`/proc/PID/cgroup`),
//!   their directories, memory limits and memory use.
//! - [`fields`]: files of one `name value` a line: `/proc/meminfo`, `/proc/vmstat`, `memory.stat`,
//!   `/proc/PID/status`, `/proc/PID/smaps_rollup`, `/proc/PID/io`.
//! - [`pressure`]: pressure stall information (`/proc/pressure/memory`, `memory.pressure`).
//! - [`zoneinfo`]: the watermarks of the memory zones (`/proc/zoneinfo`).
//! - [`process`]: the state, children and groups of a process.
//! - [`kernel`]: the release and version of the running kernel.
//!
//! Not in this crate, because one crate alone needs it:
//! - decisions: `lender` derives its headroom from these figures;
//! - writing: `testbed` makes control groups and sets their limits;
//! - NUMA: `numa` reads the topology below `/sys`, and a process's memory map through a directory
//!   of `/proc` that it holds open;
//! - page frames: `lender` and `tap` read `/proc/self/pagemap`.
//!
//! Parsers take text, so that the caller chooses how a file is read: by path, or through a
//! descriptor that was opened before the process gave up its rights. Text may be odd: a parser
//! skips lines that it does not understand, and never panics.
//!
//! **Why not the crate `procfs`** (0.18, the newest): `MountInfo` keeps the octal escapes of paths
//! (its issue 262), and one line that is not UTF-8 fails the whole table. `MemoryPressure` and
//! `Meminfo` panic on some malformed lines. `MemoryPressure` also needs the averages and the line
//! `full`. `Meminfo` needs lines that the lender does not, and allocates a string for each of some
//! 55 lines, although the lender reads that file ten times a second.

pub mod cgroup;
pub mod fields;
pub mod kernel;
pub mod mountinfo;
pub mod pressure;
pub mod process;
pub mod zoneinfo;
