//! A test access to a new mount, before it is announced.

use crate::inode::{STATX_MASK, device_of};
use crate::lifecycle::error::Error;
use crate::lifecycle::starting::failed;
use rustix::fs::{AtFlags, CWD, statx};
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

/// Time limit of the test access. It usually takes less than a millisecond.
pub(crate) const LOOK_LIMIT: Duration = Duration::from_secs(20);

/// Accesses a new mount, and waits for the answer, so that a mount that waits for itself is
/// detected. `device` is its device number.
pub(crate) fn look_through(mountpoint: &Path, device: u64, limit: Duration) -> Result<(), Error> {
    let (answers, answer) = sync_channel(1);
    let path = mountpoint.to_owned();
    // In a thread, because the kernel may block the access until the mount has ended.
    let look = move || {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_FORCE_SYNC;
        let _ = answers.send(statx(CWD, &path, flags, STATX_MASK));
    };
    thread::Builder::new().name("puma-look".to_owned()).spawn(look).map_err(|error| failed("start a thread", error))?;
    let why = match answer.recv_timeout(limit) {
        Ok(Ok(found)) if device_of(&found) == device => return Ok(()),
        Ok(Ok(_)) => "something else is mounted there".to_owned(),
        Ok(Err(errno)) => errno.to_string(),
        Err(_) => format!("within {} s", limit.as_secs()),
    };
    Err(Error::NotServed { mountpoint: mountpoint.to_owned(), why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fuse::mounting::{self, Options};
    use rustix::mount::MountFlags;

    #[test]
    fn a_mount_that_does_not_answer_is_found_out() {
        let at = tempfile::tempdir().unwrap();
        let flags = MountFlags::empty();
        let options = Options { fsname: "none".into(), subtype: "silent".into(), allow_other: false, flags };
        let Ok(device) = mounting::mount(at.path(), &options) else {
            return testbed::skip("a_mount_that_does_not_answer_is_found_out", "not root, or no /dev/fuse");
        };
        let error = look_through(at.path(), 0, Duration::from_millis(50)).unwrap_err();
        mounting::unmount(at.path(), true).unwrap();
        drop(device);
        assert!(error.to_string().contains("did not answer"), "{error}");
        let error = look_through(at.path(), 0, Duration::from_secs(60)).unwrap_err();
        assert!(error.to_string().contains("something else"), "{error}");
    }
}
