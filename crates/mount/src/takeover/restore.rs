//! Resumes a mount whose daemon is gone: the connection to the kernel, its inodes and open files,
//! and the unanswered requests.
//!
//! The order matters. Everything is restored before the first request is read. Unanswered requests
//! are requested again before that, too, because the kernel sends again *every* request that was
//! read and not answered. Outdated caches of the kernel are dropped only when the workers serve,
//! because the drop sends dirty pages to them.

use crate::backing::crossing::Crossing;
use crate::backing::dirty_ranges::DirtyRanges;
use crate::filesystem::Passthrough;
use crate::inode::Inodes;
use crate::inode::handle::Handles;
use crate::inode::opened::Opened;
use crate::inode::purge::Purge;
use crate::inode::revalidation::Revalidations;
use crate::kernel::external_changes::ExternalChanges;
use crate::kernel::invalidation::Invalidations;
use crate::kernel::passthrough::Connection;
use crate::lifecycle::config::{Config, WriteMode};
use crate::lifecycle::error::Error;
use crate::lifecycle::running::{Mount, MountInfo};
use crate::lifecycle::starting::{THREADS_MIN, descriptors, failed, raise_limits};
use crate::lifecycle::status::Counters;
use crate::lifecycle::workers::WORKERS_MAX;
use crate::ops::credentials::Privilege;
use crate::ops::readdirplus::ReaddirplusHints;
use crate::system::ProcPath;
use crate::takeover::Keep;
use crate::takeover::channel::{Channel, Held};
use crate::takeover::inherited::Inherited;
use crate::takeover::layout::{self, State};
use crate::takeover::memory::Memory;
use crate::takeover::replay::Replays;
use borrower::Borrower;
use fuse::abi::init;
use fuse::{Negotiated, Session};
use hashbrown::{HashMap, HashSet};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, open, openat};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

impl Mount {
    /// Takes a mount over from a daemon that is gone. Of `config`, the paths and the write mode are
    /// ignored, because they were decided when the mount was made.
    ///
    /// # Errors
    /// Fails if the descriptors are incomplete, or of another version.
    pub fn take_over<E>(
        config: &Config,
        inherited: Inherited,
        supervisor: Option<Arc<Channel>>,
        make_borrower: impl FnOnce(MountInfo) -> Result<Arc<Borrower>, E>,
    ) -> Result<Mount, Error>
    where
        E: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        raise_limits();
        let taking = |error: io::Error| failed("take the mount over", error);
        let missing = |what: &str| taking(io::Error::other(format!("{what} was not given")));
        let Inherited { state, source, mut devices, opens, nodes } = inherited;
        let state = state.ok_or_else(|| missing("the state memory"))?;
        let readable = source.ok_or_else(|| missing("the backing directory"))?;
        let device = devices.remove(&0).ok_or_else(|| missing("the connection to the kernel"))?;
        let (memory, state) = Memory::take_over(state).map_err(taking)?;
        let keep = Keep::new(Arc::new(memory), supervisor).map_err(taking)?;
        keep.memory.claim_when_free();
        let session = Session::resume(device, Negotiated { minor: state.minor, capabilities: state.capabilities });
        let can_resend = state.capabilities & init::HAS_RESEND != 0;
        if !can_resend {
            // No daemon would ever answer requests that were read from these descriptors. When they
            // are closed everywhere, the kernel fails these requests.
            devices.keys().for_each(|number| keep.release(Held::Device(*number)));
            devices = BTreeMap::new();
            tracing::warn!(
                "this kernel cannot send requests again (Linux 6.9 can): those that were under way fail with an error"
            );
        }
        let own_device = state.own_device;
        let borrower =
            make_borrower(MountInfo { device: own_device }).map_err(|error| Error::Borrower(error.into()))?;
        let (source, mountpoint) = (state.source.clone(), state.mountpoint.clone());
        let connection = Connection::new(&session, &keep.memory, config.pass);
        let invalidations = Invalidations::new(config.threads.max(WORKERS_MAX), &session);
        let filesystem = restore(config, state, readable, opens, nodes, keep, connection, invalidations, borrower)
            .map_err(taking)?;
        if can_resend && let Err(error) = session.notifier().resend() {
            // The mount has gone meanwhile.
            tracing::debug!(%error, "the kernel does not send requests again");
        }
        let threads = config.threads.max(THREADS_MIN);
        let mount = Mount::begin(filesystem, source, mountpoint, &session, threads, devices)
            .map_err(|error| failed("start the threads", error))?;
        mount.drop_stale();
        Ok(mount)
    }
}

#[allow(clippy::too_many_arguments)] // What was given, and what it needs, each used once.
fn restore(
    config: &Config,
    state: State,
    readable: OwnedFd,
    opens: HashMap<u64, OwnedFd>,
    mut held: HashMap<u64, OwnedFd>,
    keep: Arc<Keep>,
    connection: Arc<Connection>,
    invalidations: Invalidations,
    borrower: Arc<Borrower>,
) -> io::Result<Passthrough> {
    let privilege = if state.root { Privilege::Root } else { Privilege::User };
    let memory = keep.memory.clone();
    let path_only = |fd: &OwnedFd| open(ProcPath::new(fd).path(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    held.insert(fuse::abi::ROOT_ID, path_only(&readable)?);
    let handles_from = (privilege == Privilege::Root).then(|| readable.try_clone()).transpose()?;
    let descriptors = descriptors(config, privilege);
    // An open file may have no name left; its own descriptor always leads to it.
    let is_lost = |node: &layout::Node| node.handle.is_none() || node.flags & layout::node::DELETED != 0;
    let lost: HashSet<u64> = state.nodes.iter().filter(|node| is_lost(node)).map(|node| node.nodeid).collect();
    for known in &state.opens {
        // If few descriptors are left, files with a name are reached by their handles.
        let is_wanted = lost.contains(&known.nodeid) || (held.len() + state.opens.len()) * 2 < descriptors.limit();
        if let (Some(fd), false) = (opens.get(&known.handle), held.contains_key(&known.nodeid) || !is_wanted) {
            held.extend(path_only(fd).ok().map(|fd| (known.nodeid, fd)));
        }
    }
    borrower.keys_from(page::FileKey(state.next_key));
    let replays = Replays::new(&memory, state.intents);
    let crossing = Crossing::new(&readable, config.cross_mounts)?;
    let (inodes, lost_nodes) = Inodes::restore(
        &state.devices,
        state.nodes,
        held,
        &connection,
        borrower.clone(),
        keep.clone(),
        descriptors,
        handles_from,
        &crossing,
    );
    inodes.get(fuse::abi::ROOT_ID)?;
    let handles = Handles::new(keep.clone());
    let lost_opens = restore_opens(&state.opens, opens, &handles, &inodes, &keep);
    inodes.all_are_open();
    if lost_nodes + lost_opens > 0 {
        tracing::warn!(
            "{lost_nodes} inodes and {lost_opens} open files could not be found again: who uses them gets an error"
        );
    }
    let external_changes = ExternalChanges::start(&readable, config, privilege, true)?;
    Ok(Passthrough {
        inodes,
        handles,
        keep,
        connection,
        replays,
        borrower,
        dirty_ranges: DirtyRanges::new(config),
        invalidations,
        purge: Purge::default(),
        readdirplus_hints: ReaddirplusHints::default(),
        revalidations: Revalidations::default(),
        external_changes,
        crossing,
        counters: Counters::default(),
        write_mode: if state.write_back { WriteMode::Back } else { WriteMode::Through },
        privilege,
        checks_lists: state.capabilities & init::POSIX_ACL != 0,
        attr_timeout: config.attr_timeout,
        reported_attr_timeout: config.reported_attr_timeout,
        entry_timeout: config.entry_timeout,
        source: readable,
        own_device: state.own_device,
    })
}

/// Returns the number of opens that could not be restored. Descriptors without a slot belong to
/// unanswered opens, and are closed.
fn restore_opens(
    known: &[layout::Open],
    mut opens: HashMap<u64, OwnedFd>,
    handles: &Handles,
    inodes: &Inodes,
    keep: &Keep,
) -> usize {
    let mut lost = 0;
    let mut shared = HashMap::new();
    // Opens that share a descriptor come after those for which the supervisor holds it.
    let (first, second): (Vec<&layout::Open>, Vec<_>) =
        known.iter().partition(|open| open.is_directory || opens.contains_key(&open.handle));
    for open in first.into_iter().chain(second) {
        let slot = keep.memory.open_at(open.slot); // Free again, if it cannot be restored.
        let Ok(inode) = inodes.get(open.nodeid) else {
            lost += 1;
            continue;
        };
        let descriptors = inodes.descriptors();
        if open.is_directory {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            match inodes.anchor(&inode).and_then(|at| openat(at, c".", flags, Mode::empty())) {
                Ok(fd) => {
                    let taken = descriptors.restore(open.uid, inode.charge());
                    handles.restore_directory(open.handle, slot, fd, inode, taken);
                }
                Err(_) => lost += 1,
            }
            continue;
        }
        let alike = (open.nodeid, open.uid, open.flags);
        if let Some(fd) = opens.remove(&open.handle) {
            let flags = rustix::fs::fcntl_getfl(&fd).unwrap_or(OFlags::RDONLY);
            let opened = Opened::new(fd, flags, descriptors.restore(open.uid, inode.charge()));
            *opened.kept_for.lock() = Some(open.handle);
            inode.newest.set(&opened);
            shared.insert(alike, opened);
        }
        match shared.get(&alike) {
            Some(opened) => handles.restore_file(open.handle, slot, opened.clone(), inode),
            None => lost += 1,
        }
    }
    opens.keys().for_each(|handle| keep.release(Held::Open(*handle)));
    lost
}
