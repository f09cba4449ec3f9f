//! `pumapool mount`: the borrower.
//!
//! The started process becomes the supervisor (`supervisor/process.rs`), and starts this program
//! again as the daemon that serves.

mod memory;

use crate::cli::exit;
use crate::cli::mount::{CHANGEABLE, Options, Policies, PopulateName, StrategyName, Switch, WriteName};
use crate::commands::{guests::Guests, joined};
use crate::config::Changeable;
use crate::daemon::{Daemon, cgroups::cgroups, confine, control::answer, membership::Membership, security};
use crate::metrics::server::{self, MetricsListener};
use crate::supervisor::{daemon::Supervised, fdstore, process};
use anyhow::{Context, Result, bail};
use borrower::cgroups::Cgroups;
use borrower::{Borrower, Strategy};
use mount::handover::channel::{Channel, Message};
use mount::handover::inherited::Inherited;
use report::{Borrowing, Populate, Reply, Strategy as Policy, Upgraded, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tap::EvictionSource;

/// Time limit for requests in progress when the mount is handed over to another program. Beyond it,
/// the upgrade fails.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

/// Time limit for the supervisor to receive the descriptors. Beyond it, the upgrade fails.
const KEEP_LIMIT: Duration = Duration::from_secs(2);

/// Time limit for telling the supervisor which program takes over.
const TELL_LIMIT: Duration = Duration::from_secs(10);

/// Runs the command.
pub fn run(options: Options) -> Result<ExitCode> {
    run_for(options, None)
}

/// Mounts the images of guests that send the pages that they evict (`pumapool host-cache host`).
pub fn run_images(options: Options, guests: Arc<Guests>) -> Result<ExitCode> {
    run_for(options, Some(guests))
}

fn run_for(options: Options, guests: Option<Arc<Guests>>) -> Result<ExitCode> {
    if let Some(supervised) = Supervised::inherited()? {
        return serve(options, guests, supervised);
    }
    // Check the key before anything is started. The daemon reads it again for itself.
    let held = fdstore::inherited();
    if held.is_empty() {
        let networks: Vec<_> = options.lender.iter().cloned().chain(options.pool.network()).collect();
        security::of(&options.security, &networks)?;
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
    // A mount in use is taken over even if its metrics cannot be served.
    let mut daemon_options = options.daemon.clone();
    let tried = if held.is_empty() { None } else { daemon_options.metrics.take() };
    match Daemon::prepare("mount", &daemon_options)? {
        Ok(daemon) => {
            let (log, control, metrics) = daemon.into_parts();
            let bind = |address| {
                MetricsListener::bind(&address)
                    .inspect_err(|error| tracing::error!("cannot serve metrics: {error:#}"))
                    .ok()
            };
            process::run(log, control, metrics.or_else(|| tried.and_then(bind)), held)
        }
        Err(code) => Ok(code),
    }
}

/// The daemon: mounts, or takes over from the supervisor, and serves.
fn serve(options: Options, guests: Option<Arc<Guests>>, mut supervised: Supervised) -> Result<ExitCode> {
    let given = Inherited::receive(&supervised.channel).context("cannot receive from the supervisor")?;
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
        wide_readahead: guests.is_none(),
        pass: options.policies.passthrough == Switch::On && guests.is_none(),
        idmapped: options.policies.idmapped,
        cross_mounts: options.cross_mounts,
        flags: options.forbid.iter().map(|forbidden| forbidden.flag()).collect(),
        threads: options.policies.threads.into(),
        attr_timeout: Duration::from_secs_f64(options.policies.attribute_timeout),
        written_bytes: memory::written_bytes(memory::total_bytes()),
        ..mount::Config::new(options.source.clone(), mountpoint)
    };
    let mut unseen = None;
    let make_borrower = |info: mount::MountInfo| {
        // A mount in use is served even without the tap. Then evictions are not seen, and no page
        // is lent.
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
                has_guests: guests.is_some(),
                cgroups: groups,
                may_populate_on_read: options.policies.fill == PopulateName::Auto && options.policies.cgroup.is_empty(),
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
        false => mount::Mount::start_supervised(config, Some(supervised.channel.clone()), make_borrower)?,
        true => mount::Mount::take_over(&config, given, Some(supervised.channel.clone()), make_borrower)?,
    };
    // From here on, no mount may be left without its daemon. But until a mount in use is served
    // again, it is left to the next daemon.
    let mut mount = DetachedOnDrop(Arc::new(mount), !takes_over);
    let borrower = mount.0.borrower().clone();
    guests.iter().try_for_each(|guests| guests.listen(&mount.0, takes_over))?;
    membership.follow(&borrower);
    let description = report::Mount {
        daemon_pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        source: mount.0.source().to_string_lossy().into_owned(),
        mountpoint: mount.0.mountpoint().to_string_lossy().into_owned(),
        write: match options.policies.write {
            WriteName::Through => Write::Through,
            WriteName::Back => Write::Back,
        },
        strategy: match options.policies.strategy {
            StrategyName::Exclusive => Policy::Exclusive,
            StrategyName::NonInclusive => Policy::NonInclusive,
        },
        confined: confine::now(),
        security: membership.security_name().map(str::to_owned),
        metrics: supervised.metrics.as_ref().and_then(server::address).map(|address| address.to_string()),
        ..report::Mount::default()
    };
    let message = format!("{} is mounted at {}", mount.0.source().display(), mount.0.mountpoint().display());
    let sees = unseen.is_none();
    let status = {
        let (mount, borrower, guests) = (mount.0.clone(), borrower.clone(), guests.clone());
        let (supervisor_pid, channel) = (supervised.supervisor_pid(), supervised.channel.clone());
        move || {
            let of_guests = guests.as_ref().and_then(|guests| guests.problem());
            let of_supervisor = Supervised::problem(supervisor_pid, &channel);
            let of_tap = borrower.tap_failure().map(str::to_owned);
            let problems = [membership.problem(), unseen.clone(), of_tap, of_guests, of_supervisor];
            let status = report::Mount {
                pid: Supervised::pid(supervisor_pid, &channel),
                pool: membership.gossip().map(|gossip| gossip.status()),
                problems: problems.into_iter().flatten().collect(),
                guests: guests.as_ref().map(|guests| guests.status()),
                ..status(description.clone(), &mount, &borrower)
            };
            report::Daemon::Mount(Box::new(status))
        }
    };
    let (told, was_told) = sync_channel(1);
    let command = {
        let (mount, borrower, channel) = (mount.0.clone(), borrower.clone(), supervised.channel.clone());
        move |wanted: &str, stream: UnixStream| match (wanted, wanted.strip_prefix("upgrade ")) {
            (_, Some(program)) => hand_over(&mount, &channel, program, stream, &told),
            (joined::BORROW, _) => answer(stream, &borrow(&borrower, sees)),
            (joined::BORROW_NOT, _) => answer(stream, &borrow(&borrower, false)),
            _ => {
                let error = format!("{wanted:?} is nothing that can be asked of a mount");
                answer(stream, &Reply::<Borrowing>::refused(error));
            }
        }
    };
    let stop = {
        let (mount, guests) = (mount.0.clone(), guests.clone());
        move || {
            // Handling of a guest's messages uses the mount.
            guests.iter().for_each(|guests| guests.stop());
            if let Err(error) = mount.unmount(false) {
                tracing::warn!("{error}; detaching it: the daemon ends when the last file is closed");
                let _ = mount.unmount(true);
            }
        }
    };
    let status = Arc::new(status);
    if let Some(socket) = supervised.metrics.take() {
        let status = status.clone();
        let served = server::serve(socket, Arc::new(move || vec![status()]));
        // A mount in use is served even if its metrics cannot be.
        served.or_else(|error| {
            tracing::error!("cannot serve metrics: {error:#}");
            if takes_over { Ok(()) } else { Err(error) }
        })?;
    }
    let changeable = {
        let borrower = borrower.clone();
        Changeable::new(&CHANGEABLE, move |policies: Policies| {
            borrower.set_filter(policies.filter == Switch::On);
            borrower.set_thresholds(policies.thresholds());
        })
    };
    supervised.serve(&message, move || status(), command, changeable, stop)?;
    mount.1 = true;
    match &guests {
        Some(guests) if guests.problem().is_some() => tracing::info!("{message}"),
        Some(guests) => tracing::info!("{message}; guests can connect at {}", guests.status().listen),
        None => tracing::info!("{message}, filled on {}", populate(&borrower)),
    }
    let served = mount.0.wait();
    guests.iter().for_each(|guests| guests.stop());
    if served == mount::Served::Left {
        // For the lender the end of the connections is the end of the session. Keeping pages for a
        // successor would have to be arranged here.
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

/// Hands the mount over to another program. The supervisor starts that program, and answers on the
/// stream when it serves.
fn hand_over(mount: &mount::Mount, channel: &Channel, program: &str, stream: UnixStream, told: &SyncSender<()>) {
    if channel.is_lost() {
        let error = "the supervisor of this mount is gone: unmount it, and mount it again with the new program";
        return answer(stream, &Reply::<Upgraded>::refused(error));
    }
    if is_below(Path::new(program), mount.mountpoint()) {
        let error = format!("{program} lies in the mount, which nobody serves while it is started: put it elsewhere");
        return answer(stream, &Reply::<Upgraded>::refused(error));
    }
    if !mount.is_kept(KEEP_LIMIT) {
        let error =
            "the supervisor of this mount does not read what it is to keep: is it stopped? See `pumapool status`";
        return answer(stream, &Reply::<Upgraded>::refused(error));
    }
    let start = Instant::now();
    match mount.leave(LEAVE_LIMIT) {
        Ok(true) => {
            // Wait for descriptors that were opened meanwhile.
            mount.is_kept(KEEP_LIMIT);
            let message = format!("{} {program}", start.elapsed().as_millis());
            let _ = channel.send(&Message::Upgrade(message, Some(stream.into())));
            let _ = told.send(());
        }
        Ok(false) => {
            let error = format!("requests do not end within {LEAVE_LIMIT:?}, or the mount is gone; try again");
            answer(stream, &Reply::<Upgraded>::refused(error));
        }
        Err(error) => {
            let error = format!("the workers cannot be interrupted: {error}");
            answer(stream, &Reply::<Upgraded>::refused(error));
        }
    }
}

/// Sets whether to borrow, and returns the evictions. The node calls this about twice a second.
fn borrow(borrower: &Borrower, borrowing: bool) -> Reply<Borrowing> {
    if borrowing != borrower.is_borrowing() {
        borrower.set_borrowing(borrowing);
        tracing::info!(
            "{}",
            if borrowing { "borrowing" } else { "not borrowing: what is evicted is not put at lenders" }
        );
    }
    Reply::Done(Borrowing {
        borrowing: borrower.is_borrowing(),
        puts_under_way: borrower.puts_under_way() as u64,
        evictions: borrower.sees_evictions().then(|| borrower.metrics().evictions.get()),
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

/// The source of evictions, if there is one, and the control groups whose pages are lent.
type Evictions = (Option<Box<dyn EvictionSource>>, Option<Cgroups>);

/// Sets up the eviction tap, and the control groups that it distinguishes.
fn evictions(options: &Options, device: u64) -> Result<Evictions> {
    Ok((eviction_source(options, device)?, cgroups(&options.policies.cgroup)?))
}

/// The eviction tap, if it is requested and available. Otherwise logs or returns the reason in one
/// line.
fn eviction_source(options: &Options, device: u64) -> Result<Option<Box<dyn EvictionSource>>> {
    if options.policies.fill == PopulateName::Read && !options.policies.cgroup.is_empty() {
        bail!("--fill read does not see whose pages are evicted: leave out --cgroup, or use --fill evict");
    }
    if options.policies.fill == PopulateName::Read || (options.lender.is_empty() && !options.pool.is_wanted()) {
        return Ok(None);
    }
    let tells_cgroup = !options.policies.cgroup.is_empty();
    match tap::BpfTap::load(
        tap::Target { device, tells_cgroup, takes_hints: true },
        memory::ring_bytes(options.policies.ring),
    ) {
        Ok(tap) => Ok(Some(Box::new(tap))),
        Err(error) if tells_cgroup => Err(error).context("cannot tap evictions, which say whose they are (--cgroup)"),
        Err(error) if options.policies.fill == PopulateName::Evict => {
            Err(error).context("cannot tap evictions (--fill evict)")
        }
        Err(error) => {
            tracing::warn!("evictions cannot be tapped: {error}. Pages are lent when they are read instead");
            Ok(None)
        }
    }
}

/// When pages are lent.
fn populate(borrower: &Borrower) -> Populate {
    if borrower.sees_evictions() { Populate::Eviction } else { Populate::Read }
}

/// The status of a mount: `description` has the parts that do not change.
fn status(description: report::Mount, mount: &mount::Mount, borrower: &Borrower) -> report::Mount {
    let (read_us, get_is_late_us) = borrower.disk_us();
    report::Mount {
        fill: populate(borrower),
        // Without a tap, a page that is given away would not come back.
        strategy: if borrower.sees_evictions() { description.strategy } else { Policy::NonInclusive },
        lender_is_up: borrower.lender_is_up(),
        lenders: borrower.lenders(),
        disk: report::Disk { read_us, get_is_late_us },
        streams: borrower.streams().to_owned(),
        curve: borrower.curve(),
        borrowing: borrower.is_borrowing(),
        puts_under_way: borrower.puts_under_way() as u64,
        borrower: borrower.metrics().read(),
        cgroups: borrower.cgroups(),
        latencies: borrower.latencies(),
        catalog: borrower.census(),
        tap: borrower.tap_counters(),
        mount: mount.status(),
        ..description
    }
}
