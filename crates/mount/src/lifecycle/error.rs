//! Why a mount could not be made or ended: one line each, with what to do.

use fuse::mounting::{DEVICE, FUSERMOUNT};
use std::io;
use std::path::PathBuf;

/// An error of making or ending a mount.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // The messages say what each means.
pub enum Error {
    #[error("cannot mount {directory}: it does not exist; create it, or name another directory")]
    SourceMissing { directory: PathBuf },
    #[error("cannot mount {directory}: it is not a directory; name the directory that holds it")]
    SourceNotADirectory { directory: PathBuf },
    #[error("cannot open {directory}: {error}; run as a user who may read it")]
    SourceUnreadable { directory: PathBuf, error: io::Error },
    #[error(
        "cannot mount {directory}: it is an automount point, which hides the directory; have the automount at \
         another mountpoint"
    )]
    SourceIsAutomount { directory: PathBuf },
    #[error(
        "cannot mount {directory}: it is an interface of the kernel, which checks the rights of the daemon instead \
         of its users'; name a directory of files"
    )]
    SourceIsKernelInterface { directory: PathBuf },
    #[error(
        "cannot mount on {mountpoint}: the system, and the daemon of the mount, need what is there; choose another \
         mountpoint"
    )]
    MountpointOfSystem { mountpoint: PathBuf },
    #[error("cannot mount on {mountpoint}: it does not exist; create it: mkdir {mountpoint}")]
    MountpointMissing { mountpoint: PathBuf },
    #[error("cannot mount on {mountpoint}: it is not a directory; name a directory")]
    MountpointNotADirectory { mountpoint: PathBuf },
    #[error(
        "cannot mount on {mountpoint}: the daemon of an earlier mount there is gone; end that mount first: \
         umount {mountpoint}"
    )]
    MountpointDead { mountpoint: PathBuf },
    #[error(
        "cannot mount on {mountpoint}: it is one of our mounts already; end it first (umount {mountpoint}), or mount \
         elsewhere"
    )]
    AlreadyMounted { mountpoint: PathBuf },
    #[error(
        "cannot mount {directory} on {mountpoint}, which lies inside it: mount it over itself (same path twice), or \
         outside of it"
    )]
    MountpointInsideSource { directory: PathBuf, mountpoint: PathBuf },
    #[error("cannot mount: {DEVICE} is missing; load the kernel's fuse module: modprobe fuse")]
    NoDevice,
    #[error(
        "cannot mount as an ordinary user: {DEVICE} may not be opened; have root allow it (chmod 666 {DEVICE}, as \
         udev does), or run as root"
    )]
    DeviceForbidden,
    #[error(
        "cannot mount as an ordinary user: {FUSERMOUNT} is not installed; install the fuse3 package, or run as root"
    )]
    NoFusermount,
    #[error("not permitted to mount on {mountpoint}: {error}; run as root, or choose a directory that you own")]
    NotPermitted { mountpoint: PathBuf, error: io::Error },
    #[error(
        "cannot end the mount on {mountpoint}: it is in use; close what uses it (see: fuser -vm {mountpoint}), or \
         detach it lazily"
    )]
    Busy { mountpoint: PathBuf },
    #[error(
        "the new mount on {mountpoint} did not answer ({why}), and was undone; see the log, or choose another \
         mountpoint"
    )]
    NotServed { mountpoint: PathBuf, why: String },
    #[error(transparent)]
    Borrower(Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot {attempted}: {error}; see the log for what came before")]
    Failed { attempted: &'static str, error: io::Error },
}
