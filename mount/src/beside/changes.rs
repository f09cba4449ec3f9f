//! What the kernel is to forget, and what it is to forget once more.

use super::flights::Flights;
use hashbrown::HashSet;
use std::ffi::CString;

/// What the kernel is to forget.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Changes {
    /// The attributes of all nodes.
    pub all: bool,
    /// Those of these.
    pub nodes: HashSet<u64>,
    /// Names, each in its directory.
    pub names: HashSet<(u64, CString)>,
}

impl Changes {
    fn are_none(&self) -> bool {
        !self.all && self.nodes.is_empty() && self.names.is_empty()
    }

    fn add(&mut self, other: Changes) {
        self.all |= other.all;
        self.nodes.extend(other.nodes);
        self.names.extend(other.names);
    }
}

/// What is told once more, when the answers have arrived that were under way when it was told.
#[derive(Default)]
pub(super) struct Again {
    /// Of one generation of answers.
    waiting: Option<(usize, Changes)>,
    /// What was told since: of the next one.
    later: Changes,
}

impl Again {
    /// The kernel was told of these changes; answers may have been under way at the beginning of that. Returns what it is to be told once more now.
    pub(super) fn told(&mut self, changes: Changes, may_be_under_way: bool, flights: &Flights) -> Changes {
        let mut due = Changes::default();
        if may_be_under_way {
            self.later.add(changes);
        }
        if self.waiting.as_ref().is_some_and(|(generation, _)| flights.have_landed(*generation))
            && let Some((_, changes)) = self.waiting.take()
        {
            due.add(changes);
        }
        if self.waiting.is_none() && !self.later.are_none() {
            let later = std::mem::take(&mut self.later);
            match flights.now() {
                Some(generation) => self.waiting = Some((generation, later)),
                None => due.add(later),
            }
        }
        due
    }

    /// Whether there is something to be told again.
    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::beside::flights::Flight;

    const NODES: usize = 3;

    /// Files that change, answers that are made and arrive in any order, and a kernel that believes what arrives last until it is told to forget:
    /// when all is quiet it believes nothing that is old.
    #[test]
    fn nothing_old_is_believed_in_the_end() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let mut told_again = 0;
        for _ in 0..3000 {
            let (flights, mut again) = (Flights::default(), Again::default());
            let mut files = [0u32; NODES];
            let mut believed = [None::<u32>; NODES];
            let mut answers: Vec<(Flight<'_>, usize, u32)> = Vec::new();
            let mut events = Changes::default();
            let forget = |believed: &mut [Option<u32>; NODES], changes: &Changes| {
                changes.nodes.iter().for_each(|node| believed[*node as usize] = None);
            };
            for moment in 0..80 {
                let node = random.usize(..NODES);
                // In the end all answers arrive, and the kernel is told of all.
                match if moment < 60 { random.u8(..4) } else { 2 + moment % 2 } {
                    0 => answers.push((flights.begin(), node, files[node])),
                    1 => {
                        files[node] += 1;
                        events.nodes.insert(node as u64);
                    }
                    2 if !answers.is_empty() => {
                        let (flight, node, seen) = answers.swap_remove(random.usize(..answers.len()));
                        believed[node] = Some(seen);
                        drop(flight);
                    }
                    3 => {
                        let changes = std::mem::take(&mut events);
                        let under_way = flights.now().is_some();
                        forget(&mut believed, &changes);
                        if let (true, false) = (random.bool(), answers.is_empty()) {
                            // An answer arrives meanwhile.
                            let (flight, node, seen) = answers.swap_remove(random.usize(..answers.len()));
                            believed[node] = Some(seen);
                            drop(flight);
                        }
                        let due = again.told(changes, under_way, &flights);
                        told_again += due.nodes.len();
                        forget(&mut believed, &due);
                    }
                    _ => {}
                }
            }
            while let Some((flight, node, seen)) = answers.pop() {
                believed[node] = Some(seen);
                drop(flight);
            }
            for _ in 0..2 {
                let changes = std::mem::take(&mut events);
                forget(&mut believed, &changes);
                forget(&mut believed, &again.told(changes, false, &flights));
            }
            assert!(!again.is_waiting());
            for (file, believed) in files.iter().zip(believed) {
                assert!(believed.is_none_or(|believed| believed == *file), "seed {seed}");
            }
        }
        assert!(told_again > 0);
    }
}
