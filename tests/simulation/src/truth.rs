//! The model of a file that decides what each read through the mount may return.
//!
//! A file is a row of *units* of 512 bytes, the smallest piece that anything here reads or writes.
//! Each holds one number, or [`EOF`] where it lies behind the end. Beside what it holds now, a unit
//! may still be read as something else, for one of the reasons in [`Why`]; what a read returns must
//! have been right at some moment of it.

/// Virtual time: the number of the step.
pub type Time = u64;

/// What a unit behind the end of the file holds.
pub const EOF: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// It was right until then.
    Until(Time),
    /// It was right until then, when somebody changed the file beside the mount: who has not opened
    /// it since may still see it.
    Beside(Time),
    /// That change is under way.
    Pending(u64),
    /// The kernel may show it until it has dropped what we told it to drop, since then.
    Lingering(Time),
}

#[derive(Clone, Debug)]
struct Unit {
    current: u64,
    others: Vec<(u64, Why)>,
}

/// What may be read.
#[derive(Debug)]
pub struct Truth {
    units: Vec<Unit>,
    /// When the latest open that has been answered began.
    opened: Time,
}

impl Truth {
    /// A file of these units.
    pub fn new(units: &[u64], now: Time) -> Truth {
        let units = units.iter().map(|unit| Unit { current: *unit, others: Vec::new() }).collect();
        Truth { units, opened: now }
    }

    /// What a read that begins now has to know later: which changes beside it must see.
    pub fn opened(&self) -> Time {
        self.opened
    }

    /// An open that began at `began` has been answered.
    pub fn open(&mut self, began: Time) {
        self.opened = self.opened.max(began);
    }

    /// Whether a read that began at `from`, when [`Truth::opened`] was `opened`, may return that
    /// value.
    pub fn accepts(&self, unit: usize, value: u64, from: Time, opened: Time) -> bool {
        let unit = &self.units[unit];
        unit.current == value
            || unit.others.iter().any(|(other, why)| {
                *other == value
                    && match why {
                        Why::Until(time) => *time >= from,
                        Why::Beside(time) => *time >= opened,
                        Why::Pending(_) | Why::Lingering(_) => true,
                    }
            })
    }

    /// Whether the value is what the unit holds, and nothing else.
    pub fn is(&self, unit: usize, value: u64) -> bool {
        self.units[unit].current == value
    }

    /// The unit holds that now, as of this moment.
    pub fn store(&mut self, unit: usize, value: u64, now: Time) {
        self.replace(unit, value, Why::Until(now));
    }

    /// Somebody changed the unit beside the mount.
    pub fn beside(&mut self, unit: usize, value: u64, now: Time) {
        let old = self.units[unit].current;
        self.replace(unit, value, Why::Beside(now));
        if value == EOF || old == EOF {
            // Until it is opened, the kernel may know the one size and cache the zeros of the
            // other.
            self.outlast(unit, 0, now);
        }
    }

    /// The kernel's page holds that, and may show it until the file is opened after a change beside
    /// the mount.
    pub fn outlast(&mut self, unit: usize, value: u64, now: Time) {
        self.units[unit].others.push((value, Why::Beside(now)));
    }

    /// A change begins that may make the unit hold that.
    pub fn announce(&mut self, change: u64, unit: usize, value: u64) {
        self.units[unit].others.push((value, Why::Pending(change)));
    }

    /// The kernel's page holds that, and may show it once the file reaches there, until it has
    /// dropped the page.
    pub fn linger(&mut self, unit: usize, value: u64, now: Time) {
        self.units[unit].others.push((value, Why::Lingering(now)));
    }

    /// The change is over, and that is what the unit holds. With `lingering`, the kernel may still
    /// show what it held before until it has dropped its pages. A change of the unit itself
    /// (`fresh`), not only of the end, has put its bytes into the kernel's page.
    pub fn settle(&mut self, change: u64, unit: usize, value: u64, now: Time, lingering: bool, fresh: bool) {
        for (_, why) in &mut self.units[unit].others {
            match why {
                Why::Pending(of) if *of == change => *why = Why::Until(now),
                // A program that has changed the unit through the mount must not see anything older
                // any more.
                Why::Beside(_) if fresh => *why = Why::Until(now),
                _ => {}
            }
        }
        if lingering && self.units[unit].current == EOF {
            // The kernel may know of the new end, and still cache what it read before the old one:
            // zeros.
            self.linger(unit, 0, now);
        }
        self.replace(unit, value, if lingering { Why::Lingering(now) } else { Why::Until(now) });
    }

    /// The change is over, also where it has changed nothing in the end.
    pub fn end(&mut self, change: u64, now: Time) {
        for (_, why) in self.units.iter_mut().flat_map(|unit| &mut unit.others) {
            if *why == Why::Pending(change) {
                *why = Why::Until(now);
            }
        }
    }

    /// What may be read of a unit, for people.
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

    /// The kernel has dropped what lingered since before `since`.
    pub fn expire(&mut self, since: Time, now: Time) {
        for unit in &mut self.units {
            for (_, why) in &mut unit.others {
                if matches!(why, Why::Lingering(time) if *time <= since) {
                    *why = Why::Until(now);
                }
            }
        }
    }

    /// Forgets what no read can return any more; the oldest that is under way began at `oldest`,
    /// knowing opens up to `opened`.
    pub fn prune(&mut self, oldest: Time, opened: Time) {
        for unit in &mut self.units {
            unit.others.retain(|(_, why)| match why {
                Why::Until(time) => *time >= oldest,
                Why::Beside(time) => *time >= opened.min(self.opened),
                Why::Pending(_) | Why::Lingering(_) => true,
            });
        }
    }
}
