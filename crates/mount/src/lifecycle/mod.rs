//! A mount from its start to its end.
//!
//! - `config`: what to mount, where, and how; `error`: why that failed
//! - `starting`: the checks, and the mounting; `look`: a look through the new mount
//! - `running`: the mount while it is served, and how it ends; `workers`: its threads
//! - `status`: what it has done so far
//!
//! Going on with a mount whose daemon is gone is in `takeover/`.

pub(crate) mod config;
pub(crate) mod error;
mod look;
pub(crate) mod running;
pub(crate) mod starting;
pub(crate) mod status;
pub(crate) mod workers;
