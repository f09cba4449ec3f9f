//! Access for the crate `fuzz` to the decoders of a lender's messages. Not part of the interface.

pub use crate::net::connection::{Connection, GetConnection};
pub use crate::read::state::PageResult;
