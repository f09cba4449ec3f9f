//! Which answers were under way when something happened.
//!
//! What the kernel is told to forget it may be told again by an answer that was made before. So whoever has it forget something wants to know
//! when all answers have arrived that were being made at that moment. Requests are counted in two generations: a new one begins only when
//! the one before the last has ended, so that there are never more.

use parking_lot::Mutex;

#[derive(Default)]
struct State {
    /// Those of even and of odd generations.
    under_way: [usize; 2],
    generation: usize,
}

/// The answers that are being made.
#[derive(Default)]
pub(super) struct Flights {
    state: Mutex<State>,
}

/// One of them, until it is dropped.
pub(crate) struct Flight<'a> {
    flights: &'a Flights,
    generation: usize,
}

impl Flights {
    /// An answer is going to be made.
    pub(super) fn begin(&self) -> Flight<'_> {
        let mut state = self.state.lock();
        let generation = state.generation;
        state.under_way[generation % 2] += 1;
        Flight { flights: self, generation }
    }

    /// The generation that answers belong to which are being made now, or `None` if there are none.
    pub(super) fn now(&self) -> Option<usize> {
        let state = self.state.lock();
        state.under_way.iter().any(|count| *count > 0).then_some(state.generation)
    }

    /// Whether all answers of that generation, and of those before it, have arrived.
    pub(super) fn have_landed(&self, generation: usize) -> bool {
        let mut state = self.state.lock();
        let before = state.under_way[(state.generation + 1) % 2];
        if generation == state.generation && before == 0 {
            // Those that begin from here on are of another one.
            state.generation += 1;
        }
        generation < state.generation && {
            let own = state.under_way[generation % 2];
            // Of the two generations that there can be, it is the older one, or older than both.
            own == 0 || generation + 1 < state.generation
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.flights.state.lock().under_way[self.generation % 2] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_waited_for_and_those_after_it_are_not() {
        let flights = Flights::default();
        assert_eq!(flights.now(), None);
        let first = flights.begin();
        let then = flights.now().unwrap();
        assert!(!flights.have_landed(then));
        let second = flights.begin();
        assert!(!flights.have_landed(then));
        drop(first);
        assert!(flights.have_landed(then), "the second one was begun afterwards");
        let then = flights.now().unwrap();
        assert!(!flights.have_landed(then));
        drop(second);
        assert!(flights.have_landed(then));
        assert_eq!(flights.now(), None);
    }

    /// Whatever begins and ends in between: landed means that none is left of those that were under way then.
    #[test]
    fn none_is_left_of_those_that_were_under_way() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..2000 {
            let flights = Flights::default();
            let mut under_way: Vec<(usize, Flight<'_>)> = Vec::new();
            let mut watched: Vec<(usize, usize)> = Vec::new();
            let mut landed = 0;
            for moment in 0..60 {
                match random.u8(..4) {
                    0 => under_way.push((moment, flights.begin())),
                    1 if !under_way.is_empty() => drop(under_way.swap_remove(random.usize(..under_way.len()))),
                    2 => watched.extend(flights.now().map(|generation| (moment, generation))),
                    _ => watched.retain(|(since, generation)| {
                        let has_landed = flights.have_landed(*generation);
                        assert!(!has_landed || under_way.iter().all(|(begun, _)| begun > since), "seed {seed}");
                        landed += usize::from(has_landed);
                        !has_landed
                    }),
                }
            }
            under_way.clear();
            watched.retain(|(_, generation)| !flights.have_landed(*generation));
            assert!(watched.is_empty(), "seed {seed}: {landed} have landed before");
        }
    }
}
