//! The options of `pumapool numa`.

use crate::cli::{addresses, daemon, security, size, written};
use ::numa::Policy;
use ::numa::placing::{Wanted, Who};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use wire::address::Address;

/// Default of --rate: memory that may be moved in a second.
const RATE: &str = "512MiB";
/// The smallest rate: a GiB takes a quarter of an hour.
const RATE_MIN_BYTES: u64 = 1 << 20;

/// Options of `numa`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct Options {
    #[command(subcommand)]
    pub what: What,
}

#[derive(clap::Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Show the NUMA nodes, and how the memory of virtual machines and processes is distributed.
    #[serde(skip)]
    List(ListOptions),
    /// Place the memory of a process or of a virtual machine.
    #[serde(skip)]
    Apply(ApplyOptions),
    /// Run a command, and place its memory.
    #[serde(skip)]
    Run(RunOptions),
    /// Place the memory of several virtual machines and processes, also memory that they get later.
    Daemon(DaemonOptions),
    /// In a virtual machine: tell the host which policy suits the programs that run here.
    #[serde(skip)]
    Advise(AdviseOptions),
}

/// Options of `numa list`.
#[derive(clap::Args)]
pub struct ListOptions {
    /// List all processes, not only virtual machines and the 20 largest others.
    #[arg(long)]
    pub all: bool,

    /// Print JSON: {"nodes", "processes"}.
    #[arg(long)]
    pub json: bool,

    /// Also draw the result into this file: .svg or .png.
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
}

/// The process whose memory is placed: one of the two options.
#[derive(clap::Args)]
#[group(id = "target", required = true, multiple = false)]
pub struct TargetOptions {
    /// Process id.
    #[arg(long)]
    pub pid: Option<u32>,

    /// Name of the virtual machine (QEMU's -name).
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

/// Options of `numa apply`.
#[derive(clap::Args)]
pub struct ApplyOptions {
    #[command(flatten)]
    pub target: TargetOptions,

    /// How to place the memory.
    #[arg(long, value_enum)]
    pub policy: PolicyName,

    /// Move at most so much memory a second; at least 1MiB.
    #[arg(long, value_name = "SIZE", default_value = RATE, value_parser = rate)]
    pub rate: u64,

    /// With `carrefour`: stop after so many seconds. Default: when the process ends.
    #[arg(long = "for", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub seconds: Option<u64>,

    /// Print the result as JSON.
    #[arg(long)]
    pub json: bool,
}

/// Options of `numa run`.
#[derive(Parser)]
pub struct RunOptions {
    /// How to place the memory.
    #[arg(long, value_enum)]
    pub policy: PolicyName,

    /// With `carrefour`: move at most so much memory a second; at least 1MiB.
    #[arg(long, value_name = "SIZE", default_value = RATE, value_parser = rate)]
    pub rate: u64,

    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// Options of `numa daemon`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct DaemonOptions {
    /// A machine or process, and its policy: vm:NAME=POLICY, command:NAME=POLICY or
    /// pid:NUMBER=POLICY. May be given several times. The daemon waits for those that do not run
    /// yet.
    #[arg(long, value_name = "TARGET", required_unless_present = "guest")]
    #[serde(with = "written_targets")]
    pub target: Vec<Wanted>,

    /// Address at which guests connect (`numa advise`): vsock:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", requires = "guest", value_parser = addresses::place)]
    #[serde(with = "written::maybe_text")]
    pub listen: Option<Address>,

    /// A guest that may choose a policy for its memory, and the file with its key: vm:NAME=KEYFILE.
    /// The guest needs a copy of the key. May be given several times. Until the guest chooses, the
    /// policy of --target applies, or none.
    #[arg(long, value_name = "GUEST", requires = "listen")]
    #[serde(with = "written::texts")]
    pub guest: Vec<GuestName>,

    /// Policies that guests may choose. May be given several times.
    #[arg(long, value_enum, default_values = ["round-4k", "first-touch", "carrefour", "none"])]
    pub allow: Vec<PolicyName>,

    /// How many targets may use `carrefour` at once.
    #[arg(long, value_name = "NUMBER", default_value_t = 8)]
    pub carrefour_max: usize,

    /// Move at most so much memory a second, for all targets together; at least 1MiB.
    #[arg(long, value_name = "SIZE", default_value = RATE, value_parser = rate)]
    #[serde(with = "written::size")]
    pub rate: u64,

    #[command(flatten)]
    #[serde(flatten)]
    pub daemon: daemon::Options,
}

/// Options of `numa advise`.
#[derive(clap::Args)]
pub struct AdviseOptions {
    /// Address at which the host listens: vsock:2:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    pub to: Address,

    /// How to place this machine's memory.
    #[arg(long, value_enum)]
    pub policy: PolicyName,

    #[command(flatten)]
    pub security: security::Options,
}

#[derive(Clone)]
pub struct GuestName {
    pub who: Who,
    pub key: PathBuf,
}

impl std::fmt::Display for GuestName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.who, self.key.display())
    }
}

/// Writes and reads targets in the form of `--target`.
mod written_targets {
    use super::Wanted;
    use crate::cli::written;
    use serde::{Deserializer, Serializer};

    pub fn serialize<S: Serializer>(targets: &[Wanted], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(targets.iter().map(|target| format!("{}={}", target.who, target.policy)))
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Vec<Wanted>, D::Error> {
        written::texts::deserialize(deserializer)
    }
}

impl FromStr for GuestName {
    type Err = String;

    fn from_str(text: &str) -> Result<GuestName, String> {
        let (name, key) = text
            .strip_prefix("vm:")
            .and_then(|text| text.rsplit_once('='))
            .filter(|(name, key)| !name.is_empty() && !key.is_empty())
            .ok_or_else(|| format!("{text:?} is no guest: write vm:NAME=KEYFILE"))?;
        Ok(GuestName { who: Who::Machine(name.to_owned()), key: key.into() })
    }
}

#[derive(Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// Page by page, on each node in turn.
    #[value(name = "round-4k")]
    #[serde(rename = "round-4k")]
    Round4k,
    /// GiB by GiB, on each node in turn; for comparison.
    #[value(name = "round-1g")]
    #[serde(rename = "round-1g")]
    Round1g,
    /// On the node of the processor that touches it first.
    #[value(name = "first-touch")]
    FirstTouch,
    /// Near its users, or spread over the nodes if one node is overloaded.
    Carrefour,
    /// As the kernel places it.
    None,
}

impl PolicyName {
    /// The policy, for the crate.
    pub fn policy(self) -> Policy {
        match self {
            PolicyName::Round4k => Policy::Round4k,
            PolicyName::Round1g => Policy::Round1g,
            PolicyName::FirstTouch => Policy::FirstTouch,
            PolicyName::Carrefour => Policy::Carrefour,
            PolicyName::None => Policy::None,
        }
    }
}

fn rate(text: &str) -> Result<u64, String> {
    size::parse_rate(text, RATE_MIN_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_times_have_bounds() {
        assert_eq!(rate("1MiB"), Ok(RATE_MIN_BYTES));
        assert_eq!(rate("1048575").unwrap_err(), "write at least 1.0 MiB a second");
        let apply = |option, value| {
            let given = ["pumapool", "numa", "apply", "--pid", "1", "--policy", "carrefour", option, value];
            crate::cli::Cli::try_parse_from(given).is_ok()
        };
        for (option, value, is_good) in [
            ("--for", "0", false),
            ("--for", "86400", true),
            ("--for", "18446744073709551615", false),
            ("--rate", "0", false),
        ] {
            assert_eq!(apply(option, value), is_good, "{option} {value}");
        }
    }
}
