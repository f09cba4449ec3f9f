//! What a daemon answers to a command over its control socket.

use serde::{Deserialize, Serialize};

/// The answer to a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Reply<T> {
    /// It is not done.
    Refused {
        /// Why, and what to do.
        error: String,
    },
    /// It is done.
    Done(T),
}

impl<T> Reply<T> {
    /// It is not done, for this reason.
    pub fn refused(error: impl Into<String>) -> Reply<T> {
        Reply::Refused { error: error.into() }
    }

    /// The answer, or why there is none.
    ///
    /// # Errors
    /// The reason that the daemon gave.
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
    /// What it is told from now on.
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
