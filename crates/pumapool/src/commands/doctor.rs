//! `pumapool doctor`: checks this kernel and the user's rights, reports which features will be
//! used, and how to get the others.

use crate::cli::doctor::Options;
use anyhow::Result;
use serde::Serialize;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

/// One finding.
#[derive(Serialize)]
struct Finding {
    /// The feature.
    what: &'static str,
    /// Whether the feature is available.
    works: bool,
    /// Whether Puma cannot run without it.
    needed: bool,
    /// The result of the check, and its consequence.
    finding: String,
    /// How to get the feature; empty if there is nothing to do.
    advice: &'static str,
}

/// Runs the command. The exit code is a failure if a needed feature is missing.
pub fn run(options: &Options) -> Result<ExitCode> {
    let findings = [
        kernel(),
        rights(),
        fuse(),
        unmounting(),
        resending(),
        tap(),
        uncached_reads(),
        reclaim_scan(),
        pressure(),
        cgroup(),
        nodes(),
        free_pages(),
    ];
    if options.json {
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&findings)?)?;
    } else {
        let mut out = std::io::stdout().lock();
        for finding in &findings {
            let mark = match (finding.works, finding.needed) {
                (true, _) => "ok     ",
                (false, true) => "MISSING",
                (false, false) => "without",
            };
            writeln!(out, "{mark}  {:<18} {}", finding.what, finding.finding)?;
            if !finding.works && !finding.advice.is_empty() {
                writeln!(out, "{:29}→ {}", "", finding.advice)?;
            }
        }
    }
    let stuck = findings.iter().any(|finding| finding.needed && !finding.works);
    Ok(if stuck { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn kernel() -> Finding {
    Finding {
        what: "kernel",
        works: os::kernel::version() >= (6, 1),
        needed: false,
        finding: os::kernel::release(),
        advice: "Puma is tested on Linux 6.1 and newer",
    }
}

fn rights() -> Finding {
    let root = rustix::process::geteuid().is_root();
    // Root may be the only user of its user namespace (user_namespaces(7)).
    let is_alone = fs::read_to_string("/proc/self/setgroups").is_ok_and(|text| text.trim() == "deny");
    let finding = match (root, is_alone) {
        (true, false) => "root: mounts serve all users, the kernel checks permissions",
        (true, true) => "root of a user namespace: mounts serve you alone",
        (false, _) => "ordinary user: mounts serve you alone",
    };
    Finding {
        what: "rights",
        works: root && !is_alone,
        needed: false,
        finding: finding.into(),
        advice: "run as root to serve other users, to tap evictions (lent as they happen, by control group) and to place others' memory (numa)",
    }
}

fn fuse() -> Finding {
    let opened = fs::OpenOptions::new().read(true).write(true).open("/dev/fuse");
    Finding {
        what: "/dev/fuse",
        works: opened.is_ok(),
        needed: true,
        finding: opened.map_or_else(|error| format!("cannot be opened: {error}"), |_| "can be opened".into()),
        advice: "modprobe fuse; in a container, add the device /dev/fuse; where it may not be opened, chmod 666 /dev/fuse (udev does so)",
    }
}

fn unmounting() -> Finding {
    let root = rustix::process::geteuid().is_root();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join("fusermount3")).find(|path| path.exists());
    let finding = match (&found, root) {
        (Some(path), _) => path.display().to_string(),
        (None, true) => "not installed; root does not need it".into(),
        (None, false) => "not installed".into(),
    };
    Finding {
        what: "fusermount3",
        works: found.is_some() || root,
        needed: !root,
        finding,
        advice: "install the package fuse3",
    }
}

fn resending() -> Finding {
    let works = os::kernel::version() >= (6, 9);
    Finding {
        what: "takeover",
        works,
        needed: false,
        finding: if works {
            "requests under way are sent again: a daemon that is killed is replaced, and programs do not notice".into()
        } else {
            "a daemon that is killed is replaced, but requests under way fail with an error".into()
        },
        advice: "Linux 6.9 or newer",
    }
}

fn tap() -> Finding {
    let (works, finding) = match tap::BpfTap::load(tap::Target::default(), tap::BpfTap::RING_BYTES_MIN) {
        Ok(_) => (true, "BPF loads and reads pages: pages are lent as they are evicted".into()),
        Err(error) => (false, format!("{error}: pages are lent as they are read")),
    };
    Finding {
        what: "eviction tap",
        works,
        needed: false,
        finding,
        advice: "run as root (or with CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN) on a kernel with BTF and raw tracepoints",
    }
}

fn uncached_reads() -> Finding {
    let works = os::kernel::version() >= (6, 14);
    Finding {
        what: "uncached reads",
        works,
        needed: false,
        finding: if works {
            "RWF_DONTCACHE where the file system below has it, else O_DIRECT".into()
        } else {
            "this kernel has no RWF_DONTCACHE; O_DIRECT is used, else the page is dropped after the read".into()
        },
        advice: "Linux 6.14 or newer",
    }
}

fn reclaim_scan() -> Finding {
    let works = os::kernel::version() >= (6, 7);
    Finding {
        what: "reclaim scan",
        works,
        needed: false,
        finding: if works {
            "PAGEMAP_SCAN: a lender finds reclaimed pages quickly".into()
        } else {
            "no PAGEMAP_SCAN: a lender reads /proc/self/pagemap".into()
        },
        advice: "Linux 6.7 or newer",
    }
}

fn pressure() -> Finding {
    let works = os::pressure::is_reported();
    Finding {
        what: "memory pressure",
        works,
        needed: false,
        finding: if works {
            "PSI: a lender shrinks under pressure".into()
        } else {
            "no PSI: a lender goes by free memory alone".into()
        },
        advice: "boot with psi=1, on a kernel with CONFIG_PSI",
    }
}

/// Checks for a memory limit. The daemon serves page-cache misses and writes, so it must not wait
/// for memory that only it can free.
fn cgroup() -> Finding {
    let mut available_memory = lender::available_memory::AvailableMemory::new(Path::new("/proc"));
    let machine = available_memory.machine_bytes().ok();
    let limited = available_memory.read().map(|memory| memory.total_bytes).ok();
    let limited = limited.filter(|total| machine.is_some_and(|machine| *total < machine));
    Finding {
        what: "memory cgroup",
        works: limited.is_none(),
        needed: false,
        finding: match limited {
            None => "this shell's has no limit: daemons started here do not compete with those they serve".into(),
            Some(bytes) => format!("this shell's is limited to {}", crate::cli::size::display(bytes)),
        },
        advice: "start `pumapool mount` outside the cgroup of the programs that it serves",
    }
}

fn nodes() -> Finding {
    let nodes = numa::topology::read(Path::new(numa::topology::SYS)).map(|nodes| nodes.len());
    Finding {
        what: "memory nodes",
        works: nodes.is_ok(),
        needed: false,
        finding: match nodes {
            Ok(1) => "one: there is nothing for `pumapool numa` to place".into(),
            Ok(count) => format!("{count}: `pumapool numa list` shows where memory is"),
            Err(error) => format!("cannot be read: {error}"),
        },
        advice: "mount /sys",
    }
}

/// Checks whether hosts get back memory that is freed in their virtual machines: the machines that
/// run here, and this one if it is virtual.
fn free_pages() -> Finding {
    let mut silent: Vec<String> = Vec::new();
    let machines = numa::machines::running();
    for (pid, machine) in machines.iter().filter(|(_, machine)| !machine.reports_free_pages) {
        silent.push(if machine.name.is_empty() { format!("process {pid}") } else { machine.name.clone() });
    }
    let is_guest = fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" hypervisor"));
    if is_guest && !numa::machines::this_one_reports_free_pages(Path::new("/sys/bus/virtio/devices")) {
        silent.push("this machine itself".to_owned());
    }
    Finding {
        what: "free-page reports",
        works: silent.is_empty(),
        needed: false,
        finding: if silent.is_empty() {
            match (machines.len(), is_guest) {
                (0, false) => "no virtual machine is here that would have to".into(),
                _ => "what virtual machines free comes back to their hosts".into(),
            }
        } else {
            format!("what is freed does not come back to the host, nor is placed anew, in: {}", silent.join(", "))
        },
        advice: numa::machines::REPORT_FREE_PAGES,
    }
}
