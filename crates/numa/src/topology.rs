//! The nodes of this machine, as the kernel lists them
//! (Documentation/ABI/stable/sysfs-devices-node).

use crate::NodeId;
use serde::Serialize;
use std::fs;
use std::io;
use std::path::Path;

/// The kernel's list of nodes.
pub const SYS: &str = "/sys/devices/system/node";

/// A node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Its processors.
    pub cpus: Vec<u32>,
    /// To each listed node, in their order; 10 is the own one.
    pub distances: Vec<u32>,
    /// Its memory.
    pub memory_bytes: u64,
    /// Free memory.
    pub free_bytes: u64,
}

/// All nodes, in ascending order. A kernel without NUMA has one.
///
/// # Errors
/// Fails if a node's files cannot be read or parsed.
pub fn read(sys: &Path) -> io::Result<Vec<Node>> {
    let online = match fs::read_to_string(sys.join("online")) {
        Ok(online) => online,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![only_node()?]),
        Err(error) => return Err(error),
    };
    list(&online).ok_or_else(|| strange(&sys.join("online")))?.into_iter().map(|id| read_node(sys, id)).collect()
}

fn read_node(sys: &Path, id: u32) -> io::Result<Node> {
    let folder = sys.join(format!("node{id}"));
    let read = |name: &str| fs::read_to_string(folder.join(name));
    let meminfo = read("meminfo")?;
    // Lines of /proc/meminfo behind the node's name: Node 0 MemTotal:       24683848 kB
    let bytes = |name| {
        let mut lines = meminfo.lines().filter_map(|line| line.splitn(3, ' ').nth(2));
        lines.find_map(|line| os::fields::bytes(line, name))
    };
    let node = || {
        Some(Node {
            id: NodeId::try_from(id).ok()?,
            cpus: list(&read("cpulist").ok()?)?,
            distances: read("distance")
                .ok()?
                .split_whitespace()
                .map(|word| word.parse().ok())
                .collect::<Option<_>>()?,
            memory_bytes: bytes("MemTotal")?,
            free_bytes: bytes("MemFree")?,
        })
    };
    node().ok_or_else(|| strange(&folder))
}

fn only_node() -> io::Result<Node> {
    let cpus = std::thread::available_parallelism()?.get() as u32;
    let info = fs::read_to_string("/proc/meminfo")?;
    let bytes = |name| os::fields::bytes(&info, name).unwrap_or(0);
    let (memory_bytes, free_bytes) = (bytes("MemTotal"), bytes("MemFree"));
    Ok(Node { id: 0, cpus: (0..cpus).collect(), distances: vec![10], memory_bytes, free_bytes })
}

fn strange(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} is not as expected", path.display()))
}

/// Parses a list in the kernel's form: 0-3,8,10-11. `None`: it is malformed.
pub fn list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if last < first || last - first > u32::from(NodeId::MAX) {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
        assert_eq!(list("\n"), Some(vec![]));
        for bad in ["3-1", "a", "0-4294967295", "1-", "-"] {
            assert_eq!(list(bad), None, "{bad}");
        }
    }

    #[test]
    fn this_machine_has_nodes() {
        let nodes = read(Path::new(SYS)).unwrap();
        assert!(nodes.iter().map(|node| node.cpus.len()).sum::<usize>() > 0);
        assert!(nodes.iter().all(|node| node.distances.len() == nodes.len() && node.free_bytes <= node.memory_bytes));
        let without = read(Path::new("/no/such/folder")).unwrap();
        assert!(without.len() == 1 && without[0].memory_bytes > 0);
    }
}
