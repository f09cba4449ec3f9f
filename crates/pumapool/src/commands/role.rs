//! `pumapool role`: sets the role of a node that has joined a pool.

use crate::cli::role::Options;
use crate::daemon::control;
use anyhow::{Result, anyhow, bail};
use discovery::role::Wanted;
use report::{Reply, RoleSet, RoleWanted};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

/// Time limit for the node's answer: the node may be waiting for a mount.
const LIMIT: Duration = Duration::from_secs(10);

/// Beginning of the message to the daemon, such as "role lend".
pub const COMMAND: &str = "role ";

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let mut nodes = report::All::new(control::ask_kind("join"), Vec::new()).nodes;
    nodes.retain(|node| options.pid.is_none_or(|pid| node.status.lend.pid == pid));
    let node = match &nodes[..] {
        [node] => node,
        [] => bail!("no such node of yours runs on this machine; `pumapool status` shows those that do"),
        _ => {
            bail!("several nodes run on this machine; choose one with --pid. `pumapool status` shows their process ids")
        }
    };
    let wanted = RoleWanted::from(Wanted::from(options.role));
    let reply: Reply<RoleSet> = control::request(node.socket.as_ref(), &format!("{COMMAND}{wanted}"), LIMIT)?;
    let set = reply.done().map_err(|error| anyhow!("the node does not change its role: {error}"))?;
    if set.wanted != wanted {
        bail!("the node received only a part of the request; try again");
    }
    let at = &node.status.lend.listen;
    // The role has changed, even if nobody reads the output.
    let _ = writeln!(io::stdout(), "the role of the node {at} is {wanted} from now on");
    Ok(ExitCode::SUCCESS)
}
