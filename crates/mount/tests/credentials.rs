//! The owner and the mode of what is made through the mount, and when set-id bits fall.

mod support;

use mount::WriteMode;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use support::*;

fn ready(test: &str) -> bool {
    can_mount(test) && has_program(test, "setpriv")
}

fn set_mode(path: std::path::PathBuf, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn new_files_are_their_makers() {
    if !ready("new_files_are_their_makers") {
        return;
    }
    both_modes(|m| {
        fs::create_dir(m.path("d")).unwrap();
        set_mode(m.path("d"), 0o777);
        let d = m.path("d").display().to_string();
        let script = format!("umask 027; cd {d} && touch f && mkdir s && ln -s x l && mkfifo p && ln f h");
        assert!(as_nobody(&script).status.success());
        for (name, mode) in [("f", 0o640), ("s", 0o750), ("l", 0o777), ("p", 0o640)] {
            let made = fs::symlink_metadata(m.backing(format!("d/{name}"))).unwrap();
            assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (65534, 65534, mode), "{name}");
        }
        // And the next file is root's again.
        fs::write(m.path("d/root"), b"").unwrap();
        assert_eq!(fs::metadata(m.backing("d/root")).unwrap().uid(), 0);
        shell(&format!("umask 0; touch {d}/open; umask 077; touch {d}/closed"));
        assert_eq!(fs::metadata(m.backing("d/open")).unwrap().mode() & 0o777, 0o666);
        assert_eq!(fs::metadata(m.backing("d/closed")).unwrap().mode() & 0o777, 0o600);
    });
}

#[test]
fn permissions_are_checked() {
    if !ready("permissions_are_checked") {
        return;
    }
    let m = Mounted::through();
    fs::write(m.path("secret"), b"x").unwrap();
    set_mode(m.path("secret"), 0o600);
    let secret = m.path("secret").display().to_string();
    for script in
        [format!("cat {secret}"), format!("rm -f {secret}"), format!("chmod 777 {secret}"), format!("touch {secret}2")]
    {
        assert!(!as_nobody(&script).status.success(), "{script}");
    }
    // A sticky directory: only the owner removes.
    fs::create_dir(m.path("tmp")).unwrap();
    set_mode(m.path("tmp"), 0o1777);
    fs::write(m.path("tmp/a"), b"x").unwrap();
    assert!(!as_nobody(&format!("rm -f {}", m.path("tmp/a").display())).status.success());
    assert!(m.backing("tmp/a").exists());
}

#[test]
fn set_gid_directories() {
    if !ready("set_gid_directories") {
        return;
    }
    let m = Mounted::through();
    fs::create_dir(m.path("d")).unwrap();
    chown(m.path("d"), None, Some(4242)).unwrap();
    set_mode(m.path("d"), 0o2777);
    let d = m.path("d").display().to_string();
    // Not in the group: the file gets the group, but may not be set-gid. In it: it may.
    for (groups, name, expected) in [("--clear-groups", "out", 0o770), ("--groups=4242", "in", 0o2770)] {
        let script = format!(
            "umask 0; mkdir {d}/{name}s; python3 -c 'import os; os.close(os.open(\"{d}/{name}\", os.O_CREAT|os.O_WRONLY, 0o2770))'"
        );
        assert!(as_user(65534, 65534, groups, &script).status.success());
        let file = fs::metadata(m.backing(format!("d/{name}"))).unwrap();
        assert_eq!((file.uid(), file.gid(), file.mode() & 0o7777), (65534, 4242, expected), "{name}");
        let directory = fs::metadata(m.backing(format!("d/{name}s"))).unwrap();
        assert_eq!((directory.gid(), directory.mode() & 0o2000), (4242, 0o2000));
    }
}

/// Writing, truncating and allocating take set-id bits away for an ordinary user, and leave them
/// for root.
#[test]
fn set_id_bits_fall() {
    if !ready("set_id_bits_fall") {
        return;
    }
    for write in [mount::WriteMode::Through, mount::WriteMode::Back] {
        let m = Mounted::with(|config| config.write = write);
        let actions = [
            "echo x >> F",
            "truncate -s 1 F",
            "fallocate -l 9000 F",
            ": > F",
            "echo y | dd of=F conv=notrunc status=none",
        ];
        for (index, action) in actions.iter().enumerate() {
            for (nobody, expected) in [(true, 0o777), (false, 0o6777)] {
                let name = format!("f{index}{nobody}");
                fs::write(m.path(&name), b"some bytes").unwrap();
                set_mode(m.path(&name), 0o6777);
                let script = action.replace('F', &m.path(&name).display().to_string());
                if nobody {
                    assert!(as_nobody(&script).status.success());
                } else {
                    shell(&script);
                }
                let backing = fs::metadata(m.backing(&name)).unwrap().mode() & 0o7777;
                assert_eq!(backing, expected, "{write:?}: {action}, by nobody: {nobody}");
                assert_eq!(fs::metadata(m.path(&name)).unwrap().mode() & 0o7777, expected, "{write:?}: {action}");
            }
        }
    }
}

/// Where there are no access control lists, modes alone count.
#[test]
fn permissions_are_checked_without_access_control_lists() {
    if !ready("permissions_are_checked_without_access_control_lists") {
        return;
    }
    let (directory, backing) = new_backing();
    let file_system = FileSystem::ramfs(&backing);
    set_mode(backing.clone(), 0o755);
    fs::create_dir(backing.join("d")).unwrap();
    set_mode(backing.join("d"), 0o755);
    fs::write(backing.join("d/readable"), "content").unwrap();
    set_mode(backing.join("d/readable"), 0o644);
    fs::write(backing.join("d/secret"), "content").unwrap();
    set_mode(backing.join("d/secret"), 0o640);
    let asked = |at: std::path::PathBuf| rustix::fs::getxattr(at, "system.posix_acl_access", &mut [0u8; 64][..]);
    assert_eq!(asked(backing.join("d")), Err(rustix::io::Errno::OPNOTSUPP));
    let m = Mounted::over(directory, Some(file_system), |_| {});
    assert_eq!(asked(m.path("d")), Err(rustix::io::Errno::OPNOTSUPP));
    assert_eq!(asked(m.path("d/readable")), Err(rustix::io::Errno::OPNOTSUPP));
    let output = as_nobody(&format!("cd {} && ls && cat readable && ! cat secret", m.path("d").display()));
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "readable\nsecret\ncontent");
}

/// A FUSE server that fails when it is asked for an access control list, as some do that have none.
struct FailsLists;

impl fuse::Filesystem for FailsLists {
    fn handle(&self, request: &fuse::Request<'_>, reply: fuse::Reply<'_>, _scratch: &mut [u8]) {
        use fuse::{Errno, Operation, abi};
        let attr =
            |ino| abi::Attr { ino, mode: if ino == 1 { 0o40_755 } else { 0o100_644 }, nlink: 1, ..Default::default() };
        let _taken = match &request.operation {
            Operation::Lookup { .. } => reply.value(&abi::EntryOut { nodeid: 2, attr: attr(2), ..Default::default() }),
            Operation::Getattr(_) => {
                reply.value(&abi::AttrOut { attr: attr(request.header.nodeid), ..Default::default() })
            }
            Operation::Getxattr { name, .. } if name.to_bytes().starts_with(b"system.") => reply.error(Errno::IO),
            Operation::Getxattr { .. } => reply.error(Errno::NODATA),
            Operation::Statfs => reply.value(&abi::StatfsOut::default()),
            Operation::Forget { .. } | Operation::BatchForget { .. } => {
                reply.none();
                Ok(())
            }
            _ => reply.error(Errno::NOSYS),
        };
    }
}

/// `ls -l` asks for the list of each file, and prints an error that it does not expect.
#[test]
fn a_list_that_cannot_be_read_is_none() {
    if !can_mount("a_list_that_cannot_be_read_is_none") {
        return;
    }
    let (directory, backing) = new_backing();
    let options = fuse::mounting::Options {
        fsname: "fails-lists".to_owned(),
        subtype: "puma-test".to_owned(),
        allow_other: true,
        flags: rustix::mount::MountFlags::empty(),
    };
    let device = fuse::mounting::mount(&backing, &options).unwrap();
    let wish = fuse::Wish { capabilities: 0, readahead_bytes_max: 0, background_max: 8, time_granularity_ns: 1 };
    let session = fuse::Session::negotiate(device, wish).unwrap();
    let mut workers = [(); 2].map(|()| session.worker().unwrap());
    std::thread::scope(|scope| {
        for worker in &mut workers {
            scope.spawn(|| worker.serve(&FailsLists));
        }
        let _ended_at_last = FileSystem::mounted(&backing);
        let m = Mounted::over(directory, None, |_| {});
        let asked = |at: std::path::PathBuf| rustix::fs::getxattr(at, "system.posix_acl_access", &mut [0u8; 64][..]);
        assert_eq!(asked(m.backing("a")), Err(rustix::io::Errno::IO));
        assert_eq!(asked(m.path("a")), Err(rustix::io::Errno::OPNOTSUPP));
        let output = std::process::Command::new("ls").args(["-l"]).arg(m.path("a")).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    });
}

/// Bytes of a small disk of which half is reserved for root.
const DISK_BYTES: u64 = 64 << 20;
/// Space that the file system may need for metadata of allocated blocks, in bytes.
const NOTES_BYTES: u64 = 64 << 10;

/// No other user gets the blocks that ext4 reserves for root, by any kind of write.
#[test]
fn reserved_blocks_are_for_root() {
    if !can_mount("reserved_blocks_are_for_root") {
        return;
    }
    const STORE: &str = "import mmap, os
with open(FILE, 'wb+') as file:
    file.truncate(BYTES)
    bytes = mmap.mmap(file.fileno(), BYTES)
    for page in range(0, BYTES, 4096): bytes[page] = 1
    bytes.flush()";
    let images = tempfile::tempdir().unwrap();
    for (write, pass) in [(WriteMode::Through, false), (WriteMode::Back, false), (WriteMode::Through, true)] {
        let (directory, backing) = new_backing();
        let disk =
            FileSystem::image_with(&backing, &images.path().join(format!("{write:?}{pass}")), DISK_BYTES, "-m 50");
        let m = Mounted::over(directory, Some(disk), |config| {
            config.write = write;
            config.pass = pass;
        });
        fs::set_permissions(m.path(""), fs::Permissions::from_mode(0o777)).unwrap();
        let reserved = || {
            shell(&format!("sync -f {}", m.backing("").display()));
            let now = rustix::fs::statvfs(m.backing("")).unwrap();
            (now.f_bfree * now.f_frsize, now.f_bavail)
        };
        let (free_bytes, available) = reserved();
        assert!(available > 0);
        let reserve_bytes = free_bytes - available * rustix::fs::statvfs(m.backing("")).unwrap().f_frsize;
        let file = m.path("a").display().to_string();
        let store = STORE.replace("FILE", &format!("{file:?}")).replace("BYTES", &DISK_BYTES.to_string());
        for way in [
            format!("dd if=/dev/zero of={file} bs=1M count=64"),
            format!("dd if=/dev/zero of={file} bs=1M count=64 oflag=direct"),
            // Open for reading first: then the file may be passed through.
            format!("exec 3<{file}; dd if=/dev/zero of={file} bs=1M count=64 conv=notrunc"),
            format!("fallocate -l 64M {file}"),
            format!("env -i PATH=/usr/bin python3 -c '{}'", store.replace('\'', "\"")),
        ] {
            println!("{write:?}, pass {pass}: {way}");
            fs::write(m.backing("a"), "").unwrap();
            set_mode(m.backing("a"), 0o666);
            let output = as_nobody(&way);
            assert!(!output.status.success(), "all of it was taken");
            let (free_bytes, _) = reserved();
            assert!(
                free_bytes + NOTES_BYTES >= reserve_bytes,
                "{free_bytes} of {reserve_bytes} bytes are left for root"
            );
            fs::remove_file(&file).unwrap();
            m.wait_until_closed();
        }
        // Root may, though the daemon acts as others in between.
        shell(&format!("dd if=/dev/zero of={file} bs=1M count=40 conv=fsync 2>&1"));
        let (free_bytes, _) = reserved();
        assert!(free_bytes < reserve_bytes);
    }
}

/// That little is left is noticed, although it is not looked at with each write.
#[test]
fn a_disk_that_others_fill_up_is_noticed() {
    if !can_mount("a_disk_that_others_fill_up_is_noticed") {
        return;
    }
    const LARGE_BYTES: u64 = 6 << 30;
    let images = tempfile::tempdir().unwrap();
    let (directory, backing) = new_backing();
    let disk = FileSystem::image_with(&backing, &images.path().join("image"), LARGE_BYTES, "-m 40");
    let m = Mounted::over(directory, Some(disk), |_| {});
    set_mode(m.path(""), 0o777);
    let left = || {
        let now = rustix::fs::statvfs(m.backing("")).unwrap();
        (now.f_bfree * now.f_frsize, now.f_bavail * now.f_frsize)
    };
    let (free_bytes, available_bytes) = left();
    let reserve_bytes = free_bytes - available_bytes;
    let at = m.path("").display().to_string();
    assert!(as_nobody(&format!("dd if=/dev/zero of={at}/a bs=1M count=1")).status.success());
    // Beside the mount; it takes no time.
    let filled = File::create(m.backing("filled")).unwrap();
    let keeps_size = rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&filled, keeps_size, 0, available_bytes - (4 << 20)).unwrap();
    let all = as_nobody(&format!("dd if=/dev/zero of={at}/b bs=64K count={}", LARGE_BYTES >> 16));
    assert!(!all.status.success());
    let (free_bytes, _) = left();
    println!("{} MiB of {} MiB are left for root", free_bytes >> 20, reserve_bytes >> 20);
    assert!(free_bytes > reserve_bytes / 2);
}
