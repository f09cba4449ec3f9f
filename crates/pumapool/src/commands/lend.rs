//! `pumapool lend`: the lender.

use crate::cli::lend::{CHANGEABLE, Lending, Options};
use crate::config::{self, Changeable};
use crate::daemon::{Daemon, confine, control, pool, security};
use ::discovery::Gossip;
use anyhow::Result;
use report::Confined;
use std::process::ExitCode;
use std::time::Duration;
use wire::address::Address;
use wire::secure::Security;

/// Applies the options that can change.
pub fn change(lending: &Lending, lender: &lender::Handle) {
    lender.set_reserve_bytes(lending.reserve);
    if lender.limits() != lending.limits() {
        lender.set_limits(lending.limits());
    }
}

/// The configuration for [`lender::Server::bind`].
pub fn config(lending: &Lending, security: Security) -> Result<lender::Config> {
    Ok(lender::Config {
        // The daemon leaves its folder; the address must not.
        listen: lending.listen.clone().absolute()?,
        capacity: lending.capacity,
        reserve_bytes: lending.reserve,
        grace: Duration::from_secs(lending.grace),
        limits: lending.limits(),
        security,
    })
}

/// The parts of a lender's status that do not change, for `lend` and `join`.
pub fn describe(daemon: &Daemon, listen: &Address, confined: Confined, security: &Security) -> report::Lend {
    report::Lend {
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        listen: listen.to_string(),
        confined,
        security: Some(security::name(security).to_owned()),
        metrics: daemon.metrics().map(Address::to_string),
        ..report::Lend::default()
    }
}

/// The present status of a lender.
pub fn status(description: &report::Lend, handle: &lender::Handle, gossip: Option<&Gossip>) -> report::Lend {
    report::Lend { lender: handle.status(), pool: gossip.map(Gossip::status), ..description.clone() }
}

/// Runs the command.
pub fn run(options: Options) -> Result<ExitCode> {
    let networks: Vec<_> = options.pool.network().into_iter().chain([options.lending.listen.clone()]).collect();
    let security = security::of(&options.security, &networks)?;
    let daemon = match Daemon::prepare("lend", &options.daemon)? {
        Ok(daemon) => daemon,
        Err(code) => return Ok(code),
    };
    let server = lender::Server::bind(config(&options.lending, security.clone())?)?;
    // Before the first thread is started: threads inherit it.
    let confined = confine::lender(server.local_address(), daemon.metrics(), &control::folder(), config::path());
    let description = describe(&daemon, server.local_address(), confined, &security);
    let address = server.local_address().to_string();
    let handle = server.handle();
    let gossip = pool::lend(&options.pool, security, &handle, server.local_address())?;
    let status = {
        let (handle, gossip) = (handle.clone(), gossip.clone());
        move || report::Daemon::Lend(Box::new(status(&description, &handle, gossip.as_deref())))
    };
    let changeable = {
        let handle = handle.clone();
        Changeable::new(&CHANGEABLE, move |lending: Lending| change(&lending, &handle))
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
