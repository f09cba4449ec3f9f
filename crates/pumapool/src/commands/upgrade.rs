//! `pumapool upgrade`: another program takes a mount over, while it is in use.

use crate::commands::umount;
use crate::daemon::control;
use anyhow::{Context, Result, anyhow, bail};
use report::{Reply, Upgraded};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How long it may take: the daemon leaves, the new program starts or fails to, the old one serves
/// again.
const LIMIT: Duration = Duration::from_secs(60);

/// Options of `upgrade`.
#[derive(clap::Args)]
pub struct Options {
    /// Where it is mounted.
    #[arg(required_unless_present = "all")]
    mountpoint: Option<PathBuf>,

    /// All mounts that the program at this path has made, also before it was replaced.
    #[arg(long, conflicts_with = "mountpoint")]
    all: bool,

    /// The program that is to serve it [default: the one that this command is].
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let binary = match &options.binary {
        Some(binary) => binary.clone(),
        None => std::env::current_exe().context("cannot find this program; name one by --binary")?,
    };
    let binary = binary.canonicalize().with_context(|| {
        format!("cannot find {}, the program that is to serve it (--binary FILE)", binary.display())
    })?;
    let Some(program) = binary.to_str().filter(|path| !path.contains('\n')) else {
        bail!("{} is no path that can be passed on; put the program elsewhere", binary.display());
    };
    match &options.mountpoint {
        Some(mountpoint) => upgrade(mountpoint, program).map(|()| ExitCode::SUCCESS),
        None => umount::each(|mountpoint| upgrade(mountpoint, program)),
    }
}

fn upgrade(mountpoint: &Path, program: &str) -> Result<()> {
    let (mountpoint, daemon) = umount::find(mountpoint)?;
    let Some(daemon) = daemon else {
        bail!("the daemon of {} does not answer; `pumapool status` shows those that do", mountpoint.display());
    };
    let wanted = format!("upgrade {program}");
    let reply: Reply<Upgraded> = control::request(daemon.socket.as_ref(), &wanted, LIMIT)?;
    let Upgraded { pid, pause_ms } = reply.done().map_err(|error| anyhow!("not upgraded: {error}"))?;
    let at = mountpoint.display();
    // It is done, whether anybody hears of it or not.
    let _ = writeln!(io::stdout(), "{at} is served by process {pid} now, after a pause of {pause_ms} ms");
    Ok(())
}
