//! The borrower's state of one lender, in one word: its epoch; whether it is up, suspended or down;
//! and whether it is bypassed.
//!
//! ```text
//!          up                 suspend
//!   down ──────▶ up ──────────────────────▶ suspended
//!     ▲          │ ▲                          │  │  ▲
//!     │   lost   │ └──────── resume ──────────┘  │  │ expect (by a successor)
//!     ├──────────┘                               │  └──────── down
//!     └─────────────────── lost ─────────────────┘
//! ```
//!
//! Only *lost* increments the epoch, which invalidates all entries of the lender at once. A
//! suspended lender keeps its epoch. If its session is resumed, its entries are current, as if the
//! lender had merely been slow to answer: changes invalidate entries whether the lender is
//! connected or not.
//!
//! A lender that is *bypassed* is connected, but too slow for gets ([`crate::policy::gate`]), and
//! mostly too slow for puts. Its entries stay valid, as those of a suspended lender do, and it
//! still gets drops.
//!
//! Pure logic: a transition takes the word and returns the next one, or None where it does not
//! apply. The invariant: a lost epoch never becomes valid again, except by wrapping (see
//! [`Place::epoch`]).

use crate::catalog::entry::{Place, Standing};
use crate::policy::gate::Passes;

const UP: u32 = 1 << 16;
const SUSPENDED: u32 = 1 << 17;
/// No gets.
const BYPASSED: u32 = 1 << 18;
/// No puts either.
const SHUT: u32 = 1 << 19;
const GATE: u32 = BYPASSED | SHUT;
const EPOCH: u32 = (Place::EPOCHS - 1) as u32;

/// The state of a lender. The default is down, in epoch 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LenderWord(pub u32);

impl LenderWord {
    /// A session has begun, without pages.
    pub fn up(self) -> Option<LenderWord> {
        self.is_down().then_some(LenderWord(self.0 | UP))
    }

    /// The connection is lost.
    pub fn suspend(self) -> Option<LenderWord> {
        self.is_up().then_some(LenderWord(self.0 ^ (UP | SUSPENDED)))
    }

    /// The lender has kept the session.
    pub fn resume(self) -> Option<LenderWord> {
        self.is_suspended().then_some(LenderWord(self.0 ^ (UP | SUSPENDED)))
    }

    /// The lender has not kept the session, or its grace time has ended.
    pub fn lost(self) -> Option<LenderWord> {
        (!self.is_down()).then_some(LenderWord((self.0 + 1) & EPOCH | self.0 & GATE))
    }

    /// Sets what the lender's gate lets through from now on. The other bits stay unchanged.
    pub fn gate(self, passes: Passes) -> Option<LenderWord> {
        let bits = match passes {
            Passes::All => 0,
            Passes::Puts => BYPASSED,
            Passes::Nothing => BYPASSED | SHUT,
        };
        let word = self.0 & !GATE | bits;
        (word != self.0).then_some(LenderWord(word))
    }

    /// A predecessor left a session at the lender in that epoch, which may be resumed.
    pub fn expect(self, epoch: u8) -> Option<LenderWord> {
        self.is_down().then_some(LenderWord(u32::from(epoch) & EPOCH | SUSPENDED | self.0 & GATE))
    }

    /// Returns whether the lender is connected.
    pub fn is_up(self) -> bool {
        self.0 & UP != 0
    }

    /// Returns whether pages can be put at the lender.
    pub(crate) fn is_usable(self) -> bool {
        self.0 & (UP | SHUT) == UP
    }

    /// Returns whether the lender is too slow for gets.
    pub fn is_bypassed(self) -> bool {
        self.0 & BYPASSED != 0
    }

    /// Returns whether the lender is disconnected and may come back with its pages.
    pub(crate) fn is_suspended(self) -> bool {
        self.0 & SUSPENDED != 0
    }

    fn is_down(self) -> bool {
        !self.is_up() && !self.is_suspended()
    }

    /// Returns the epoch.
    pub fn epoch(self) -> u8 {
        (self.0 & EPOCH) as u8
    }

    /// Returns the standing of an entry of that epoch.
    pub fn standing(self, epoch: u8) -> Standing {
        match self.epoch() == epoch {
            true if self.is_up() && !self.is_bypassed() => Standing::Valid,
            true if self.is_up() || self.is_suspended() => Standing::Unavailable,
            _ => Standing::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loss_moves_the_epoch() {
        let down = LenderWord::default();
        let up = down.up().unwrap();
        assert_eq!(
            (up.standing(0), up.standing(1), down.standing(0)),
            (Standing::Valid, Standing::Lost, Standing::Lost)
        );
        let suspended = up.suspend().unwrap();
        assert_eq!((suspended.standing(0), suspended.epoch()), (Standing::Unavailable, 0));
        assert_eq!(suspended.resume().unwrap(), up);
        let lost = suspended.lost().unwrap();
        assert_eq!((lost, up.lost().unwrap()), (LenderWord(1), LenderWord(1)));
        assert_eq!(lost.up().unwrap().standing(0), Standing::Lost);
        assert_eq!(down.expect(0).unwrap(), suspended);
        let last = LenderWord(EPOCH).up().unwrap();
        assert_eq!(last.lost().unwrap(), down, "epochs wrap");
    }

    #[test]
    fn transitions_apply_where_they_belong() {
        let down = LenderWord(5);
        let (up, suspended) = (down.up().unwrap(), down.expect(7).unwrap());
        assert_eq!((down.suspend(), down.resume(), down.lost()), (None, None, None));
        assert_eq!((up.up(), up.resume(), up.expect(0)), (None, None, None));
        assert_eq!((suspended.up(), suspended.suspend(), suspended.expect(0)), (None, None, None));
    }

    #[test]
    fn one_that_is_bypassed_keeps_its_pages_and_is_not_asked() {
        let up = LenderWord::default().up().unwrap();
        let slow = up.gate(Passes::Nothing).unwrap();
        assert_eq!((slow.standing(0), slow.is_usable(), slow.is_up()), (Standing::Unavailable, false, true));
        assert_eq!((slow.gate(Passes::Nothing), slow.gate(Passes::All)), (None, Some(up)));
        let unknown = slow.gate(Passes::Puts).unwrap();
        assert_eq!(
            (unknown.standing(0), unknown.is_usable(), unknown.is_bypassed()),
            (Standing::Unavailable, true, true)
        );
        assert_eq!((unknown.gate(Passes::Nothing), unknown.gate(Passes::All)), (Some(slow), Some(up)));
        let back = slow.suspend().unwrap().resume().unwrap();
        assert!(back.is_bypassed() && back.lost().unwrap().is_bypassed(), "bypassed until it is measured to be fast");
    }
}
