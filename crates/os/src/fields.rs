//! Files with one `name value` a line.
//!
//! A name is matched as a whole, and may be followed by a colon: `MemTotal:  1024 kB`
//! (`/proc/meminfo`, `/proc/PID/status`, `/proc/PID/smaps_rollup`), `read_bytes: 4096`
//! (`/proc/PID/io`), `pglazyfreed 42` (`/proc/vmstat`, `memory.stat`). The kernel's
//! Documentation/filesystems/proc.rst and admin-guide/cgroup-v2.rst describe the files.

/// The number after `name`, which has no unit. `None`: no line has that name and a number.
pub fn count(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| value(line, name)?.parse().ok())
}

/// The size after `name`, which the kernel writes in kB, in bytes. `None`: no line has that name
/// and a size, or the size in bytes does not fit into 64 bits.
pub fn bytes(text: &str, name: &str) -> Option<u64> {
    let bytes = |line| value(line, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024);
    text.lines().find_map(bytes)
}

fn value<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let rest = line.strip_prefix(name)?;
    let rest = rest.strip_prefix(':').unwrap_or(rest);
    rest.starts_with([' ', '\t']).then(|| rest.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_in_bytes() {
        let meminfo = "MemTotal:  1024000 kB\nMemFree:    409600 kB\nInactive(file):  102400 kB\nHugePages_Total:  3\n";
        assert_eq!(bytes(meminfo, "MemTotal"), Some(1_048_576_000));
        assert_eq!(bytes(meminfo, "MemFree"), Some(409_600 << 10));
        assert_eq!(bytes(meminfo, "Inactive(file)"), Some(100 << 20));
        for other in ["Mem", "Inactive", "HugePages_Total", "MemAvailable", ""] {
            assert_eq!(bytes(meminfo, other), None, "{other}");
        }
        assert_eq!(bytes("VmRSS:\t    12 kB\n", "VmRSS"), Some(12 << 10));
        let max = u64::MAX;
        for odd in ["a: what kB", "a: kB", "a: -1 kB", "a:", "a", &format!("a: {max} kB"), &format!("a: {max}0 kB")] {
            assert_eq!(bytes(odd, "a"), None, "{odd}");
        }
    }

    #[test]
    fn counts_are_found_by_their_whole_name() {
        let vmstat = "pglazyfree 7\npglazyfreed 42\nworkingset_refault_anon 1\nworkingset_refault_file 9\n";
        assert_eq!(count(vmstat, "pglazyfreed"), Some(42));
        assert_eq!(count(vmstat, "pglazyfree"), Some(7));
        assert_eq!(count(vmstat, "workingset_refault_file"), Some(9));
        assert_eq!(count(vmstat, "workingset_refault"), None);
        assert_eq!(count("Name:\tx\nThreads:\t5\n", "Threads"), Some(5));
        assert_eq!(count("rchar: 1\nread_bytes: 4096\ncancelled_write_bytes: 0\n", "read_bytes"), Some(4096));
        for odd in ["", "a", "a ", "a -1", "a x", "a 1 2", "ab 1"] {
            assert_eq!(count(odd, "a"), None, "{odd}");
        }
    }
}
