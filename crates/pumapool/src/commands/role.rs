//! `pumapool role`: says what a node that has joined is to do.

use crate::daemon::{control, reported};
use anyhow::{Result, anyhow, bail};
use clap::ValueEnum;
use pool::role::Wanted;
use report::{Reply, RoleSet};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

/// How long the node may take to answer: it may be waiting for a mount.
const LIMIT: Duration = Duration::from_secs(10);

/// The command, as it is sent: "role lend".
pub const COMMAND: &str = "role ";

/// Options of `role`.
#[derive(clap::Args)]
pub struct Options {
    /// What it is to do from now on, until it is told something else or restarted.
    #[arg(value_enum)]
    role: Name,

    /// The node, if there are several on this machine: its process id, as `status` shows it.
    #[arg(long)]
    pid: Option<u32>,
}

/// A role on the command line.
#[derive(Clone, Copy, Debug, ValueEnum, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// What it needs.
    Auto,
    /// Lend, and not borrow.
    Lend,
    /// Borrow, and not lend.
    Borrow,
}

impl From<Name> for Wanted {
    fn from(name: Name) -> Wanted {
        match name {
            Name::Auto => Wanted::Auto,
            Name::Lend => Wanted::Lend,
            Name::Borrow => Wanted::Borrow,
        }
    }
}

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let mut nodes = report::All::new(control::ask_kind("join"), Vec::new()).nodes;
    nodes.retain(|node| options.pid.is_none_or(|pid| node.status.pid == pid));
    let node = match &nodes[..] {
        [node] => node,
        [] => bail!("no such node of yours runs on this machine; `pumapool status` shows those that do"),
        _ => bail!("several nodes run on this machine: say which one with --pid, as `pumapool status` shows it"),
    };
    let wanted = reported::role_wanted(options.role.into());
    let reply: Reply<RoleSet> = control::request(node.socket.as_ref(), &format!("{COMMAND}{wanted}"), LIMIT)?;
    let set = reply.done().map_err(|error| anyhow!("the node does not do it: {error}"))?;
    if set.wanted != wanted {
        bail!("the node has not heard it all; try again");
    }
    let at = &node.status.listen;
    // It is done, whether anybody hears of it or not.
    let _ = writeln!(io::stdout(), "the role of the node {at} is {wanted} from now on");
    Ok(ExitCode::SUCCESS)
}
