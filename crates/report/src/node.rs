//! The status of a node that has joined a pool.

use crate::{Lend, measured, words};
use serde::{Deserialize, Serialize};

words! {
    /// The role of a node.
    pub enum RoleName {
        /// It lends.
        Lend = "lend",
        /// It borrows.
        Borrow = "borrow",
    }
}

words! {
    /// The role that an administrator has set for a node.
    pub enum RoleWanted {
        /// The node chooses its role as needed.
        Auto = "auto",
        /// Lend, and not borrow.
        Lend = "lend",
        /// Borrow, and not lend.
        Borrow = "borrow",
    }
}

words! {
    /// The state of a mount of a node.
    pub enum NodeMountState {
        /// It puts evicted pages at lenders.
        Borrows = "borrows",
        /// It does not.
        DoesNotBorrow = "does not borrow",
        /// Its daemon does not answer.
        DoesNotAnswer = "does not answer",
        /// It is no longer mounted.
        Gone = "gone",
    }
}

/// A node that has joined a pool: a lender with a role and mounts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Join {
    /// The lender. Its fields are the node's own in JSON.
    #[serde(flatten)]
    pub lend: Lend,
    /// Its role.
    pub role: Role,
    /// Its mounts.
    pub mounts: Vec<NodeMount>,
}

measured! {
    /// The role of a node, with the reason.
    pub struct Role, "Nodes that lend and borrow by need" of ["join"] by ["node"] {
        /// what it does
        role: RoleName = state Count "pumapool_node_role",
        /// The role that was set.
        wanted: RoleWanted,
        /// Why the role is what it is.
        reason: String,
        /// how long this has been so
        since_ms: u64 = gauge Milliseconds "pumapool_node_role_age_seconds",
        /// how often that has changed
        changes: u64 = counter Count "pumapool_node_role_changes_total",
        /// how long it must be calm now before it lends
        calm_ms: u64 = gauge Milliseconds "pumapool_node_calm_seconds",
        /// what its mounts have evicted lately, which the role is decided by
        evicted_pages_per_second: u64 = gauge Count "pumapool_node_evicted_pages_per_second",
    }
}

measured! {
    /// A mount of a node.
    pub struct NodeMount, "Nodes: their mounts" of ["join"] by ["node", "mount"] {
        /// Where it is mounted.
        mountpoint: String,
        /// what its mount does
        state: NodeMountState = state Count "pumapool_node_mount_state",
        /// whether its evictions are seen
        sees_evictions: bool = gauge Count "pumapool_node_mount_sees_evictions",
    }
}
