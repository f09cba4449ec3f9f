//! An evicted page, from the tap to the lender that keeps it.
//!
//! Pure logic, without sockets, clocks and threads: [`buffers`] collects pages for each lender, and
//! `placement` chooses the lender. [`groups`] limits the lent pages of a control group, and
//! `demoted` holds pages that a guest has evicted. The edge: [`cgroups`] finds the control group
//! of an eviction.

pub mod buffers;
pub mod cgroups;
pub(crate) mod demoted;
pub mod groups;
pub(crate) mod placement;
