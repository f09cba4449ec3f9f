//! From what all nodes say to the list of lenders. Nothing but logic.

use crate::lender::Lender;
use serde::Serialize;
use std::collections::HashMap;

/// A node that lends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Its name, which it keeps over restarts.
    pub node: String,
    /// Grows with each start of that node.
    pub incarnation: u64,
    /// What it lends.
    #[serde(flatten)]
    pub lender: Lender,
}

/// A node that others are heard of, ourselves not among them.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    /// Its name.
    pub node: &'a str,
    /// Its incarnation.
    pub incarnation: u64,
    /// What stands under [`crate::lender::KEY`]; None if nothing has arrived yet.
    pub value: Option<&'a str>,
}

/// What the live nodes say.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The lenders, by name.
    pub members: Vec<Member>,
    /// Live nodes that say that they do not lend.
    pub not_lending: Vec<String>,
    /// Live nodes but ourselves, whether they lend or not.
    pub live_peers: usize,
    /// Values that make no sense, and were left out.
    pub nonsense: usize,
}

/// Reads what the live nodes say; `own` is our name.
///
/// Of a node that was started again only the newest incarnation counts, while the one before still
/// seems alive; so it is of two names with one address.
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

/// The list that follows `now`, if it is another one. With `hold` nobody is taken from it but who
/// says so.
///
/// A node that hears nobody is more likely cut off than left by all at once, or its only lender has
/// died: in both cases the data path knows better, and to give up all lenders would throw away what
/// they keep.
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
    fn who_hears_nobody_keeps_the_list() {
        let full = read([peer("b", 1, "b:1 1 1")].into_iter(), "own");
        let list = next(&[], &full, false).unwrap();
        assert_eq!(next(&list, &full, false), None);
        assert_eq!(next(&list, &read([].into_iter(), "own"), false), None);
        assert_eq!(next(&list, &read([peer("b", 1, "")].into_iter(), "own"), false), Some(vec![]));

        // Held, the list only grows, and what is said anew of somebody counts.
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
