//! The options of `pumapool join`.

use crate::cli::{daemon, lend, mount, pool, role, security, written};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::str::FromStr;
use wire::address::Address;

/// Options of `join`.
#[derive(clap::Args, Serialize, Deserialize)]
#[command(mut_args(|argument| if argument.get_id() == "seeds" { argument.required(true) } else { argument }))]
pub struct Options {
    /// A directory to mount, over itself or at MOUNTPOINT. May be given several times.
    #[arg(long = "mount", value_name = "SRC[:MOUNTPOINT]", required = true)]
    pub mounts: Vec<Wanted>,

    /// Role at the start. `pumapool role` changes it.
    #[arg(long, value_enum, default_value_t = role::Name::Auto)]
    pub role: role::Name,

    /// The node lends again after nearly no evictions for so long, in seconds. If it has to borrow
    /// soon after, this time doubles, up to 32 times as long.
    #[arg(long, value_name = "SECONDS", default_value_t = ::discovery::role::CALM_DEFAULT.as_secs(),
        value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub calm: u64,

    #[command(flatten)]
    #[serde(flatten)]
    pub lending: lend::Lending,

    #[command(flatten)]
    #[serde(flatten)]
    pub pool: pool::Options,

    #[command(flatten)]
    #[serde(flatten)]
    pub policies: mount::Policies,

    #[command(flatten)]
    #[serde(flatten)]
    pub security: security::Options,

    #[command(flatten)]
    #[serde(flatten)]
    pub daemon: daemon::Options,
}

impl Options {
    /// The options of a mount. Its own lender is not for it.
    pub fn mount(&self, wanted: &Wanted, own: &Address) -> mount::Options {
        mount::Options::of_node(
            wanted.source.clone(),
            wanted.mountpoint.clone(),
            self.pool.of_mount(),
            self.policies.clone(),
            self.security.clone(),
            own.clone(),
        )
    }
}

/// A mount of the command line: `SRC` or `SRC:MOUNTPOINT`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// The backing directory.
    #[serde(with = "written::path")]
    pub source: PathBuf,
    /// Where it is mounted, if not over the directory itself.
    #[serde(with = "written::maybe_path")]
    pub mountpoint: Option<PathBuf>,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        let (source, mountpoint) = match text.split_once(':') {
            Some((source, mountpoint)) => (source, Some(mountpoint)),
            None => (text, None),
        };
        if source.is_empty() || mountpoint.is_some_and(|path| path.is_empty() || path.contains(':')) {
            return Err("write SRC or SRC:MOUNTPOINT, where neither has a colon in it".to_owned());
        }
        Ok(Wanted { source: source.into(), mountpoint: mountpoint.map(PathBuf::from) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_read() {
        let wanted = |source: &str, mountpoint: Option<&str>| Wanted {
            source: source.into(),
            mountpoint: mountpoint.map(PathBuf::from),
        };
        assert_eq!("/srv".parse(), Ok(wanted("/srv", None)));
        assert_eq!("/srv:/mnt/x".parse(), Ok(wanted("/srv", Some("/mnt/x"))));
        for text in ["", ":", ":/mnt", "/srv:", "/a:/b:/c"] {
            assert!(text.parse::<Wanted>().is_err(), "{text}");
        }
    }
}
