//! The lender.
pub mod headroom;
mod pressure;
pub mod store;
