//! `pumapool host-cache`: a host's page cache stores pages that its guests evict.

use crate::cli::host_cache::{GuestName, GuestOptions, HostOptions, Mode, Options, Side, Switch};
use crate::cli::mount::{Options as MountOptions, Policies};
use crate::commands::guests::Guests;
use crate::commands::mount;
use crate::daemon::{Daemon, security};
use anyhow::{Result, bail};
use hostcache::guest::{self, Statistics, Stop};
use hostcache::{Volume, host};
use std::process::ExitCode;
use std::sync::Arc;
use wire::address::Address;
use wire::key::PoolKey;

/// Runs the command.
pub fn run(options: Options) -> Result<ExitCode> {
    match options.side {
        Side::Guest(options) => run_guest(options),
        Side::Host(options) => run_host(options),
    }
}

fn run_guest(options: GuestOptions) -> Result<ExitCode> {
    // Check the options before anything is started.
    let host = options.to.clone().absolute()?;
    let security = security::of(&options.security, std::slice::from_ref(&host))?;
    let mut volume = Volume::open(&options.fs)?;
    let config = guest::Config {
        host: host.clone(),
        security,
        tells_held: options.tell_reads == Switch::On,
        ring_bytes: options.ring,
    };
    let daemon = match Daemon::prepare("guest", &options.daemon)? {
        Ok(daemon) => daemon,
        Err(code) => return Ok(code),
    };
    let (statistics, stop) = (Arc::new(Statistics::default()), Arc::new(Stop::default()));
    let message = format!("evictions of {} are sent to {host}", options.fs.display());
    let status = {
        let statistics = statistics.clone();
        let description = report::Guest {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            metrics: daemon.metrics().map(Address::to_string),
            fs: options.fs.to_string_lossy().into_owned(),
            host: host.to_string(),
            ..report::Guest::default()
        };
        move || {
            report::Daemon::Guest(Box::new(report::Guest {
                connected: statistics.is_connected(),
                guest: statistics.counts(),
                ..description.clone()
            }))
        }
    };
    let for_stop = stop.clone();
    let serving = daemon.serve(&message, status, move || for_stop.request())?;
    tracing::info!("{message}");
    guest::run(&mut volume, &config, &statistics, &stop);
    serving.ended_well();
    Ok(ExitCode::SUCCESS)
}

fn run_host(options: HostOptions) -> Result<ExitCode> {
    if let Address::Tcp { port: 0, .. } | Address::Vsock { port: 0, .. } = options.listen {
        bail!("{}: choose a port; the kernel would choose another one whenever a daemon takes over", options.listen);
    }
    let needs_key = !matches!(options.listen, Address::Unix(_)) && !options.trust_network;
    for GuestName { image, key } in &options.guest {
        if key.is_none() && needs_key {
            bail!(
                "{} is on a network, and {} has no key: make one with `pumapool key new FILE`, copy it to the guest, and name it by \
                 --guest {}=FILE; or --trust-network",
                options.listen,
                image.display(),
                image.display()
            );
        }
    }
    let mut guests = options.guest.clone();
    for key in guests.iter_mut().filter_map(|guest| guest.key.as_mut()) {
        // The daemon changes its working directory. If that is gone, reading the key reports it.
        *key = std::path::absolute(&*key).unwrap_or_else(|_| key.clone());
    }
    let (mode, keeps, limit) = (options.mode, options.keep, options.limit);
    let config = move || {
        let guest = |GuestName { image, key }: &GuestName| -> Result<host::Guest> {
            let key = key.as_deref().map(PoolKey::read).transpose()?;
            Ok(host::Guest { image: image.clone(), key })
        };
        Ok(host::Config {
            guests: guests.iter().map(guest).collect::<Result<_>>()?,
            placing: match mode {
                Mode::Clean => ::mount::images::Placing::Clean,
                Mode::Write => ::mount::images::Placing::Written,
            },
            keeps,
            pages_max: limit.map(|bytes| bytes / page::PAGE_SIZE as u64),
        })
    };
    let guests = Guests::new(options.listen.absolute()?, config);
    let mut policies = Policies::default();
    (policies.catalog, policies.threads) = (options.catalog, options.threads);
    let mount = MountOptions::of_images(options.images, options.mountpoint, policies, options.daemon);
    mount::run_images(mount, Arc::new(guests))
}
