//! `pumapool host-cache`: a host's page cache stores pages that its guests evict.

use crate::cli::written;
use crate::cli::{addresses, size};
use crate::commands::guests::Guests;
use crate::commands::mount::{self, Policies};
use crate::daemon::{self, Daemon, reported, security};
use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use hostcache::guest::{self, Statistics, Stop};
use hostcache::{Volume, host};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use wire::address::Address;
use wire::key::PoolKey;

/// Options of `host-cache`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct Options {
    #[command(subcommand)]
    side: Side,
}

#[derive(clap::Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Side {
    /// In a virtual machine: send the pages that this machine evicts to its host.
    Guest(GuestOptions),
    /// On the host: mount the images of virtual machines, and store pages that the guests evict in
    /// the page cache.
    Host(HostOptions),
}

/// Options of `host-cache guest`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct GuestOptions {
    /// Mountpoint of an ext4 or XFS file system, on a disk that the host serves.
    #[arg(long, value_name = "MOUNTPOINT")]
    #[serde(with = "written::path")]
    fs: PathBuf,

    /// Address at which the host listens: vsock:2:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    #[serde(with = "written::text")]
    to: Address,

    /// Tell the host which pages this machine has read, so that the host drops its copies.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    tell_reads: Switch,

    /// Memory for evicted pages that wait to be sent (a power of two).
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = mount::ring_bytes)]
    ring: usize,

    #[command(flatten)]
    #[serde(flatten)]
    security: security::Options,

    #[command(flatten)]
    #[serde(flatten)]
    daemon: daemon::Options,
}

/// Options of `host-cache host`.
#[derive(clap::Args, Serialize, Deserialize)]
pub struct HostOptions {
    /// Directory of the images.
    #[arg(long, value_name = "DIR")]
    #[serde(with = "written::path")]
    images: PathBuf,

    /// Where to mount the directory. Virtual machines must open their disks there. Default: in
    /// place, over the directory itself.
    #[serde(with = "written::maybe_path")]
    mountpoint: Option<PathBuf>,

    /// Address at which guests connect: vsock:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", value_parser = addresses::place)]
    #[serde(with = "written::text")]
    listen: Address,

    /// A raw image in DIR, and the key file of the guest that uses this image as its disk. The
    /// guest needs a copy of the key. May be given several times. A single guest needs no key if
    /// the address is unix:PATH, or with --trust-network.
    #[arg(long, value_name = "IMAGE[=KEYFILE]", required = true)]
    guest: Vec<GuestName>,

    /// Use no key: trust everybody who can connect to be the guest.
    #[arg(long)]
    trust_network: bool,

    /// How to put pages into the page cache.
    #[arg(long, value_enum, default_value_t = Mode::Clean)]
    mode: Mode,

    /// Keep the copies of pages that the guest has read. Without this option the host drops them.
    #[arg(long)]
    keep: bool,

    /// Limit for the evicted pages of one guest in the page cache. Default: as much as the kernel
    /// has room for.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(with = "written::maybe_size")]
    limit: Option<u64>,

    /// Memory for the catalog of the images' pages: 2 MiB for each GiB of pages.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse_catalog)]
    #[serde(with = "written::size")]
    catalog: u64,

    /// Threads that always serve the images. While all of them wait for the disk, the daemon starts
    /// more, up to 128.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,

    #[command(flatten)]
    #[serde(flatten)]
    daemon: daemon::Options,
}

#[derive(Clone, Copy, ValueEnum, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Mode {
    /// Store clean pages; nothing is written to the disk.
    Clean,
    /// Write the pages into the image again, as in the paper; for comparison.
    Write,
}

#[derive(Clone, Serialize, Deserialize)]
struct GuestName {
    #[serde(with = "written::path")]
    image: PathBuf,
    #[serde(with = "written::maybe_path")]
    key: Option<PathBuf>,
}

impl std::str::FromStr for GuestName {
    type Err = String;

    fn from_str(text: &str) -> Result<GuestName, String> {
        let (image, key) = text.split_once('=').map_or((text, None), |(image, key)| (image, Some(key)));
        if image.is_empty() || key.is_some_and(str::is_empty) {
            return Err("write the image's name and its key file, such as disk.img=/etc/pumapool-keys/disk.key".into());
        }
        if Path::new(image).components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
            return Err(format!("{image:?} is not a path within the directory of images (--images)"));
        }
        Ok(GuestName { image: image.into(), key: key.map(PathBuf::from) })
    }
}

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
    let security = options.security.security(std::slice::from_ref(&host))?;
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
                guest: reported::guest(statistics.counts()),
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

/// The default options of a mount.
#[derive(Parser)]
struct Defaults {
    #[command(flatten)]
    policies: Policies,
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
    let mut policies = Defaults::parse_from(["mount"]).policies;
    (policies.catalog, policies.threads) = (options.catalog, options.threads);
    let mount = mount::Options::of_images(options.images, options.mountpoint, policies, options.daemon);
    mount::run_images(mount, Arc::new(guests))
}
