//! The oracle: a model of a file that decides which values each read through the mount may return.
//!
//! A file is a sequence of *units* of 512 bytes, the smallest piece that any operation reads or
//! writes. Each holds one number, or [`EOF`] behind the end. Apart from its current value, a read
//! may also return other values of a unit, for one of the reasons in [`Why`]. A value that a read
//! returns must have been right at some moment of the read.

/// Virtual time: the number of the step.
pub type Time = u64;

/// The value of a unit behind the end of the file.
pub const EOF: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The value was right until then.
    Until(Time),
    /// The value was right until an external change at that time. A program that has not opened the
    /// file since may still read it.
    External(Time),
    /// The change with this number is in progress.
    Pending(u64),
    /// The kernel may return the value until it has executed the drop that the daemon requested at
    /// that time.
    Lingering(Time),
}

#[derive(Clone, Debug)]
struct Unit {
    current: u64,
    others: Vec<(u64, Why)>,
}

/// The values that may be read.
#[derive(Debug)]
pub struct Oracle {
    units: Vec<Unit>,
    /// The time when the latest answered open began.
    opened: Time,
}

impl Oracle {
    /// Returns a file of these units.
    pub fn new(units: &[u64], now: Time) -> Oracle {
        let units = units.iter().map(|unit| Unit { current: *unit, others: Vec::new() }).collect();
        Oracle { units, opened: now }
    }

    /// Returns the state that a read must store at its beginning: it decides which external changes
    /// the read must see.
    pub fn opened(&self) -> Time {
        self.opened
    }

    /// An open that began at `began` has been answered.
    pub fn open(&mut self, began: Time) {
        self.opened = self.opened.max(began);
    }

    /// Returns whether a read may return that value. The read began at `from`, when
    /// [`Oracle::opened`] was `opened`.
    pub fn accepts(&self, unit: usize, value: u64, from: Time, opened: Time) -> bool {
        let unit = &self.units[unit];
        unit.current == value
            || unit.others.iter().any(|(other, why)| {
                *other == value
                    && match why {
                        Why::Until(time) => *time >= from,
                        Why::External(time) => *time >= opened,
                        Why::Pending(_) | Why::Lingering(_) => true,
                    }
            })
    }

    /// Returns whether this is the only right value of the unit.
    pub fn is(&self, unit: usize, value: u64) -> bool {
        self.units[unit].current == value
    }

    /// The unit has this value from now on.
    pub fn store(&mut self, unit: usize, value: u64, now: Time) {
        self.replace(unit, value, Why::Until(now));
    }

    /// An external writer changed the unit.
    pub fn external(&mut self, unit: usize, value: u64, now: Time) {
        let old = self.units[unit].current;
        self.replace(unit, value, Why::External(now));
        if value == EOF || old == EOF {
            // Until the file is opened, the kernel may use the one size and cache the zeros of the
            // other.
            self.outlast(unit, 0, now);
        }
    }

    /// The kernel's page holds this value, and may return it until the file is opened after an
    /// external change.
    pub fn outlast(&mut self, unit: usize, value: u64, now: Time) {
        self.units[unit].others.push((value, Why::External(now)));
    }

    /// A change begins that may give the unit this value.
    pub fn announce(&mut self, change: u64, unit: usize, value: u64) {
        self.units[unit].others.push((value, Why::Pending(change)));
    }

    /// The kernel's page holds this value. The kernel may return it once the file reaches this
    /// unit, until it has dropped the page.
    pub fn linger(&mut self, unit: usize, value: u64, now: Time) {
        self.units[unit].others.push((value, Why::Lingering(now)));
    }

    /// The change has ended, and this is the unit's value. With `lingering`, the kernel may still
    /// return the old value until it has dropped its pages. A change of the unit itself (`fresh`),
    /// not only of the end, has put its bytes into the kernel's page.
    pub fn resolve(&mut self, change: u64, unit: usize, value: u64, now: Time, lingering: bool, fresh: bool) {
        for (_, why) in &mut self.units[unit].others {
            match why {
                Why::Pending(of) if *of == change => *why = Why::Until(now),
                // A program that has changed the unit through the mount must not read an older
                // value any more.
                Why::External(_) if fresh => *why = Why::Until(now),
                _ => {}
            }
        }
        if lingering && self.units[unit].current == EOF {
            // The kernel may have the new end, and still cache the zeros that it read before the
            // old end.
            self.linger(unit, 0, now);
        }
        self.replace(unit, value, if lingering { Why::Lingering(now) } else { Why::Until(now) });
    }

    /// The change has ended, possibly without any effect.
    pub fn end(&mut self, change: u64, now: Time) {
        for (_, why) in self.units.iter_mut().flat_map(|unit| &mut unit.others) {
            if *why == Why::Pending(change) {
                *why = Why::Until(now);
            }
        }
    }

    /// Describes the possible values of a unit, for people.
    pub fn explain(&self, unit: usize) -> String {
        let unit = &self.units[unit];
        format!("it holds {}, and may be {:?}; the last open began at {}", unit.current, unit.others, self.opened)
    }

    fn replace(&mut self, unit: usize, value: u64, why: Why) {
        let unit = &mut self.units[unit];
        let old = std::mem::replace(&mut unit.current, value);
        if old != value {
            unit.others.push((old, why));
        }
    }

    /// The kernel has executed the drops from before `since`.
    pub fn expire(&mut self, since: Time, now: Time) {
        for unit in &mut self.units {
            for (_, why) in &mut unit.others {
                if matches!(why, Why::Lingering(time) if *time <= since) {
                    *why = Why::Until(now);
                }
            }
        }
    }

    /// Forgets values that no read can return any more. The oldest read in progress began at
    /// `oldest`, with opens up to `opened`.
    pub fn prune(&mut self, oldest: Time, opened: Time) {
        for unit in &mut self.units {
            unit.others.retain(|(_, why)| match why {
                Why::Until(time) => *time >= oldest,
                Why::External(time) => *time >= opened.min(self.opened),
                Why::Pending(_) | Why::Lingering(_) => true,
            });
        }
    }
}
