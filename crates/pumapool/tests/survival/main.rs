//! The mount survives its daemon: programs that use it see a pause when the daemon is killed or
//! replaced, never an error, and nothing is lost or done twice. Everything here expects exactly
//! what a file system without kills would give.

mod broken;
mod kills;
mod load;
#[path = "../setup/mod.rs"]
mod setup;
mod stored;
mod supervisor;
