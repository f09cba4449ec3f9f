//! The options of `pumapool lend`, and those that `join` has of it.

use crate::cli::{addresses, daemon, pool, security, size, written};
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU32, NonZeroU64};
use wire::address::Address;

/// Options of `lend`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    pub lending: Lending,

    #[command(flatten)]
    #[serde(flatten)]
    pub pool: pool::Options,

    #[command(flatten)]
    #[serde(flatten)]
    pub security: security::Options,

    #[command(flatten)]
    #[serde(flatten)]
    pub daemon: daemon::Options,
}

/// Options of `lend` and `join`: the lent memory, and where to listen.
#[derive(clap::Args, Serialize, Deserialize)]
#[group(id = "lending", multiple = true)]
pub struct Lending {
    /// Where to listen: HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:PORT. Port 0 lets the kernel
    /// choose one.
    #[arg(long, value_name = "ADDR", value_parser = addresses::place)]
    #[serde(with = "written::text")]
    pub listen: Address,

    /// Lend at most so much memory. `auto`: all that the machine (or its cgroup) can spare.
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = capacity)]
    #[serde(with = "written_capacity")]
    pub capacity: lender::Capacity,

    /// Always keep so much memory free, in addition to the kernel's own reserve.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse)]
    #[serde(with = "written::size")]
    pub reserve: u64,

    /// Keep the pages of a borrower that lost its connection for so long, in seconds. 0: not at
    /// all.
    #[arg(long, value_name = "SECONDS", default_value_t = lender::GRACE_DEFAULT.as_secs(),
        value_parser = clap::value_parser!(u64).range(0..=wire::GRACE_SECONDS_MAX))]
    pub grace: u64,

    /// Use at most so much processor time to serve borrowers, in percent of one processor (200: two
    /// processors). Default: no limit.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub cpu: Option<u32>,

    /// Let all borrowers together send and get at most so many bytes a second; at least 4MiB.
    /// Default: no limit.
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    #[serde(with = "written::maybe_size")]
    pub rate: Option<NonZeroU64>,
}

/// The options of [`Lending`] that can change while the lender runs. The capacity cannot, because
/// the store is laid out once.
pub const CHANGEABLE: [&str; 3] = ["reserve", "cpu", "rate"];

impl Lending {
    /// The limits, for the lender.
    pub fn limits(&self) -> lender::Limits {
        lender::Limits { cpu_percent: self.cpu.and_then(NonZeroU32::new), rate_bytes: self.rate }
    }
}

fn capacity(text: &str) -> Result<lender::Capacity, String> {
    if text == "auto" {
        return Ok(lender::Capacity::Auto);
    }
    size::parse(text).map(lender::Capacity::Bytes)
}

/// A capacity as `--capacity` takes it.
mod written_capacity {
    use crate::cli::size;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(capacity: &lender::Capacity, serializer: S) -> Result<S::Ok, S::Error> {
        match capacity {
            lender::Capacity::Auto => serializer.serialize_str("auto"),
            lender::Capacity::Bytes(bytes) => serializer.serialize_str(&size::exact(*bytes)),
        }
    }

    pub fn deserialize<'a, D: Deserializer<'a>>(deserializer: D) -> Result<lender::Capacity, D::Error> {
        super::capacity(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

fn rate(text: &str) -> Result<NonZeroU64, String> {
    let bytes = size::parse_rate(text, lender::RATE_MIN_BYTES)?;
    NonZeroU64::try_from(bytes).map_err(|error| error.to_string())
}
