//! Puma for the demo: a lender, and the mount over the data set, through the command that users
//! have.
//!
//! The lender is in a memory group of its own, as if it were another machine. The mount daemon is
//! outside of the reader's memory group, because its pages are not the reader's. But it is on the
//! same slow disk, because it reads this disk for the reader.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use testbed::{Failure, Group, Interrupt, Process, Puma, PumaMount, Scratch, SlowDisk};

/// Time limit for the lender to end.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Names of the daemons' logs.
const LENDER_LOG: &str = "demo-lend";
const MOUNT_LOG: &str = "demo-mount";
/// Free memory that the lender keeps.
const RESERVE_BYTES: u64 = 64 << 20;
/// The lender's own needs, in addition to lent memory.
const LENDER_OWN_BYTES: u64 = 64 << 20;
/// The configuration of Puma.
pub struct Setup<'a> {
    /// The command.
    pub pumapool: &'a Path,
    /// The maximum of lent memory.
    pub capacity_bytes: u64,
    /// Whether the lender gets a memory group.
    pub limit_lender: bool,
    /// Passed to the mount unchanged.
    pub strategy: Option<&'a str>,
    /// The directory that is mounted.
    pub source: &'a Path,
    /// The mountpoint.
    pub mount_point: PathBuf,
    /// The slow disk of the source.
    pub slow_disk: Option<&'a SlowDisk>,
    /// The directory of the daemons' logs.
    pub logs: &'a Path,
}

/// A lender and a mount. Dropping this ends both.
pub struct Running {
    puma: Puma,
    // Drop order: the mount before the things that it depends on, processes before their groups.
    mount: PumaMount,
    lender: Process,
    _mount_group: Group,
    _lender_group: Group,
    _socket: Scratch,
}

impl Running {
    /// Starts both, and waits until they are ready.
    pub fn start(setup: &Setup<'_>, interrupt: &Interrupt) -> Result<Running, Failure> {
        let puma = Puma {
            pumapool: setup.pumapool.to_owned(),
            logs: setup.logs.to_owned(),
            interrupt: Some(interrupt.clone()),
        };
        // In the system's directory for temporary files, because paths of sockets must be short.
        let socket = Scratch::new("demo-socket")?;
        let address = format!("unix:{}", socket.path().join("lender").display());
        // As between machines: the figures include the cost of sealing.
        let key = socket.path().join("pool.key");
        puma.new_key(&key)?;
        for log in [LENDER_LOG, MOUNT_LOG] {
            let _of_no_earlier_run = fs::remove_file(setup.logs.join(format!("{log}.log")));
        }
        let limit_bytes = setup.capacity_bytes + RESERVE_BYTES + LENDER_OWN_BYTES;
        let lender_group = Group::create("lender", setup.limit_lender.then_some(limit_bytes), None)?;
        let mut lend = Command::new(setup.pumapool);
        lend.args(["lend", "--listen", &address, "--foreground"]).arg("--key").arg(&key);
        lend.args(["--capacity", &mib(setup.capacity_bytes), "--reserve", &mib(RESERVE_BYTES)]);
        let (lender, _) = puma.start(lend, LENDER_LOG, &[&lender_group])?;

        let mount_group = Group::create("mount", None, setup.slow_disk)?;
        let mut mount = Command::new(setup.pumapool);
        mount.arg("mount").args([setup.source, &setup.mount_point]);
        mount.args(["--lender", &address, "--foreground"]).arg("--key").arg(&key);
        // While the pool is filled the disk has its full speed, and the gate would bypass the
        // lender.
        mount.args(["--gate", "off"]);
        if let Some(strategy) = setup.strategy {
            mount.args(["--strategy", strategy]);
        }
        let mount = puma.mount(mount, &setup.mount_point, MOUNT_LOG, &[&mount_group])?;
        let (_mount_group, _lender_group) = (mount_group, lender_group);
        Ok(Running { puma, mount, lender, _mount_group, _lender_group, _socket: socket })
    }

    /// The process that reads the disk for all reads through the mount.
    pub fn mount_pid(&self) -> u32 {
        self.mount.pid()
    }

    /// Pages that lent memory has answered so far, including pending ones.
    pub fn pool_pages(&self) -> Option<u64> {
        let status = self.mount.find().ok()?;
        let of = status.borrower;
        Some(of.lender_pages + of.buffer_pages + of.zero_pages)
    }

    /// Whether pages are lent only when they are read from the disk, because their eviction cannot
    /// be seen.
    pub fn populates_on_read(&self) -> bool {
        self.mount.find().is_ok_and(|status| status.fill != report::Populate::Eviction)
    }

    /// What Puma says about itself, if it says anything.
    pub fn status(&self) -> Option<report::All> {
        self.puma.status().ok()
    }

    /// Unmounts, and ends both daemons.
    pub fn end(mut self) -> Result<(), Failure> {
        self.mount.end().map_err(|problem| Failure::Problem(format!("unmounting: {problem}")))?;
        self.lender.stop(ANSWER_MAX)?;
        Ok(())
    }
}

fn mib(bytes: u64) -> String {
    format!("{}MiB", bytes >> 20)
}
