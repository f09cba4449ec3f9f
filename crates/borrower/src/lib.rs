//! The borrower stores the pages that the kernel evicts in the memory of lenders, and answers
//! misses from there.
//!
//! The logic, without sockets, clocks and threads, is separate from the edge, which has them:
//!
//! | folder | logic | edge |
//! |---|---|---|
//! | [`catalog`] | where each page is, and which events and copies count | |
//! | [`read`] | the state machine of a READ, batches of READs | the threads that serve them |
//! | [`put`] | buffers, choice of lender, quotas | control groups |
//! | [`policy`] | decisions that cost or save time, and never a byte | |
//! | `net` | | the links to the lenders |
//!
//! [`mod@core`] joins the logic, and [`Borrower`] both.
//!
//! The promise: [`Borrower::read_all`] returns what a read of the backing file would return. A
//! failure of a lender, of the network or of the eviction tap is a miss, never an error.

mod backing;
mod borrower;
pub mod catalog;
mod change;
mod config;
pub mod core;
mod file;
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(test, feature = "shuttle"))]
mod interleavings;
mod metrics;
mod net;
pub mod policy;
pub mod put;
pub mod read;
mod under_way;

pub use backing::{BackingFile, FileIdentity, Stamp, Writers};
pub use borrower::{BAD_PAGES_MAX, Borrower, Usefulness};
pub use catalog::File;
pub use catalog::copying::may_be_copied_below;
pub use catalog::file::Left;
pub use catalog::overtaking::Overtaken;
pub use change::ChangeGuard;
pub use config::{Config, LeftLender, LenderAddress, Session};
pub use core::{Change, Strategy};
pub use metrics::{Counter, Metrics};
pub use policy::gate;
pub use put::demoted::Demotion;
pub use put::{cgroups, groups};
pub use read::batch::BATCH_READS_MAX;
pub use read::drive::ReadRequest;
pub use read::serve::{REQUEST_READS_MAX, Reads};
pub use wire::secure::Security;
