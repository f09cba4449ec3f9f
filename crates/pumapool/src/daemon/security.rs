//! The pool's key on the command line: it decides which peers `lend` and `mount` trust.
//!
//! Over a network one of the two options is required, so that nobody works without a key by
//! mistake.

use crate::cli::written;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use wire::address::Address;
use wire::key::PoolKey;
use wire::secure::Security;

/// Options of everything that connects.
#[derive(clap::Args, Clone, Default, Serialize, Deserialize)]
#[group(id = "security", multiple = true)]
pub struct Options {
    /// Key file of the pool, as `pumapool key new FILE` makes it. Connections without the key are
    /// refused, and all data is encrypted. The file must be yours or root's, and closed to others
    /// (mode 600).
    #[arg(long, value_name = "FILE", env = "PUMAPOOL_KEY_FILE")]
    #[serde(with = "written::maybe_path")]
    key: Option<PathBuf>,

    /// Use no key: trust everybody who can connect, and send pages in clear, with checksums. A
    /// unix:PATH at which root or your own user listens needs neither this option nor a key.
    #[arg(long)]
    trust_network: bool,
}

impl Options {
    /// The file with the key, if there is one.
    pub fn key_file(&self) -> Option<&Path> {
        self.key.as_deref()
    }

    /// Makes the path of the key file absolute, so that it is independent of the working directory.
    ///
    /// # Errors
    /// Fails if there is no working directory.
    pub fn make_absolute(&mut self) -> Result<()> {
        if let Some(path) = &mut self.key {
            *path = std::path::absolute(&*path).with_context(|| format!("the key file {}", path.display()))?;
        }
        Ok(())
    }

    /// The security of connections to or at these addresses.
    pub fn security(&self, addresses: &[Address]) -> Result<Security> {
        let beyond = addresses.iter().find(|address| !matches!(address, Address::Unix(_)));
        match (&self.key, self.trust_network, beyond) {
            (Some(_), true, _) => {
                bail!("--key (or PUMAPOOL_KEY_FILE) and --trust-network exclude each other: choose one")
            }
            (Some(path), false, _) => {
                // A relative path is one of the folder where the command was given; the daemon
                // looks before it leaves that.
                let path = std::path::absolute(path).with_context(|| format!("the key file {}", path.display()))?;
                Ok(Security::Keyed(PoolKey::read(&path)?))
            }
            (None, true, _) => Ok(Security::Trusting),
            (None, false, None) => Ok(Security::Local),
            (None, false, Some(address)) => bail!(
                "{address} is on a network, and there is no key: make one with `pumapool key new FILE`, copy it to all machines of the \
                 pool, and name it with --key FILE; or --trust-network"
            ),
        }
    }
}

/// The name of the security in the status.
pub fn name(security: &Security) -> &'static str {
    match security {
        Security::Keyed(_) => "key",
        Security::Trusting => "trust-network",
        Security::Local => "local",
    }
}
