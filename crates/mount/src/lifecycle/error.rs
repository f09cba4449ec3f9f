//! Why a mount could not be made or ended: one line each, with what to do.

use std::fmt;
use std::io;
use std::path::PathBuf;

/// An error of making or ending a mount.
#[derive(Debug)]
#[allow(missing_docs)] // The messages say what each means.
pub enum Error {
    SourceMissing { source: PathBuf },
    SourceNotADirectory { source: PathBuf },
    SourceUnreadable { source: PathBuf, error: io::Error },
    SourceIsAutomount { source: PathBuf },
    SourceIsKernelInterface { source: PathBuf },
    MountpointOfSystem { mountpoint: PathBuf },
    MountpointMissing { mountpoint: PathBuf },
    MountpointNotADirectory { mountpoint: PathBuf },
    MountpointDead { mountpoint: PathBuf },
    AlreadyMounted { mountpoint: PathBuf },
    MountpointInsideSource { source: PathBuf, mountpoint: PathBuf },
    NoDevice,
    DeviceForbidden,
    NoFusermount,
    NotPermitted { mountpoint: PathBuf, error: io::Error },
    Busy { mountpoint: PathBuf },
    NotServed { mountpoint: PathBuf, why: String },
    Borrower(Box<dyn std::error::Error + Send + Sync>),
    Failed { attempted: &'static str, error: io::Error },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::SourceMissing { source } => {
                write!(f, "cannot mount {}: it does not exist; create it, or name another directory", source.display())
            }
            Error::SourceNotADirectory { source } => {
                write!(f, "cannot mount {}: it is not a directory; name the directory that holds it", source.display())
            }
            Error::SourceUnreadable { source, error } => {
                write!(f, "cannot open {}: {error}; run as a user who may read it", source.display())
            }
            Error::SourceIsAutomount { source } => write!(
                f,
                "cannot mount {}: it is an automount point, which hides the directory; have the automount at another mountpoint",
                source.display()
            ),
            Error::SourceIsKernelInterface { source } => write!(
                f,
                "cannot mount {}: it is an interface of the kernel, which checks the rights of the daemon instead of its users'; name a directory of files",
                source.display()
            ),
            Error::MountpointOfSystem { mountpoint } => write!(
                f,
                "cannot mount on {}: the system, and the daemon of the mount, need what is there; choose another mountpoint",
                mountpoint.display()
            ),
            Error::MountpointMissing { mountpoint } => {
                write!(f, "cannot mount on {0}: it does not exist; create it: mkdir {0}", mountpoint.display())
            }
            Error::MountpointNotADirectory { mountpoint } => {
                write!(f, "cannot mount on {}: it is not a directory; name a directory", mountpoint.display())
            }
            Error::MountpointDead { mountpoint } => write!(
                f,
                "cannot mount on {0}: the daemon of an earlier mount there is gone; end that mount first: umount {0}",
                mountpoint.display()
            ),
            Error::AlreadyMounted { mountpoint } => write!(
                f,
                "cannot mount on {0}: it is one of our mounts already; end it first (umount {0}), or mount elsewhere",
                mountpoint.display()
            ),
            Error::MountpointInsideSource { source, mountpoint } => write!(
                f,
                "cannot mount {} on {}, which lies inside it: mount it over itself (same path twice), or outside of it",
                source.display(),
                mountpoint.display()
            ),
            Error::NoDevice => {
                write!(
                    f,
                    "cannot mount: {} is missing; load the kernel's fuse module: modprobe fuse",
                    fuse::mounting::DEVICE
                )
            }
            Error::DeviceForbidden => write!(
                f,
                "cannot mount as an ordinary user: {0} may not be opened; have root allow it (chmod 666 {0}, as udev does), or run as root",
                fuse::mounting::DEVICE
            ),
            Error::NoFusermount => write!(
                f,
                "cannot mount as an ordinary user: {} is not installed; install the fuse3 package, or run as root",
                fuse::mounting::FUSERMOUNT
            ),
            Error::NotPermitted { mountpoint, error } => write!(
                f,
                "not permitted to mount on {}: {error}; run as root, or choose a directory that you own",
                mountpoint.display()
            ),
            Error::Busy { mountpoint } => write!(
                f,
                "cannot end the mount on {0}: it is in use; close what uses it (see: fuser -vm {0}), or detach it lazily",
                mountpoint.display()
            ),
            Error::NotServed { mountpoint, why } => write!(
                f,
                "the new mount on {} did not answer ({why}), and was undone; see the log, or choose another mountpoint",
                mountpoint.display()
            ),
            Error::Borrower(error) => write!(f, "{error}"),
            Error::Failed { attempted, error } => {
                write!(f, "cannot {attempted}: {error}; see the log for what came before")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Borrower(error) => error.source(),
            _ => None,
        }
    }
}
