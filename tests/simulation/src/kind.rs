//! [`Kind`]: the change of a file, which is drawn at random.

use crate::file::UNITS;
use fastrand::Rng;

/// The kind of a change. Ranges are in units.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// A write out of the page cache.
    Write { first: usize, end: usize },
    /// The kernel writes back stores through a mapping.
    Writeback { page: usize, units: Vec<u64> },
    /// The end is moved.
    Truncate { size: usize },
    /// A hole is punched.
    Punch { first: usize, end: usize },
    /// A direct write. `copied`: the backing file system makes a copy by itself, after which the
    /// kernel drops the pages, whatever they hold.
    Direct { first: usize, end: usize, copied: bool },
    /// No byte changes.
    Attributes,
}

impl Kind {
    /// Returns a random write.
    pub fn write(units: usize, size: usize, random: &mut Rng) -> Kind {
        // Half of them end within the file, so it seldom reaches its greatest length, at which no
        // append is possible.
        let within = if random.bool() { size.max(1) } else { units };
        let (mut first, mut end) = range(within, random);
        let page_end = (size + 1).next_multiple_of(UNITS);
        if random.u32(0..4) == 0 && size < units {
            // From the end on, in its page; or in the next page, with a gap.
            first = match random.bool() {
                true if page_end < units => random.usize(page_end..units.min(page_end + UNITS)),
                _ => random.usize(size..page_end),
            };
            end = random.usize(first + 1..=units.min(first + UNITS));
        } else if random.bool() {
            (first, end) = (first / UNITS * UNITS, end.next_multiple_of(UNITS));
        }
        Kind::Write { first, end }
    }

    /// Returns a random change of bytes other than a write.
    pub fn other(units: usize, random: &mut Rng) -> Kind {
        let (first, end) = range(units, random);
        match random.u32(0..5) {
            0..2 => Kind::Truncate { size: random.usize(0..=units) },
            2 => Kind::Punch { first, end },
            3 => Kind::Direct { first, end, copied: false },
            _ if random.bool() => Kind::Direct { first, end, copied: true },
            _ => Kind::Direct { first: first / UNITS * UNITS, end: end.next_multiple_of(UNITS), copied: true },
        }
    }
}

fn range(units: usize, random: &mut Rng) -> (usize, usize) {
    let first = random.usize(0..units);
    (first, random.usize(first + 1..=units.min(first + 3 * UNITS)))
}
