//! Spreads a process's memory: reads the present places, and moves pages to others, within the rate
//! limit.

use crate::process::{Moved, Process, Unit};
use crate::spread::{Placed, Spread};
use crate::topology::Node;
use crate::{NodeId, PAGE_BYTES, Policy};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;

/// Units that are moved at once: the process waits for some of them meanwhile.
const BATCH_UNITS: usize = 512;
const BATCH_PAGES: u64 = (64 << 20) / PAGE_BYTES;

/// The message on a machine with one node.
pub const ONE_NODE: &str = "this machine has one node: memory cannot be nearer or farther, and nothing is done";

/// The result, in pages of 4 KiB.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Applied {
    /// All present pages.
    pub pages: u64,
    /// Those that were moved to another node.
    pub moved_pages: u64,
    /// Those that could not be moved because they were in use.
    pub busy_pages: u64,
    /// Those that could not be moved because other processes share them.
    pub shared_pages: u64,
    /// Those that could not be moved because their node is full.
    pub full_pages: u64,
    /// Those that the kernel refused to move.
    pub refused_pages: u64,
    /// The full nodes.
    pub full_nodes: Vec<NodeId>,
    /// Pages on each node now.
    pub pages_by_node: BTreeMap<NodeId, u64>,
}

/// Spreads a process's present memory over the nodes. After each batch it calls `pace` with the
/// number of bytes that were moved, and with 0 if none of some thousand pages had to be moved.
/// `pace` may wait, and returns false to stop.
///
/// # Errors
/// Fails if the process has ended, or may not be read or changed.
pub fn spread(
    process: &Process,
    policy: Policy,
    nodes: &[NodeId],
    pace: &mut dyn FnMut(u64) -> bool,
) -> io::Result<Applied> {
    let mut applied = Applied::default();
    let Some(mut spread) = Spread::new(policy, nodes) else { return Ok(applied) };
    // Huge pages first: small ones then even out the rest.
    for huge in [true, false] {
        for area in process.areas()? {
            let goes_on = process.units(area, &mut |units| {
                let units: Vec<Unit> = units.iter().copied().filter(|unit| (unit.pages > 1) == huge).collect();
                window(process, &mut spread, &units, &mut applied, pace)
            })?;
            if !goes_on {
                return Ok(applied);
            }
        }
    }
    Ok(applied)
}

fn window(
    process: &Process,
    spread: &mut Spread,
    units: &[Unit],
    applied: &mut Applied,
    pace: &mut dyn FnMut(u64) -> bool,
) -> io::Result<bool> {
    if units.is_empty() {
        return Ok(pace(0));
    }
    let homes = process.nodes_of(units)?;
    let placed: Vec<Placed> =
        units.iter().zip(homes).filter_map(|(unit, home)| Some((unit.page, unit.pages, home?))).collect();
    let mut moves: Vec<(Unit, NodeId)> = Vec::new();
    for ((page, pages, home), to) in placed.iter().copied().zip(spread.place(&placed)) {
        applied.pages += pages;
        if to == home {
            *applied.pages_by_node.entry(home).or_default() += pages;
        } else {
            moves.push((Unit { page, pages }, to));
        }
    }
    if moves.is_empty() {
        return Ok(pace(0));
    }
    let mut rest = &moves[..];
    while !rest.is_empty() {
        let mut pages = 0;
        let fits = |(unit, _): &&(Unit, NodeId)| {
            pages += unit.pages;
            pages <= BATCH_PAGES
        };
        let count = rest.iter().take(BATCH_UNITS).take_while(fits).count().max(1);
        let (batch, others) = rest.split_at(count);
        rest = others;
        let mut moved_pages = 0;
        for (moved, (unit, to)) in process.move_to(batch)?.into_iter().zip(batch) {
            match moved {
                Moved::Yes => {
                    moved_pages += unit.pages;
                    *applied.pages_by_node.entry(*to).or_default() += unit.pages;
                    continue;
                }
                Moved::Gone => {
                    applied.pages -= unit.pages;
                    continue;
                }
                Moved::Busy => applied.busy_pages += unit.pages,
                Moved::Shared => applied.shared_pages += unit.pages,
                Moved::Full => {
                    applied.full_pages += unit.pages;
                    if !applied.full_nodes.contains(to) {
                        applied.full_nodes.push(*to);
                    }
                }
                Moved::No(_) => applied.refused_pages += unit.pages,
            }
            if let [Some(home)] = process.nodes_of(&[*unit])?[..] {
                *applied.pages_by_node.entry(home).or_default() += unit.pages;
            }
        }
        applied.moved_pages += moved_pages;
        if !pace(moved_pages * PAGE_BYTES) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The nodes that a process's memory may use: those that have memory, and that its cpuset permits.
///
/// # Errors
/// Fails if the process has ended.
pub fn usable_nodes(process: &Process, nodes: &[Node]) -> io::Result<Vec<NodeId>> {
    let allowed = process.allowed_nodes()?;
    Ok(nodes.iter().filter(|node| node.memory_bytes > 0 && allowed.contains(&node.id)).map(|node| node.id).collect())
}

/// The reason in one line why a process's memory cannot be placed with this policy. `None`: it can.
pub fn obstacle(process: &Process, policy: Policy, nodes: &[Node], usable: &[NodeId]) -> Option<String> {
    match usable {
        _ if nodes.len() == 1 => Some(ONE_NODE.to_owned()),
        [] => Some("its cpuset allows no node that has memory: nothing is done".to_owned()),
        [only] => Some(format!("its cpuset allows node {only} alone: nothing is done; widen cpuset.mems for more")),
        _ if policy == Policy::Carrefour && process.is_kvm() => {
            Some("a machine on KVM, whose accesses cannot be seen from here: choose round-4k or first-touch".to_owned())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_one_node_nothing_is_moved() {
        let process = Process::open(std::process::id()).unwrap();
        let nodes = crate::topology::read(std::path::Path::new(crate::topology::SYS)).unwrap();
        let usable = usable_nodes(&process, &nodes).unwrap();
        assert!(!usable.is_empty());
        let applied = spread(&process, Policy::Round4k, &usable[..1], &mut |_| true).unwrap();
        assert!(applied.pages > 10, "{applied:?}");
        // With one usable node everything is there already, unless the kernel has spread it itself.
        if nodes.len() == 1 {
            assert_eq!(applied.moved_pages, 0, "{applied:?}");
        }
        let mut looks = 0;
        let once = &mut |_| {
            looks += 1;
            false
        };
        let part = spread(&process, Policy::Round4k, &usable[..1], once).unwrap();
        assert!(part.pages < applied.pages && looks == 1, "a look can be ended: {part:?}, {looks}");
        let none = spread(&process, Policy::FirstTouch, &usable, &mut |_| true).unwrap();
        assert_eq!(none.pages, 0);
    }
}
