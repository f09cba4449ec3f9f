//! `pumapool upgrade`: another program takes over a mount that is in use.

use crate::cli::upgrade::Options;
use crate::commands::umount;
use crate::daemon::control;
use anyhow::{Context, Result, anyhow, bail};
use report::{Reply, Upgraded};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// Time limit: the daemon stops serving, and the new program starts. If the new program fails, the
/// old one serves again.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let binary = match &options.binary {
        Some(binary) => binary.clone(),
        None => std::env::current_exe().context("cannot find this program; name one by --binary")?,
    };
    let binary = binary
        .canonicalize()
        .with_context(|| format!("cannot find {}, the program to upgrade to (--binary FILE)", binary.display()))?;
    let Some(program) = binary.to_str().filter(|path| !path.contains('\n')) else {
        bail!("the path {} is not UTF-8 or has a line break; move the program elsewhere", binary.display());
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
    // The upgrade is done, even if nobody reads the output.
    let _ = writeln!(io::stdout(), "{at} is served by process {pid} now, after a pause of {pause_ms} ms");
    Ok(())
}
