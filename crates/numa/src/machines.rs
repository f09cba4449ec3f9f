//! Virtual machines and other processes, as the system lists them. With KVM and QEMU a machine's
//! memory is a process's.

use crate::NodeId;
use crate::process::{Process, shown};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

/// The remedy if a machine does not return freed memory to its host.
pub const REPORT_FREE_PAGES: &str = "add `-device virtio-balloon-pci,free-page-reporting=on` to QEMU, or <memballoon model='virtio' freePageReporting='on'/> to the domain";

/// A process with memory.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// Its number.
    pub pid: u32,
    /// Its name, or the machine's.
    pub name: String,
    /// Whether it is a virtual machine.
    pub machine: Option<Machine>,
    /// Pages of 4 KiB on each node.
    pub pages_by_node: BTreeMap<NodeId, u64>,
}

/// The arguments of a machine's process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// The name in QEMU's arguments; empty if there is none.
    pub name: String,
    /// Whether memory that the guest frees returns to the host: a balloon with free-page reporting.
    pub reports_free_pages: bool,
}

/// The machine of a process with these arguments. `None`: it is another program.
pub fn machine(arguments: &[String]) -> Option<Machine> {
    let program = arguments.first()?.rsplit('/').next()?;
    if !(program.starts_with("qemu-system-") || program == "qemu-kvm" || program == "kvm") {
        return None;
    }
    // -name db1,process=x    -name guest=db1,debug-threads=on
    let name = arguments.iter().skip_while(|word| *word != "-name").nth(1).and_then(|name| {
        let first = name.split(',').next()?;
        name.split(',').find_map(|part| part.strip_prefix("guest=")).or((!first.contains('=')).then_some(first))
    });
    let reports = |word: &&String| {
        // -device virtio-balloon-pci,free-page-reporting=on -device
        // {"driver":"virtio-balloon-pci","free-page-reporting":true}
        let word: String = word.chars().filter(|char| !char.is_whitespace()).collect();
        word.contains("virtio-balloon")
            && ["free-page-reporting=on", "free-page-reporting=true", "\"free-page-reporting\":true"]
                .iter()
                .any(|setting| word.contains(setting))
    };
    Some(Machine {
        name: shown(name.unwrap_or_default()),
        reports_free_pages: arguments.iter().find(reports).is_some(),
    })
}

/// Users of virtual machines, in addition to root and the calling user: libvirt's, by their names
/// in Debian and in Fedora.
const MACHINE_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// The numbers of the users whose processes may be virtual machines. Any other user can name a
/// process as he likes.
fn machine_users() -> Vec<u32> {
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let of_line = |line: &str| {
        let mut words = line.split(':');
        let name = words.next()?;
        MACHINE_USERS.contains(&name).then(|| words.nth(1)?.parse().ok()).flatten()
    };
    let asks = rustix::process::geteuid().as_raw();
    [0, asks].into_iter().chain(passwd.lines().filter_map(of_line)).collect()
}

/// The machine of a process. `None`: it is another program, or runs for another user than `users`,
/// if only in part (a set-user-ID program).
fn machine_of(process: &Process, users: &[u32]) -> Option<Machine> {
    let found = machine(&process.arguments().ok()?)?;
    let its_users = process.users().ok()?;
    (!its_users.is_empty() && its_users.iter().all(|user| users.contains(user))).then_some(found)
}

/// The virtual machines that run here, with their processes' numbers.
pub fn running() -> Vec<(u32, Machine)> {
    let users = machine_users();
    pids(|process| machine_of(process, &users)).unwrap_or_default()
}

/// Whether memory that is freed in this machine, a guest, returns to its host: it has a balloon
/// that has agreed to report free pages (VIRTIO 1.2, 5.5.3: device 5, VIRTIO_BALLOON_F_REPORTING is
/// bit 5). `devices` are those of the virtio bus in sysfs.
pub fn this_one_reports_free_pages(devices: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(devices) else { return false };
    let word = |folder: &Path, name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    entries.flatten().any(|entry| {
        let folder = entry.path();
        // Bits in ascending order, a character each.
        word(&folder, "device").trim() == "0x0005" && word(&folder, "features").as_bytes().get(5) == Some(&b'1')
    })
}

/// All processes that may be read, and have memory.
///
/// # Errors
/// Fails if there is no /proc.
pub fn all() -> io::Result<Vec<Found>> {
    let (mut all, users) = (Vec::new(), machine_users());
    for entry in std::fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // A process that has ended meanwhile, or is another user's, is left out.
        let found = || {
            let process = Process::open(pid)?;
            let (name, machine) = (process.name()?, machine_of(&process, &users));
            io::Result::Ok(Found { pid, name, machine, pages_by_node: process.pages_by_node()? })
        };
        all.extend(found().ok().filter(|found| !found.pages_by_node.is_empty()));
    }
    Ok(all)
}

/// The process of the machine with that name. Only machines of root, of the calling user, and of
/// libvirt's users count.
///
/// # Errors
/// Fails, with one line, if there is none, or more than one.
pub fn named(name: &str) -> Result<u32, String> {
    let users = machine_users();
    let machines = pids(|process| Some(machine_of(process, &users)?.name))?;
    let hint = || {
        let names: Vec<&str> = machines.iter().map(|(_, name)| name.as_str()).filter(|name| !name.is_empty()).collect();
        match &names[..] {
            [] => "nor any that has a name".to_owned(),
            names => format!("there are: {}", names.join(", ")),
        }
    };
    only(&machines, name, "virtual machine", hint)
}

/// The process with that name. If several have started each other, as PostgreSQL's, the first one.
///
/// # Errors
/// Fails, with one line, if there is none, or more than one.
pub fn command(name: &str) -> Result<u32, String> {
    let mut processes = pids(|process| process.name().ok())?;
    let all: Vec<u32> = processes.iter().filter(|(_, other)| other == name).map(|(pid, _)| *pid).collect();
    let is_first =
        |pid: u32| Process::open(pid).and_then(|process| process.parent()).is_ok_and(|parent| !all.contains(&parent));
    processes.retain(|(pid, other)| other != name || is_first(*pid));
    only(&processes, name, "process", || "`pumapool numa list --all` shows those that are there".to_owned())
}

/// The number and the result of each process for which `word` returns something.
fn pids<T>(word: impl Fn(&Process) -> Option<T>) -> Result<Vec<(u32, T)>, String> {
    let entries = std::fs::read_dir("/proc").map_err(|error| format!("cannot list processes: {error}"))?;
    let found = |entry: io::Result<std::fs::DirEntry>| {
        let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        Some((pid, word(&Process::open(pid).ok()?)?))
    };
    Ok(entries.filter_map(found).collect())
}

fn only(all: &[(u32, String)], name: &str, kind: &str, hint: impl Fn() -> String) -> Result<u32, String> {
    let of_name: Vec<u32> = all.iter().filter(|(_, other)| other == name).map(|(pid, _)| *pid).collect();
    match of_name[..] {
        [pid] => Ok(pid),
        [] => Err(format!("there is no {kind} {name:?}; {}", hint())),
        _ => Err(format!("there is more than one {kind} {name:?}: use its number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Option<Machine> {
        machine(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn of_those_that_started_each_other_it_is_the_first() {
        use std::os::unix::fs::PermissionsExt;
        let name = format!("twin-{}", std::process::id());
        let scratch = testbed::Scratch::new(&name).unwrap();
        let program = scratch.path().join(&name);
        // The shell starts another one of its name, which prints a line when it runs, and ends with
        // the first.
        std::fs::write(&program, "#!/bin/sh\n(echo there; read line; :)\nread line\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let pipe = std::process::Stdio::piped;
        let mut child = std::process::Command::new(&program).stdin(pipe()).stdout(pipe()).spawn().unwrap();
        let mut there = [0; 5];
        io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut there).unwrap();
        let of_name =
            pids(|process| process.name().ok()).unwrap().into_iter().filter(|(_, other)| *other == name).count();
        let found = command(&name);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!((of_name, found), (2, Ok(child.id())));
        assert!(command(&name).is_err());
    }

    #[test]
    fn another_users_process_is_no_machine_whatever_it_is_called() {
        use std::os::unix::process::CommandExt;
        if !rustix::process::geteuid().is_root() {
            return testbed::skip("another_users_process_is_no_machine_whatever_it_is_called", "needs root");
        }
        let name = format!("db-{}", std::process::id());
        let pipe = std::process::Stdio::piped;
        let start = |user: u32| {
            let mut command = std::process::Command::new("/bin/sh");
            command.arg0("qemu-system-x").args(["-c", "echo there; read line", "-name", &name]);
            let mut child = command.uid(user).current_dir("/").stdin(pipe()).stdout(pipe()).spawn().unwrap();
            io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 5]).unwrap();
            child
        };
        let mut children = [start(0), start(65_534)];
        let (found, listed) = (super::named(&name), running());
        for child in &mut children {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
        assert_eq!(found, Ok(children[0].id()));
        assert!(!listed.iter().any(|(pid, _)| *pid == children[1].id()));
    }

    #[test]
    fn machines_are_known_by_what_they_were_called_with() {
        let named = |name: &str, reports_free_pages| Some(Machine { name: name.to_owned(), reports_free_pages });
        let cases = [
            ("/usr/bin/qemu-system-x86_64 -m 4G -name db1 -nographic", named("db1", false)),
            (
                "qemu-kvm -name guest=db2,debug-threads=on -device virtio-balloon-pci,free-page-reporting=on",
                named("db2", true),
            ),
            (
                r#"qemu-system-aarch64 -device {"driver":"virtio-balloon-pci","free-page-reporting":true}"#,
                named("", true),
            ),
            ("qemu-system-x86_64 -device virtio-balloon-pci,free-page-reporting=off", named("", false)),
            ("qemu-system-x86_64 -name", named("", false)),
            ("/usr/bin/vim qemu-system-x86_64 -name db1", None),
            ("", None),
        ];
        for (line, expected) in cases {
            assert_eq!(of(line), expected, "{line}");
        }
    }

    #[test]
    fn a_guest_knows_whether_its_balloon_reports() {
        let devices = tempfile::tempdir().unwrap();
        let device = |name: &str, kind: &str, features: &str| {
            let folder = devices.path().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("device"), format!("{kind}\n")).unwrap();
            std::fs::write(folder.join("features"), format!("{features}\n")).unwrap();
        };
        assert!(!this_one_reports_free_pages(devices.path()));
        device("virtio0", "0x0001", "11111111");
        assert!(!this_one_reports_free_pages(devices.path()), "another device's bit");
        device("virtio1", "0x0005", "11111011");
        assert!(!this_one_reports_free_pages(devices.path()), "all bits but that");
        device("virtio1", "0x0005", "00000100");
        assert!(this_one_reports_free_pages(devices.path()));
    }

    #[test]
    fn this_process_is_among_them() {
        let own = all().unwrap().into_iter().find(|found| found.pid == std::process::id()).unwrap();
        assert!(own.machine.is_none() && own.pages_by_node.values().sum::<u64>() > 0);
        let problem = super::named("no such machine").unwrap_err();
        assert!(problem.contains("no such machine") && problem.lines().count() == 1, "{problem}");
    }
}
