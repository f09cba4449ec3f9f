//! Where the sequential filter steps back: what is read in streams is lent all the same if it fits,
//! and lenders are faster.
//!
//! Streams are left to the disk (Puma 2015, §3.3.3) because a disk is good at them, and because at
//! a lender they push out what is read at random. Neither holds of a file that is read over and
//! over, comes back before lenders have to forget it, and faster from them than from the disk:
//! there the filter gives away all that there is to gain (`blast`). So:
//!
//! - A page fits if fewer pages were evicted since it was than lenders have room for:
//!   [`mrc::Victims`], of all that is evicted, whether it is lent or not. Each file has its own
//!   record of that ([`crate::policy::streams::Streams::fit`]): one that is read over and over
//!   fits, a backup beside it does not.
//! - Lending streams does harm if what is read at random would then be farther back than there is
//!   room. We assume that streams displaced every random page whose reuse distance exceeds the
//!   capacity, and count such a page as `RANDOM_PAGES` pages of a stream.
//! - Lenders and disk are compared by what a page takes in long READs. As long as nothing is known
//!   of the lenders, one in `TRIED` neighbourhoods is lent.
//! - That leaves out what lenders cost otherwise: each page that they are to have is sealed and
//!   sent by the same processors. So when streams are lent, how fast they go on, all of the mount
//!   together, is compared with how fast they did when they were left to the disk.
//!
//! Pure: times are arguments.

use crate::policy::curve::Watched;
use crate::policy::streams::Looked;
use crate::put::placement::NEIGHBOURHOOD_PAGES;
use mrc::Victims;
use page::{FileKey, PageRange};
use std::time::Duration;
use sync::Mutex;
use sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Pages in the sample: fewer than for a curve, as it is only asked whether most of a file fits. It
/// takes 0.3 MiB.
const SAMPLES_MAX: usize = 2048;

/// One neighbourhood in so many is lent to see how fast lenders are.
const TRIED: u64 = 8;

/// A READ at random takes a disk as long as so many pages of a stream, at the least.
const RANDOM_PAGES: f64 = 64.0;

/// Gain and harm together, in pages of the sample, from which on all count half as much.
const WEIGHED_MAX: f64 = 8192.0;

/// Pages of a stream from which on it is known how long they take, from lenders and from the disk,
/// and when older ones count half as much.
const TIMED_PAGES_MIN: f64 = 128.0;
const TIMED_PAGES_MAX: f64 = 8192.0;

/// What lenders must take of what the disk does, at the most, for streams to be lent: what little
/// they are asked for before that is measured without the puts that there will be. And for streams
/// to be left to the disk again.
const LENT_RATIO: f64 = 0.5;
const SLOWER_RATIO: f64 = 1.0;

/// Pages that show how fast streams go on: more of them, as a disk with a limit stops for tens of
/// milliseconds.
const PACED_PAGES_MIN: f64 = 8192.0;
const PACED_PAGES_MAX: f64 = 65_536.0;
/// Between two READs of streams so many times as long as the second takes count at the most: what
/// is longer is their readers' doing.
const REST_TIMES: u32 = 4;
/// Lent streams lag from so many times the time on, until they need less than those that are left.
const LAGGING_RATIO: f64 = 1.25;
/// Pages of streams that the disk reads, 8 GiB, before it is tried again whether they lag.
const LAGGED_PAGES: u64 = 2 << 20;

/// Pages of streams that the disk reads, 64 GiB, before lenders that were slower are tried again.
const RETRIED_PAGES: u64 = 16 << 20;

/// What becomes of what is read in streams that fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Lending {
    /// It is left to the disk: it is not known to be worth its room.
    #[default]
    Left,
    /// A part of it is lent, to see how fast lenders are.
    Tried,
    /// It is lent.
    Lent,
    /// It is read from the disk, which is faster, even what lenders have.
    Slower,
}

impl Lending {
    /// Whether that page is lent.
    pub fn lends(self, index: u64) -> bool {
        match self {
            Lending::Left | Lending::Slower => false,
            Lending::Tried => (index / u64::from(NEIGHBOURHOOD_PAGES)).is_multiple_of(TRIED),
            Lending::Lent => true,
        }
    }

    /// Whether any is.
    pub fn is_any(self) -> bool {
        matches!(self, Lending::Tried | Lending::Lent)
    }

    /// In a word, for the status.
    pub fn text(self) -> &'static str {
        match self {
            Lending::Left => "left to the disk",
            Lending::Tried => "tried",
            Lending::Lent => "lent where they fit",
            Lending::Slower => "faster from the disk",
        }
    }
}

/// Pages, and the time that they took.
#[derive(Default)]
struct Rate {
    pages: f64,
    us: f64,
}

impl Rate {
    fn note(&mut self, pages: usize, took: Duration, pages_max: f64) {
        self.pages += pages as f64;
        self.us += took.as_secs_f64() * 1e6;
        if self.pages > pages_max {
            (self.pages, self.us) = (self.pages / 2.0, self.us / 2.0);
        }
    }

    /// If it is known of so many pages.
    fn us_per_page(&self, pages_min: f64) -> Option<f64> {
        (self.pages >= pages_min).then(|| self.us / self.pages)
    }
}

/// What lending streams would bring: pages of streams that would fit, and pages of streams that
/// those are worth that would be farther back than there is room.
#[derive(Default)]
struct Weighed {
    gain: f64,
    harm: f64,
}

#[derive(Default)]
struct Speeds {
    lenders: Rate,
    disk: Rate,
    /// How fast streams go on that come from lenders, and those that are left to the disk.
    lent_pace: Rate,
    left_pace: Rate,
    lags: bool,
    is_slower: Option<bool>,
    /// Pages that the disk has read since lenders were found to be slower.
    left_pages: u64,
}

impl Speeds {
    fn forget_lenders(&mut self) {
        (self.lenders, self.lent_pace, self.lags) = Default::default();
    }

    fn compare(&mut self) {
        let timed = |rate: &Rate| rate.us_per_page(TIMED_PAGES_MIN);
        let (Some(lenders), Some(disk)) = (timed(&self.lenders), timed(&self.disk)) else {
            self.is_slower = None;
            return;
        };
        let ratio = if self.is_slower == Some(false) { SLOWER_RATIO } else { LENT_RATIO };
        let paced = |rate: &Rate| rate.us_per_page(PACED_PAGES_MIN);
        let lagging = if self.lags { 1.0 } else { LAGGING_RATIO };
        let paces = paced(&self.lent_pace).zip(paced(&self.left_pace));
        self.lags = paces.is_some_and(|(lent, left)| lent > left * lagging);
        let is_slower = lenders > disk * ratio || self.lags;
        if self.is_slower != Some(is_slower) {
            (self.is_slower, self.left_pages) = (Some(is_slower), 0);
        }
    }
}

/// Whether streams are lent, of one mount.
pub struct StreamRoom {
    /// What would be, were all lent.
    supposed: Watched,
    weighed: Mutex<Weighed>,
    speeds: Mutex<Speeds>,
    /// Whether gain exceeds harm.
    is_worth: AtomicBool,
    /// How the speeds compare: a [`Lending`].
    speed: AtomicU32,
    /// When a READ of a stream was answered last, in microseconds.
    answered_us: AtomicU64,
}

/// Where all of a READ came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From lenders.
    Lenders,
    /// From the disk, to which it is left.
    Disk,
}

impl StreamRoom {
    /// Before lenders that give away what they are asked for, or keep it.
    pub fn new(keeps: bool) -> StreamRoom {
        StreamRoom {
            supposed: Watched::new(Victims::with_samples(keeps, SAMPLES_MAX)),
            weighed: Mutex::default(),
            speeds: Mutex::default(),
            is_worth: AtomicBool::new(false),
            speed: AtomicU32::new(Lending::Tried as u32),
            answered_us: AtomicU64::new(0),
        }
    }

    /// What becomes of streams that fit.
    pub fn lending(&self) -> Lending {
        match self.speed.load(Ordering::Relaxed) {
            _ if !self.is_worth.load(Ordering::Relaxed) => Lending::Left,
            speed if speed == Lending::Lent as u32 => Lending::Lent,
            speed if speed == Lending::Slower as u32 => Lending::Slower,
            _ => Lending::Tried,
        }
    }

    /// A READ of these pages has come; lenders have room for `room_pages`. What is known of those
    /// that are sampled.
    pub fn missed(&self, file: FileKey, range: PageRange, is_sequential: bool, room_pages: impl Fn() -> u64) -> Looked {
        let (mut looked, mut room) = (Looked::default(), None);
        self.supposed.missed(file, range, |needed_pages| {
            let room_pages = *room.get_or_insert_with(|| room_pages() as f64);
            looked.sampled_pages += 1;
            match needed_pages {
                Some(needed) if needed <= room_pages => looked.fitting_pages += 1,
                Some(_) => looked.far_pages += 1,
                None => {}
            }
        });
        if looked.sampled_pages > 0 {
            self.weigh(looked, range.end - range.first, is_sequential);
        }
        looked
    }

    fn weigh(&self, looked: Looked, read_pages: u64, is_sequential: bool) {
        let weighed = &mut *self.weighed.lock();
        if is_sequential {
            weighed.gain += f64::from(looked.fitting_pages);
        } else {
            weighed.harm += f64::from(looked.far_pages) * (RANDOM_PAGES / read_pages as f64).max(1.0);
        }
        if weighed.gain + weighed.harm > WEIGHED_MAX {
            (weighed.gain, weighed.harm) = (weighed.gain / 2.0, weighed.harm / 2.0);
        }
        let was_worth = self.is_worth.load(Ordering::Relaxed);
        self.is_worth.store(weighed.gain > weighed.harm * if was_worth { 1.0 } else { 2.0 }, Ordering::Relaxed);
    }

    /// This page was evicted, and might have been lent.
    pub fn evicted(&self, file: FileKey, index: u32) {
        self.supposed.evicted(file, index);
    }

    /// Lenders took so long for so many pages, of a large READ; divided by how many were under way.
    pub fn lender_took(&self, pages: usize, took: Duration) {
        self.took(|speeds| speeds.lenders.note(pages, took, TIMED_PAGES_MAX));
    }

    /// The disk did, for a large READ in a stream.
    pub fn disk_took(&self, pages: usize, took: Duration) {
        self.took(|speeds| {
            speeds.disk.note(pages, took, TIMED_PAGES_MAX);
            if speeds.is_slower == Some(true) {
                speeds.left_pages += pages as u64;
                if speeds.left_pages > if speeds.lags { LAGGED_PAGES } else { RETRIED_PAGES } {
                    speeds.forget_lenders();
                }
            }
        });
    }

    /// They are others now, or have become slower or faster.
    pub fn forget_lenders(&self) {
        self.took(Speeds::forget_lenders);
    }

    /// A READ of a stream, of so many pages, was answered at the time `now`, and has taken so long.
    /// None: it came from here and there.
    pub fn went_on(&self, pages: usize, from: Option<Origin>, now: Duration, took: Duration) {
        let now_us = now.as_micros() as u64;
        let before_us = self.answered_us.swap(now_us, Ordering::Relaxed);
        let since = Duration::from_micros(now_us.saturating_sub(before_us)).min(took * REST_TIMES);
        self.took(|speeds| match from {
            Some(Origin::Lenders) => speeds.lent_pace.note(pages, since, PACED_PAGES_MAX),
            Some(Origin::Disk) => speeds.left_pace.note(pages, since, PACED_PAGES_MAX),
            None => {}
        });
    }

    fn took(&self, note: impl FnOnce(&mut Speeds)) {
        let mut speeds = self.speeds.lock();
        note(&mut speeds);
        speeds.compare();
        let speed = match speeds.is_slower {
            None => Lending::Tried,
            Some(true) => Lending::Slower,
            Some(false) => Lending::Lent,
        };
        self.speed.store(speed as u32, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::streams::Streams;

    const ROOM_PAGES: u64 = 16_384;
    const WINDOW_PAGES: u64 = 64;
    /// About what the files have.
    const FILE_PAGES: u64 = 8192;

    /// A mount whose page cache keeps nothing.
    struct World {
        room: StreamRoom,
        streams: Vec<Streams>,
    }

    impl World {
        fn new() -> World {
            World { room: StreamRoom::new(false), streams: Vec::new() }
        }

        fn read(&mut self, file: usize, range: PageRange) {
            while self.streams.len() <= file {
                self.streams.push(Streams::default());
            }
            let (streams, key) = (&mut self.streams[file], FileKey(file as u32));
            let is_sequential = streams.note(range);
            let looked = self.room.missed(key, range, is_sequential, || ROOM_PAGES);
            if is_sequential {
                streams.looked_at(range.end - range.first, looked, FILE_PAGES);
            }
            (range.first..range.end).for_each(|index| self.room.evicted(key, index as u32));
        }

        fn pass(&mut self, file: usize, pages: u64) {
            for first in (0..pages).step_by(WINDOW_PAGES as usize) {
                self.read(file, PageRange { first, end: first + WINDOW_PAGES });
            }
        }

        fn lends(&self, file: usize) -> bool {
            self.room.lending().is_any() && self.streams[file].fit()
        }
    }

    #[test]
    fn what_comes_back_in_time_is_lent_and_nothing_else() {
        let mut world = World::new();
        world.pass(0, 8192);
        assert!(!world.lends(0), "it may never come back");
        world.pass(0, 8192);
        assert!(world.lends(0));
        // A backup, once a day: it does not fit, and the other one still does.
        (0..3).for_each(|_| world.pass(0, 8192));
        world.pass(1, 4 * ROOM_PAGES);
        (0..3).for_each(|_| world.pass(0, 8192));
        assert!(world.lends(0) && !world.lends(1));
        // It grows.
        (0..4).for_each(|_| world.pass(0, 2 * ROOM_PAGES));
        assert!(!world.lends(0));
    }

    /// What is read at random needs three quarters of the room, and has it to itself unless streams
    /// are lent.
    #[test]
    fn what_is_read_at_random_goes_before() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for (pages, expected) in [(ROOM_PAGES / 2, false), (ROOM_PAGES / 8, true)] {
            let mut world = World::new();
            for _ in 0..8 {
                for first in (0..pages).step_by(WINDOW_PAGES as usize) {
                    world.read(0, PageRange { first, end: first + WINDOW_PAGES });
                    for _ in 0..WINDOW_PAGES {
                        let index = random.u64(0..ROOM_PAGES / 4 * 3) * 5;
                        world.read(1, PageRange { first: index, end: index + 1 });
                    }
                }
            }
            assert_eq!(world.lends(0), expected, "a stream of {pages} pages");
        }
    }

    #[test]
    fn it_is_tried_before_anything_is_known_and_again_long_after() {
        let mut world = World::new();
        (0..2).for_each(|_| world.pass(0, 8192));
        let room = &world.room;
        let (fast, slow) = (Duration::from_micros(300), Duration::from_millis(1));
        assert_eq!(room.lending(), Lending::Tried);
        let tried = (0..8192).filter(|index| Lending::Tried.lends(*index)).count() as u64;
        assert_eq!(tried, 8192 / TRIED);
        (0..10).for_each(|_| room.disk_took(64, slow));
        (0..10).for_each(|_| room.lender_took(64, fast));
        assert_eq!(room.lending(), Lending::Lent);
        // The disk has not become faster only because it is not asked.
        (0..200).for_each(|_| room.lender_took(64, slow - fast));
        assert_eq!(room.lending(), Lending::Lent);
        (0..200).for_each(|_| room.lender_took(64, slow + fast));
        assert_eq!(room.lending(), Lending::Slower);
        (0..200).for_each(|_| room.disk_took(64, 3 * slow));
        assert_eq!(room.lending(), Lending::Lent);
        (0..200).for_each(|_| room.disk_took(64, fast));
        assert_eq!(room.lending(), Lending::Slower);
        (0..RETRIED_PAGES / 64).for_each(|_| room.disk_took(64, fast));
        assert_eq!(room.lending(), Lending::Tried);
        (0..10).for_each(|_| room.lender_took(64, slow));
        assert_eq!(room.lending(), Lending::Slower);
        room.forget_lenders();
        assert_eq!(room.lending(), Lending::Tried);
    }

    #[test]
    fn a_stream_that_goes_on_more_slowly_than_from_the_disk_is_left_to_it() {
        let mut world = World::new();
        (0..2).for_each(|_| world.pass(0, 8192));
        let room = &world.room;
        let (fast, slow) = (Duration::from_micros(300), Duration::from_millis(1));
        (0..10).for_each(|_| room.disk_took(64, slow));
        (0..10).for_each(|_| room.lender_took(64, fast));
        let now = std::cell::Cell::new(Duration::ZERO);
        let read = |count: usize, from: Origin, each: Duration, took: Duration| {
            (0..count).for_each(|_| {
                now.set(now.get() + each);
                room.went_on(64, Some(from), now.get(), took);
            });
            room.lending()
        };
        assert_eq!(read(200, Origin::Disk, slow, slow), Lending::Lent);
        assert_eq!(read(200, Origin::Lenders, fast, fast), Lending::Lent);
        // A reader that rests is no matter of lenders, nor is one that is as slow with either.
        assert_eq!(read(500, Origin::Lenders, 100 * slow, fast), Lending::Lent);
        assert_eq!(read(2000, Origin::Lenders, slow + slow / 10, fast), Lending::Lent);
        // Each get is quick, but nothing else gets on.
        assert_eq!(read(2000, Origin::Lenders, 2 * slow, slow), Lending::Slower);
        (0..10).for_each(|_| room.lender_took(64, fast));
        assert_eq!(room.lending(), Lending::Slower);
        // The disk has become slower still, or lenders are others, or it was long ago.
        assert_eq!(read(2000, Origin::Disk, 4 * slow, 4 * slow), Lending::Lent);
        let lag = || read(2000, Origin::Lenders, 6 * slow, 6 * slow);
        assert_eq!(lag(), Lending::Slower);
        room.forget_lenders();
        assert_eq!(room.lending(), Lending::Tried);
        (0..10).for_each(|_| room.lender_took(64, fast));
        assert_eq!(lag(), Lending::Slower);
        (0..=LAGGED_PAGES / 64).for_each(|_| room.disk_took(64, slow));
        assert_eq!(room.lending(), Lending::Tried);
    }
}
