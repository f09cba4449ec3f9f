//! `pumapool lend`: the lender.

use crate::{control::Control, daemon, size};
use anyhow::Result;
use serde_json::json;
use std::process::ExitCode;
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
    if let Some(code) = options.daemon.detach()? {
        return Ok(code);
    }
    let server = lender::Server::bind(lender::Config {
        listen: options.listen,
        capacity: options.capacity,
        reserve_bytes: options.reserve,
        policy: lender::PolicyName::Lru,
    })?;
    let address = server.local_address().to_string();
    let handle = server.handle();
    daemon::on_signal({
        let handle = handle.clone();
        move || handle.shutdown()
    })?;
    let _control = Control::serve("lend", {
        let address = address.clone();
        move || {
            json!({
                "kind": "lend",
                "pid": std::process::id(),
                "version": env!("CARGO_PKG_VERSION"),
                "listen": address,
                "lender": handle.status(),
            })
        }
    })?;
    tracing::info!(listen = address, "lending");
    options.daemon.ready("lend", &format!("lending on {address}"))?;
    server.run()?;
    Ok(ExitCode::SUCCESS)
}
