//! Where the borrower stands with one lender: its epoch, whether it is up, suspended or down, and
//! whether it is shunned, in one word.
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
//! Only *lost* moves the epoch on, which voids all entries of the lender at once. A suspended
//! lender keeps its epoch: should its session be resumed, what is on record is as current as if the
//! lender had merely been slow to answer, because nothing that voids an entry asks whether its
//! lender is there.
//!
//! A lender that is *shunned* is there, but too slow to be asked ([`crate::policy::gate`]), and
//! mostly too slow to put anything there. What is on record stays valid, as with one that is
//! suspended; it is told of changes.
//!
//! Pure: a transition takes the word and gives the next one, or nothing where it does not apply.
//! What must never happen here: an epoch valid again after it was lost, other than by wrapping (see
//! [`Place::epoch`]).

use crate::catalog::entry::{Place, Standing};
use crate::policy::gate::Passes;

const UP: u32 = 1 << 16;
const SUSPENDED: u32 = 1 << 17;
/// No gets.
const SHUNNED: u32 = 1 << 18;
/// No puts either.
const SHUT: u32 = 1 << 19;
const GATE: u32 = SHUNNED | SHUT;
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

    /// The lender has not kept the session, or nobody waits for it any longer.
    pub fn lost(self) -> Option<LenderWord> {
        (!self.is_down()).then_some(LenderWord((self.0 + 1) & EPOCH | self.0 & GATE))
    }

    /// What its gate lets through from now on. Whatever else it is stays as it is.
    pub fn gate(self, passes: Passes) -> Option<LenderWord> {
        let bits = match passes {
            Passes::All => 0,
            Passes::Puts => SHUNNED,
            Passes::Nothing => SHUNNED | SHUT,
        };
        let word = self.0 & !GATE | bits;
        (word != self.0).then_some(LenderWord(word))
    }

    /// A predecessor left a session there in that epoch, which may be resumed.
    pub fn expect(self, epoch: u8) -> Option<LenderWord> {
        self.is_down().then_some(LenderWord(u32::from(epoch) & EPOCH | SUSPENDED | self.0 & GATE))
    }

    /// Whether it is there.
    pub fn is_up(self) -> bool {
        self.0 & UP != 0
    }

    /// Whether pages can be put there.
    pub fn is_usable(self) -> bool {
        self.0 & (UP | SHUT) == UP
    }

    /// Whether it is too slow to be asked.
    pub fn is_shunned(self) -> bool {
        self.0 & SHUNNED != 0
    }

    /// Whether it is away and may come back with its pages.
    pub fn is_suspended(self) -> bool {
        self.0 & SUSPENDED != 0
    }

    fn is_down(self) -> bool {
        !self.is_up() && !self.is_suspended()
    }

    /// The epoch.
    pub fn epoch(self) -> u8 {
        (self.0 & EPOCH) as u8
    }

    /// Where an entry of that epoch stands.
    pub fn standing(self, epoch: u8) -> Standing {
        match self.epoch() == epoch {
            true if self.is_up() && !self.is_shunned() => Standing::Valid,
            true if self.is_up() || self.is_suspended() => Standing::Suspended,
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
        let away = up.suspend().unwrap();
        assert_eq!((away.standing(0), away.epoch()), (Standing::Suspended, 0));
        assert_eq!(away.resume().unwrap(), up);
        let lost = away.lost().unwrap();
        assert_eq!((lost, up.lost().unwrap()), (LenderWord(1), LenderWord(1)));
        assert_eq!(lost.up().unwrap().standing(0), Standing::Lost);
        assert_eq!(down.expect(0).unwrap(), away);
        let last = LenderWord(EPOCH).up().unwrap();
        assert_eq!(last.lost().unwrap(), down, "epochs wrap");
    }

    #[test]
    fn transitions_apply_where_they_belong() {
        let down = LenderWord(5);
        let (up, away) = (down.up().unwrap(), down.expect(7).unwrap());
        assert_eq!((down.suspend(), down.resume(), down.lost()), (None, None, None));
        assert_eq!((up.up(), up.resume(), up.expect(0)), (None, None, None));
        assert_eq!((away.up(), away.suspend(), away.expect(0)), (None, None, None));
    }

    #[test]
    fn one_that_is_shunned_keeps_its_pages_and_is_not_asked() {
        let up = LenderWord::default().up().unwrap();
        let slow = up.gate(Passes::Nothing).unwrap();
        assert_eq!((slow.standing(0), slow.is_usable(), slow.is_up()), (Standing::Suspended, false, true));
        assert_eq!((slow.gate(Passes::Nothing), slow.gate(Passes::All)), (None, Some(up)));
        let unknown = slow.gate(Passes::Puts).unwrap();
        assert_eq!((unknown.standing(0), unknown.is_usable(), unknown.is_shunned()), (Standing::Suspended, true, true));
        assert_eq!((unknown.gate(Passes::Nothing), unknown.gate(Passes::All)), (Some(slow), Some(up)));
        let back = slow.suspend().unwrap().resume().unwrap();
        assert!(back.is_shunned() && back.lost().unwrap().is_shunned(), "slow until it is seen to be fast");
    }
}
