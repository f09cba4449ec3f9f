//! Texts of this machine: the kernel's files about memory, sizes in options, the status of other
//! daemons.

use super::Target;
use crate::{size, status};
use report::Daemon;

pub const MEMORY_FILES: Target = Target {
    name: "memory_files",
    about: "/proc: meminfo, cgroup, mountinfo, vmstat, pressure, zoneinfo, and what a lender decides from them",
    input_bytes_max: 2048,
    run: |bytes| {
        let text = String::from_utf8_lossy(bytes);
        let mut files = text.split('\0');
        let mut next = || files.next().unwrap_or_default();
        lender::fuzzing::memory_files(next(), next(), next(), next(), next(), next());
    },
    seeds: || {
        let meminfo = "MemTotal:  1024000 kB\nMemFree:    409600 kB\nMemAvailable: 1 kB\n";
        let stalls = "some avg10=0.00 total=500\nfull total=1\n";
        let version_1 = ["4:memory:/outer/inner\n1:cpu:/\n", "31 25 0:27 / /m rw shared:1 - cgroup cgroup rw,memory\n"];
        let version_2 = ["0::/a/b\n", "30 25 0:26 /x /sys\\040y rw - cgroup2 cgroup2 rw\n"];
        [version_1, version_2]
            .map(|[membership, mounts]| {
                [meminfo, membership, mounts, "pglazyfreed 42\n", stalls, "        high     18\n"]
                    .join("\0")
                    .into_bytes()
            })
            .to_vec()
    },
};

pub const PROC_FILES: Target = Target {
    name: "proc_files",
    about: "/proc: the table of mounts, the groups and the stat of a process, and lines of a name and a value",
    input_bytes_max: 1024,
    run: |bytes| {
        for mount in os::mountinfo::mounts(bytes) {
            let (root, at, source) = (mount.root(), mount.mountpoint(), mount.source());
            assert!(root.as_os_str().len() + at.as_os_str().len() + source.as_os_str().len() <= bytes.len());
            let kept = os::mountinfo::MountEntry::from(mount);
            assert_eq!((kept.mountpoint, kept.user), (at, mount.user()));
        }
        let text = String::from_utf8_lossy(bytes);
        for membership in os::cgroup::memberships(&text) {
            assert!(membership.path.len() <= text.len() && !membership.path.contains('\n'));
        }
        os::cgroup::MemoryGroup::of(&text, bytes);
        os::process::has_ended(&text);
        os::process::processor_ticks(&text);
        os::pressure::stalled_us(&text);
        for name in ["MemTotal", "a"] {
            let bytes = os::fields::bytes(&text, name);
            assert!(bytes.is_none_or(|bytes| bytes % 1024 == 0));
            os::cgroup::MemoryGroup::counter(&text, name);
        }
    },
    seeds: || {
        [
            r"36 35 98:0 /a\040b /mnt\134 rw,nosuid master:1 - fuse.x /dev/a rw,user_id=7",
            "31 25 0:27 /x /m rw shared:1 - cgroup cgroup rw,memory\n4:cpu,memory:/x/y\n0::/a\n",
            "7 (a) R) Z 1 7 7 0 -1 4 1 2 3 4 30 12 0 0",
            "MemTotal:  1024000 kB\na 7\ntotal_a 8\n",
            "some avg10=0.00 total=500\n",
        ]
        .map(|text| text.as_bytes().to_vec())
        .to_vec()
    },
};

pub const SIZES: Target = Target {
    name: "sizes",
    about: "sizes as people write them",
    input_bytes_max: 64,
    run: |bytes| {
        let Ok(text) = str::from_utf8(bytes) else { return };
        match size::parse(text) {
            Ok(bytes) => {
                let shown = size::display(bytes);
                assert!(shown.ends_with('B') && shown.len() < 24, "{shown}");
                assert_eq!(size::parse(&bytes.to_string()), Ok(bytes));
            }
            Err(line) => assert!(!line.contains('\n'), "{line:?}"),
        }
    },
    seeds: || {
        ["0", "4096", "64k", "512MiB", "4 G", "99999999999T", "1.5G"].map(|text| text.as_bytes().to_vec()).to_vec()
    },
};

pub const STATUS: Target = Target {
    name: "status",
    about: "the answer of another daemon on its control socket, as `pumapool status` shows it",
    input_bytes_max: 4096,
    run: |bytes| {
        let Ok(text) = str::from_utf8(bytes) else { return };
        let mut shown = Vec::new();
        match serde_json::from_str(text) {
            Ok(Daemon::Lend(told)) => status::print_lender(&mut shown, &told).expect("memory takes everything"),
            Ok(Daemon::Mount(told)) => status::print_mount(&mut shown, &told).expect("memory takes everything"),
            _ => return,
        }
        assert!(str::from_utf8(&shown).is_ok());
    },
    seeds: || {
        let lender = r#"{"kind":"lend","pid":1,"listen":"unix:/x","lender":{"capacity_pages":100,"stored_pages":7,"borrowers":1,
            "available_bytes":4096,"free_resident_pages":1,"gets":10,"hits":5,"puts":3,"replaced":1,"reclaimed_by_kernel":2}}"#;
        let mount = r#"{"kind":"mount","pid":1,"source":"/a","mountpoint":"/b","lenders":[{"address":"unix:/x","state":"used","ping_us":7}],"lender_is_up":true,
            "strategy":"exclusive","fill":"evict","write":"through","catalog":{"live_pages":3,"files":1},
            "borrower":{"lender_pages":1,"buffer_pages":2,"zero_pages":3,"backing_pages":4,"evictions":5,"put_pages":6,
            "evictions_not_trusted":7},"tap":{"ring_full_pages":8}}"#;
        let huge = |text: &str| text.replace(":3", ":18446744073709551615").replace(":7", ":4503599627370496");
        [lender.into(), mount.into(), huge(lender), huge(mount)].map(String::into_bytes).to_vec()
    },
};
