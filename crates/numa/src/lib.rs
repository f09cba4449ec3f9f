//! Where memory is, on machines whose memory is nearer to some processors than to others (Voron's
//! thesis on NUMA and virtual machines).
//!
//! The policies know neither processes nor clocks: they are given where pages are and, for
//! Carrefour, who uses them, and say what to move. So they are the same over a real machine and
//! over the simulated one ([`simulator`]).

pub mod advice;
pub mod apply;
pub mod carrefour;
pub mod follow;
pub mod machines;
pub mod mempolicy;
pub mod placing;
pub mod process;
pub mod sampling;
pub mod simulator;
pub mod spread;
pub mod topology;

use std::fmt;
use std::str::FromStr;

/// A node, by the kernel's number.
pub type NodeId = u16;

/// Bytes of a page, as the kernel moves them.
pub const PAGE_BYTES: u64 = 4096;

/// How memory is placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// One page after the other on the nodes in turn: no controller has more to do than another.
    Round4k,
    /// One GiB after the other on the nodes in turn, as Xen does by itself: for comparison.
    Round1g,
    /// Where it is touched first; and where it is touched first after it was freed.
    FirstTouch,
    /// Moved to who uses it, or spread where too much is asked of one controller ([`carrefour`]).
    Carrefour,
    /// As the kernel does without us.
    None,
}

/// All of them.
pub const POLICIES: [Policy; 5] =
    [Policy::Round4k, Policy::Round1g, Policy::FirstTouch, Policy::Carrefour, Policy::None];

impl Policy {
    /// As it is written.
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

/// A page is to be elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Which.
    pub page: u64,
    /// Its node then.
    pub to: NodeId,
}
