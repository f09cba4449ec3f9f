//! Decides when pages of sequential streams are lent in spite of the filter: if they fit, and
//! lenders are faster than the disk.
//!
//! Streams are left to the disk (Puma 2015, §3.3.3) because a disk is good at them, and because at
//! a lender they displace pages that are read at random. Neither reason applies to a file that is
//! read again and again, comes back before lenders must forget it, and arrives faster from them
//! than from the disk. For such a file the filter would forgo the whole gain (`blast`). So:
//!
//! - A page fits if fewer pages were evicted since its own eviction than lenders have room for:
//!   [`mrc::Victims`], of all evictions, whether lent or not. Each file has its own record of that
//!   ([`crate::policy::streams::Streams::fit`]). A file that is read again and again fits; a backup
//!   that runs at the same time does not.
//! - Lending streams does harm if it displaces pages that are read at random. We assume that
//!   streams displace every random page whose reuse distance exceeds the capacity, and count such a
//!   page as `RANDOM_PAGES` pages of a stream.
//! - Lenders and disk are compared by the time that a page takes in long READs. While nothing is
//!   known of the lenders, one in `TRIED` placement extents is lent.
//! - That leaves out the other costs of lenders: the same processors seal and send each page that
//!   lenders are to get. So when streams are lent, the speed of all streams of the mount together
//!   is compared with their speed when they were left to the disk.
//!
//! Pure logic: times are arguments.

use crate::policy::curve::Watched;
use crate::policy::streams::Looked;
use crate::put::placement::EXTENT_PAGES;
use locks::Mutex;
use locks::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use mrc::Victims;
use page::{FileKey, PageRange};
use std::time::Duration;

/// The number of pages in the sample. It is smaller than for a curve, because the only question is
/// whether most of a file fits. It takes 0.3 MiB.
const SAMPLES_MAX: usize = 2048;

/// One placement extent in this number is lent to measure how fast lenders are.
const TRIED: u64 = 8;

/// The minimum cost of a random READ for a disk, in pages of a stream.
const RANDOM_PAGES: f64 = 64.0;

/// When gain and harm together reach this number of sampled pages, both are halved.
const WEIGHED_MAX: f64 = 8192.0;

/// The number of stream pages after which the speed of lenders, or of the disk, is known; and the
/// number after which older pages count half.
const TIMED_PAGES_MIN: f64 = 128.0;
const TIMED_PAGES_MAX: f64 = 8192.0;

/// Streams are lent if lenders take at most [`LENT_RATIO`] of the disk's time for a page: the few
/// gets before that are measured without the puts that lending will cause. Above [`SLOWER_RATIO`]
/// streams are left to the disk again.
const LENT_RATIO: f64 = 0.5;
const SLOWER_RATIO: f64 = 1.0;

/// The number of pages that show the speed of streams. It is larger than for single READs, because
/// a disk with a limit stops for tens of milliseconds.
const PACED_PAGES_MIN: f64 = 8192.0;
const PACED_PAGES_MAX: f64 = 65_536.0;
/// The time between two READs of streams counts up to this multiple of the second one's duration.
/// Longer pauses come from the readers.
const REST_TIMES: u32 = 4;
/// Lent streams lag if they take more than this multiple of the time of streams that are left to
/// the disk. They lag until they take less time than those.
const LAGGING_RATIO: f64 = 1.25;
/// The number of stream pages that the disk reads, 8 GiB, before lending is tried again after
/// streams lagged.
const LAGGED_PAGES: u64 = 2 << 20;

/// The number of stream pages that the disk reads, 64 GiB, before lenders that were slower are
/// tried again.
const RETRIED_PAGES: u64 = 16 << 20;

/// The treatment of pages that are read in streams that fit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum Lending {
    /// Pages of streams are left to the disk: lending them is not known to be worth the room.
    #[default]
    Left,
    /// A part of the streams is lent, to measure how fast lenders are.
    Tried,
    /// Streams are lent.
    Lent,
    /// Streams are read from the disk, which is faster, even pages that lenders have.
    Slower,
}

impl Lending {
    /// Returns whether that page is lent.
    pub fn lends(self, index: u64) -> bool {
        match self {
            Lending::Left | Lending::Slower => false,
            Lending::Tried => (index / u64::from(EXTENT_PAGES)).is_multiple_of(TRIED),
            Lending::Lent => true,
        }
    }

    /// Returns whether any page is lent.
    pub(crate) fn is_any(self) -> bool {
        matches!(self, Lending::Tried | Lending::Lent)
    }

    /// Returns a short text for the status.
    pub fn text(self) -> &'static str {
        match self {
            Lending::Left => "left to the disk",
            Lending::Tried => "tried",
            Lending::Lent => "lent where they fit",
            Lending::Slower => "faster from the disk",
        }
    }
}

/// A number of pages, and the time that they took.
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

    /// Returns the time in microseconds for a page, if at least `pages_min` pages were measured.
    fn us_per_page(&self, pages_min: f64) -> Option<f64> {
        (self.pages >= pages_min).then(|| self.us / self.pages)
    }
}

/// The effect of lending streams. The gain: stream pages that would fit. The harm: random pages
/// that would no longer fit, in equivalent stream pages.
#[derive(Default)]
struct Weighed {
    gain: f64,
    harm: f64,
}

#[derive(Default)]
struct Speeds {
    lenders: Rate,
    disk: Rate,
    /// The speeds of streams that come from lenders, and of streams that are left to the disk.
    lent_pace: Rate,
    left_pace: Rate,
    lags: bool,
    is_slower: Option<bool>,
    /// The number of pages that the disk has read since lenders were found to be slower.
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

/// Decides for one mount whether streams are lent.
pub struct StreamRoom {
    /// A model in which all evicted pages are lent.
    supposed: Watched,
    weighed: Mutex<Weighed>,
    speeds: Mutex<Speeds>,
    /// Whether the gain exceeds the harm.
    is_worth: AtomicBool,
    /// The result of comparing the speeds: a [`Lending`].
    speed: AtomicU32,
    /// The time of the last answer to a READ of a stream, in microseconds.
    answered_us: AtomicU64,
}

/// The source of all pages of a READ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The pages came from lenders.
    Lenders,
    /// The pages came from the disk, to which the stream is left.
    Disk,
}

impl StreamRoom {
    /// `keeps`: lenders keep the pages that they answer (non-inclusive).
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

    /// Returns the treatment of streams that fit.
    pub fn lending(&self) -> Lending {
        match self.speed.load(Ordering::Relaxed) {
            _ if !self.is_worth.load(Ordering::Relaxed) => Lending::Left,
            speed if speed == Lending::Lent as u32 => Lending::Lent,
            speed if speed == Lending::Slower as u32 => Lending::Slower,
            _ => Lending::Tried,
        }
    }

    /// A READ of these pages has arrived; lenders have room for `room_pages`. Returns the counts of
    /// its sampled pages.
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

    /// Lenders took this long for `pages` pages of a large READ, divided by the number of requests
    /// in progress.
    pub(crate) fn lender_took(&self, pages: usize, took: Duration) {
        self.took(|speeds| speeds.lenders.note(pages, took, TIMED_PAGES_MAX));
    }

    /// The disk took this long for `pages` pages of a large READ in a stream.
    pub(crate) fn disk_took(&self, pages: usize, took: Duration) {
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

    /// The lenders were replaced, or have become slower or faster.
    pub(crate) fn forget_lenders(&self) {
        self.took(Speeds::forget_lenders);
    }

    /// A READ of a stream, of `pages` pages, was answered at the time `now`, and has taken `took`.
    /// `from` is None if its pages had several sources.
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
    /// About the usual size of the files in these tests.
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
        assert!(!world.lends(0), "the stream may never come back");
        world.pass(0, 8192);
        assert!(world.lends(0));
        // A backup, once a day: it does not fit, and the other file still does.
        (0..3).for_each(|_| world.pass(0, 8192));
        world.pass(1, 4 * ROOM_PAGES);
        (0..3).for_each(|_| world.pass(0, 8192));
        assert!(world.lends(0) && !world.lends(1));
        // The file grows.
        (0..4).for_each(|_| world.pass(0, 2 * ROOM_PAGES));
        assert!(!world.lends(0));
    }

    /// Pages that are read at random need three quarters of the room, and have it to themselves
    /// unless streams are lent.
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
        // A disk that is not used has not become faster.
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
        // A reader that pauses does not count against lenders, nor does one that is equally slow
        // with either.
        assert_eq!(read(500, Origin::Lenders, 100 * slow, fast), Lending::Lent);
        assert_eq!(read(2000, Origin::Lenders, slow + slow / 10, fast), Lending::Lent);
        // Each get is quick, but all other work becomes slower.
        assert_eq!(read(2000, Origin::Lenders, 2 * slow, slow), Lending::Slower);
        (0..10).for_each(|_| room.lender_took(64, fast));
        assert_eq!(room.lending(), Lending::Slower);
        // The disk has become slower still; or lenders were replaced; or the measurement is old.
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
