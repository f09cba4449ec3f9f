//! The metrics of daemons, for Prometheus. A daemon serves its own metrics with `--metrics`
//! ([`server`]); `pumapool metrics` prints or serves those of all daemons.
//!
//! The crate `report` declares each metric next to its field, and finds the values in statuses.
//! [`page`] writes them, and [`reference`] describes them.

pub mod page;
pub mod reference;
pub mod server;
