//! Placement of memory on machines whose memory is nearer to some processors than to others
//! (Voron's thesis on NUMA and virtual machines).
//!
//! The policies know neither processes nor clocks. Their input is the places of pages and, for
//! Carrefour, their users; their output is moves. So they are the same for a real machine and for
//! the simulated one ([`simulator`]).

pub mod advice;
pub mod apply;
mod carrefour;
mod follow;
pub mod machines;
pub mod mempolicy;
pub mod placing;
pub mod process;
mod sampling;
pub mod simulator;
mod spread;
pub mod topology;

use std::fmt;
use std::str::FromStr;

/// A node, by the kernel's number.
pub type NodeId = u16;

/// Bytes of a page, the unit in which the kernel moves memory.
pub const PAGE_BYTES: u64 = 4096;

/// A policy of placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// One page after the other on the nodes in turn: all controllers have the same load.
    Round4k,
    /// One GiB after the other on the nodes in turn, Xen's default: for comparison.
    Round1g,
    /// Where it is touched first, and again after it was freed.
    FirstTouch,
    /// Moved to its user, or spread if one controller is overloaded (`carrefour.rs`).
    Carrefour,
    /// The kernel's own placement.
    None,
}

/// All policies.
pub const POLICIES: [Policy; 5] =
    [Policy::Round4k, Policy::Round1g, Policy::FirstTouch, Policy::Carrefour, Policy::None];

impl Policy {
    /// The name in options and messages.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Round4k => "round-4k",
            Policy::Round1g => "round-1g",
            Policy::FirstTouch => "first-touch",
            Policy::Carrefour => "carrefour",
            Policy::None => "none",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Policy, String> {
        POLICIES.into_iter().find(|policy| policy.name() == text).ok_or_else(|| {
            let names: Vec<&str> = POLICIES.iter().map(|policy| policy.name()).collect();
            format!("there is no policy {text:?}: {}", names.join(", "))
        })
    }
}

/// A move of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The page.
    pub page: u64,
    /// The new node.
    pub to: NodeId,
}
