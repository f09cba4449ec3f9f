//! Computes the list of lenders from the values of all nodes. Pure logic.

use crate::lender::Lender;
use std::collections::HashMap;

/// A node that lends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name, which it keeps over restarts.
    pub node: String,
    /// Grows with each start of that node.
    pub incarnation: u64,
    /// Its lending.
    pub lender: Lender,
}

impl Member {
    /// Returns the lender as the status reports it.
    pub(crate) fn reported(&self) -> report::Member {
        let Lender { address, free_bytes, capacity_bytes } = &self.lender;
        report::Member {
            node: self.node.clone(),
            incarnation: self.incarnation,
            address: address.to_string(),
            free_bytes: *free_bytes,
            capacity_bytes: *capacity_bytes,
        }
    }
}

/// A node that gossip reports, other than this one.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    /// Its name.
    pub node: &'a str,
    /// Its incarnation.
    pub incarnation: u64,
    /// The value of [`crate::lender::KEY`]; `None` if nothing has arrived yet.
    pub value: Option<&'a str>,
}

/// The values of the live nodes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The lenders, by name.
    pub members: Vec<Member>,
    /// Live nodes that do not lend.
    pub not_lending: Vec<String>,
    /// Live nodes without this one, whether they lend or not.
    pub live_peers: usize,
    /// Malformed values, which were left out.
    pub nonsense: usize,
}

/// Parses the values of the live nodes; `own` is this node's name.
///
/// If a node was restarted, only the newest incarnation counts, while the one before still seems
/// alive. The same applies to two names with one address.
pub fn read<'a>(live: impl Iterator<Item = Peer<'a>>, own: &str) -> Reading {
    let mut newest: HashMap<&str, Peer> = HashMap::new();
    for peer in live.filter(|peer| peer.node != own) {
        let known = newest.entry(peer.node).or_insert(peer);
        if known.incarnation < peer.incarnation {
            *known = peer;
        }
    }
    let mut reading = Reading { live_peers: newest.len(), ..Reading::default() };
    for peer in newest.into_values() {
        match peer.value.map(Lender::from_text) {
            None => {}
            Some(Ok(None)) => reading.not_lending.push(peer.node.to_owned()),
            Some(Ok(Some(lender))) => {
                reading.members.push(Member { node: peer.node.to_owned(), incarnation: peer.incarnation, lender });
            }
            Some(Err(_)) => reading.nonsense += 1,
        }
    }
    let of_address = |member: &Member| (member.lender.address.clone(), u64::MAX - member.incarnation);
    reading.members.sort_by_key(of_address);
    reading.members.dedup_by(|later, first| later.lender.address == first.lender.address);
    reading.members.sort_by(|one, other| one.node.cmp(&other.node));
    reading
}

/// The list that follows `now`, if it differs. With `hold` a lender is removed only if it reports
/// that itself.
///
/// If a node receives no messages, it is more likely cut off than left by all at once, or its only
/// lender has died. In both cases the data path has better information, and giving up all lenders
/// would lose the pages that they keep.
pub fn next(now: &[Member], reading: &Reading, hold: bool) -> Option<Vec<Member>> {
    if reading.live_peers == 0 {
        return None;
    }
    let mut list = reading.members.clone();
    if hold {
        let is_unheard = |member: &Member| {
            let same = |other: &Member| other.node == member.node || other.lender.address == member.lender.address;
            !reading.members.iter().any(same) && !reading.not_lending.contains(&member.node)
        };
        list.extend(now.iter().filter(|member| is_unheard(member)).cloned());
        list.sort_by(|one, other| one.node.cmp(&other.node));
    }
    (list != now).then_some(list)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer<'a>(node: &'a str, incarnation: u64, value: &'a str) -> Peer<'a> {
        Peer { node, incarnation, value: Some(value) }
    }

    fn names(reading: &Reading) -> Vec<(&str, u64)> {
        reading.members.iter().map(|member| (member.node.as_str(), member.incarnation)).collect()
    }

    #[test]
    fn lenders_are_listed_by_name_without_ourselves() {
        let silent = Peer { node: "d", incarnation: 1, value: None };
        let peers =
            [peer("c", 1, "c:1 1 1"), peer("b", 1, ""), peer("own", 1, "own:1 1 1"), peer("a", 1, "a:1 1 1"), silent];
        let reading = read(peers.into_iter(), "own");
        assert_eq!(names(&reading), [("a", 1), ("c", 1)]);
        assert_eq!((reading.live_peers, reading.nonsense), (4, 0));
    }

    #[test]
    fn nonsense_is_left_out_and_counted() {
        let reading = read([peer("a", 1, "a:1 x"), peer("b", 1, "b:1 1 1")].into_iter(), "own");
        assert_eq!(names(&reading), [("b", 1)]);
        assert_eq!(reading.nonsense, 1);
    }

    #[test]
    fn only_the_newest_incarnation_counts() {
        for turn in [false, true] {
            let mut peers = vec![peer("a", 1, "a:1 1 1"), peer("a", 2, "")];
            if turn {
                peers.reverse();
            }
            let reading = read(peers.into_iter(), "own");
            assert_eq!((names(&reading), reading.live_peers), (vec![], 1));
        }
        let reading = read([peer("a", 1, "a:1 1 1"), peer("b", 2, "a:1 2 2")].into_iter(), "own");
        assert_eq!(names(&reading), [("b", 2)]);
    }

    #[test]
    fn a_node_without_messages_keeps_the_list() {
        let full = read([peer("b", 1, "b:1 1 1")].into_iter(), "own");
        let list = next(&[], &full, false).unwrap();
        assert_eq!(next(&list, &full, false), None);
        assert_eq!(next(&list, &read([].into_iter(), "own"), false), None);
        assert_eq!(next(&list, &read([peer("b", 1, "")].into_iter(), "own"), false), Some(vec![]));

        // While held, the list only grows, and new values of a lender count.
        let other = read([peer("a", 1, "a:1 1 1")].into_iter(), "own");
        let both = next(&list, &other, true).unwrap();
        assert_eq!(both.iter().map(|member| member.node.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(next(&both, &other, true), None);
        let changed = read([peer("a", 1, "a:1 0 1")].into_iter(), "own");
        assert_eq!(next(&both, &changed, true).unwrap()[0].lender.free_bytes, 0);
        assert_eq!(next(&both, &other, false).unwrap().len(), 1);
        let left = read([peer("a", 1, "a:1 1 1"), peer("b", 1, "")].into_iter(), "own");
        assert_eq!(next(&both, &left, true).unwrap().len(), 1);
    }
}
