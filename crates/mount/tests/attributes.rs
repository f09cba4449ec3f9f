//! Attributes, extended attributes and ACLs through a real mount.

mod support;

use rustix::fs::{AtFlags, CWD, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags, statx, utimensat};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown};
use support::*;

#[test]
fn mode_owner_and_times() {
    if !can_mount("mode_owner_and_times") {
        return;
    }
    both_modes(|m| {
        fs::write(m.path("a"), b"x").unwrap();
        fs::set_permissions(m.path("a"), fs::Permissions::from_mode(0o4751)).unwrap();
        assert_eq!(fs::metadata(m.backing("a")).unwrap().mode() & 0o7777, 0o4751);
        chown(m.path("a"), Some(1000), None).unwrap();
        chown(m.path("a"), None, Some(2000)).unwrap();
        let backing = fs::metadata(m.backing("a")).unwrap();
        // As on any file system, a new owner costs the set-uid bit.
        assert_eq!((backing.uid(), backing.gid(), backing.mode() & 0o7777), (1000, 2000, 0o751));
        std::os::unix::fs::symlink("a", m.path("s")).unwrap();
        lchown(m.path("s"), Some(3000), Some(4000)).unwrap();
        let link = fs::symlink_metadata(m.backing("s")).unwrap();
        assert_eq!((link.uid(), link.gid()), (3000, 4000));
        assert_eq!(fs::metadata(m.backing("a")).unwrap().uid(), 1000);

        let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let set = |access, modification, flags, name: &str| {
            let times = Timestamps { last_access: access, last_modification: modification };
            utimensat(CWD, m.path(name), &times, flags).unwrap();
        };
        set(time(1000, 123_456_789), time(2000, 987_654_321), AtFlags::empty(), "a");
        let backing = fs::metadata(m.backing("a")).unwrap();
        assert_eq!(
            (backing.atime(), backing.atime_nsec(), backing.mtime(), backing.mtime_nsec()),
            (1000, 123_456_789, 2000, 987_654_321)
        );
        set(time(0, UTIME_OMIT), time(-5, 0), AtFlags::empty(), "a");
        let backing = fs::metadata(m.backing("a")).unwrap();
        assert_eq!((backing.atime(), backing.mtime()), (1000, -5));
        set(time(0, UTIME_NOW), time(0, UTIME_OMIT), AtFlags::empty(), "a");
        let backing = fs::metadata(m.backing("a")).unwrap();
        assert!(backing.atime() > 1_000_000 && backing.mtime() == -5);
        set(time(7, 0), time(8, 0), AtFlags::SYMLINK_NOFOLLOW, "s");
        assert_eq!(fs::symlink_metadata(m.backing("s")).unwrap().mtime(), 8);
        let (here, backing) = (fs::metadata(m.path("a")).unwrap(), fs::metadata(m.backing("a")).unwrap());
        assert_eq!((here.blocks(), here.blksize(), here.ino()), (backing.blocks(), backing.blksize(), backing.ino()));
    });
}

#[test]
fn time_of_birth() {
    if !can_mount("time_of_birth") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"x").unwrap();
    let birth = |path| statx(CWD, path, AtFlags::empty(), StatxFlags::BTIME | StatxFlags::BASIC_STATS).unwrap();
    let (here, backing) = (birth(m.path("a")), birth(m.backing("a")));
    if backing.stx_mask & StatxFlags::BTIME.bits() == 0 {
        return skip("time_of_birth", "none in the backing file system");
    }
    if here.stx_mask & StatxFlags::BTIME.bits() == 0 {
        return skip("time_of_birth", "the kernel does not ask for it (before 6.6)");
    }
    assert_eq!((here.stx_btime.tv_sec, here.stx_btime.tv_nsec), (backing.stx_btime.tv_sec, backing.stx_btime.tv_nsec));
}

#[test]
fn extended_attributes() {
    if !can_mount("extended_attributes") {
        return;
    }
    for inode_descriptors_max in [None, Some(1)] {
        let m = Mounted::with(|config| config.inode_descriptors_max = inode_descriptors_max);
        let path = m.path("a");
        fs::write(&path, b"x").unwrap();
        let get = |name: &str, len: usize| {
            let mut value = vec![0; len];
            rustix::fs::getxattr(&path, name, &mut value[..]).map(|len| value[..len].to_vec())
        };
        for name in ["user.a", "trusted.b", "security.c"] {
            rustix::fs::setxattr(&path, name, name.as_bytes(), XattrFlags::CREATE).unwrap();
            assert_eq!(rustix::fs::setxattr(&path, name, b"", XattrFlags::CREATE), Err(rustix::io::Errno::EXIST));
            assert_eq!(get(name, 100).unwrap(), name.as_bytes());
            assert_eq!(rustix::fs::getxattr_query(&path, name).unwrap(), name.len());
            assert_eq!(get(name, 2), Err(rustix::io::Errno::RANGE));
        }
        rustix::fs::setxattr(&path, "user.empty", b"", XattrFlags::empty()).unwrap();
        assert_eq!(get("user.empty", 10).unwrap(), b"");
        assert_eq!(rustix::fs::setxattr(&path, "user.none", b"", XattrFlags::REPLACE), Err(rustix::io::Errno::NODATA));
        assert_eq!(get("user.none", 10), Err(rustix::io::Errno::NODATA));
        let mut list = [0; 1000];
        let len = rustix::fs::listxattr(&path, &mut list[..]).unwrap();
        let names = String::from_utf8(list[..len].to_vec()).unwrap();
        assert!(["user.a\0", "trusted.b\0", "security.c\0"].iter().all(|name| names.contains(name)), "{names:?}");
        assert_eq!(rustix::fs::listxattr(&path, &mut list[..3]), Err(rustix::io::Errno::RANGE));
        assert!(
            !String::from_utf8_lossy(&as_nobody(&format!("getfattr -d -m - {}", path.display())).stdout)
                .contains("trusted")
        );
        rustix::fs::removexattr(&path, "user.a").unwrap();
        assert_eq!(rustix::fs::removexattr(&path, "user.a"), Err(rustix::io::Errno::NODATA));
        // Symbolic links carry those of root.
        std::os::unix::fs::symlink("a", m.path("s")).unwrap();
        rustix::fs::lsetxattr(m.path("s"), "trusted.link", b"l", XattrFlags::empty()).unwrap();
        let mut value = [0; 8];
        assert_eq!(rustix::fs::lgetxattr(m.backing("s"), "trusted.link", &mut value[..]).unwrap(), 1);
        assert_eq!(get("trusted.link", 8), Err(rustix::io::Errno::NODATA));
    }
}

#[test]
fn access_control_lists() {
    if !can_mount("access_control_lists") || !has_program("access_control_lists", "setfacl") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"for one").unwrap();
    let a = m.path("a").display().to_string();
    shell(&format!("chmod 600 {a}"));
    assert!(!as_nobody(&format!("cat {a}")).status.success());
    shell(&format!("setfacl -m u:65534:r {a}"));
    wait_until("the list holds", || as_nobody(&format!("cat {a}")).stdout == b"for one");
    assert!(!as_nobody(&format!("echo x > {a}")).status.success());
    assert!(shell(&format!("getfacl -cn {}", m.backing("a").display())).contains("user:65534:r--"));
    shell(&format!("setfacl -b {a}"));
    // A directory's default list instead of the umask.
    let d = m.path("d").display().to_string();
    shell(&format!("mkdir {d} && setfacl -d -m u::rwx,g::rwx,o::r,u:1000:rw {d}"));
    shell(&format!("umask 077; touch {d}/f; mkdir {d}/s; mkfifo {d}/p"));
    let backing = fs::metadata(m.backing("d/f")).unwrap();
    assert_eq!(backing.mode() & 0o777, 0o664);
    assert!(shell(&format!("getfacl -cn {d}/s")).contains("default:user:1000:rw-"));
    assert_eq!(fs::metadata(m.backing("d/p")).unwrap().mode() & 0o777, 0o664);
}

#[test]
fn file_flags_and_space() {
    if !can_mount("file_flags_and_space") || !has_program("file_flags_and_space", "lsattr") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("a"), b"x").unwrap();
    let (a, backing) = (m.path("a").display().to_string(), m.backing("a").display().to_string());
    shell(&format!("chattr +d {a}"));
    assert!(shell(&format!("lsattr {backing}")).split(' ').next().unwrap().contains('d'));
    shell(&format!("chattr +i {a}"));
    let refused = [errno_of(fs::write(m.path("a"), b"y")), errno_of(fs::remove_file(m.path("a")))];
    shell(&format!("chattr -i {a}"));
    assert_eq!(refused, [libc::EPERM; 2]);
    let (here, backing) = (rustix::fs::statvfs(m.path("")).unwrap(), rustix::fs::statvfs(m.backing("")).unwrap());
    assert_eq!((here.f_blocks, here.f_files, here.f_bsize), (backing.f_blocks, backing.f_files, backing.f_bsize));
    assert_eq!(here.f_namemax, backing.f_namemax);
}
