//! The options of everything that connects: the pool's key.
//!
//! Over a network one of the two options is required, so that nobody works without a key by
//! mistake.

use crate::cli::written;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Options of everything that connects.
#[derive(clap::Args, Clone, Default, Serialize, Deserialize)]
#[group(id = "security", multiple = true)]
pub struct Options {
    /// Key file of the pool, as `pumapool key new FILE` makes it. Connections without the key are
    /// refused, and all data is encrypted. The file must be yours or root's, and closed to others
    /// (mode 600).
    #[arg(long, value_name = "FILE", env = "PUMAPOOL_KEY_FILE")]
    #[serde(with = "written::maybe_path")]
    pub key: Option<PathBuf>,

    /// Use no key: trust everybody who can connect, and send pages in clear, with checksums. A
    /// unix:PATH at which root or your own user listens needs neither this option nor a key.
    #[arg(long)]
    pub trust_network: bool,
}

impl Options {
    /// The file with the key, if there is one.
    pub fn key_file(&self) -> Option<&Path> {
        self.key.as_deref()
    }
}
