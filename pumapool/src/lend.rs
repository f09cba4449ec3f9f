//! `pumapool lend`: the lender.

use crate::daemon::{self, Daemon};
use crate::size;
use anyhow::Result;
use serde_json::json;
use std::process::ExitCode;
use std::time::Duration;
use wire::address::Address;

/// Options of `lend`.
#[derive(clap::Args)]
pub struct Options {
    /// Where to listen: HOST:PORT, [IPV6]:PORT or unix:PATH. Port 0 lets the kernel choose one.
    #[arg(long, value_name = "ADDR")]
    listen: Address,

    /// How much to lend at the most; `auto` lends all that the machine (or its cgroup) could spare.
    #[arg(long, value_name = "SIZE|auto", default_value = "auto", value_parser = capacity)]
    capacity: lender::Capacity,

    /// How much memory to leave free.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse)]
    reserve: u64,

    /// How long to keep the pages of a borrower that lost its connection, in seconds; 0: not at all.
    #[arg(long, value_name = "SECONDS", default_value_t = lender::GRACE_DEFAULT.as_secs(),
        value_parser = clap::value_parser!(u64).range(0..=wire::GRACE_SECONDS_MAX))]
    grace: u64,

    #[command(flatten)]
    daemon: daemon::Options,
}

fn capacity(text: &str) -> Result<lender::Capacity, String> {
    if text == "auto" {
        return Ok(lender::Capacity::Auto);
    }
    size::parse(text).map(lender::Capacity::Bytes)
}

/// Runs the command.
pub fn run(options: Options) -> Result<ExitCode> {
    let daemon = match Daemon::prepare("lend", &options.daemon)? {
        Ok(daemon) => daemon,
        Err(code) => return Ok(code),
    };
    let server = lender::Server::bind(lender::Config {
        // The daemon leaves its folder; the address must not.
        listen: options.listen.absolute()?,
        capacity: options.capacity,
        reserve_bytes: options.reserve,
        policy: lender::PolicyName::Lru,
        grace: Duration::from_secs(options.grace),
    })?;
    let address = server.local_address().to_string();
    let handle = server.handle();
    let status = {
        let (address, handle) = (address.clone(), handle.clone());
        move || {
            json!({
                "kind": "lend",
                "pid": std::process::id(),
                "version": env!("CARGO_PKG_VERSION"),
                "listen": address,
                "lender": handle.status(),
            })
        }
    };
    let serving = daemon.serve(&format!("lending on {address}"), status, move || handle.shutdown())?;
    tracing::info!("lending on {address}");
    server.run()?;
    serving.ended_well();
    Ok(ExitCode::SUCCESS)
}
