//! `pumapool host-cache`: a host's page cache filled by what its guests evict.

use crate::daemon::{self, Daemon};
use crate::mount::{self, Policies};
use crate::{addresses, security, size};
use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use hostcache::guest::{self, Statistics, Stop};
use hostcache::{Volume, host};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use wire::address::Address;
use wire::key::PoolKey;
use wire::listener::{Error, Listener};

/// How long the daemon before may go on to listen, and how often it is looked whether it does.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(5);
const TAKE_OVER_LOOK: Duration = Duration::from_millis(20);

/// Options of `host-cache`.
#[derive(clap::Args)]
pub struct Options {
    #[command(subcommand)]
    side: Side,
}

#[derive(clap::Subcommand)]
enum Side {
    /// In a virtual machine: give the host what this machine evicts.
    Guest(GuestOptions),
    /// On the host: serve the images of virtual machines, with what they evict in the page cache.
    Host(HostOptions),
}

/// Options of `host-cache guest`.
#[derive(clap::Args)]
pub struct GuestOptions {
    /// The mountpoint of an ext4 or XFS file system on a disk that the host serves.
    #[arg(long, value_name = "MOUNTPOINT")]
    fs: PathBuf,

    /// Where the host listens: vsock:2:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    to: Address,

    /// Whether the host is told what was read, so that it lets its copies go.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    tell_reads: Switch,

    /// Memory for evicted pages that wait to be sent (a power of two).
    #[arg(long, value_name = "SIZE", default_value = "8MiB", value_parser = mount::ring_bytes)]
    ring: usize,

    #[command(flatten)]
    security: security::Options,

    #[command(flatten)]
    daemon: daemon::Options,
}

/// Options of `host-cache host`.
#[derive(clap::Args)]
pub struct HostOptions {
    /// The directory with the images.
    #[arg(long, value_name = "DIR")]
    images: PathBuf,

    /// Where to mount it, for the virtual machines' disks to be opened there; without this, in place, over the directory itself.
    mountpoint: Option<PathBuf>,

    /// Where guests are listened to: vsock:PORT, HOST:PORT or unix:PATH.
    #[arg(long, value_name = "ADDR", value_parser = addresses::place)]
    listen: Address,

    /// An image below DIR (raw), and the file with the key of the guest whose disk it is, which that guest has a copy of. May be given
    /// several times. A single guest needs no key where the address is unix:PATH, or with --trust-network.
    #[arg(long, value_name = "IMAGE[=KEYFILE]", required = true)]
    guest: Vec<GuestName>,

    /// Do without a key: whoever can connect is the guest.
    #[arg(long)]
    trust_network: bool,

    /// How pages get into the page cache.
    #[arg(long, value_enum, default_value_t = Mode::Clean)]
    mode: Mode,

    /// Leave the copies of pages that the guest has read where they are, instead of letting them go.
    #[arg(long)]
    keep: bool,

    /// How much of one guest's pages may be in the page cache because it has evicted them; without it, as much as the kernel finds room
    /// for.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    limit: Option<u64>,

    /// Memory for what is known of the images: 2 MiB for each GiB.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse_catalog)]
    catalog: u64,

    /// Threads that serve the images, hence reads of the disk at once.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,

    #[command(flatten)]
    daemon: daemon::Options,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
enum Switch {
    On,
    Off,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// As clean pages: nothing is written.
    Clean,
    /// Written into the image again, as the paper has it: for comparison.
    Write,
}

#[derive(Clone)]
struct GuestName {
    image: PathBuf,
    key: Option<PathBuf>,
}

impl std::str::FromStr for GuestName {
    type Err = String;

    fn from_str(text: &str) -> Result<GuestName, String> {
        let (image, key) = text.split_once('=').map_or((text, None), |(image, key)| (image, Some(key)));
        if image.is_empty() || key.is_some_and(str::is_empty) {
            return Err(
                "write the image's name, and the key's file behind a =, such as disk.img=/etc/pumapool-keys/disk.key"
                    .into(),
            );
        }
        if Path::new(image).components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
            return Err(format!("{image:?} is no name below the directory of images"));
        }
        Ok(GuestName { image: image.into(), key: key.map(PathBuf::from) })
    }
}

/// Guests of a mount.
pub struct Guests {
    /// What is wrong is told when they are to be listened to: a mount that is in use is taken over all the same.
    config: Result<host::Config>,
    listen: Address,
}

impl Guests {
    /// Listens. Who takes a mount over waits until the one before has stopped to.
    pub fn listen(self, mount: Arc<::mount::Mount>, takes_over: bool) -> Result<Arc<host::Host>> {
        let begun = Instant::now();
        let listener = loop {
            match Listener::bind(&self.listen) {
                Err(Error::AddressInUse { .. }) if takes_over && begun.elapsed() < TAKE_OVER_LIMIT => {
                    std::thread::sleep(TAKE_OVER_LOOK);
                }
                bound => break bound?,
            }
        };
        let config = self.config?;
        let (told, tell) = sync_channel(1);
        // Images are opened through the mount itself: never by the first thread, whose death is how the keeper knows that a daemon dies.
        let serve = move || {
            let host = host::Host::new(mount, config, listener).map(Arc::new);
            let serving = host.as_ref().ok().cloned();
            let _ = told.send(host);
            serving.iter().for_each(|host| host.run());
        };
        std::thread::Builder::new().name("puma-guests".into()).spawn(serve).context("cannot start a thread")?;
        Ok(tell.recv().context("the images could not be looked at")??)
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
    // Looked at before anything is started.
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
    let message = format!("what {} evicts is given to {host}", options.fs.display());
    let status = {
        let (statistics, fs, host) = (statistics.clone(), options.fs.clone(), host.to_string());
        move || {
            json!({
                "kind": "guest",
                "pid": std::process::id(),
                "version": env!("CARGO_PKG_VERSION"),
                "fs": fs.to_string_lossy(),
                "host": host,
                "connected": statistics.is_connected(),
                "guest": statistics.counts(),
            })
        }
    };
    let for_stop = stop.clone();
    let serving = daemon.serve(&message, status, move || for_stop.request())?;
    tracing::info!("{message}");
    guest::run(&mut volume, &config, &statistics, &stop);
    serving.ended_well();
    Ok(ExitCode::SUCCESS)
}

/// The options of a mount that nobody has said anything about.
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
                "{} is on a network, and {} has no key: make one with `pumapool key new FILE`, copy it to the guest, and name it here, \
                 --guest {}=FILE; or --trust-network",
                options.listen,
                image.display(),
                image.display()
            );
        }
    }
    let guest = |GuestName { image, key }: &GuestName| -> Result<host::Guest> {
        let read = |path: &PathBuf| -> Result<PoolKey> {
            let path = std::path::absolute(path).with_context(|| format!("the key file {}", path.display()))?;
            Ok(PoolKey::read(&path)?)
        };
        Ok(host::Guest { image: image.clone(), key: key.as_ref().map(read).transpose()? })
    };
    let config = |guests| host::Config {
        guests,
        placing: match options.mode {
            Mode::Clean => ::mount::images::Placing::Clean,
            Mode::Write => ::mount::images::Placing::Written,
        },
        keeps: options.keep,
        pages_max: options.limit.map(|bytes| bytes / page::PAGE_SIZE as u64),
    };
    let guests: Result<Vec<_>> = options.guest.iter().map(guest).collect();
    let guests = Guests { config: guests.map(config), listen: options.listen.absolute()? };
    let mut policies = Defaults::parse_from(["mount"]).policies;
    (policies.catalog, policies.threads) = (options.catalog, options.threads);
    mount::run(mount::Options::of_images(options.images, options.mountpoint, guests, policies, options.daemon))
}
