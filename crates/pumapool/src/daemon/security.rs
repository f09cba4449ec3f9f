//! The security of connections: the options of the pool's key decide which peers `lend` and `mount`
//! trust.

use crate::cli::security::Options;
use anyhow::{Context, Result, bail};
use wire::address::Address;
use wire::key::PoolKey;
use wire::secure::Security;

/// Makes the path of the key file absolute, so that it is independent of the working directory.
///
/// # Errors
/// Fails if there is no working directory.
pub fn make_absolute(options: &mut Options) -> Result<()> {
    if let Some(path) = &mut options.key {
        *path = std::path::absolute(&*path).with_context(|| format!("the key file {}", path.display()))?;
    }
    Ok(())
}

/// The security of connections to or at these addresses.
pub fn of(options: &Options, addresses: &[Address]) -> Result<Security> {
    let beyond = addresses.iter().find(|address| !matches!(address, Address::Unix(_)));
    match (&options.key, options.trust_network, beyond) {
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
/// The name of the security in the status.
pub fn name(security: &Security) -> &'static str {
    match security {
        Security::Keyed(_) => "key",
        Security::Trusting => "trust-network",
        Security::Local => "local",
    }
}
