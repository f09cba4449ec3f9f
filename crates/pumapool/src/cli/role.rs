//! The options of `pumapool role`.

use clap::ValueEnum;
use discovery::role::Wanted;
use serde::{Deserialize, Serialize};

/// Options of `role`.
#[derive(clap::Args)]
pub struct Options {
    /// The node's role from now on, until it gets another one or is restarted.
    #[arg(value_enum)]
    pub role: Name,

    /// Process id of the node, if there are several on this machine. `status` shows it.
    #[arg(long)]
    pub pid: Option<u32>,
}

/// A role on the command line.
#[derive(Clone, Copy, Debug, ValueEnum, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Name {
    /// Lend or borrow, as the node needs it.
    Auto,
    /// Only lend.
    Lend,
    /// Only borrow.
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
