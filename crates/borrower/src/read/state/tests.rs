use super::*;
use crate::backing::FileIdentity;
use crate::catalog::file::GAP_PAGES_MAX;
use crate::core::{Change, Outcome, Setup, Strategy};
use crate::put::buffers::Batch;
use page::ChecksumKey;
use page::seal::Sealing;
use std::collections::HashMap;
use std::sync::Arc;

const PAGES: usize = 4;

/// A pool that is populated on read, and a lender that may be made to lie.
struct World {
    core: Core,
    file: Arc<File>,
    backing: Vec<u8>,
    changes: i128,
    /// The pages that the lender has, by index and version.
    lent: HashMap<(u32, u64), (Page, u64)>,
}

impl World {
    fn new(sealing: Sealing) -> World {
        let core = Core::new(Setup {
            put_batches: 4,
            batch_pages: 8,
            ..Setup::new(1, sealing, Strategy::NonInclusive, false)
        });
        core.catalog.lender_up(0);
        let file = core.catalog.adopt(FileIdentity { device: 1, inode: 1, generation: 1 });
        let mut world = World { core, file, backing: Vec::new(), changes: 0, lent: HashMap::new() };
        world.backing = world.content();
        world
    }

    fn content(&self) -> Vec<u8> {
        (0..PAGES * PAGE_SIZE).map(|at| (at / PAGE_SIZE) as u8 * 16 + 1 + self.changes as u8).collect()
    }

    fn stamp(&self) -> Stamp {
        Stamp { size_bytes: self.backing.len() as u64, mtime_ns: self.changes, ctime_ns: self.changes }
    }

    fn change(&mut self) {
        let change = Change::Other { start: 0, end: self.backing.len() as u64 };
        let changing = self.core.begin_change(&self.file, change, self.stamp());
        self.changes += 1;
        self.backing = self.content();
        self.core.end_change(&self.file, changing, Outcome::Applied(self.stamp()), (0, 0), None);
    }

    /// Reads the whole file. The lender answers with the page whose index and version `lie` returns
    /// for the right ones, after `lie` may have changed its bytes. Pages that the READ puts go to
    /// the lender.
    fn read(&mut self, lie: impl Fn((u32, u64), &mut Page) -> (u32, u64)) -> Vec<u8> {
        let (mut reading, mut buf) = (ReadState::default(), vec![0xee; PAGES * PAGE_SIZE]);
        reading.start(1, 0, buf.len());
        let mut got = Vec::new();
        let mut event = Event::Go;
        loop {
            event = match reading.step(&self.core, &self.file, event, &mut buf) {
                Step::Begin => Event::Begin { state: self.file.state.lock(), positions: (0, 0), waits: true },
                Step::Fill => Event::Fill,
                Step::Ask(0) => Event::Asked,
                Step::Receive => {
                    let mut answer = |key: &WireKey, place: usize| {
                        let right = (key.id().index, key.version().0);
                        let (mut page, checksum) = self.lent[&lie(right, &mut [0; PAGE_SIZE])];
                        lie(right, &mut page);
                        buf[place..place + PAGE_SIZE].copy_from_slice(&page);
                        PageResult::Page { checksum }
                    };
                    let pages = reading.request().iter().zip(reading.unanswered());
                    got.clear();
                    got.extend(pages.map(|(key, place)| answer(key, *place)));
                    Event::Responded(Response::Answered(&got))
                }
                Step::ReadBacking(part) => {
                    buf[part.clone()].copy_from_slice(&self.backing[part.clone()]);
                    Event::Read(part.len())
                }
                Step::Look => Event::Looked(self.stamp()),
                Step::End => Event::End,
                Step::Done(len) => break assert_eq!(len, buf.len()),
                Step::Ask(_) | Step::Wait(_) | Step::ReadBackingLocked(_) | Step::Failed => {
                    panic!("there is one lender, and no change comes in between")
                }
            };
        }
        while let Some((request, batch)) = self.core.next_put(0, true) {
            for (item, page) in batch.items().iter().zip(batch.pages()) {
                let name = (item.key.id().index, item.key.version().0);
                self.lent.insert(name, (*page, item.checksum.get()));
            }
            self.core.puts_answered(0, request, &vec![1; batch.items().len()]).unwrap();
        }
        buf
    }

    /// Sends all pages to the lender, and begins a READ while they are on their way. Nothing is
    /// filled in yet.
    fn send_and_read(&self) -> (Arc<Batch>, ReadState) {
        let mut reading = ReadState::default();
        let begin = |reading: &mut ReadState| {
            reading.start(1, 0, self.backing.len());
            let event = Event::Begin { state: self.file.state.lock(), positions: (0, 0), waits: true };
            assert!(matches!(reading.step(&self.core, &self.file, event, &mut []), Step::Fill));
        };
        begin(&mut reading);
        assert!(reading.end(&self.core, &self.file, &mut self.file.state.lock(), &self.backing));
        let (_, sent) = self.core.next_put(0, true).unwrap();
        begin(&mut reading);
        assert!(!reading.is_plain());
        (sent, reading)
    }

    /// Returns the step after [`Event::Fill`].
    fn fill<'w>(&'w self, reading: &mut ReadState) -> Step<'w> {
        reading.step(&self.core, &self.file, Event::Fill, &mut vec![0; self.backing.len()])
    }

    fn counts(&self) -> (u64, u64) {
        (self.core.metrics.lender_pages.get(), self.core.metrics.bad_pages.get())
    }
}

#[test]
fn what_was_not_answered_when_the_lender_was_lost_is_not_asked_for() {
    let world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
    let (core, file) = (&world.core, &world.file);
    let (_sent, mut reading) = world.send_and_read();
    // The READ comes to the page when the lender is lost, and the entry still names it.
    let batches = core.queue(0).lock().abandon();
    assert!(matches!(world.fill(&mut reading), Step::ReadBacking(all) if all == (0..world.backing.len())));
    for item in batches.iter().flat_map(|batch| batch.items()) {
        assert!(file.state.lock().names(item.key.id().index, |version| version == item.key.version()));
    }
    drop(batches);
    core.queue(0).lock().abandoned();
}

#[test]
fn what_was_abandoned_is_invalidated_and_dropped() {
    let world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
    let (core, file) = (&world.core, &world.file);
    let (sent, mut reading) = world.send_and_read();
    core.abandon_puts(0);
    assert!(matches!(world.fill(&mut reading), Step::ReadBacking(all) if all == (0..world.backing.len())));
    assert!((0..PAGES as u32).all(|index| !file.state.lock().names(index, |_| true)));
    // If the put has reached the lender, the lender gets a drop.
    let mut drops = Vec::new();
    core.catalog.take_drops(0, ITEMS_MAX, &mut drops);
    assert_eq!(drops.len(), PAGES);
    drop(sent);
    assert_eq!(core.queue(0).lock().under_way(), 0);
}

#[test]
fn few_pages_between_others_are_read_along() {
    // Returns the number of pages read from the backing file, and the runs. `counts` are the
    // lengths of alternating pieces: pages without another source, and pages with one.
    let runs = |counts: &[usize]| {
        let kinds = [Source::Backing, Source::Zero].into_iter().cycle();
        let sources = counts.iter().zip(kinds).flat_map(|(count, kind)| std::iter::repeat_n(kind, *count)).collect();
        let mut reading = ReadState { sources, ..ReadState::default() };
        let runs: Vec<_> = std::iter::from_fn(|| reading.next_below()).collect();
        let left = reading.sources.iter().filter(|source| **source == Source::Zero).count();
        (left, runs.iter().map(|run| run.start / PAGE_SIZE..run.end / PAGE_SIZE).collect::<Vec<_>>())
    };
    const MAX: usize = GAP_PAGES_MAX;
    assert_eq!(runs(&[0, 3]), (3, vec![]));
    assert_eq!(runs(&[2, MAX, 1, MAX + 1, 1]), (MAX + 1, vec![0..MAX + 3, 2 * MAX + 4..2 * MAX + 5]));
    // Pages at either end are no gap, however few they are.
    assert_eq!(runs(&[0, 1, 2, 3, 4, 1, 1, MAX + 1, 2]), (MAX + 2, vec![1..12, MAX + 13..MAX + 15]));
}

#[test]
fn what_a_lender_has_between_others_is_not_asked_for() {
    let mut world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
    let honest = |name, _: &mut Page| name;
    world.read(honest);
    assert_eq!(world.lent.len(), PAGES);
    // Of four pages the lender has only the two in the middle, and then the first two.
    for (gone, asked) in [([0, 3], 0), ([2, 3], 2)] {
        world.read(honest);
        for index in gone {
            let (_, version) = *world.lent.keys().find(|(at, _)| *at == index).unwrap();
            let key = WireKey::new(PageId { file: world.file.key(), index }, Version(version));
            world.core.pages_lost(1, &[key]); // lender 1 does not have it
            assert!(world.file.state.lock().names(index, |known| known == Version(version)));
            world.core.pages_lost(0, &[key]);
            assert!(!world.file.state.lock().names(index, |known| known == Version(version)));
            world.lent.remove(&(index, version));
        }
        let (before, _) = world.counts();
        assert!(world.read(honest) == world.backing);
        assert_eq!(world.counts().0 - before, asked, "without {gone:?}");
    }
}

#[test]
fn swapped_changed_and_replayed_pages_are_read_from_below() {
    for sealing in [Sealing::Checksum(ChecksumKey::new([1; 32])), Sealing::aead(&[1; 32]).unwrap()] {
        let is_sealed = matches!(sealing, Sealing::Aead(_));
        let mut world = World::new(sealing);
        let honest = |name, _: &mut Page| name;
        assert!(world.read(honest) == world.backing);
        assert_eq!((world.counts(), world.lent.len()), ((0, 0), PAGES));
        let in_clear =
            world.lent.values().filter(|(page, _)| world.backing.chunks(PAGE_SIZE).any(|backing| backing == page));
        assert_eq!(in_clear.count(), if is_sealed { 0 } else { PAGES });
        assert!(world.read(honest) == world.backing);
        assert_eq!(world.counts(), (4, 0));

        // The first two pages are swapped, each with its own seal; a bit of the third is flipped.
        let versions: HashMap<u32, u64> = world.lent.keys().copied().collect();
        let lie = |(index, version), page: &mut Page| {
            page[77] ^= u8::from(index == 2);
            let swapped = if index < 2 { 1 - index } else { index };
            (swapped, versions.get(&swapped).copied().unwrap_or(version))
        };
        assert!(world.read(lie) == world.backing);
        assert_eq!(world.counts(), (5, 3));

        // The old bytes, with the old seal, for the new version of each page.
        let old: HashMap<u32, u64> = world.lent.keys().copied().collect();
        world.change();
        world.read(honest);
        assert!(world.read(honest) == world.backing);
        let (good, bad) = world.counts();
        let replay = |(index, _): (u32, u64), _: &mut Page| (index, old[&index]);
        assert!(world.read(replay) == world.backing);
        assert_eq!(world.counts(), (good, bad + PAGES as u64));
    }
}

#[test]
fn who_does_not_borrow_puts_nothing_and_gets_what_is_there() {
    let mut world = World::new(Sealing::Checksum(ChecksumKey::new([1; 32])));
    let honest = |name, _: &mut Page| name;
    world.read(honest);
    world.core.set_borrowing(false);
    assert!(world.read(honest) == world.backing);
    assert_eq!(world.counts(), (PAGES as u64, 0));
    world.change();
    let lent = world.lent.len();
    for _ in 0..2 {
        assert!(world.read(honest) == world.backing);
        assert_eq!((world.counts(), world.lent.len()), ((PAGES as u64, 0), lent));
    }
    world.core.set_borrowing(true);
    world.read(honest);
    assert!(world.read(honest) == world.backing);
    assert_eq!((world.counts(), world.lent.len()), ((2 * PAGES as u64, 0), lent + PAGES));
}

#[test]
fn what_was_raced_may_end_anywhere() {
    // Bytes 4 to 12 of a READ, of which the file had five.
    let raced = RacedRead { span: 4..12, read: vec![1, 2, 3, 4, 5] };
    let copy = |bytes: Range<usize>| {
        let mut piece = vec![0; bytes.len()];
        (raced.copy(&bytes, &mut piece), piece)
    };
    assert_eq!(copy(4..6), (2, vec![1, 2]));
    assert_eq!(copy(7..12), (2, vec![4, 5, 0, 0, 0]));
    assert_eq!(copy(9..11), (0, vec![0, 0]));
    assert_eq!(copy(10..12), (0, vec![0, 0]), "it begins behind the end");
    assert_eq!(raced.within(&(0..20)), 4..12);
    assert_eq!((raced.within(&(3..5)), raced.within(&(10..13))), (4..5, 10..12));
    assert_eq!((raced.within(&(0..3)), raced.within(&(14..20))), (3..3, 14..14));
}
