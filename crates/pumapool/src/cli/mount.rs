//! The options of `pumapool mount`.

use crate::cli::{addresses, cgroups::CgroupName, daemon, pool, security, size, written};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use wire::address::Address;

/// Options of `mount`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct Options {
    /// The directory whose files are read through the pool.
    #[serde(with = "written::path")]
    pub source: PathBuf,

    /// Where to mount it. Default: in place, over the directory itself.
    #[serde(with = "written::maybe_path")]
    pub mountpoint: Option<PathBuf>,

    /// A lender: HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:CID:PORT. May be given several times;
    /// each address of a name is a lender. Without a lender, or while it cannot be reached, files
    /// are read from SOURCE.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    #[serde(with = "written::texts")]
    pub lender: Vec<Address>,

    #[command(flatten)]
    #[serde(flatten)]
    pub pool: pool::Options,

    #[command(flatten)]
    #[serde(flatten)]
    pub policies: Policies,

    /// Forbid writes, set-uid programs, devices or programs at the mountpoint. May be given several
    /// times.
    #[arg(long, value_enum, value_name = "WHAT")]
    pub forbid: Vec<Forbidden>,

    /// Show file systems that are mounted below SOURCE. Without this option their mount points
    /// appear as empty, closed directories. The restrictions of each file system (ro, nosuid,
    /// nodev, noexec) stay in force. Interfaces of the kernel (proc, sysfs, cgroup, ...), FUSE
    /// mounts of other users, and mounts of pumapool are never shown.
    #[arg(long)]
    pub cross_mounts: bool,

    /// Whether pages are put at lenders from the beginning. `pumapool join` begins with `off`, and
    /// turns it on and off.
    #[arg(long, value_enum, default_value_t = Switch::On, hide = true)]
    pub borrow: Switch,

    /// A lender of the pool that is not used: the one of this node.
    #[arg(long, value_name = "ADDR", hide = true)]
    #[serde(with = "written::maybe_text")]
    pub except: Option<Address>,

    #[command(flatten)]
    #[serde(flatten)]
    pub security: security::Options,

    #[command(flatten)]
    #[serde(flatten)]
    pub daemon: daemon::Options,
}

impl Options {
    /// Options for a mount of a node that has joined a pool. The mount does not use the lender of
    /// its own node, and does not borrow until the node's role allows it.
    pub fn of_node(
        source: PathBuf,
        mountpoint: Option<PathBuf>,
        pool: pool::Options,
        policies: Policies,
        security: security::Options,
        own: Address,
    ) -> Options {
        Options {
            source,
            mountpoint,
            lender: Vec::new(),
            pool,
            policies,
            forbid: Vec::new(),
            cross_mounts: false,
            borrow: Switch::Off,
            except: Some(own),
            security,
            daemon: daemon::Options::default(),
        }
    }

    /// Options for a mount of images. Their pages come from evictions of guests; there is no
    /// lender.
    pub fn of_images(
        source: PathBuf,
        mountpoint: Option<PathBuf>,
        policies: Policies,
        daemon: daemon::Options,
    ) -> Options {
        Options {
            source,
            mountpoint,
            lender: Vec::new(),
            pool: pool::Options::default(),
            policies,
            forbid: Vec::new(),
            cross_mounts: false,
            borrow: Switch::On,
            except: None,
            security: security::Options::default(),
            daemon,
        }
    }
}

/// How it is served; the same for `mount` and `join`.
#[derive(clap::Args, Clone, Serialize, Deserialize)]
#[group(id = "policies", multiple = true)]
pub struct Policies {
    /// Whether a lender keeps a page that it returns.
    #[arg(long, value_enum, default_value_t = Policies::default().strategy)]
    pub strategy: StrategyName,

    /// Write to SOURCE before a write returns, or let the page cache gather writes first. `back`
    /// makes small writes faster; do not change SOURCE beside the mount then.
    #[arg(long, value_enum, default_value_t = Policies::default().write)]
    pub write: WriteName,

    /// When to send pages to the lender: when the kernel evicts them (needs BPF), or when they are
    /// read from the disk.
    #[arg(long, value_enum, default_value_t = Policies::default().fill)]
    pub fill: PopulateName,

    /// Skip long sequential reads, unless they repeat, fit at the lenders and are faster there.
    #[arg(long, value_enum, default_value_t = Policies::default().filter)]
    pub filter: Switch,
    /// Stop using a lender while it is slower than the disk or than the limits.
    #[arg(long, value_enum, default_value_t = Policies::default().gate)]
    pub gate: Switch,
    /// The gate's limits for the average latency of 15 seconds, in microseconds: it closes above
    /// the first and opens below the second.
    #[arg(long, value_name = "UPPER,LOWER", default_value_t = Policies::default().gate_short)]
    #[serde(with = "written::text")]
    pub gate_short: Thresholds,
    /// The gate's limits for the average latency of a minute, in microseconds.
    #[arg(long, value_name = "UPPER,LOWER", default_value_t = Policies::default().gate_long)]
    #[serde(with = "written::text")]
    pub gate_long: Thresholds,
    /// If a lender is slow to answer, also read from the disk and use the first answer.
    #[arg(long, value_enum, default_value_t = Policies::default().hedge)]
    pub hedge: Switch,
    /// Let the kernel read files in SOURCE by itself, at full speed, if the pool is of no use to
    /// them: files opened for reading while no lender is used, and files that are only read in long
    /// streams. It lasts until the file is closed. Needs Linux 6.9, root and `--write through`.
    #[arg(long, value_enum, default_value_t = Policies::default().passthrough)]
    pub passthrough: Switch,
    /// Allow idmapped mounts of MOUNTPOINT (Linux 6.12), which pods with `hostUsers: false` need.
    /// The kernel then tells the user of a request only where it creates a file: `trusted.`
    /// attributes are not listed, and all other requests count as those of one user, who is not
    /// root.
    #[arg(long)]
    pub idmapped: bool,
    /// Stop using a lender for good after it has returned so many pages that do not verify.
    /// Mounting again forgives it.
    #[arg(long, value_name = "COUNT", default_value_t = Policies::default().bad_pages,
        value_parser = clap::value_parser!(u64).range(1..))]
    pub bad_pages: u64,
    /// Memory for the catalog of lent pages: 2 MiB for each GiB lent. When the catalog is full,
    /// Puma forgets the least recently used files.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse_catalog)]
    #[serde(with = "written::size")]
    pub catalog: u64,
    /// Threads that always serve the mount. While all of them wait for SOURCE, the daemon starts
    /// more, up to 128.
    #[arg(long, default_value_t = Policies::default().threads, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,

    /// How long the kernel may keep attributes without asking, in seconds. Changes made beside the
    /// mount are seen that much later. If the kernel reports such changes (root, a local backing
    /// file system), they are seen at once, and unchanged attributes are kept for a minute from the
    /// second look on. 0: the kernel asks each time.
    #[arg(long, value_name = "SECONDS", default_value_t = Policies::default().attribute_timeout, value_parser = seconds)]
    pub attribute_timeout: f64,

    /// Lend only for this control group and all below it: PATH[,quota=SIZE][,share=NUMBER]. The
    /// quota limits how much of the group is lent. While all lenders are full, groups share the
    /// room in proportion to their shares. `others` instead of PATH names all other groups
    /// together, `each` names each of them on its own; without either, nothing is lent for them.
    /// May be given several times. `pumapool status --by-cgroup` shows the use of each group.
    #[arg(long, value_name = "GROUP")]
    #[serde(with = "written::texts")]
    pub cgroup: Vec<CgroupName>,

    /// Memory for evicted pages that wait to be sent (a power of two). `auto`: 32 MiB, or a
    /// sixteenth of the memory of the machine (or of the mount's cgroup), if that is less.
    #[arg(long, value_name = "SIZE|auto", default_value_t = Policies::default().ring)]
    #[serde(with = "written::text")]
    pub ring: Ring,
}

impl Default for Policies {
    fn default() -> Policies {
        let gate = borrower::gate::Config::default();
        Policies {
            strategy: StrategyName::Exclusive,
            write: WriteName::Through,
            fill: PopulateName::Auto,
            filter: Switch::On,
            gate: Switch::On,
            gate_short: Thresholds(gate.short),
            gate_long: Thresholds(gate.long),
            hedge: Switch::On,
            passthrough: Switch::On,
            idmapped: false,
            bad_pages: borrower::BAD_PAGES_MAX,
            catalog: 256 << 20,
            threads: 8,
            attribute_timeout: 1.0,
            cgroup: Vec::new(),
            ring: Ring::Auto,
        }
    }
}

/// Of [`Policies`], what can change while it runs.
pub const CHANGEABLE: [&str; 3] = ["filter", "gate-short", "gate-long"];

impl Policies {
    pub fn thresholds(&self) -> borrower::gate::Config {
        borrower::gate::Config { short: self.gate_short.0, long: self.gate_long.0 }
    }
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StrategyName {
    /// The lender gives it away: local and remote memory add up.
    Exclusive,
    /// The lender keeps it: it need not be sent again.
    NonInclusive,
}

#[derive(Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WriteName {
    Through,
    Back,
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PopulateName {
    /// When they are evicted, if BPF is available; otherwise when they are read.
    Auto,
    /// When the kernel evicts them; fails without BPF.
    Evict,
    /// When they are read from the disk.
    Read,
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Switch {
    On,
    Off,
}

/// By the names of mount(8).
#[derive(Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Forbidden {
    Ro,
    Nosuid,
    Nodev,
    Noexec,
}

impl Forbidden {
    pub fn flag(self) -> ::mount::MountFlags {
        match self {
            Forbidden::Ro => ::mount::MountFlags::RDONLY,
            Forbidden::Nosuid => ::mount::MountFlags::NOSUID,
            Forbidden::Nodev => ::mount::MountFlags::NODEV,
            Forbidden::Noexec => ::mount::MountFlags::NOEXEC,
        }
    }
}

/// `UPPER,LOWER` in microseconds.
#[derive(Clone, Copy)]
pub struct Thresholds(borrower::gate::Thresholds);

impl std::fmt::Display for Thresholds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{},{}", self.0.upper_us, self.0.lower_us)
    }
}

impl std::str::FromStr for Thresholds {
    type Err = String;

    fn from_str(text: &str) -> Result<Thresholds, String> {
        let parsed = text.split_once(',').and_then(|(upper, lower)| {
            Some(borrower::gate::Thresholds { upper_us: upper.parse().ok()?, lower_us: lower.parse().ok()? })
        });
        parsed
            .filter(|thresholds| thresholds.lower_us <= thresholds.upper_us)
            .map(Thresholds)
            .ok_or_else(|| "write two numbers of microseconds, the upper one first, such as 40000,1500".to_owned())
    }
}

/// How large the ring of evicted pages is.
#[derive(Clone, Copy)]
pub enum Ring {
    Auto,
    Bytes(usize),
}

impl std::fmt::Display for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ring::Auto => write!(f, "auto"),
            Ring::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl std::str::FromStr for Ring {
    type Err = String;

    fn from_str(text: &str) -> Result<Ring, String> {
        if text == "auto" { Ok(Ring::Auto) } else { ring_bytes(text).map(Ring::Bytes) }
    }
}

impl Options {
    /// Whether it stays in the foreground.
    pub fn is_in_foreground(&self) -> bool {
        self.daemon.foreground
    }
}

pub fn ring_bytes(text: &str) -> Result<usize, String> {
    let bytes = usize::try_from(size::parse(text)?).map_err(|error| error.to_string())?;
    let bounds = tap::BpfTap::RING_BYTES_MIN..=tap::BpfTap::RING_BYTES_MAX;
    if bytes.is_power_of_two() && bounds.contains(&bytes) {
        return Ok(bytes);
    }
    Err(format!(
        "write a power of two from {} to {}",
        size::display(*bounds.start() as u64),
        size::display(*bounds.end() as u64)
    ))
}

fn seconds(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    if (0.0..=86_400.0).contains(&value) { Ok(value) } else { Err("write a number from 0 to 86400".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_options_are_the_default() {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            policies: Policies,
        }
        let parsed = <Command as clap::Parser>::parse_from(["mount"]).policies;
        let json = |policies: &Policies| serde_json::to_value(policies).unwrap();
        assert_eq!(json(&parsed), json(&Policies::default()));
    }

    #[test]
    fn a_ring_is_read_as_it_is_written() {
        let reread = |text: &str| text.parse::<Ring>().map(|ring| ring.to_string());
        assert_eq!(reread("auto").unwrap(), "auto");
        assert_eq!(reread("4MiB").unwrap(), (4 << 20).to_string());
        assert!(reread("3MiB").unwrap_err().contains("power of two"));
    }
}
