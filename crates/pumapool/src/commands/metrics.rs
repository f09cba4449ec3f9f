//! `pumapool metrics`: prints or serves the metrics of all daemons of this machine for Prometheus.

use crate::cli::metrics::Options;
use crate::commands::status;
use crate::daemon::control;
use crate::metrics::page;
use crate::metrics::server::MetricsListener;
use anyhow::{Context, Result};
use report::{Daemon, Status};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let Some(listen) = &options.listen else {
        let page = options.format.convert(&page::openmetrics(&daemons(control::ask_all()))?);
        let printed = std::io::stdout().write_all(page.as_bytes());
        status::seen_enough(printed)?;
        return Ok(ExitCode::SUCCESS);
    };
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot listen for signals")?;
    let listener = MetricsListener::bind(listen)?;
    listener.serve(Arc::new(|| daemons(control::look_at_all())))?;
    writeln!(std::io::stdout(), "READY metrics of this machine are at {}", listener.address())?;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let _ = signals.forever().next();
    Ok(ExitCode::SUCCESS)
}

fn daemons(statuses: Vec<Status>) -> Vec<Daemon> {
    statuses.into_iter().map(|status| status.daemon).collect()
}
