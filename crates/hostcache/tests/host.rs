//! Tests of a host: real mounts, real sockets, and a guest that sends arbitrary messages.

use borrower::Borrower;
use fastrand::Rng;
use hostcache::host::{Config, Guest, Host, Problem};
use mount::Mount;
use mount::images::Placing;
use page::PAGE_SIZE;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use testbed::{Scratch, cached_pages, wait_until};
use wire::address::{Address, Stream};
use wire::frames::{FrameReader, Outgoing, send};
use wire::key::PoolKey;
use wire::listener::Listener;
use wire::secure::{Channel, Handshake};
use wire::{DemotedPage, DemotionOutcome, Header, Hello, Kind, PageSpan, Refused};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

const PAGES: usize = 256;
const WAIT_MAX: Duration = Duration::from_secs(60);

fn can_run(test: &str) -> bool {
    if rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists() {
        return true;
    }
    testbed::skip(test, "not root, or no /dev/fuse");
    false
}

fn page_of(index: usize, round: u8) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| (index * 31 + at / 8) as u8 ^ round)
}

/// A mounted directory with images, and a host.
struct Images {
    host: Arc<Host>,
    mount: Arc<Mount>,
    thread: Option<std::thread::JoinHandle<()>>,
    scratch: Scratch,
}

impl Images {
    fn start(test: &str, guests: Vec<Guest>, change: impl FnOnce(&mut Config)) -> Images {
        Images::try_start(test, guests, change).unwrap()
    }

    fn try_start(test: &str, guests: Vec<Guest>, change: impl FnOnce(&mut Config)) -> Result<Images, Problem> {
        let scratch = Scratch::new(test).unwrap();
        let (backing, at) = (scratch.directory("below").unwrap(), scratch.directory("at").unwrap());
        for guest in &guests {
            let bytes: Vec<u8> = (0..PAGES).flat_map(|index| page_of(index, 0)).collect();
            fs::write(backing.join(&guest.image), bytes).unwrap();
        }
        let images: Vec<_> = guests.iter().map(|guest| backing.join(&guest.image)).collect();
        assert!(testbed::wait_until_aged(&images, WAIT_MAX), "what is being written is not believed");
        fs::write(backing.join("other.qcow2"), b"QFI\xfb and more").unwrap();
        let borrower = |_| Borrower::start(borrower::Config { has_guests: true, ..borrower::Config::default() }, None);
        let mount = Arc::new(Mount::start(mount::Config::new(backing, at), borrower).unwrap());
        let mut config = Config { guests, placing: Placing::Clean, keeps: false, pages_max: None };
        change(&mut config);
        let listener = Listener::bind(&Address::Unix(scratch.path().join("socket"))).unwrap();
        let host = Arc::new(Host::new(mount.clone(), config, listener)?);
        let serving = host.clone();
        let thread = Some(std::thread::spawn(move || serving.run()));
        Ok(Images { host, mount, thread, scratch })
    }

    fn image(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join("at").join(name)
    }

    fn cached(&self, name: &str) -> u64 {
        cached_pages(&self.path(name), (PAGES * PAGE_SIZE) as u64).unwrap()
    }

    fn backing_pages(&self) -> u64 {
        self.mount.borrower().metrics().backing_pages.get()
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        self.host.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn evict(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

fn read(file: &File, index: usize) -> [u8; PAGE_SIZE] {
    let mut page = [0; PAGE_SIZE];
    file.read_exact_at(&mut page, (index * PAGE_SIZE) as u64).unwrap();
    page
}

/// A guest that sends arbitrary messages.
struct Says {
    stream: Stream,
    channel: Channel,
    reader: FrameReader,
    request: u64,
}

impl Says {
    fn connect(images: &Images, key: Option<&PoolKey>) -> Result<Says, String> {
        let stream = Address::Unix(images.scratch.path().join("socket")).connect(WAIT_MAX).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let mut says = Says { stream, channel: Channel::plain(), reader: FrameReader::new(), request: 0 };
        let mut out = Outgoing::default();
        if let Some(key) = key {
            let (handshake, first) = Handshake::begin(key).unwrap();
            out.push(&says.channel, Kind::Handshake1, wire::PROTOCOL.into(), &first).unwrap();
            send(&says.stream, out.bytes(), WAIT_MAX).unwrap();
            let answer = says.next(Kind::Handshake2)?;
            says.channel = handshake.finish(&answer).unwrap();
            says.reader.open_with(says.channel.clone());
            out.clear();
        }
        let (protocol, role) = (U32::new(wire::PROTOCOL), U32::new(wire::ROLE_GUEST));
        out.push(&says.channel, Kind::Hello, 0, &Hello { magic: wire::MAGIC, protocol, role, session: [1; 16] })
            .unwrap();
        send(&says.stream, out.bytes(), WAIT_MAX).unwrap();
        says.next(Kind::Welcome)?;
        Ok(says)
    }

    fn next(&mut self, wanted: Kind) -> Result<Vec<u8>, String> {
        let frame =
            self.reader.next(&self.stream, Instant::now() + WAIT_MAX, |_| true).map_err(|broken| broken.to_string())?;
        if frame.kind == Kind::Refused {
            return Err(Refused::read_from_bytes(frame.body).unwrap().text());
        }
        assert_eq!(frame.kind, wanted);
        Ok(frame.body.to_vec())
    }

    /// Sends evicted pages, and returns the results. Pages that the kernel has missed because the
    /// machine stood still are sent once more.
    fn demote(&mut self, pages: &[(usize, [u8; PAGE_SIZE])]) -> Vec<DemotionOutcome> {
        let mut outcomes = self.demote_once(pages);
        let all_came = wait_until(WAIT_MAX, || {
            let missed = |outcome: &DemotionOutcome| *outcome == DemotionOutcome::Missed;
            let Some(at) = outcomes.iter().position(missed) else { return true };
            outcomes[at] = self.demote_once(&pages[at..at + 1])[0];
            false
        });
        assert!(all_came, "{outcomes:?}");
        outcomes
    }

    fn demote_once(&mut self, pages: &[(usize, [u8; PAGE_SIZE])]) -> Vec<DemotionOutcome> {
        let mut outcomes = Vec::new();
        for pages in pages.chunks(wire::DEMOTE_ITEMS_MAX) {
            let items: Vec<u8> = pages
                .iter()
                .flat_map(|(index, bytes)| {
                    DemotedPage { index: U64::new(*index as u64), bytes: *bytes }.as_bytes().to_vec()
                })
                .collect();
            self.request += 1;
            let mut out = Outgoing::default();
            out.begin(&self.channel).extend_from_slice(&items);
            out.end(&self.channel, &Header::new(Kind::Demote, pages.len(), items.len(), self.request)).unwrap();
            send(&self.stream, out.bytes(), WAIT_MAX).unwrap();
            outcomes.extend(
                self.next(Kind::Demoted).unwrap().iter().map(|byte| DemotionOutcome::from_wire(*byte).unwrap()),
            );
        }
        outcomes
    }

    /// Reports that pages were read. The host processes later evictions after this.
    fn held(&mut self, first: usize, pages: u32) {
        let span = PageSpan { first: U64::new(first as u64), pages: U32::new(pages) };
        let mut out = Outgoing::default();
        out.begin(&self.channel).extend_from_slice(span.as_bytes());
        out.end(&self.channel, &Header::new(Kind::Held, 1, size_of::<PageSpan>(), 0)).unwrap();
        send(&self.stream, out.bytes(), WAIT_MAX).unwrap();
    }
}

fn alone(image: &str) -> Vec<Guest> {
    vec![Guest { image: image.into(), key: None }]
}

#[test]
fn what_the_image_holds_is_cached_and_nothing_else() {
    let test = "what_the_image_holds_is_cached_and_nothing_else";
    if !can_run(test) {
        return;
    }
    let images = Images::start(test, alone("disk"), |_| {});
    let file = images.image("disk");
    let mut guest = Says::connect(&images, None).unwrap();
    assert_eq!(guest.demote(&[(200, page_of(200, 0))]), [DemotionOutcome::Unknown], "never read");

    // Read, and evicted here: the page comes back from the guest, and from nowhere else.
    (0..PAGES).for_each(|index| assert!(read(&file, index) == page_of(index, 0)));
    evict(&file);
    assert_eq!(images.cached("disk"), 0);
    let backing = images.backing_pages();
    let good: Vec<_> = (0..PAGES).step_by(3).map(|index| (index, page_of(index, 0))).collect();
    assert_eq!(guest.demote(&good), vec![DemotionOutcome::Stored; good.len()]);
    assert_eq!(images.cached("disk"), good.len() as u64, "these and no others");
    assert_eq!(guest.demote(&good[..2]), [DemotionOutcome::Cached; 2]);
    assert_eq!(
        guest.demote(&[(1, page_of(2, 0)), (4, [0; PAGE_SIZE])]),
        [DemotionOutcome::Differs; 2],
        "another page's bytes, and made up ones"
    );
    assert_eq!(
        guest.demote(&[(PAGES, [0; PAGE_SIZE]), (usize::MAX, [0; PAGE_SIZE]), (u32::MAX as usize, [7; PAGE_SIZE])]),
        [DemotionOutcome::Unknown; 3]
    );
    good.iter().for_each(|(index, page)| assert!(read(&file, *index) == *page));
    assert_eq!(images.backing_pages(), backing, "nothing was read below");

    // The host drops pages that the guest has read again.
    guest.held(0, 4);
    assert_eq!(guest.demote(&[]), []);
    assert!(wait_until(WAIT_MAX, || images.host.status()[0].held_pages == 4));
    assert_eq!(images.cached("disk"), good.len() as u64 - 2);
    assert!(wait_until(WAIT_MAX, || images.host.status()[0].placed_pages == good.len() as u64 - 2));
    let status = images.host.status().remove(0);
    assert_eq!((status.hit_pages, status.placed_pages, status.connected), (2, good.len() as u64 - 2, true));
    assert_eq!(
        (status.stored_pages, status.cached_pages, status.differing_pages, status.unknown_pages),
        (good.len() as u64, 2, 2, 4)
    );

    // Twice in one message: the later one counts.
    evict(&file);
    let outcomes = guest.demote_once(&[(7, page_of(7, 1)), (7, page_of(7, 0))]);
    assert!(outcomes[0] == DemotionOutcome::Missed && outcomes[1] != DemotionOutcome::Differs, "{outcomes:?}");
}

#[test]
fn a_page_that_was_written_is_known_as_it_was_written() {
    let test = "a_page_that_was_written_is_known_as_it_was_written";
    if !can_run(test) {
        return;
    }
    let images = Images::start(test, alone("disk"), |_| {});
    let file = images.image("disk");
    // Read-ahead may read pages after the external change was seen, and their hashes are known
    // then.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut guest = Says::connect(&images, None).unwrap();
    (0..PAGES).for_each(|index| assert!(read(&file, index) == page_of(index, 0)));
    let new: Vec<u8> = (8..16).flat_map(|index| page_of(index, 5)).collect();
    file.write_all_at(&new, 8 * PAGE_SIZE as u64).unwrap();
    file.write_all_at(b"part", 20 * PAGE_SIZE as u64 + 100).unwrap();
    evict(&file);
    assert_eq!(
        guest.demote(&[(8, page_of(8, 0)), (9, page_of(9, 5)), (20, page_of(20, 0))]),
        [DemotionOutcome::Differs, DemotionOutcome::Stored, DemotionOutcome::Unknown]
    );
    assert!(read(&file, 8) == page_of(8, 5) && read(&file, 9) == page_of(9, 5));

    // A discard removes the bytes; so does an external change of the image, once it was seen.
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, hole, 10 * PAGE_SIZE as u64, PAGE_SIZE as u64).unwrap();
    evict(&file);
    assert_eq!(
        guest.demote(&[(10, page_of(10, 5)), (11, page_of(11, 5))]),
        [DemotionOutcome::Unknown, DemotionOutcome::Stored]
    );
    assert!(read(&file, 10) == [0; PAGE_SIZE]);
    let backing = File::options().write(true).open(images.scratch.path().join("below/disk")).unwrap();
    backing.write_all_at(&page_of(11, 9), 11 * PAGE_SIZE as u64).unwrap();
    evict(&file);
    images.image("disk");
    assert_eq!(guest.demote(&[(11, page_of(11, 5)), (12, page_of(12, 5))]), [DemotionOutcome::Unknown; 2]);
    assert!(read(&file, 11) == page_of(11, 9));
}

#[test]
fn the_papers_way_writes_what_is_there() {
    let test = "the_papers_way_writes_what_is_there";
    if !can_run(test) {
        return;
    }
    let images = Images::start(test, alone("disk"), |config| config.placing = Placing::Written);
    let file = images.image("disk");
    let mut guest = Says::connect(&images, None).unwrap();
    (0..PAGES).for_each(|index| assert!(read(&file, index) == page_of(index, 0)));
    evict(&file);
    let before = fs::metadata(images.scratch.path().join("below/disk")).unwrap().modified().unwrap();
    assert_eq!(
        guest.demote(&[(5, page_of(5, 0)), (6, page_of(6, 1))]),
        [DemotionOutcome::Stored, DemotionOutcome::Differs]
    );
    assert_eq!(images.cached("disk"), 1);
    assert_ne!(fs::metadata(images.scratch.path().join("below/disk")).unwrap().modified().unwrap(), before);
    // An external change is not overwritten.
    let backing = File::options().write(true).open(images.scratch.path().join("below/disk")).unwrap();
    backing.write_all_at(&page_of(9, 7), 9 * PAGE_SIZE as u64).unwrap();
    assert_eq!(guest.demote(&[(9, page_of(9, 0))]), [DemotionOutcome::Differs]);
    assert!(fs::read(images.scratch.path().join("below/disk")).unwrap()[9 * PAGE_SIZE..][..PAGE_SIZE] == page_of(9, 7));
    backing.write_all_at(&page_of(9, 0), 9 * PAGE_SIZE as u64).unwrap();
    images.image("disk");
    (0..PAGES).for_each(|index| assert!(read(&file, index) == page_of(index, 0)));
}

#[test]
fn a_limit_takes_the_oldest_away_and_copies_may_stay() {
    let test = "a_limit_takes_the_oldest_away_and_copies_may_stay";
    if !can_run(test) {
        return;
    }
    let images = Images::start(test, alone("disk"), |config| (config.pages_max, config.keeps) = (Some(40), true));
    let file = images.image("disk");
    let mut guest = Says::connect(&images, None).unwrap();
    (0..PAGES).for_each(|index| assert!(read(&file, index) == page_of(index, 0)));
    evict(&file);
    let all: Vec<_> = (0..PAGES).map(|index| (index, page_of(index, 0))).collect();
    assert!(guest.demote(&all).iter().all(|outcome| *outcome == DemotionOutcome::Stored));
    let cached = images.cached("disk");
    assert!((40 - wire::DEMOTE_ITEMS_MAX as u64..=40).contains(&cached), "{cached}");
    // A guest that comes back has its earlier pages, and no others.
    drop(guest);
    let mut guest = Says::connect(&images, None).unwrap();
    evict(&file);
    assert!(guest.demote(&all[..30]).iter().all(|outcome| *outcome == DemotionOutcome::Stored));
    let cached_anew = images.cached("disk");
    assert!((30 - wire::DEMOTE_ITEMS_MAX as u64..=40).contains(&cached_anew), "{cached_anew}");
    assert!(guest.demote(&all[PAGES - 20..]).iter().all(|outcome| *outcome == DemotionOutcome::Stored));
    let cached = images.cached("disk");
    assert!(cached <= 40, "{cached}");
    guest.held(PAGES - 10, 10);
    assert!(wait_until(WAIT_MAX, || images.host.status()[0].hit_pages == 10), "{:?}", images.host.status());
    assert_eq!(images.cached("disk"), cached, "they stay");
    assert!(images.host.status()[0].limited_pages >= PAGES as u64 - 40);
}

/// A guest that writes its disk, and a liar that sends the content from before as evicted: every
/// reader gets the written bytes.
#[test]
fn no_page_hides_what_was_written() {
    const STORED_MIN: usize = 150;
    const WRITERS: usize = 3;
    const HOT_PAGES: usize = 24;
    let test = "no_page_hides_what_was_written";
    if !can_run(test) {
        return;
    }
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let images = Images::start(test, alone("disk"), |_| {});
    let ended = AtomicBool::new(false);
    let stored = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (images, ended) = (&images, &ended);
                scope.spawn(move || {
                    let file = images.image("disk");
                    let mut random = Rng::with_seed(seed ^ writer as u64);
                    // Each thread has pages of its own, next to the others' pages, and remembers
                    // what it has written there.
                    let mut rounds = [0u8; HOT_PAGES];
                    while !ended.load(Ordering::Relaxed) {
                        let nth = random.usize(..HOT_PAGES);
                        let index = nth * WRITERS + writer;
                        match random.u8(..8) {
                            0 | 1 => {
                                rounds[nth] = random.u8(..3);
                                file.write_all_at(&page_of(index, rounds[nth]), (index * PAGE_SIZE) as u64).unwrap();
                            }
                            2 => {
                                let part = page_of(index, rounds[nth]);
                                let at = random.usize(..PAGE_SIZE - 64);
                                file.write_all_at(&part[at..at + 64], (index * PAGE_SIZE + at) as u64).unwrap();
                            }
                            3 => {
                                let (at, len) =
                                    ((index * PAGE_SIZE) as u64, std::num::NonZeroU64::new(PAGE_SIZE as u64));
                                rustix::fs::fadvise(&file, at, len, rustix::fs::Advice::DontNeed).unwrap();
                            }
                            _ => assert!(read(&file, index) == page_of(index, rounds[nth]), "page {index}"),
                        }
                    }
                })
            })
            .collect();
        let (images, ended) = (&images, &ended);
        let byzantine = scope.spawn(move || {
            let mut guest = Says::connect(images, None).unwrap();
            let mut random = Rng::with_seed(!seed);
            let mut stored = 0;
            let begun = Instant::now();
            while stored < STORED_MIN && begun.elapsed() < WAIT_MAX {
                let mut page = || {
                    let index = random.usize(..HOT_PAGES * WRITERS);
                    (index, page_of(index, random.u8(..3)))
                };
                let pages: Vec<_> = (0..12).map(|_| page()).collect();
                stored +=
                    guest.demote_once(&pages).iter().filter(|outcome| **outcome == DemotionOutcome::Stored).count();
                if random.u8(..4) == 0 {
                    guest.held(random.usize(..HOT_PAGES * WRITERS), 4);
                }
            }
            ended.store(true, Ordering::Relaxed);
            stored
        });
        let stored = byzantine.join().unwrap_or(0);
        ended.store(true, Ordering::Relaxed);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        stored
    });
    assert!(stored >= STORED_MIN, "{stored}: nothing was tried");
}

#[test]
fn a_guest_has_its_own_image_and_no_other() {
    let test = "a_guest_has_its_own_image_and_no_other";
    if !can_run(test) {
        return;
    }
    let keys = [PoolKey::new([1; 32]), PoolKey::new([2; 32])];
    let guests = || {
        let guest = |(name, key): (&str, &PoolKey)| Guest { image: name.into(), key: Some(key.clone()) };
        ["one", "two"].into_iter().zip(&keys).map(guest).collect::<Vec<_>>()
    };
    let images = Images::start(test, guests(), |_| {});
    for name in ["one", "two"] {
        let file = images.image(name);
        (0..PAGES).for_each(|index| assert!(read(&file, index) == page_of(index, 0)));
        evict(&file);
    }
    let mut two = Says::connect(&images, Some(&keys[1])).unwrap();
    assert_eq!(two.demote(&[(5, page_of(5, 0))]), [DemotionOutcome::Stored]);
    assert_eq!((images.cached("one"), images.cached("two")), (0, 1));
    for unauthenticated in [None, Some(&PoolKey::new([3; 32]))] {
        let Err(refusal) = Says::connect(&images, unauthenticated) else { panic!("a stranger is welcome") };
        assert!(refusal.contains("key"), "{refusal}");
    }
    // The newest connection is the guest's.
    let mut again = Says::connect(&images, Some(&keys[1])).unwrap();
    assert_eq!(again.demote(&[(6, page_of(6, 0))]), [DemotionOutcome::Stored]);
    assert!(two.next(Kind::Demoted).is_err(), "its older connection is ended");
    let status = images.host.status();
    assert_eq!((status[0].connected, status[1].connected, status[1].connects), (false, true, 2));
    drop(again);
    assert!(wait_until(WAIT_MAX, || !images.host.status()[1].connected));
}

#[test]
fn pages_that_cannot_be_served_are_reported() {
    let test = "what_cannot_be_served_is_told";
    if !can_run(test) {
        return;
    }
    let problem = |guests: Vec<Guest>, image: &str| {
        let change =
            |config: &mut Config| config.guests.iter_mut().take(1).for_each(|guest| guest.image = image.into());
        match Images::try_start(test, guests, change) {
            Ok(_) => panic!("served"),
            Err(problem) => problem.to_string(),
        }
    };
    assert!(problem(alone("disk"), "other.qcow2").contains("qemu-img convert"));
    assert!(problem(alone("disk"), "missing").contains("cannot read the image missing"));
    let mut two = alone("disk");
    two.extend(alone("more"));
    assert!(problem(two, "disk").contains("key of its own"));
    // A guest that cannot be served does not affect the others.
    let keyed = |name: &str, byte| Guest { image: name.into(), key: Some(PoolKey::new([byte; 32])) };
    let bad_first = |config: &mut Config| config.guests[0].image = "other.qcow2".into();
    let images = Images::try_start(test, vec![keyed("disk", 1), keyed("more", 2)], bad_first).unwrap();
    assert!(images.host.status()[0].problem.as_ref().is_some_and(|problem| problem.contains("qcow2")));
    let Err(refusal) = Says::connect(&images, Some(&PoolKey::new([1; 32]))) else { panic!("served") };
    assert!(refusal.contains("qcow2"), "{refusal}");
    assert!(Says::connect(&images, Some(&PoolKey::new([2; 32]))).is_ok());
    drop(images);
    let same = |name: &str| Guest { image: name.into(), key: Some(PoolKey::new([1; 32])) };
    assert!(problem(vec![same("disk"), same("more")], "disk").contains("each has its own"));
}
