//! The answers of a daemon to commands over its control socket.

use serde::{Deserialize, Serialize};

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Reply<T> {
    /// The command was not executed.
    Refused {
        /// Why, and what to do.
        error: String,
    },
    /// The command was executed.
    Done(T),
}

impl<T> Reply<T> {
    /// Creates a refusal with this reason.
    pub fn refused(error: impl Into<String>) -> Reply<T> {
        Reply::Refused { error: error.into() }
    }

    /// Returns the answer.
    ///
    /// # Errors
    /// Returns the reason that the daemon gave for a refusal.
    pub fn done(self) -> Result<T, String> {
        match self {
            Reply::Refused { error } => Err(error),
            Reply::Done(answer) => Ok(answer),
        }
    }
}

/// Another program serves the mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgraded {
    /// The process that serves it now.
    pub pid: u32,
    /// How long no process served it.
    pub pause_ms: u64,
}

/// A node is told what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleSet {
    /// The role from now on.
    pub wanted: crate::RoleWanted,
}

/// A mount was told whether to borrow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Borrowing {
    /// Whether it borrows.
    pub borrowing: bool,
    /// Put messages that are not answered yet.
    pub puts_under_way: u64,
    /// Pages that its daemon has seen evicted; none if it does not see evictions.
    pub evictions: Option<u64>,
}
