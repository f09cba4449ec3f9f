//! Sampled curves against exact ones, on traces of all kinds.

use mrc::{Key, Lru, Victims};
use std::collections::{BTreeSet, HashMap};

/// The maximum error of a sampled curve.
const ERROR_MAX: f64 = 0.02;
/// The maximum error in size, for curves with a cliff.
const SIZE_ERROR_MAX: f64 = 0.04;

/// Whether the falling or rising curve is near the expected value.
fn is_near(expected: f64, capacity: usize, curve: impl Fn(f64) -> f64) -> bool {
    let around = [1.0 - SIZE_ERROR_MAX, 1.0, 1.0 + SIZE_ERROR_MAX].map(|factor| curve(capacity as f64 * factor));
    let (low, high) = (around.into_iter().fold(1.0, f64::min), around.into_iter().fold(0.0, f64::max));
    (low - ERROR_MAX..=high + ERROR_MAX).contains(&expected)
}

/// Traces of pages: their name, and the pages in order.
fn traces(seed: u64) -> Vec<(&'static str, Vec<u64>)> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (pages, length) = (60_000u64, 600_000);
    let uniform: Vec<u64> = (0..length).map(|_| random.u64(0..pages)).collect();
    // Zipf with exponent 0.9 by its inverse; the ranks are spread over the file.
    let (exponent, largest) = (0.1f64, (pages as f64).powf(0.1));
    let mut zipf = || {
        let rank = (1.0 + random.f64() * (largest - 1.0)).powf(1.0 / exponent) as u64;
        rank.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40
    };
    let zipf_only: Vec<u64> = (0..length).map(|_| zipf()).collect();
    let sequential: Vec<u64> = (0..length as u64).map(|at| at % pages).collect();
    let mixed = (0..length as u64).map(|at| if at % 3 == 0 { 1_000_000 + at % 90_000 } else { zipf() }).collect();
    vec![("uniform", uniform), ("zipf", zipf_only), ("sequential", sequential), ("mixed", mixed)]
}

/// An exact LRU cache.
struct Exact {
    capacity: usize,
    clock: u64,
    used: HashMap<u64, u64>,
    order: BTreeSet<(u64, u64)>,
}

impl Exact {
    fn new(capacity: usize) -> Exact {
        Exact { capacity, clock: 0, used: HashMap::new(), order: BTreeSet::new() }
    }

    fn remove(&mut self, page: u64) -> bool {
        let used = self.used.remove(&page);
        used.is_some_and(|at| self.order.remove(&(at, page)))
    }

    /// Puts a page first; returns the page that is evicted.
    fn push(&mut self, page: u64) -> Option<u64> {
        self.remove(page);
        self.clock += 1;
        self.used.insert(page, self.clock);
        self.order.insert((self.clock, page));
        if self.order.len() <= self.capacity {
            return None;
        }
        let (_, oldest) = self.order.pop_first()?;
        self.used.remove(&oldest);
        Some(oldest)
    }
}

#[test]
fn lru_curves_are_those_of_exact_caches() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    for (name, trace) in traces(seed) {
        let mut lru = Lru::default();
        trace.iter().for_each(|page| lru.access(Key::new(7, *page)));
        lru.count(trace.len() as u64);
        for capacity in [2_000, 10_000, 30_000, 50_000, 100_000] {
            let mut exact = Exact::new(capacity);
            let misses = trace.iter().filter(|page| {
                let missed = !exact.remove(**page);
                exact.push(**page);
                missed
            });
            let expected = misses.count() as f64 / trace.len() as f64;
            let found = lru.miss_ratio(capacity as f64);
            println!("{name} {capacity}: exact {expected:.3}, sampled {found:.3}");
            assert!(
                is_near(expected, capacity, |pages| lru.miss_ratio(pages)),
                "{name} {capacity}: {expected} {found}"
            );
        }
    }
}

/// A pool behind an LRU cache, and one behind a cache that evicts at random, which is no LRU.
#[test]
fn victim_curves_are_those_of_exact_pools() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    for (name, trace) in traces(seed) {
        for at_random in [false, true] {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut events, mut local) = (Vec::new(), Exact::new(10_000));
            let mut cached: Vec<u64> = Vec::new();
            let mut places: HashMap<u64, usize> = HashMap::new();
            for page in &trace {
                let evicted = if at_random {
                    if places.contains_key(page) {
                        continue;
                    }
                    let victim = (cached.len() == 10_000).then(|| {
                        let place = random.usize(..cached.len());
                        let victim = cached.swap_remove(place);
                        places.remove(&victim);
                        if let Some(moved) = cached.get(place) {
                            places.insert(*moved, place);
                        }
                        victim
                    });
                    places.insert(*page, cached.len());
                    cached.push(*page);
                    victim
                } else {
                    let was_there = local.remove(*page);
                    let evicted = local.push(*page);
                    if was_there {
                        continue;
                    }
                    evicted
                };
                events.push((*page, evicted));
            }
            let mut victims = Victims::new(false);
            // The first events are not watched: the page cache is full when the watch begins.
            for (missed, evicted) in &events[events.len() / 4..] {
                victims.missed(Key::new(7, *missed));
                evicted.iter().for_each(|page| victims.evicted(Key::new(7, *page)));
            }
            for capacity in [2_000, 10_000, 20_000, 40_000, 100_000] {
                let mut pool = Exact::new(capacity);
                let (mut hits, mut misses) = (0, 0);
                for (nth, (missed, evicted)) in events.iter().enumerate() {
                    let hit = pool.remove(*missed);
                    // The second half, when the pool is warm.
                    if nth >= events.len() / 2 {
                        misses += 1;
                        hits += u64::from(hit);
                    }
                    if let Some(page) = evicted {
                        pool.push(*page);
                    }
                }
                let (expected, found) = (hits as f64 / f64::from(misses), victims.point(capacity as f64));
                println!("{name} random {at_random} {capacity}: exact {expected:.3}, sampled {found:?}");
                let curve = |pages| victims.point(pages).hit_ratio;
                assert!(is_near(expected, capacity, curve), "{name} {capacity}: {expected} {found:?}");
            }
        }
    }
}

#[test]
fn nothing_seen_is_nothing_said() {
    let (lru, victims) = (Lru::default(), Victims::new(false));
    assert!((lru.miss_ratio(1e6) - 1.0).abs() < f64::EPSILON);
    assert_eq!((victims.point(1e6).hit_ratio, victims.sampled_misses()), (0.0, 0));
}

/// A request for a page that stays moves it to the front.
#[test]
fn a_pool_that_keeps_has_what_it_was_asked_for() {
    let mut victims = Victims::new(true);
    (0..100).for_each(|index| victims.evicted(Key::new(1, index)));
    assert_eq!([0, 0, 98].map(|index| victims.missed(Key::new(1, index))), [Some(100.0), Some(1.0), Some(3.0)]);
    victims.invalidated(Key::new(1, 0));
    assert_eq!(victims.missed(Key::new(1, 0)), None);
}
