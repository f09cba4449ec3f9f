//! `pumapool mount`: the borrower.
//!
//! The process that is started becomes the keeper (`keeper.rs`), and starts this program again as
//! the daemon that serves.

use crate::addresses;
use crate::cgroups::{CgroupName, cgroups};
use crate::configuration::Changeable;
use crate::control::answer;
use crate::daemon::{self, Daemon};
use crate::exit;
use crate::host_cache::Guests;
use crate::kept::Kept;
use crate::membership::Membership;
use crate::metrics::server::{self, Door};
use crate::{confine, fdstore, joined, keeper, pool, security, size};
use anyhow::{Context, Result, bail};
use borrower::cgroups::Cgroups;
use borrower::{Borrower, Strategy};
use clap::ValueEnum;
use mount::handover::channel::{Channel, Message};
use mount::handover::given::Given;
use serde_json::{Map, Value, json};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tap::EvictionSource;
use wire::address::Address;

/// Options of `mount`.
#[derive(clap::Args)]
pub struct Options {
    /// The directory whose files are to be read through the pool.
    source: PathBuf,

    /// Where to mount it; without this, in place, over the directory itself.
    mountpoint: Option<PathBuf>,

    /// A lender: HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:CID:PORT. May be given several times;
    /// each address that a name has is a lender. Without one, or while it is away, files are read
    /// from SOURCE.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    lender: Vec<Address>,

    #[command(flatten)]
    pool: pool::Options,

    #[command(flatten)]
    policies: Policies,

    /// What is forbidden at the mountpoint: to write, or to use set-uid programs, devices, or
    /// programs. May be given several times.
    #[arg(long, value_enum, value_name = "WHAT")]
    forbid: Vec<Forbidden>,

    /// Show file systems that are mounted below SOURCE. Without this their mount points appear as
    /// empty, closed directories. What each of them forbids (ro, nosuid, nodev, noexec) stays
    /// forbidden in it. Interfaces of the kernel (proc, sysfs, cgroup, ...), FUSE mounts of other
    /// users, and mounts of pumapool are never shown.
    #[arg(long)]
    cross_mounts: bool,

    /// Whether pages are put at lenders from the beginning. `pumapool join` begins with `off`, and
    /// turns it on and off.
    #[arg(long, value_enum, default_value_t = Switch::On, hide = true)]
    borrow: Switch,

    /// A lender of the pool that is not used: the one of this node.
    #[arg(long, value_name = "ADDR", hide = true)]
    except: Option<Address>,

    #[command(flatten)]
    security: security::Options,

    #[command(flatten)]
    daemon: daemon::Options,

    /// Guests that give what they evict (`pumapool host-cache host`).
    #[arg(skip)]
    guests: Option<Arc<Guests>>,
}

impl Options {
    /// A mount of images, of which it is guests that evict, and no lender.
    pub fn of_images(
        source: PathBuf,
        mountpoint: Option<PathBuf>,
        guests: Arc<Guests>,
        policies: Policies,
        daemon: daemon::Options,
    ) -> Options {
        Options {
            source,
            mountpoint,
            lender: Vec::new(),
            pool: pool::Options::default(),
            policies,
            forbid: Vec::new(),
            cross_mounts: false,
            borrow: Switch::On,
            except: None,
            security: security::Options::default(),
            daemon,
            guests: Some(guests),
        }
    }
}

/// How it is served; the same for `mount` and `join`.
#[derive(clap::Args)]
#[group(id = "policies", multiple = true)]
pub struct Policies {
    /// What happens to a page at the lender when it is read back.
    #[arg(long, value_enum, default_value_t = StrategyName::Exclusive)]
    strategy: StrategyName,

    /// Whether a write is in SOURCE before it is answered, or gathers in the page cache first
    /// (faster small writes; SOURCE must then not be changed beside the mount).
    #[arg(long, value_enum, default_value_t = WriteName::Through)]
    write: WriteName,

    /// When pages are sent to the lender: as the kernel evicts them (needs BPF), or as they are
    /// read from the disk.
    #[arg(long, value_enum, default_value_t = FillName::Auto)]
    fill: FillName,

    /// Whether what is read in long sequential streams is left to the disk, which is good at that,
    /// and not lent; but where it comes back while lenders have room for it, and faster from them.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    filter: Switch,
    /// Whether a lender is left alone while it answers later than the directory below, or than the
    /// thresholds.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    gate: Switch,
    /// The gate's thresholds for the average latency of 15 seconds: it closes above the first and
    /// opens below the second, in microseconds.
    #[arg(long, value_name = "UPPER,LOWER", default_value_t = Thresholds(borrower::gate::Config::default().short))]
    gate_short: Thresholds,
    /// As --gate-short, for the average of a minute.
    #[arg(long, value_name = "UPPER,LOWER", default_value_t = Thresholds(borrower::gate::Config::default().long))]
    gate_long: Thresholds,
    /// Whether a get that takes longer than a read of SOURCE would is raced by one.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    hedge: Switch,
    /// Whether files that the pool is of no use to are left to the kernel, which then reads them in
    /// SOURCE by itself, at the speed that they have there: what is opened for reading while no
    /// lender is used, and what is only read in long streams. It is so until it is closed. (From
    /// Linux 6.9 on, as root, and with --write through.)
    #[arg(long, value_enum, default_value_t = Switch::On)]
    passthrough: Switch,
    /// Allow idmapped mounts of MOUNTPOINT (Linux 6.12), which pods with `hostUsers: false` need.
    /// The kernel then tells the user of a request only where it creates a file: `trusted.`
    /// attributes are not listed, and all other requests count as those of one user, who is not
    /// root.
    #[arg(long)]
    idmapped: bool,
    /// After how many returned pages that do not verify a lender is not used any more, until the
    /// mount starts anew.
    #[arg(long, value_name = "COUNT", default_value_t = borrower::BAD_PAGES_MAX,
        value_parser = clap::value_parser!(u64).range(1..))]
    bad_pages: u64,
    /// Memory for the catalog of lent pages: 2 MiB for each GiB lent. When it is full, the files
    /// that were not used for longest are forgotten.
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = size::parse_catalog)]
    pub catalog: u64,
    /// Threads that always serve the mount. While all of them wait for SOURCE, more are started, up
    /// to 128.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: u16,

    /// How long the kernel may keep attributes without asking, in seconds: the delay with which
    /// changes made beside the mount are seen. Where the kernel tells of them (root, a local file
    /// system below), they are seen at once, and what nobody changes is kept for a minute from the
    /// second time on that it is asked for. 0: it asks each time.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    attribute_timeout: f64,

    /// A control group for which pages are lent, with all below it:
    /// PATH[,quota=SIZE][,share=NUMBER]. A quota is how much of it is lent at the most; while all
    /// lenders are full, groups have what is lent in proportion to their shares. `others` instead
    /// of PATH stands for all that are not named, together, and `each` for all of them on their
    /// own; without either, nothing is lent for them. May be given several times.
    /// `pumapool status --by-cgroup` shows what each has.
    #[arg(long, value_name = "GROUP")]
    cgroup: Vec<CgroupName>,

    /// Memory for evicted pages that wait to be sent (a power of two); `auto`: 32 MiB, or a
    /// sixteenth of what the machine (or the cgroup of the mount) has, if that is less.
    #[arg(long, value_name = "SIZE|auto", default_value_t = Ring::Auto)]
    ring: Ring,
}

/// Of [`Policies`], what can change while it runs.
pub const CHANGEABLE: [&str; 3] = ["filter", "gate-short", "gate-long"];

impl Policies {
    fn thresholds(&self) -> borrower::gate::Config {
        borrower::gate::Config { short: self.gate_short.0, long: self.gate_long.0 }
    }

    /// As options of `mount`.
    pub fn arguments(&self) -> Vec<String> {
        // Named one by one, so that none is forgotten.
        let Policies {
            strategy,
            write,
            fill,
            filter,
            gate,
            gate_short,
            gate_long,
            hedge,
            passthrough,
            idmapped,
            bad_pages,
            catalog,
            threads,
            attribute_timeout,
            cgroup,
            ring,
        } = self;
        let mut arguments = Vec::new();
        for (option, value) in [
            ("--strategy", name(*strategy)),
            ("--write", name(*write)),
            ("--fill", name(*fill)),
            ("--filter", name(*filter)),
            ("--gate", name(*gate)),
            ("--gate-short", gate_short.to_string()),
            ("--gate-long", gate_long.to_string()),
            ("--hedge", name(*hedge)),
            ("--passthrough", name(*passthrough)),
            ("--bad-pages", bad_pages.to_string()),
            ("--catalog", catalog.to_string()),
            ("--threads", threads.to_string()),
            ("--attribute-timeout", attribute_timeout.to_string()),
            ("--ring", ring.to_string()),
        ] {
            arguments.extend([option.to_owned(), value]);
        }
        arguments.extend(idmapped.then(|| "--idmapped".to_owned()));
        arguments.extend(cgroup.iter().flat_map(|name| ["--cgroup".to_owned(), name.to_string()]));
        arguments
    }
}

/// What a choice is called on the command line.
fn name(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
enum StrategyName {
    /// The lender gives it away: local and remote memory add up.
    Exclusive,
    /// The lender keeps it: it need not be sent again.
    NonInclusive,
}

#[derive(Clone, Copy, ValueEnum)]
enum WriteName {
    Through,
    Back,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
enum FillName {
    /// Evict where it can be had, else read.
    Auto,
    /// As the kernel evicts them; an error where that cannot be had.
    Evict,
    /// As they are read from the disk.
    Read,
}

#[derive(Clone, Copy, ValueEnum, PartialEq)]
enum Switch {
    On,
    Off,
}

/// By the names of mount(8).
#[derive(Clone, Copy, ValueEnum)]
enum Forbidden {
    Ro,
    Nosuid,
    Nodev,
    Noexec,
}

impl Forbidden {
    fn flag(self) -> ::mount::MountFlags {
        match self {
            Forbidden::Ro => ::mount::MountFlags::RDONLY,
            Forbidden::Nosuid => ::mount::MountFlags::NOSUID,
            Forbidden::Nodev => ::mount::MountFlags::NODEV,
            Forbidden::Noexec => ::mount::MountFlags::NOEXEC,
        }
    }
}

/// `UPPER,LOWER` in microseconds.
#[derive(Clone, Copy)]
struct Thresholds(borrower::gate::Thresholds);

impl std::fmt::Display for Thresholds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{},{}", self.0.upper_us, self.0.lower_us)
    }
}

impl std::str::FromStr for Thresholds {
    type Err = String;

    fn from_str(text: &str) -> Result<Thresholds, String> {
        let parsed = text.split_once(',').and_then(|(upper, lower)| {
            Some(borrower::gate::Thresholds { upper_us: upper.parse().ok()?, lower_us: lower.parse().ok()? })
        });
        parsed
            .filter(|thresholds| thresholds.lower_us <= thresholds.upper_us)
            .map(Thresholds)
            .ok_or_else(|| "write two numbers of microseconds, the upper one first, such as 40000,1500".to_owned())
    }
}

/// How large the ring of evicted pages is.
#[derive(Clone, Copy)]
enum Ring {
    Auto,
    Bytes(usize),
}

impl Ring {
    /// Of so much memory it takes one part at the most, but [`Ring::AUTO_BYTES_MIN`]: it counts as
    /// memory of the cgroup.
    const MEMORY_SHARE: u64 = 16;
    /// 256 pages, however little memory there is: with less next to nothing would be lent.
    const AUTO_BYTES_MIN: u64 = 1 << 20;

    fn bytes(self) -> usize {
        match self {
            Ring::Auto => Ring::auto_bytes(memory_bytes()),
            Ring::Bytes(bytes) => bytes,
        }
    }

    fn auto_bytes(memory_bytes: u64) -> usize {
        let share_bytes = (memory_bytes / Ring::MEMORY_SHARE).max(Ring::AUTO_BYTES_MIN);
        tap::BpfTap::RING_BYTES.min(1 << share_bytes.ilog2())
    }
}

impl std::fmt::Display for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ring::Auto => write!(f, "auto"),
            Ring::Bytes(bytes) => write!(f, "{bytes}"),
        }
    }
}

impl std::str::FromStr for Ring {
    type Err = String;

    fn from_str(text: &str) -> Result<Ring, String> {
        if text == "auto" { Ok(Ring::Auto) } else { ring_bytes(text).map(Ring::Bytes) }
    }
}

/// The memory of the daemon's cgroup, or of the machine. As much as there can be, if the kernel
/// does not tell.
fn memory_bytes() -> u64 {
    lender::headroom::Headroom::default().read().map_or(u64::MAX, |memory| memory.total_bytes)
}

/// Of so much memory, what may be in the page cache below, written and not yet dropped. A group
/// that is full of it has the kernel write it back page by page, and whoever reads or writes wait
/// for that.
fn written_bytes(memory_bytes: u64) -> u64 {
    const MEMORY_SHARE: u64 = 16;
    (memory_bytes / MEMORY_SHARE).min(mount::Config::WRITTEN_BYTES)
}

impl Options {
    /// Whether it stays in the foreground.
    pub fn is_in_foreground(&self) -> bool {
        self.daemon.foreground
    }
}

pub fn ring_bytes(text: &str) -> Result<usize, String> {
    let bytes = usize::try_from(size::parse(text)?).map_err(|error| error.to_string())?;
    let bounds = tap::BpfTap::RING_BYTES_MIN..=tap::BpfTap::RING_BYTES_MAX;
    if bytes.is_power_of_two() && bounds.contains(&bytes) {
        return Ok(bytes);
    }
    Err(format!(
        "write a power of two from {} to {}",
        size::display(*bounds.start() as u64),
        size::display(*bounds.end() as u64)
    ))
}

fn seconds(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| format!("{text:?} is no number of seconds"))?;
    if (0.0..=86_400.0).contains(&value) { Ok(value) } else { Err("write a number from 0 to 86400".into()) }
}

/// How long the requests in hand may take when the mount is left to another program. Beyond it
/// there is no upgrade.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// How long the keeper may take for what it is to keep. Beyond it there is no upgrade.
const KEEP_LIMIT: Duration = Duration::from_secs(2);

/// How long the keeper may take to be told who takes over.
const TELL_LIMIT: Duration = Duration::from_secs(10);

/// Runs the command.
pub fn run(options: Options) -> Result<ExitCode> {
    if let Some(kept) = Kept::inherited()? {
        return serve(options, kept);
    }
    // The key is looked at before anything is started; the daemon reads it for itself.
    let held = fdstore::inherited();
    if held.is_empty() {
        let networks: Vec<_> = options.lender.iter().cloned().chain(options.pool.network()).collect();
        options.security.security(&networks)?;
    }
    let mountpoint = options.mountpoint.as_ref().unwrap_or(&options.source);
    if let Some(key) = options.security.key_file()
        && held.is_empty()
        && is_below(key, mountpoint)
    {
        bail!(
            "the key {} lies in what is mounted at {}: a daemon that takes the mount over could not read it; put it elsewhere",
            key.display(),
            mountpoint.display()
        );
    }
    // A mount that is in use is taken on, whatever becomes of its metrics.
    let mut daemon_options = options.daemon.clone();
    let tried = if held.is_empty() { None } else { daemon_options.metrics.take() };
    match Daemon::prepare("mount", &daemon_options)? {
        Ok(daemon) => {
            let (log, control, metrics) = daemon.into_parts();
            let bind = |address| {
                Door::bind(&address).inspect_err(|error| tracing::error!("metrics are not served: {error:#}")).ok()
            };
            keeper::run(log, control, metrics.or_else(|| tried.and_then(bind)), held)
        }
        Err(code) => Ok(code),
    }
}

/// The daemon: mounts, or takes over what the keeper gives, and serves.
fn serve(mut options: Options, mut kept: Kept) -> Result<ExitCode> {
    let given = Given::receive(&kept.channel).context("cannot hear from the keeper")?;
    let takes_over = !given.is_empty();
    let (pool, security) = (&options.pool, options.security.clone());
    let membership = Membership::begin(&options.lender, pool, security, options.except.clone(), takes_over)?;
    let membership = Arc::new(membership);
    let mountpoint = options.mountpoint.clone().unwrap_or_else(|| options.source.clone());
    let config = mount::Config {
        write: match options.policies.write {
            WriteName::Through => mount::WriteMode::Through,
            WriteName::Back => mount::WriteMode::Back,
        },
        wide_readahead: options.guests.is_none(),
        pass: options.policies.passthrough == Switch::On && options.guests.is_none(),
        idmapped: options.policies.idmapped,
        cross_mounts: options.cross_mounts,
        flags: options.forbid.iter().map(|forbidden| forbidden.flag()).collect(),
        threads: options.policies.threads.into(),
        attr_timeout: Duration::from_secs_f64(options.policies.attribute_timeout),
        written_bytes: written_bytes(memory_bytes()),
        ..mount::Config::new(options.source.clone(), mountpoint)
    };
    let mut unseen = None;
    let make_borrower = |info: mount::MountInfo| {
        // A mount that is in use is served on, whatever becomes of the tap; but what is not seen to
        // be evicted is not lent, as it was not to be.
        let (source, groups) = evictions(&options, info.device).or_else(|error| {
            if !takes_over {
                return Err(error);
            }
            let text = format!("{error:#}; nothing more is lent, until `pumapool upgrade` tries it again");
            tracing::error!("{text}");
            unseen = Some(text);
            Ok((None, None))
        })?;
        let borrower = Borrower::start(
            borrower::Config {
                lenders: membership.lenders(),
                expects_lenders: membership.expects_lenders(),
                strategy: match options.policies.strategy {
                    StrategyName::Exclusive => Strategy::Exclusive,
                    StrategyName::NonInclusive => Strategy::NonInclusive,
                },
                get_connections: options.policies.threads.into(),
                filter: options.policies.filter == Switch::On,
                gate: (options.policies.gate == Switch::On).then(|| options.policies.thresholds()),
                hedge: options.policies.hedge == Switch::On,
                bad_pages_max: options.policies.bad_pages,
                catalog_bytes_max: options.policies.catalog,
                session: None,
                security: membership.security(),
                has_guests: options.guests.is_some(),
                cgroups: groups,
                may_fill_on_read: options.policies.fill == FillName::Auto && options.policies.cgroup.is_empty(),
            },
            source,
        )?;
        borrower.set_borrowing(options.borrow == Switch::On && unseen.is_none());
        anyhow::Ok(borrower)
    };
    // The catalog of a daemon before this one, and its session with the lender, would be claimed
    // here: as of now the new borrower begins with an empty catalog, which is right and only
    // slower.
    let mount = match takes_over {
        false => mount::Mount::start_kept(config, Some(kept.channel.clone()), make_borrower)?,
        true => mount::Mount::take_over(&config, given, Some(kept.channel.clone()), make_borrower)?,
    };
    // Whatever happens from here on: no mount without its daemon. But one that is in use is left to
    // the next one, until it is served.
    let mut mount = DetachedOnDrop(Arc::new(mount), !takes_over);
    let borrower = mount.0.borrower().clone();
    let guests = options.guests.take();
    guests.iter().try_for_each(|guests| guests.listen(&mount.0, takes_over))?;
    membership.follow(&borrower);
    let description = json!({
        "kind": "mount",
        "daemon_pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
        "source": mount.0.source().to_string_lossy(),
        "mountpoint": mount.0.mountpoint().to_string_lossy(),
        "write": options.policies.write.to_possible_value().map(|value| value.get_name().to_owned()),
        "strategy": options.policies.strategy.to_possible_value().map(|value| value.get_name().to_owned()),
        "confined": confine::now(),
        "security": membership.security_name(),
        "metrics": kept.metrics.as_ref().and_then(server::address).map(|address| address.to_string()),
    });
    let message = format!("{} is mounted at {}", mount.0.source().display(), mount.0.mountpoint().display());
    let sees = unseen.is_none();
    let status = {
        let (mount, borrower, guests) = (mount.0.clone(), borrower.clone(), guests.clone());
        let (keeper_pid, channel) = (kept.keeper_pid(), kept.channel.clone());
        move || {
            let mut status = status(description.clone(), &mount, &borrower);
            status["pid"] = Kept::pid(keeper_pid, &channel).into();
            status["pool"] = pool::status(membership.gossip());
            let of_guests = guests.as_ref().and_then(|guests| guests.problem());
            let of_keeper = Kept::problem(keeper_pid, &channel);
            let of_tap = borrower.tap_failure().map(str::to_owned);
            let problems = [membership.problem(), unseen.clone(), of_tap, of_guests, of_keeper];
            status["problems"] = problems.into_iter().flatten().collect();
            if let Some(guests) = &guests {
                status["guests"] = guests.status();
            }
            status
        }
    };
    let (told, was_told) = sync_channel(1);
    let command = {
        let (mount, borrower, channel) = (mount.0.clone(), borrower.clone(), kept.channel.clone());
        move |wanted: &str, stream: UnixStream| match (wanted, wanted.strip_prefix("upgrade ")) {
            (_, Some(program)) => hand_over(&mount, &channel, program, stream, &told),
            (joined::BORROW, _) => answer(stream, &borrow(&borrower, sees)),
            (joined::BORROW_NOT, _) => answer(stream, &borrow(&borrower, false)),
            _ => answer(stream, &json!({"error": format!("{wanted:?} is nothing that can be asked of a mount")})),
        }
    };
    let stop = {
        let (mount, guests) = (mount.0.clone(), guests.clone());
        move || {
            // A guest that is being dealt with uses the mount.
            guests.iter().for_each(|guests| guests.stop());
            if let Err(error) = mount.unmount(false) {
                tracing::warn!("{error}; detaching it: the daemon ends when the last file is closed");
                let _ = mount.unmount(true);
            }
        }
    };
    let status = Arc::new(status);
    if let Some(socket) = kept.metrics.take() {
        let status = status.clone();
        let served = server::serve(socket, Arc::new(move || vec![status()]));
        // A mount that is in use is served on, whatever becomes of its metrics.
        served.or_else(|error| {
            tracing::error!("metrics are not served: {error:#}");
            if takes_over { Ok(()) } else { Err(error) }
        })?;
    }
    let changeable = {
        let borrower = borrower.clone();
        Changeable::new(&CHANGEABLE, move |command| {
            if let crate::Command::Mount(Options { policies, .. }) = command {
                borrower.set_filter(policies.filter == Switch::On);
                borrower.set_thresholds(policies.thresholds());
            }
        })
    };
    kept.serve(&message, move || status(), command, changeable, stop)?;
    mount.1 = true;
    match &guests {
        Some(guests) if guests.problem().is_some() => tracing::info!("{message}"),
        Some(guests) => tracing::info!(
            "{message}; guests are listened to at {}",
            guests.status()["listen"].as_str().unwrap_or_default()
        ),
        None => tracing::info!("{message}, filled on {}", fill(&borrower)),
    }
    let served = mount.0.wait();
    guests.iter().for_each(|guests| guests.stop());
    if served == mount::Served::Left {
        // The lender takes the end of our connections for the end of the session. What it keeps for
        // a successor is to be arranged here.
        let _ = was_told.recv_timeout(TELL_LIMIT);
        return Ok(ExitCode::from(exit::HANDED_OVER));
    }
    borrower.stop();
    Ok(ExitCode::SUCCESS)
}

/// Whether the way to a file leads through a directory. Both are looked at, so that the directory
/// must be served.
fn is_below(file: &Path, directory: &Path) -> bool {
    let [file, directory] = [file, directory].map(Path::canonicalize);
    matches!((file, directory), (Ok(file), Ok(directory)) if file.starts_with(&directory))
}

/// Leaves the mount to another program: the keeper starts it, and answers on the stream when it
/// serves.
fn hand_over(mount: &mount::Mount, channel: &Channel, program: &str, stream: UnixStream, told: &SyncSender<()>) {
    if channel.is_lost() {
        let error = "the keeper of this mount is gone: unmount it, and mount it again with the new program";
        return answer(stream, &json!({"error": error}));
    }
    if is_below(Path::new(program), mount.mountpoint()) {
        let error = format!("{program} lies in the mount, which nobody serves while it is started: put it elsewhere");
        return answer(stream, &json!({"error": error}));
    }
    if !mount.is_kept(KEEP_LIMIT) {
        let error =
            "the supervisor of this mount does not read what it is to keep: is it stopped? See `pumapool status`";
        return answer(stream, &json!({"error": error}));
    }
    let start = Instant::now();
    match mount.leave(LEAVE_LIMIT) {
        Ok(true) => {
            // What was opened meanwhile.
            mount.is_kept(KEEP_LIMIT);
            let message = format!("{} {program}", start.elapsed().as_millis());
            let _ = channel.send(&Message::Upgrade(message, Some(stream.into())));
            let _ = told.send(());
        }
        Ok(false) => {
            let error = format!("requests do not end within {LEAVE_LIMIT:?}, or the mount is gone; try again");
            answer(stream, &json!({"error": error}));
        }
        Err(error) => answer(stream, &json!({"error": format!("the workers cannot be interrupted: {error}")})),
    }
}

/// Whether to borrow is said about twice a second, and what has been evicted is told in return.
fn borrow(borrower: &Borrower, borrowing: bool) -> Value {
    if borrowing != borrower.is_borrowing() {
        borrower.set_borrowing(borrowing);
        tracing::info!(
            "{}",
            if borrowing { "borrowing" } else { "not borrowing: what is evicted is not put at lenders" }
        );
    }
    json!({
        "borrowing": borrower.is_borrowing(),
        "puts_under_way": borrower.puts_under_way(),
        "evictions": borrower.sees_evictions().then(|| borrower.metrics().evictions.get()),
    })
}

/// The mount, and whether it is taken out of the tree when dropped, if it still is there.
struct DetachedOnDrop(Arc<mount::Mount>, bool);

impl Drop for DetachedOnDrop {
    fn drop(&mut self) {
        if self.1 {
            let _ = self.0.unmount(true);
        }
    }
}

/// Where evictions come from, if anywhere, and the control groups that pages are lent for.
type Evictions = (Option<Box<dyn EvictionSource>>, Option<Cgroups>);

/// What a borrower is to know of evictions: the tap, and the control groups that it tells apart.
fn evictions(options: &Options, device: u64) -> Result<Evictions> {
    Ok((eviction_source(options, device)?, cgroups(&options.policies.cgroup)?))
}

/// The eviction tap, if it is wanted and can be had; one clear line if not.
fn eviction_source(options: &Options, device: u64) -> Result<Option<Box<dyn EvictionSource>>> {
    if options.policies.fill == FillName::Read && !options.policies.cgroup.is_empty() {
        bail!("--fill read does not see whose pages are evicted: leave out --cgroup, or use --fill evict");
    }
    if options.policies.fill == FillName::Read || (options.lender.is_empty() && !options.pool.is_wanted()) {
        return Ok(None);
    }
    let tells_cgroup = !options.policies.cgroup.is_empty();
    match tap::BpfTap::load(tap::Target { device, tells_cgroup, takes_hints: true }, options.policies.ring.bytes()) {
        Ok(tap) => Ok(Some(Box::new(tap))),
        Err(error) if tells_cgroup => Err(error).context("cannot tap evictions, which say whose they are (--cgroup)"),
        Err(error) if options.policies.fill == FillName::Evict => {
            Err(error).context("cannot tap evictions (--fill evict)")
        }
        Err(error) => {
            tracing::warn!("evictions cannot be tapped: {error}. Pages are lent when they are read instead");
            Ok(None)
        }
    }
}

/// When pages are lent.
fn fill(borrower: &Borrower) -> &'static str {
    if borrower.sees_evictions() { "eviction" } else { "read" }
}

fn status(mut description: Value, mount: &mount::Mount, borrower: &Borrower) -> Value {
    description["fill"] = fill(borrower).into();
    if !borrower.sees_evictions() {
        // What is given away would not come back.
        description["strategy"] = "non-inclusive".into();
    }
    let census = borrower.census();
    let counters: Map<String, Value> =
        borrower.metrics().all().into_iter().map(|(name, _, value)| (name.to_owned(), value.into())).collect();
    description["lender_is_up"] = borrower.lender_is_up().into();
    description["lenders"] = serde_json::to_value(borrower.lenders()).unwrap_or_default();
    let (disk_us, late_us) = borrower.disk_us();
    description["disk"] = json!({"read_us": disk_us, "get_is_late_us": late_us});
    description["streams"] = borrower.streams().into();
    description["curve"] = serde_json::to_value(borrower.curve()).unwrap_or_default();
    description["borrowing"] = borrower.is_borrowing().into();
    description["puts_under_way"] = borrower.puts_under_way().into();
    description["borrower"] = counters.into();
    description["cgroups"] = serde_json::to_value(borrower.cgroups()).unwrap_or_default();
    description["latencies"] = json!({"get": borrower.get_times(), "below": borrower.below_times()});
    description["catalog"] =
        json!({"files": census.files, "live_pages": census.live_pages, "entry_bytes": census.entry_bytes});
    description["tap"] = borrower.tap_counters().map_or(Value::Null, |counters| {
        json!({
            "captured_pages": counters.captured,
            "omitted_pages": counters.omitted,
            "ring_full_pages": counters.ring_full,
            "invalidated_pages": counters.invalidated,
            "unreadable_pages": counters.unreadable,
        })
    });
    description["mount"] = serde_json::to_value(mount.status()).unwrap_or_default();
    description
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_does_not_fill_a_small_memory() {
        assert_eq!(
            [0, 92, 512, 1 << 20].map(|memory_mib| written_bytes(memory_mib << 20)),
            [0, 92 << 16, 32 << 20, 64 << 20]
        );
    }

    #[test]
    fn a_small_memory_has_a_small_ring() {
        let auto_mib = |memory_mib: u64| Ring::auto_bytes(memory_mib << 20) >> 20;
        assert_eq!([4, 92, 128, 500, 512, 1 << 20].map(auto_mib), [1, 4, 8, 16, 32, 32]);
        let reread = |text: &str| text.parse::<Ring>().map(|ring| ring.to_string());
        assert_eq!(reread("auto").unwrap(), "auto");
        assert_eq!(reread("4MiB").unwrap(), (4 << 20).to_string());
        assert!(reread("3MiB").unwrap_err().contains("power of two"));
    }
}
