//! A host's page cache, filled by what its guests evict (Sugimoto, Kourai and Yamaguchi; Wong and
//! Wilkes' DEMOTE).
//!
//! Of two page caches one above the other the lower one holds what the upper one has just read, and
//! hardly ever hits. Here the guest gives its host what it evicts, and says what it has read; so
//! that the two hold different things.
//!
//! ```text
//! guest:  eviction ─▶ tap ─▶ file offset ─▶ place on the disk (FIEMAP) ─┐
//!                                                                       │ vsock, TCP, unix
//! host:   page cache of the image ◀─ READ ◀─ "will need" ◀─ is it what the image holds? ◀─┘
//! ```
//!
//! What must never happen: that a guest's page is believed for anything but that it is what the
//! image holds anyway (`mount::images`). So nothing that a guest says, or says too late, can change
//! a byte of any read; what a mapping says that is out of date is a page that finds no use.

mod extents;
pub mod guest;
pub mod host;
mod volume;

pub use extents::Place;
pub use volume::{InodeKey, Problem, Volume};
