//! The daemons drop rights that they do not need, to limit the damage of a fault. No right can be
//! regained.
//!
//! - `lend`, when it listens: every capability, so that it is root in name only. If the kernel has
//!   Landlock, also access to all files except those with which it measures memory and looks up
//!   names, and its configuration. It may remove the files that it must remove at its end.
//! - `join`, when its mounts have been started: the same rights as `lend`. Its mounts have the
//!   rights of a mount.
//! - `mount`, when the supervisor begins, so for all of its daemons: the capabilities outside
//!   [`MOUNT_NEEDS`]. The remaining ones are powerful, because a mount acts for all users. But none
//!   of them loads modules, sets clocks, or configures networks. A newer program that needs more
//!   (`pumapool upgrade`) does not get it: unmount, and mount again.
//! - All daemons: a program that they start gains no rights (no_new_privs).
//!
//! The kernel stores these rights for each thread, and new threads and programs inherit them. So
//! they are dropped while the process has only one thread.
//!
//! A process without the right to drop a capability lacks the capability, too. Then nothing is
//! dropped, and nothing is logged. A mount of an ordinary user drops nothing, because it needs the
//! set-uid program fusermount3 to end. `status` shows the result.

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

/// Capabilities that the supervisor and the daemons of a mount need, including later daemons.
const MOUNT_NEEDS: CapabilitySet = CapabilitySet::empty()
    // To act for the users of the mount, whose rights the kernel has checked.
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    // To open inodes by their handles.
    .union(CapabilitySet::DAC_READ_SEARCH)
    // For mounting, unmounting, trusted extended attributes, page frames, the eviction tap, and
    // detection of external changes.
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::BPF)
    .union(CapabilitySet::PERFMON)
    // To raise limits beyond the hard ones, and not to wait for writeback that waits for this
    // daemon.
    .union(CapabilitySet::SYS_RESOURCE)
    // To keep the capabilities of a worker while it acts as another user.
    .union(CapabilitySet::SETPCAP);

/// Files for looking up names, as far as they exist. Landlock permits the present file, not its
/// name. If /etc/resolv.conf is a link into one of the directories, it may be replaced.
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

/// A directory of this name has only configurations of this program.
const OWN_FOLDER: &str = "pumapool";

/// The requested version of Landlock; an older kernel applies the part that it supports.
const LANDLOCK: ABI = ABI::V5;

const ALL_PERMITTED: &str = "all permitted";

/// Confines a lender with these addresses for borrowers and metrics. In `folder` it removes its
/// socket and log. It may read its configuration again. If that file is replaced, the new one is
/// another file, which Landlock can permit only with all others in the same directory. That is done
/// only for this program's own directory, such as /etc/pumapool.
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

/// The directory of the configuration, if it is this program's own.
fn own_folder(configuration: &Path) -> Option<&Path> {
    configuration.parent().filter(|folder| folder.file_name().is_some_and(|name| name == OWN_FOLDER))
}

/// Confines the supervisor of a mount, before it starts a daemon.
pub fn supervisor() {
    let is_able = |sets: CapabilitySets| sets.effective.contains(CapabilitySet::SETPCAP | CapabilitySet::SYS_ADMIN);
    if rustix::process::geteuid().is_root() && capabilities(None).is_ok_and(is_able) {
        drop_capabilities(MOUNT_NEEDS);
    }
}

/// The present rights of this thread.
pub fn now() -> Confined {
    let permitted = capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.permitted);
    Confined {
        no_new_privs: no_new_privs().unwrap_or(false),
        capabilities: permitted.iter_names().map(|(name, _)| name.to_owned()).collect(),
        files: ALL_PERMITTED.to_owned(),
    }
}

/// Drops all capabilities except the `needed` ones, also from the sets that started programs could
/// use.
fn drop_capabilities(needed: CapabilitySet) {
    let _ = set_no_new_privs(true);
    // This needs a capability that is still there. A capability that this kernel does not know is
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

/// From now on this thread can open only the files that a lender needs. It can change nothing,
/// except that it can remove files in the directories `removes`. Open files stay open.
fn restrict_files<'a>(
    removes: &[PathBuf],
    configurations: impl Iterator<Item = &'a Path>,
) -> Result<RulesetStatus, RulesetError> {
    let reads: BitFlags<AccessFs> = AccessFs::ReadFile | AccessFs::ReadDir;
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(LANDLOCK))?
        .create()?
        .add_rules(path_beneath_rules(lender::available_memory::memory_folders(), reads))?
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

    /// In a thread of its own, because the rights end with the thread.
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
            supervisor();
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
            // A program that it starts has no more rights.
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
