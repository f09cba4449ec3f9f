//! A host's page cache, filled by its guests' evictions (Sugimoto, Kourai and Yamaguchi; Wong and
//! Wilkes' DEMOTE).
//!
//! If one page cache lies under another, the lower one holds the pages that the upper one has just
//! read, and hardly ever hits. Here the guest sends its host the pages that it evicts, and reports
//! the pages that it has read. So the two caches hold different pages.
//!
//! ```text
//! guest:  eviction ─▶ tap ─▶ file offset ─▶ place on the disk (FIEMAP) ─┐
//!                                                                       │ vsock, TCP, unix
//! host:   page cache of the image ◀─ READ ◀─ "will need" ◀─ is it what the image holds? ◀─┘
//! ```
//!
//! Must never happen: the host uses a guest's page that differs from the image's present
//! content (`mount::images`). So no message of a guest, however wrong or late, can change a byte of
//! any read. An outdated mapping causes a page that is useless.

mod extents;
pub mod guest;
pub mod host;
mod volume;

pub use extents::Place;
pub use volume::{InodeKey, Problem, Volume};
