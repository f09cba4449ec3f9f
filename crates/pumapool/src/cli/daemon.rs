//! The options of every daemon.

use crate::cli::{addresses, written};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use wire::address::Address;

/// Options of every daemon.
#[derive(clap::Args, Clone, Default, Serialize, Deserialize)]
#[group(id = "daemon")]
pub struct Options {
    /// Stay in the foreground and log to standard error.
    #[arg(long)]
    pub foreground: bool,

    /// Log to this file while in the background [default: a file next to the daemon's socket, which
    /// is removed when the daemon ends well].
    #[arg(long, value_name = "FILE")]
    #[serde(with = "written::maybe_path")]
    pub log_file: Option<PathBuf>,

    /// Serve this daemon's metrics for Prometheus at http://ADDR/metrics: HOST:PORT or unix:PATH.
    /// Everybody who can connect can read them, so that 127.0.0.1:PORT is a good choice.
    #[arg(long, value_name = "ADDR", value_parser = addresses::http)]
    #[serde(with = "written::maybe_text")]
    pub metrics: Option<Address>,
}
