//! PostgreSQL in a group of its own, and go-tpc (github.com/pingcap/go-tpc), which fills and
//! queries it.

use super::{Case, Run};
use crate::program::{self, Program};
use crate::world::World;
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use testbed::{Failure, Group, wait_until};

/// The database.
pub const DATABASE: &str = "papers";
const USER: &str = "puma";
const HOST: &str = "127.0.0.1";
/// PostgreSQL does not run as root. It runs in a user namespace with only this user, who is the
/// bench's user outside.
const USER_INSIDE: u32 = 65_534;
/// The share of a server's memory for its own cache: one part in so many, the usual value for the
/// papers' GiB.
const SHARED_BUFFERS_SHARE: u64 = 8;
/// Part of go-tpc's output if a statement was refused.
const GO_TPC_FAILED: &str = "failed, err";
/// Time limit for a server to accept connections. It may have to read its log first.
const READY_MAX: Duration = Duration::from_secs(300);
/// Time limit for its end: a checkpoint writes everything back.
const END_MAX: Duration = Duration::from_secs(300);

/// Fails if one of the programs is missing.
pub fn check() -> Result<(), Failure> {
    program::check(&["initdb", "postgres", "psql", "pg_isready", "go-tpc", "unshare"])
}

/// A running server.
pub struct Server<'a> {
    world: &'a World,
    program: Program<'a>,
    port: u16,
}

impl<'a> Server<'a> {
    /// Starts a server with its data there. `is_safe`: committed data is on the disk; otherwise
    /// nothing is waited for.
    pub fn start(
        world: &'a World,
        data: &Path,
        memory_bytes: u64,
        is_safe: bool,
        groups: &[&Group],
    ) -> Result<Server<'a>, Failure> {
        // No other program gets this port between here and the server's start.
        let port = TcpListener::bind((HOST, 0)).and_then(|listener| listener.local_addr());
        let port = port.map_err(Failure::attempted("finding a free port"))?.port();
        let mut command = inside("postgres")?;
        command.arg("-D").arg(data).args(["-p", &port.to_string(), "-h", HOST, "-k", ""]);
        let settings = [
            format!("shared_buffers={}kB", (memory_bytes / SHARED_BUFFERS_SHARE) >> 10),
            format!("effective_cache_size={}kB", memory_bytes >> 10),
            format!("fsync={}", if is_safe { "on" } else { "off" }),
            // Compiled queries need more memory than a small group has.
            "jit=off".to_owned(),
            // The usual value at the time. Remains of an old log in the directory are no data.
            "max_wal_size=128MB".to_owned(),
            "min_wal_size=32MB".to_owned(),
            "max_connections=20".to_owned(),
            // It would begin after a minute and read whole tables: each round would measure
            // something else.
            "autovacuum=off".to_owned(),
        ];
        for setting in &settings {
            command.args(["-c", setting]);
        }
        command.stdin(Stdio::null());
        let program = Program::start(world, "postgres", command, groups)?;
        let server = Server { world, program, port };
        let is_ready = program::find("pg_isready")?;
        let asked = || {
            let mut command = Command::new(&is_ready);
            command.args(["-q", "-h", HOST, "-p", &port.to_string()]);
            world.interrupt.check().is_err() || command.status().is_ok_and(|status| status.success())
        };
        let is_ready = wait_until(READY_MAX, asked);
        world.interrupt.check()?;
        if is_ready {
            return Ok(server);
        }
        let log = world.log("postgres");
        Err(Failure::Problem(format!(
            "postgres is not ready after {READY_MAX:?}; {} ends with: {}",
            log.display(),
            testbed::tail(&log)
        )))
    }

    /// Executes statements, one after the other.
    pub fn execute(&self, database: &str, statements: &[&str]) -> Result<(), Failure> {
        for statement in statements {
            let mut command = Command::new(program::find("psql")?);
            command.args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-h", HOST, "-p", &self.port.to_string()]);
            command.args(["-U", USER, "-d", database, "-c", statement]);
            program::run(self.world, "psql", command, &[])?;
        }
        Ok(())
    }

    /// Runs go-tpc. Returns its output.
    pub fn go_tpc(&self, arguments: &[&str]) -> Result<String, Failure> {
        let mut command = Command::new(program::find("go-tpc")?);
        command.args(arguments).args(["-d", "postgres", "-H", HOST, "-P", &self.port.to_string()]);
        command.args(["-U", USER, "-D", DATABASE, "--conn-params", "sslmode=disable"]);
        let said = program::run(self.world, "go-tpc", command, &[])?;
        // Its exit code is 0 nevertheless.
        match said.lines().find(|line| line.contains(GO_TPC_FAILED)) {
            Some(line) => Err(Failure::Problem(format!("go-tpc {}: {line}", arguments.join(" ")))),
            None => Ok(said),
        }
    }

    /// Ends it normally.
    pub fn stop(mut self) -> Result<(), Failure> {
        // Without waiting for clients, but with a last checkpoint.
        self.program.process().signal(Signal::INT)?;
        match self.program.process().wait(END_MAX)? {
            Some(status) if status.success() => Ok(()),
            ended => Err(Failure::Problem(format!("postgres did not end in order: {ended:?}"))),
        }
    }
}

/// The sources of pages, up to a moment.
pub struct Reads {
    gets: u64,
    disk_reads: u64,
}

impl Reads {
    pub fn now(world: &World, case: &Case<'_>) -> Result<Reads, Failure> {
        let gets = case.side.map_or(Ok(0), |side| side.counter(|of| of.lender_pages))?;
        Ok(Reads { gets, disk_reads: world.disk.read_count()? })
    }

    /// The pages since then.
    pub fn until_now(&self, world: &World, case: &Case<'_>) -> Result<BTreeMap<String, f64>, Failure> {
        let now = Reads::now(world, case)?;
        let values = [("gets", now.gets - self.gets), ("disk_reads", now.disk_reads - self.disk_reads)];
        Ok(values.map(|(key, value)| (key.to_owned(), value as f64)).into())
    }
}

/// Makes a database in a directory, fills it, and ends the server. Does nothing if it exists
/// already.
pub fn prepare(
    world: &World,
    directory: &Path,
    memory_bytes: u64,
    fill: impl Fn(&Server<'_>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if directory.exists() {
        return Ok(());
    }
    fs::create_dir(directory)
        .and_then(|()| fs::set_permissions(directory, Permissions::from_mode(0o700)))
        .map_err(Failure::attempted(format!("making {}", directory.display())))?;
    let mut command = inside("initdb")?;
    command.arg("-D").arg(directory).args(["-U", USER, "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync"]);
    program::run(world, "initdb", command, &[])?;
    let server = Server::start(world, directory, memory_bytes, false, &[])?;
    server.execute("postgres", &[&format!("create database {DATABASE}")])?;
    fill(&server)?;
    // Twice: the second one removes the log that the first one left.
    server.execute(DATABASE, &["vacuum (analyze)", "checkpoint", "checkpoint"])?;
    server.stop()
}

/// Replaces the used database by a copy of the original one.
pub fn copy(world: &World, from: &Path, to: &Path) -> Result<(), Failure> {
    if to.exists() {
        fs::remove_dir_all(to).map_err(Failure::attempted(format!("removing {}", to.display())))?;
    }
    let mut command = Command::new("cp");
    command.arg("-a").args([from, to]);
    program::run(world, "cp", command, &[]).map(drop)
}

/// Starts the server for a case, in memory of its own, its files in the caches. Its settings are
/// those of a machine with that memory.
pub fn serve<'a>(run: &Run<'a>, case: &Case<'_>, group: &Group, memory_bytes: u64) -> Result<Server<'a>, Failure> {
    run.fill_caches(case, group)?;
    Server::start(run.world, &case.path, memory_bytes, true, &[group])
}

/// A program of PostgreSQL, as a user other than root.
fn inside(name: &str) -> Result<Command, Failure> {
    let mut command = Command::new("unshare");
    let user = USER_INSIDE.to_string();
    command.args(["--user", "--map-user", &user, "--map-group", &user, "--"]).arg(program::find(name)?);
    Ok(command)
}
