//! `pumapool lend`: the lender.

use crate::cli::written;
use crate::cli::{addresses, size};
use crate::config::{self, Changeable};
use crate::daemon::{self, Daemon, confine, control, pool, reported, security};
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::num::{NonZeroU32, NonZeroU64};
use std::process::ExitCode;
use std::time::Duration;
use wire::address::Address;
use wire::secure::Security;

/// Options of `lend`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct Options {
    #[command(flatten)]
    #[serde(flatten)]
    lending: Lending,

    #[command(flatten)]
    #[serde(flatten)]
    pool: pool::Options,

    #[command(flatten)]
    #[serde(flatten)]
    security: security::Options,

    #[command(flatten)]
    #[serde(flatten)]
    daemon: daemon::Options,
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
    capacity: lender::Capacity,

    /// Always keep so much memory free, in addition to the kernel's own reserve.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse)]
    #[serde(with = "written::size")]
    reserve: u64,

    /// Keep the pages of a borrower that lost its connection for so long, in seconds. 0: not at
    /// all.
    #[arg(long, value_name = "SECONDS", default_value_t = lender::GRACE_DEFAULT.as_secs(),
        value_parser = clap::value_parser!(u64).range(0..=wire::GRACE_SECONDS_MAX))]
    grace: u64,

    /// Use at most so much processor time to serve borrowers, in percent of one processor (200: two
    /// processors). Default: no limit.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    cpu: Option<u32>,

    /// Let all borrowers together send and get at most so many bytes a second; at least 4MiB.
    /// Default: no limit.
    #[arg(long, value_name = "SIZE", value_parser = rate)]
    #[serde(with = "written::maybe_size")]
    rate: Option<NonZeroU64>,
}

/// The options of [`Lending`] that can change while the lender runs. The capacity cannot, because
/// the store is laid out once.
pub const CHANGEABLE: [&str; 3] = ["reserve", "cpu", "rate"];

impl Lending {
    /// Applies the options that can change.
    pub fn change(&self, lender: &lender::Handle) {
        lender.set_reserve_bytes(self.reserve);
        if lender.limits() != self.limits() {
            lender.set_limits(self.limits());
        }
    }

    fn limits(&self) -> lender::Limits {
        lender::Limits { cpu_percent: self.cpu.and_then(NonZeroU32::new), rate_bytes: self.rate }
    }

    /// The configuration for [`lender::Server::bind`].
    pub fn config(&self, security: Security) -> Result<lender::Config> {
        Ok(lender::Config {
            // The daemon leaves its folder; the address must not.
            listen: self.listen.clone().absolute()?,
            capacity: self.capacity,
            reserve_bytes: self.reserve,
            grace: Duration::from_secs(self.grace),
            limits: self.limits(),
            security,
        })
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

/// Runs the command.
pub fn run(options: Options) -> Result<ExitCode> {
    let networks: Vec<_> = options.pool.network().into_iter().chain([options.lending.listen.clone()]).collect();
    let security = options.security.security(&networks)?;
    let security_name = security::name(&security);
    let daemon = match Daemon::prepare("lend", &options.daemon)? {
        Ok(daemon) => daemon,
        Err(code) => return Ok(code),
    };
    let server = lender::Server::bind(options.lending.config(security.clone())?)?;
    // Before the first thread is started: threads inherit it.
    let confined = confine::lender(server.local_address(), daemon.metrics(), &control::folder(), config::path());
    let address = server.local_address().to_string();
    let handle = server.handle();
    let gossip = pool::lend(&options.pool, security, &handle, server.local_address())?;
    let status = {
        let (handle, gossip) = (handle.clone(), gossip.clone());
        let description = report::Lend {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            listen: address.clone(),
            confined,
            security: Some(security_name.to_owned()),
            metrics: daemon.metrics().map(Address::to_string),
            ..report::Lend::default()
        };
        move || {
            report::Daemon::Lend(Box::new(report::Lend {
                lender: reported::lender(handle.status()),
                pool: reported::pool(gossip.as_ref()),
                ..description.clone()
            }))
        }
    };
    let changeable = {
        let handle = handle.clone();
        Changeable::new(&CHANGEABLE, move |lending: Lending| lending.change(&handle))
    };
    let stop = move || {
        // First, no new borrower should connect.
        gossip.iter().for_each(|gossip| gossip.stop());
        handle.shutdown();
    };
    let serving = daemon.can_change(changeable).serve(&format!("lending on {address}"), status, stop)?;
    tracing::info!("lending on {address}");
    server.run()?;
    serving.ended_well();
    Ok(ExitCode::SUCCESS)
}
