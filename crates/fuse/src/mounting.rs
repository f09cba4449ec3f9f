//! Makes and ends the mount: by mount(2) if the process has the rights, else by the set-uid program
//! `fusermount3`.

use crate::Errno;
use crate::abi;
use rustix::fs::{Mode, OFlags, open};
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType};
use std::ffi::CString;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

/// The device on which all FUSE connections begin.
pub const DEVICE: &str = "/dev/fuse";
/// The program that mounts for ordinary users.
pub const FUSERMOUNT: &str = "fusermount3";

/// The options of a mount.
#[derive(Clone, Debug)]
pub struct Options {
    /// The source that /proc/mounts shows.
    pub fsname: String,
    /// The part of the file system's type after `fuse.`.
    pub subtype: String,
    /// Whether other users than the one who mounts may use it.
    pub allow_other: bool,
    /// Restrictions: `RDONLY`, `NOSUID`, `NODEV`, `NOEXEC` of [`MountFlags`].
    pub flags: MountFlags,
}

/// Mounts on `mountpoint` by mount(2), which needs CAP_SYS_ADMIN. Returns the connection's
/// descriptor.
pub fn mount(mountpoint: &Path, options: &Options) -> io::Result<OwnedFd> {
    let device = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let data = format!(
        "fd={},rootmode=40000,user_id={},group_id={},default_permissions{},max_read={}",
        device.as_raw_fd(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
        if options.allow_other { ",allow_other" } else { "" },
        crate::session::IO_BYTES_MAX,
    );
    let data = CString::new(data)?;
    let kind = format!("fuse.{}", options.subtype);
    rustix::mount::mount(options.fsname.as_str(), mountpoint, kind.as_str(), options.flags, data.as_c_str())?;
    Ok(device)
}

/// Mounts on `mountpoint` by `fusermount3`, as an ordinary user. Returns the connection's
/// descriptor. `NotFound` means that the program is not installed. For other errors the message
/// includes the program's standard error.
pub fn mount_by_fusermount(mountpoint: &Path, options: &Options) -> io::Result<OwnedFd> {
    let (ours, theirs) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // The program inherits its end, so this descriptor must not be closed on exec.
    let inherited = rustix::io::dup(&theirs)?;
    drop(theirs);
    let mut list = format!(
        "fsname={},subtype={},default_permissions,max_read={}",
        options.fsname.replace('\\', "\\\\").replace(',', "\\,"),
        options.subtype,
        crate::session::IO_BYTES_MAX
    );
    for (flag, name) in [(MountFlags::RDONLY, ",ro"), (MountFlags::NOEXEC, ",noexec")] {
        if options.flags.contains(flag) {
            list.push_str(name);
        }
    }
    if options.allow_other {
        list.push_str(",allow_other");
    }
    let child = Command::new(FUSERMOUNT)
        .arg("-o")
        .arg(list)
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", inherited.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    drop(inherited);
    let output = child?.wait_with_output()?;
    if !output.status.success() {
        return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().replace('\n', "; ")));
    }
    receive_descriptor(&ours)?.ok_or_else(|| io::Error::other(format!("{FUSERMOUNT} sent no descriptor")))
}

fn receive_descriptor(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            return Ok(descriptors.next());
        }
    }
    Ok(None)
}

/// Ends a mount. Without `lazy`, a mount in use is an error (EBUSY); with it, it disappears at once
/// and ends with its last use.
pub fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(mountpoint, flags | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => {}
        result => return Ok(result?),
    }
    let mut command = Command::new(FUSERMOUNT);
    command.arg("-u").arg("-q");
    if lazy {
        command.arg("-z");
    }
    let output = command.arg("--").arg(mountpoint).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("busy") || said.is_empty() {
        Err(Errno::BUSY.into())
    } else {
        Err(io::Error::other(said.trim().to_owned()))
    }
}

/// Returns another descriptor of the same connection, with a queue of its own.
pub fn clone_device(device: &OwnedFd) -> io::Result<OwnedFd> {
    let clone = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let original = device.as_raw_fd() as u32;
    // SAFETY: FUSE_DEV_IOC_CLONE reads one u32 through the pointer, which the setter owns for the
    // duration of the call.
    unsafe {
        rustix::ioctl::ioctl(&clone, rustix::ioctl::Setter::<{ abi::DEV_IOC_CLONE }, u32>::new(original))?;
    }
    Ok(clone)
}

/// Returns the device number of the file system mounted at `path`, if its type is `fuse.<subtype>`.
/// Sends no request to the mounted file system, which may not be served yet.
pub fn find(path: &Path, subtype: &str) -> io::Result<Option<u64>> {
    let kind = format!("fuse.{subtype}");
    let table = os::mountinfo::read()?;
    // A later line for the same place covers an earlier one.
    let last = os::mountinfo::mounts(&table).rfind(|mount| mount.mountpoint().as_os_str() == path.as_os_str());
    Ok(last.filter(|mount| mount.kind == kind).map(|mount| mount.device))
}
