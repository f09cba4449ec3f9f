//! Puma under test: the modes of its mounts, and the output of its daemons.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use testbed::{Failure, Puma, PumaMount};

/// By default a mount would abandon a byzantine lender for good, and the test would end there: so
/// the limit is off.
const BAD_PAGES: &str = "1000000000000";

/// The mode of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// `--strategy`.
    pub strategy: &'static str,
    /// `--write`.
    pub write: &'static str,
    /// `--fill`.
    pub fill: &'static str,
}

impl Mode {
    /// Every mode. If the pool is populated on read, only the strategy non-inclusive makes sense.
    pub const ALL: [Mode; 6] = [
        Mode { strategy: "exclusive", write: "through", fill: "evict" },
        Mode { strategy: "exclusive", write: "back", fill: "evict" },
        Mode { strategy: "non-inclusive", write: "through", fill: "evict" },
        Mode { strategy: "non-inclusive", write: "back", fill: "evict" },
        Mode { strategy: "non-inclusive", write: "through", fill: "read" },
        Mode { strategy: "non-inclusive", write: "back", fill: "read" },
    ];
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, write {}, fill on {}", self.strategy, self.write, self.fill)
    }
}

/// Mounts `source` at `at`.
pub fn mount(puma: &Puma, source: &Path, at: &Path, options: &[&str], log: &str) -> Result<PumaMount, Failure> {
    let mut command = Command::new(&puma.pumapool);
    command.env_remove("PUMAPOOL_KEY_FILE");
    // The backing disk is as fast as a lender here, so the gate would bypass the lenders that are
    // under test.
    command.arg("mount").args([source, at]).args(["--gate", "off", "--bad-pages", BAD_PAGES]).args(options);
    command.args(["--foreground", "--trust-network"]);
    puma.mount(command, at, log, &[])
}

/// Lines of the logs that report a panic: there must be none.
pub fn panics(puma: &Puma) -> Vec<String> {
    let logs = fs::read_dir(&puma.logs).into_iter().flatten().flatten().map(|entry| entry.path());
    let logs = logs.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
    let texts: Vec<String> = logs.filter_map(|path: PathBuf| fs::read_to_string(path).ok()).collect();
    let lines = texts.iter().flat_map(|text| text.lines()).filter(|line| line.contains("panicked"));
    lines.map(str::to_owned).collect()
}
