//! Doors for the crate `fuzz`: what takes apart the bytes that a lender sends. No part of the
//! interface, and nothing of it decides anything.

pub use crate::net::connection::{Connection, GetConnection};
pub use crate::read::state::PageResult;
