//! `pumapool join`: a node that lends while its memory is idle, and borrows while its mounts evict.
//!
//! The lender and gossip are in this process. Each mount is a `pumapool mount` of its own
//! (`joined.rs`), which survives like any other. Twice a second the node asks its mounts for their
//! evictions, [`discovery::role`] decides on the role, and the node applies it:
//!
//! - to *borrow*: first the lender refuses new pages, gives back its pages, and gossip announces
//!   that it does not lend. Only when the lender is empty do the mounts begin to put.
//! - to *lend*: first each mount confirms that it does not put any more. Only then does the lender
//!   accept pages. The mounts still get pages that they have at other lenders, until these are
//!   gone.
//!
//! The node must never lend and borrow at once. Lending does not begin before each mount has
//! confirmed that it puts nothing.

use crate::cli::join::Options;
use crate::cli::lend::{CHANGEABLE, Lending};
use crate::cli::role::Name;
use crate::commands::{joined::Mounts, lend, role};
use crate::config::{self, Changeable};
use crate::daemon::{
    Daemon, confine,
    control::{self, answer},
    pool, security,
};
use ::discovery::Gossip;
use ::discovery::role::{self as node_role, Config, Role, Roles};
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use parking_lot::Mutex;
use report::{Reply, RoleName, RoleSet};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};
use wire::address::Address;

/// Time between two rounds.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Limit on the mounts of a node. Each round asks them one after the other.
const MOUNTS_MAX: usize = 64;

/// State that the threads share.
struct Node {
    roles: Mutex<Roles>,
    mounts: Mutex<Mounts>,
    lender: lender::Handle,
    gossip: Option<Arc<Gossip>>,
    /// The address at which others reach the lender.
    address: Address,
}

/// Runs the command.
pub fn run(options: Options, log: &str) -> Result<ExitCode> {
    ensure!(options.mounts.len() <= MOUNTS_MAX, "a node has at most {MOUNTS_MAX} mounts; start another one for more");
    let networks: Vec<_> = options.pool.network().into_iter().chain([options.lending.listen.clone()]).collect();
    let security = security::of(&options.security, &networks)?;
    let daemon = match Daemon::prepare("join", &options.daemon)? {
        Ok(daemon) => daemon,
        Err(code) => return Ok(code),
    };
    let server = lender::Server::bind(lend::config(&options.lending, security.clone())?)?;
    let own = pool::lender_address(&options.pool, server.local_address())?;
    // While programs can still be started, with all rights. They open their own descriptors, and
    // none of ours.
    let mounts = Mounts::start(&options.mounts, log, &|wanted| options.mount(wanted, &own))?;
    // Before the first thread is started: threads inherit it. Mounts are ended by signals, which
    // need no rights beyond the user's.
    let confined = confine::lender(server.local_address(), daemon.metrics(), &control::folder(), config::path());
    let description = lend::describe(&daemon, server.local_address(), confined, &security);
    let address = server.local_address().to_string();
    let handle = server.handle();
    // Do not lend before the mounts have answered.
    handle.set_lending(false);
    let gossip = pool::lend(&options.pool, security, &handle, server.local_address())?;
    let config = Config { calm: Duration::from_secs(options.calm), wanted: options.role.into() };
    let node = Arc::new(Node {
        roles: Mutex::new(Roles::new(config, Instant::now())),
        mounts: Mutex::new(mounts),
        lender: handle.clone(),
        gossip: gossip.clone(),
        address: own,
    });
    node.look();
    if !node.mounts.lock().see_evictions() {
        tracing::warn!(
            "no mount sees evictions (`pumapool doctor` says why): the role does not change by itself, only by `pumapool role`"
        );
    }
    let status = {
        let node = node.clone();
        move || {
            // The role does not change while these are looked at one after the other.
            let mounts = node.mounts.lock();
            report::Daemon::Join(Box::new(report::Join {
                lend: lend::status(&description, &node.lender, node.gossip.as_deref()),
                role: node.status(),
                mounts: mounts.status(),
            }))
        }
    };
    let command = {
        let node = node.clone();
        move |wanted: &str, stream: UnixStream| answer(stream, &node.command(wanted))
    };
    let stop = {
        let handle = handle.clone();
        move || {
            // First, no new borrower should connect.
            gossip.iter().for_each(|gossip| gossip.stop());
            handle.shutdown();
        }
    };
    let changeable = {
        let handle = handle.clone();
        Changeable::new(&CHANGEABLE, move |lending: Lending| lend::change(&lending, &handle))
    };
    let (stop_looking, stopped) = sync_channel(0);
    let looking = {
        let node = node.clone();
        let thread = std::thread::Builder::new().name("puma-role".into());
        thread.spawn(move || node.keep_looking(&stopped)).context("cannot start a thread")?
    };
    let message = format!("joined as {address}, with {} mounts", options.mounts.len());
    let serving = daemon.can_change(changeable).serve_commands(&message, status, command, stop)?;
    tracing::info!("{message}");
    let ran = server.run();
    drop(stop_looking);
    let _ = looking.join();
    node.mounts.lock().stop();
    ran?;
    serving.ended_well();
    Ok(ExitCode::SUCCESS)
}

impl Node {
    fn keep_looking(&self, stopped: &Receiver<()>) {
        while stopped.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            self.look();
        }
    }

    /// One round: asks the mounts, decides on the role, and applies it.
    fn look(&self) {
        let mut mounts = self.mounts.lock();
        let before = self.lender.status();
        let role = {
            let mut roles = self.roles.lock();
            let was = roles.status(Instant::now());
            let role = roles.step(Instant::now(), mounts.evicted_pages(), before.available_bytes);
            if was.role != role.into() {
                tracing::info!("{}", describe(&roles.status(Instant::now())));
            }
            role
        };
        match role {
            Role::Borrow => {
                if before.lending {
                    self.lend(false);
                }
                let lent = self.lender.status();
                mounts.tell(lent.stored_pages == 0 && lent.zero_pages == 0);
            }
            Role::Lend => {
                mounts.tell(false);
                let may_lend = mounts.none_borrows();
                if may_lend != before.lending {
                    self.lend(may_lend);
                }
            }
        }
    }

    fn lend(&self, lending: bool) {
        self.lender.set_lending(lending);
        if let Some(gossip) = &self.gossip {
            pool::tell(gossip, &self.lender, &self.address);
        }
    }

    fn status(&self) -> report::Role {
        self.roles.lock().status(Instant::now())
    }

    fn command(&self, wanted: &str) -> Reply<RoleSet> {
        let name = wanted.strip_prefix(role::COMMAND).and_then(|name| Name::from_str(name, false).ok());
        match name {
            Some(name) => {
                self.roles.lock().set_wanted(name.into());
                Reply::Done(RoleSet { wanted: node_role::Wanted::from(name).into() })
            }
            None => Reply::refused(format!("{wanted:?} is nothing that can be asked of a node")),
        }
    }
}

fn describe(status: &report::Role) -> String {
    let role = if status.role == RoleName::Lend { "lending" } else { "borrowing" };
    format!("{role}: {}", status.reason)
}
