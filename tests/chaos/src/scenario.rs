//! The troubles of lenders: a schedule from a seed, which the load's loop executes step by step.
//!
//! Every step that harms is followed by one that heals, so that a mount meets lenders that
//! disappear, come back, and hang in between. [`Trouble::heal`] ends the trouble, whatever the last
//! step was.

use crate::byzantine::MOODS;
use crate::lender::{Lender, Who};
use crate::probe::now_ms;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use testbed::Failure;

/// The maximum number of recorded steps, which show the events before a failure.
const JOURNAL_MAX: usize = 512;

/// The kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scenario {
    /// Killed and started again each second.
    Killed,
    /// Stopped (SIGSTOP) for a while, again and again.
    Stopped,
    /// Another process takes its memory.
    Squeezed,
    /// Cut off: link cut, address gone, or killed without notice while the link was cut.
    CutOff,
    /// A byzantine lender in its place.
    Hostile,
    /// All of these.
    All,
    /// Those that a lender survives, so that its memory can be measured from the beginning to the
    /// end of a soak.
    Survived,
}

impl Scenario {
    /// The scenarios of chaos, in this order.
    pub const EVERY: [Scenario; 6] =
        [Scenario::Killed, Scenario::Stopped, Scenario::Squeezed, Scenario::CutOff, Scenario::Hostile, Scenario::All];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Scenario::Killed => "killed",
            Scenario::Stopped => "stopped",
            Scenario::Squeezed => "squeezed",
            Scenario::CutOff => "cut-off",
            Scenario::Hostile => "hostile",
            Scenario::All => "all",
            Scenario::Survived => "survived",
        }
    }

    /// Whether the lender must be in a network of its own.
    pub fn needs_network(self) -> bool {
        matches!(self, Scenario::CutOff | Scenario::All | Scenario::Survived)
    }
}

#[derive(Clone, Copy, Debug)]
enum Harm {
    Kill,
    Stop,
    MemoryHog,
    Pull,
    LoseAddress,
    Vanish,
    Byzantine,
}

/// The trouble of a lender.
pub struct Trouble {
    scenario: Scenario,
    random: fastrand::Rng,
    /// The number of byzantine lenders so far.
    byzantine_lenders: u64,
    next: Instant,
    /// The last step did this harm, which is to be healed next.
    harm: Option<Harm>,
    /// Rest between two troubles, in milliseconds; longer for a soak than for chaos.
    rest_ms: std::ops::Range<u64>,
    journal: VecDeque<(u64, String)>,
    /// Steps that harmed.
    pub harm_count: u64,
}

impl Trouble {
    /// No trouble yet. It comes after rests of so many milliseconds.
    pub fn new(scenario: Scenario, seed: u64, rest_ms: std::ops::Range<u64>) -> Trouble {
        Trouble {
            scenario,
            random: fastrand::Rng::with_seed(seed),
            byzantine_lenders: 0,
            next: Instant::now(),
            harm: None,
            rest_ms,
            journal: VecDeque::new(),
            harm_count: 0,
        }
    }

    /// Takes the next step if it is time.
    pub fn step(&mut self, lender: &mut Lender) -> Result<(), Failure> {
        if Instant::now() < self.next {
            return Ok(());
        }
        let pause_ms = match self.harm.take() {
            Some(harm) => {
                self.undo(harm, lender)?;
                self.random.u64(self.rest_ms.clone())
            }
            None => {
                if lender.revive()? {
                    self.note("had ended by itself: started again".to_owned());
                }
                let harm = self.choose();
                self.harm_count += 1;
                let pause_ms = self.harm(harm, lender)?;
                self.note(format!("{harm:?} for {pause_ms} ms"));
                self.harm = Some(harm);
                pause_ms
            }
        };
        self.next = Instant::now() + Duration::from_millis(pause_ms);
        Ok(())
    }

    /// Whether the lender may be unable to answer now.
    pub fn is_harming(&self) -> bool {
        self.harm.is_some()
    }

    /// Ends all trouble, with the real lender in its place.
    pub fn heal(&mut self, lender: &mut Lender) -> Result<(), Failure> {
        if let Some(harm) = self.harm.take() {
            self.undo(harm, lender)?;
        }
        if lender.who() != Who::Lender {
            lender.run(Who::Lender)?;
        }
        lender.revive()?;
        self.note("all healed".to_owned());
        Ok(())
    }

    /// Describes the steps in the seconds before a time (milliseconds since the epoch), in one
    /// line.
    pub fn before(&self, at_ms: u64, took_ms: u64) -> String {
        let near = self.journal.iter().filter(|(when, _)| *when + 6000 > at_ms && *when < at_ms + took_ms);
        let near = near.map(|(when, what)| format!("{:+} ms {what}", *when as i64 - at_ms as i64));
        near.collect::<Vec<_>>().join("; ")
    }

    fn note(&mut self, what: String) {
        if self.journal.len() == JOURNAL_MAX {
            self.journal.pop_front();
        }
        self.journal.push_back((now_ms(), what));
    }

    fn choose(&mut self) -> Harm {
        use Harm::*;
        let harms: &[Harm] = match self.scenario {
            Scenario::Killed => &[Kill],
            Scenario::Stopped => &[Stop],
            Scenario::Squeezed => &[MemoryHog],
            Scenario::CutOff => &[Pull, LoseAddress, Vanish],
            Scenario::Hostile => &[Byzantine],
            Scenario::All => &[Kill, Stop, MemoryHog, Pull, LoseAddress, Vanish, Byzantine],
            Scenario::Survived => &[Stop, MemoryHog, Pull, LoseAddress],
        };
        harms[self.random.usize(..harms.len())]
    }

    /// Does the harm, and returns its duration in milliseconds.
    fn harm(&mut self, harm: Harm, lender: &mut Lender) -> Result<u64, Failure> {
        let network = lender.network();
        let network = || network.as_ref().ok_or_else(|| Failure::Problem("this lender has no network".to_owned()));
        Ok(match harm {
            Harm::Kill => {
                lender.kill()?;
                self.random.u64(0..300)
            }
            Harm::Stop => {
                lender.stop()?;
                self.random.u64(200..4000)
            }
            Harm::MemoryHog => {
                lender.start_hog()?;
                self.random.u64(500..2500)
            }
            Harm::Pull => {
                network()?.pull()?;
                self.random.u64(200..5000)
            }
            Harm::LoseAddress => {
                network()?.lose_address()?;
                self.random.u64(200..5000)
            }
            Harm::Vanish => {
                // Its farewell cannot arrive either.
                network()?.pull()?;
                lender.kill()?;
                self.random.u64(200..2000)
            }
            Harm::Byzantine => {
                // A short round must meet lies about pages, a longer one all moods.
                let mood = self.byzantine_lenders * 3 % MOODS;
                self.byzantine_lenders += 1;
                lender.run(Who::Byzantine(self.random.u64(..u64::MAX / MOODS) * MOODS + mood))?;
                self.random.u64(2000..6000)
            }
        })
    }

    fn undo(&mut self, harm: Harm, lender: &mut Lender) -> Result<(), Failure> {
        let network = lender.network();
        match harm {
            Harm::Kill => lender.run(Who::Lender)?,
            Harm::Stop => lender.go_on()?,
            Harm::MemoryHog => lender.release(),
            Harm::Pull => network.map_or(Ok(()), |network| network.plug())?,
            Harm::LoseAddress => network.map_or(Ok(()), |network| network.plug_in_address())?,
            Harm::Vanish => {
                lender.run(Who::Lender)?;
                network.map_or(Ok(()), |network| network.plug())?;
            }
            // In its own scenario, one byzantine lender follows the other.
            Harm::Byzantine if self.scenario == Scenario::Hostile => {}
            Harm::Byzantine => lender.run(Who::Lender)?,
        }
        self.note(format!("end of {harm:?}"));
        Ok(())
    }
}
