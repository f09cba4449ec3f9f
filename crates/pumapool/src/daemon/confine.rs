//! The daemons drop what they do not need, so that a fault in one of them gives away less. All of
//! it is one-way.
//!
//! - `lend`, when it listens: every capability (it is root in name only from then on), and by
//!   Landlock, where the kernel has it, all files but those that it reads to learn about memory and
//!   to look names up, and its configuration. What it has to remove at its end it may remove.
//! - `join`, the same, when its mounts have been started: they have the rights of a mount, and it
//!   has those of a lender.
//! - `mount`, when the keeper begins, hence for every daemon that the keeper starts: the
//!   capabilities outside [`MOUNT_NEEDS`]. Those that are left are much (it acts for all users),
//!   but none of them loads modules, sets clocks, or configures networks. A newer program that
//!   needs more (`pumapool upgrade`) does not get it: unmount, and mount again.
//! - All: nothing that they start gains rights by being started (no_new_privs).
//!
//! The kernel keeps all this for each thread; threads and programs that are started inherit it. So
//! it must be done while the process has one thread, and is.
//!
//! A process that lacks the right to drop something lacks the thing, too: then nothing is dropped,
//! and nothing said. An ordinary user's mount is left alone altogether, because it takes the
//! set-uid program fusermount3 to end it. `status` shows what is the case.

use landlock::{
    ABI, Access, AccessFs, BitFlags, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
    path_beneath_rules,
};
use report::Confined;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, no_new_privs,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use std::path::{Path, PathBuf};
use wire::address::Address;

/// What the keeper and the daemons of a mount need, also those that take over.
const MOUNT_NEEDS: CapabilitySet = CapabilitySet::empty()
    // Acting for the users of the mount, whose rights the kernel has checked.
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    // Opening inodes by their handles.
    .union(CapabilitySet::DAC_READ_SEARCH)
    // Mounting, unmounting, trusted extended attributes, page frames, the eviction tap, and being
    // told of changes beside the mount.
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    // Limits beyond the hard ones, and not waiting for writeback that waits for us.
    .union(CapabilitySet::SYS_RESOURCE)
    // Each worker keeps its capabilities when it acts as somebody else, which is a right of its
    // own.
    .union(CapabilitySet::SETPCAP);

/// What names are looked up with, where there is such a thing. A file is permitted as the one that
/// it is now; where /etc/resolv.conf leads into one of the folders, it may be replaced.
const RESOLVER_READS: [&str; 9] = [
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/host.conf",
    "/run/systemd/resolve",
    "/run/NetworkManager",
    "/run/resolvconf",
    "/run/connman",
];

/// A folder of this name is ours: what is in it is configurations.
const OWN_FOLDER: &str = "pumapool";

/// The version of Landlock that is asked for; an older kernel does what it can.
const LANDLOCK: ABI = ABI::V5;

const ALL_PERMITTED: &str = "all permitted";

/// A lender that listens there, and has its metrics served there; `folder` is where it removes its
/// socket and log. It may read its configuration again. One that has replaced it is another file,
/// which Landlock can permit only with all others in the same folder: it does in one of our own,
/// such as /etc/pumapool.
pub fn lender(listen: &Address, metrics: Option<&Address>, folder: &Path, configuration: Option<&Path>) -> Confined {
    let mut removes = vec![folder.to_owned()];
    for address in metrics.into_iter().chain([listen]) {
        if let Address::Unix(path) = address {
            removes.extend(path.parent().map(Path::to_owned));
        }
    }
    let own_folder = configuration.and_then(own_folder);
    let few = own_folder.map_or("few".to_owned(), |folder| format!("few, and all in {}", folder.display()));
    let files = match restrict_files(&removes, configuration.into_iter().chain(own_folder)) {
        Ok(RulesetStatus::FullyEnforced) => few,
        Ok(RulesetStatus::PartiallyEnforced) => format!("{few}, as far as this kernel can forbid them"),
        Ok(RulesetStatus::NotEnforced) | Err(_) => ALL_PERMITTED.to_owned(),
    };
    drop_capabilities(CapabilitySet::empty());
    Confined { files, ..now() }
}

/// The folder of the configuration, if it is one of our own.
fn own_folder(configuration: &Path) -> Option<&Path> {
    configuration.parent().filter(|folder| folder.file_name().is_some_and(|name| name == OWN_FOLDER))
}

/// The keeper of a mount, before it starts a daemon.
pub fn keeper() {
    let is_able = |sets: CapabilitySets| sets.effective.contains(CapabilitySet::SETPCAP | CapabilitySet::SYS_ADMIN);
    if rustix::process::geteuid().is_root() && capabilities(None).is_ok_and(is_able) {
        drop_capabilities(MOUNT_NEEDS);
    }
}

/// What this thread may do.
pub fn now() -> Confined {
    let permitted = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted);
    Confined {
        no_new_privs: no_new_privs().unwrap_or(false),
        capabilities: permitted.iter_names().map(|(name, _)| name.to_owned()).collect(),
        files: ALL_PERMITTED.to_owned(),
    }
}

/// Keeps of the capabilities, and of those that could be had by starting programs, those that are
/// `needed`.
fn drop_capabilities(needed: CapabilitySet) {
    let _ = set_no_new_privs(true);
    // While there still is the capability that it takes. What this kernel does not know yet is
    // EINVAL.
    for one in (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        if !needed.contains(one) {
            let _ = remove_capability_from_bounding_set(one);
        }
    }
    let _ = clear_ambient_capability_set();
    if let Ok(sets) = capabilities(None) {
        let _ = set_capabilities(
            None,
            CapabilitySets {
                effective: sets.effective & needed,
                permitted: sets.permitted & needed,
                inheritable: CapabilitySet::empty(),
            },
        );
    }
}

/// From now on this thread opens no files but those that a lender needs, and changes nothing but
/// that it removes files from the folders `removes`. What is open stays so.
fn restrict_files<'a>(
    removes: &[PathBuf],
    configurations: impl Iterator<Item = &'a Path>,
) -> Result<RulesetStatus, RulesetError> {
    let reads: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::ReadDir;
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .create()?
        .add_rules(path_beneath_rules(lender::headroom::memory_folders(), reads))?
        .add_rules(path_beneath_rules(RESOLVER_READS, reads))?
        .add_rules(path_beneath_rules(configurations, AccessFs::ReadFile))?
        .add_rules(path_beneath_rules(removes, AccessFs::RemoveFile))?
        .restrict_self()?;
    Ok(status.ruleset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::ErrorKind;

    /// In a thread of its own, which takes all this with it when it ends.
    #[test]
    fn a_lender_reaches_nothing_but_what_it_needs() {
        let scratch = testbed::Scratch::new("confine").unwrap();
        let (own, other) = (scratch.directory("own").unwrap(), scratch.directory("other").unwrap());
        for folder in [&own, &other] {
            fs::write(folder.join("file"), "bytes").unwrap();
        }
        let run = || {
            let open = fs::File::open(other.join("file")).unwrap();
            let confined = lender(&"unix:/nowhere/socket".parse().unwrap(), None, &own, None);
            assert!(confined.no_new_privs && confined.capabilities.is_empty(), "{confined:?}");
            assert!(fs::read_to_string("/proc/meminfo").unwrap().contains("MemTotal"));
            assert_eq!(std::io::read_to_string(open).unwrap(), "bytes", "what is open stays so");
            if confined.files == ALL_PERMITTED {
                return testbed::skip("a_lender_reaches_nothing_but_what_it_needs", "this kernel has no Landlock");
            }
            let refused = |result: std::io::Result<()>| result.unwrap_err().kind() == ErrorKind::PermissionDenied;
            assert!(refused(fs::read(other.join("file")).map(drop)));
            assert!(refused(fs::write(other.join("file"), "others")));
            assert!(refused(fs::write(own.join("new"), "bytes")));
            assert!(refused(fs::remove_file(other.join("file"))));
            assert!(refused(std::process::Command::new("/bin/true").status().map(drop)));
            fs::remove_file(own.join("file")).unwrap();
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
        assert_eq!(fs::read_to_string(other.join("file")).unwrap(), "bytes", "other threads are as they were");
    }

    #[test]
    fn a_lender_reads_its_configuration_and_what_replaces_it_in_a_folder_of_ours() {
        let test = "a_lender_reads_its_configuration_and_what_replaces_it_in_a_folder_of_ours";
        let scratch = testbed::Scratch::new(test).unwrap();
        for (name, is_ours) in [("pumapool", true), ("etc", false)] {
            let folder = scratch.directory(name).unwrap();
            let (file, other) = (folder.join("lend.toml"), folder.join("new.toml"));
            for file in [&file, &other] {
                fs::write(file, "bytes").unwrap();
            }
            let run = || {
                let confined = lender(&"unix:/nowhere/socket".parse().unwrap(), None, scratch.path(), Some(&file));
                if confined.files == ALL_PERMITTED {
                    return testbed::skip(test, "this kernel has no Landlock");
                }
                let expected = if is_ours { format!("few, and all in {}", folder.display()) } else { "few".to_owned() };
                assert!(
                    confined.files.starts_with(&expected) && is_ours == confined.files.contains(name),
                    "{confined:?}"
                );
                assert_eq!(fs::read_to_string(&file).unwrap(), "bytes");
                assert_eq!(fs::read_to_string(&other).is_ok(), is_ours, "{name}");
            };
            std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
            fs::rename(&other, &file).unwrap();
        }
        let own = |path| own_folder(Path::new(path)).and_then(Path::to_str);
        assert_eq!(own("/etc/pumapool/lend.toml"), Some("/etc/pumapool"));
        assert_eq!(
            [own("/etc/lend.toml"), own("/etc/pumapool.toml"), own("/etc/pumapool/../lend.toml"), own("/x")],
            [None; 4]
        );
    }

    #[test]
    fn what_a_mount_needs_stays() {
        let has = |confined: &Confined, name: &str| confined.capabilities.iter().any(|one| one == name);
        let run = || {
            let before = now();
            keeper();
            let after = now();
            if !rustix::process::geteuid().is_root() || !has(&before, "SYS_ADMIN") {
                assert_eq!(before.capabilities, after.capabilities);
                return;
            }
            assert!(after.no_new_privs && has(&after, "SYS_ADMIN"), "{after:?}");
            for gone in
                ["SYS_MODULE", "SYS_BOOT", "SYS_TIME", "SYS_RAWIO", "NET_ADMIN", "NET_RAW", "AUDIT_WRITE", "MAC_ADMIN"]
            {
                assert!(!has(&after, gone), "{gone}");
            }
            // What it starts has no more.
            let status = std::process::Command::new("/bin/cat").arg("/proc/self/status").output().unwrap().stdout;
            let status = String::from_utf8(status).unwrap();
            let set = |name: &str| {
                let line = status.lines().find(|line| line.starts_with(name)).unwrap();
                u64::from_str_radix(line[name.len()..].trim(), 16).unwrap()
            };
            assert_eq!(set("CapBnd:") & !MOUNT_NEEDS.bits(), 0, "{status}");
            assert_eq!(set("CapPrm:") & !MOUNT_NEEDS.bits(), 0, "{status}");
            assert_eq!(set("NoNewPrivs:"), 1, "{status}");
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }
}
