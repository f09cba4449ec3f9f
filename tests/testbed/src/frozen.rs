//! A file system that is frozen for a while, as a snapshot freezes it.

use crate::failure::Failure;
use crate::process::Process;
use crate::ram_disk::run_program;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The child's program: it waits for SIGTERM, or until its input ends, and thaws.
const THAWER: &str = "trap : TERM; trap '' HUP INT; echo ready; read -r nothing; exec fsfreeze --unfreeze \"$1\"";

/// Time limit for the child to be ready.
const READY_MAX: Duration = Duration::from_secs(30);

/// A frozen file system. Dropping this thaws it, also when a test fails. If the thread that made it
/// is killed, a child gets a signal and thaws it. This does not help if the thread waits for a
/// mount that its own process serves: it does not end, and `fsfreeze --unfreeze` must be called by
/// hand.
pub struct Frozen {
    _thawer: Process,
}

impl Frozen {
    /// Freezes the file system that is mounted at `path`.
    ///
    /// # Errors
    /// Fails if fsfreeze is missing, or fails.
    pub fn new(path: &Path) -> Result<Frozen, Failure> {
        let mut command = Command::new("sh");
        // It would report that the file system is thawed already.
        command.args(["-c", THAWER, "thawer"]).arg(path).stdin(Stdio::piped()).stderr(Stdio::null());
        let mut thawer = Process::spawn(command, &[])?;
        thawer.wait_for_line("ready", READY_MAX)?;
        run_program("fsfreeze", &["--freeze"], &[path])?;
        Ok(Frozen { _thawer: thawer })
    }
}
