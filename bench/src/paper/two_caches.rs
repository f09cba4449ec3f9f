//! Two page caches, one under the other, both least-recently-used, like a guest's and its host's:
//! computes which of them has a page. No I/O.

/// The source of the lower cache's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filling {
    /// Pages that were read from the disk.
    Reads,
    /// Pages that the upper cache evicts; a page that is read moves up and leaves the lower cache.
    Evictions,
}

/// The places where a trace has found pages, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// In the upper cache.
    pub upper: u64,
    /// In the lower cache.
    pub lower: u64,
    /// On the disk.
    pub disk: u64,
}

impl Found {
    /// The share of the misses of the upper cache that the lower one had.
    pub fn lower_ratio(self) -> f64 {
        self.lower as f64 / (self.lower + self.disk).max(1) as f64
    }
}

impl std::ops::Sub for Found {
    type Output = Found;

    fn sub(self, before: Found) -> Found {
        Found { upper: self.upper - before.upper, lower: self.lower - before.lower, disk: self.disk - before.disk }
    }
}

/// The two caches.
pub struct TwoCaches {
    upper: Lru,
    lower: Lru,
    filling: Filling,
    found: Found,
}

impl TwoCaches {
    /// Empty caches, for pages with numbers below `pages`.
    pub fn new(pages: u32, upper_pages: u32, lower_pages: u32, filling: Filling) -> TwoCaches {
        let (upper, lower) = (Lru::new(pages, upper_pages), Lru::new(pages, lower_pages));
        TwoCaches { upper, lower, filling, found: Found::default() }
    }

    /// A page is read.
    pub fn read(&mut self, page: u32) {
        if self.upper.touch(page) {
            self.found.upper += 1;
            return;
        }
        match self.filling {
            Filling::Reads if self.lower.touch(page) => self.found.lower += 1,
            Filling::Evictions if self.lower.remove(page) => self.found.lower += 1,
            Filling::Reads => {
                self.found.disk += 1;
                self.lower.insert(page);
            }
            Filling::Evictions => self.found.disk += 1,
        }
        if let Some(evicted) = self.upper.insert(page)
            && self.filling == Filling::Evictions
        {
            self.lower.insert(evicted);
        }
    }

    /// The results so far.
    pub fn found(&self) -> Found {
        self.found
    }
}

/// No page.
const NONE: u32 = u32::MAX;

/// The pages of a cache, from the most to the least recently used.
struct Lru {
    /// For each page the ones before and after it; for the last number, which is no page, the last
    /// and the first.
    links: Vec<(u32, u32)>,
    len: u32,
    capacity: u32,
}

impl Lru {
    fn new(pages: u32, capacity: u32) -> Lru {
        let mut links = vec![(NONE, NONE); pages as usize];
        links.push((pages, pages));
        Lru { links, len: 0, capacity }
    }

    fn end(&self) -> u32 {
        self.links.len() as u32 - 1
    }

    fn push_front(&mut self, page: u32) {
        let end = self.end();
        let first = self.links[end as usize].1;
        self.links[page as usize] = (end, first);
        self.links[first as usize].0 = page;
        self.links[end as usize].1 = page;
        self.len += 1;
    }

    fn remove(&mut self, page: u32) -> bool {
        let (before, behind) = self.links[page as usize];
        if before == NONE {
            return false;
        }
        self.links[before as usize].1 = behind;
        self.links[behind as usize].0 = before;
        self.links[page as usize] = (NONE, NONE);
        self.len -= 1;
        true
    }

    /// Returns whether the page is there; then it becomes the most recently used.
    fn touch(&mut self, page: u32) -> bool {
        let is_there = self.remove(page);
        if is_there {
            self.push_front(page);
        }
        is_there
    }

    /// Adds the page. Returns the page that it replaces, if any.
    fn insert(&mut self, page: u32) -> Option<u32> {
        if self.touch(page) {
            return None;
        }
        self.push_front(page);
        if self.len <= self.capacity {
            return None;
        }
        let last = self.links[self.end() as usize].0;
        self.remove(last);
        Some(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;
    use std::collections::VecDeque;

    #[test]
    fn the_lists_are_what_they_say() {
        let (seed, pages) = (7, 40);
        let mut random = Rng::with_seed(seed);
        let mut lru = Lru::new(pages, 10);
        let mut model: VecDeque<u32> = VecDeque::new();
        for _ in 0..20_000 {
            let page = random.u32(0..pages);
            let there = model.iter().position(|other| *other == page);
            there.and_then(|at| model.remove(at));
            match random.u32(0..3) {
                0 => assert_eq!(lru.remove(page), there.is_some()),
                1 => {
                    assert_eq!(lru.touch(page), there.is_some());
                    there.inspect(|_| model.push_front(page));
                }
                _ => {
                    model.push_front(page);
                    let evicted = if model.len() > 10 { model.pop_back() } else { None };
                    assert_eq!(lru.insert(page), evicted);
                }
            }
            assert_eq!(lru.len as usize, model.len());
        }
    }

    /// Over and over through more pages than either cache has: each cache finds only pages that it
    /// had not passed to the other.
    #[test]
    fn both_together_hold_as_much_as_both() {
        let pages = 90;
        let turn = |filling| {
            let mut caches = TwoCaches::new(pages, 50, 50, filling);
            (0..2 * pages).for_each(|nth| caches.read(nth % pages));
            let before = caches.found();
            (0..pages).for_each(|page| caches.read(page));
            caches.found() - before
        };
        assert_eq!(turn(Filling::Reads), Found { upper: 0, lower: 0, disk: 90 });
        assert_eq!(turn(Filling::Evictions), Found { upper: 0, lower: 90, disk: 0 });
        assert_eq!(turn(Filling::Evictions).lower_ratio(), 1.0);
    }
}
