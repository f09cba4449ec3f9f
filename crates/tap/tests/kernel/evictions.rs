//! What is evicted is captured byte for byte, and what is not is not.

use crate::setup::{KnownFile, MemoryCgroup, content, exclusive, skip, tap_on};
use page::{PAGE_SIZE, Page};
use std::os::unix::fs::FileExt;
use std::time::Duration;
use tap::{BpfTap, Eviction, EvictionSource};

/// A wait for something that has happened already, or that another process is about to do.
const SHORT: Duration = Duration::from_millis(50);

/// Longer than any state takes to come about.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// What was captured of one file.
struct Captured<'a> {
    generation: u32,
    content: &'a [Page],
    times: Vec<u32>,
    wrong: u64,
}

impl Captured<'_> {
    fn of(file: &KnownFile) -> Captured<'_> {
        let times = vec![0; file.pages as usize];
        Captured { generation: file.generation(), content: &file.content, times, wrong: 0 }
    }

    fn take(&mut self, event: &Eviction<'_>) {
        if event.generation != self.generation {
            return;
        }
        match self.times.get_mut(event.index as usize) {
            Some(times) if event.page == Some(&self.content[event.index as usize]) => *times += 1,
            _ => self.wrong += 1,
        }
    }

    fn events(&self) -> u64 {
        self.times.iter().map(|&times| u64::from(times)).sum()
    }

    fn pages(&self) -> usize {
        self.times.iter().filter(|&&times| times > 0).count()
    }

    /// Takes everything that is in the ring.
    fn drain(&mut self, tap: &mut BpfTap) {
        while tap.poll(Duration::ZERO, &mut |event| self.take(&event)).unwrap() > 0 {}
    }
}

#[test]
fn reclaim_is_captured_byte_for_byte() {
    const TEST: &str = "reclaim_is_captured_byte_for_byte";
    const PAGES: u64 = 32 * 1024;
    const READS: u32 = 2;
    let _exclusive = exclusive();
    let Some(file) = KnownFile::new(0x5eed_0002, PAGES, TEST) else { return };
    let Some(mut tap) = tap_on(&file, 4 * BpfTap::RING_BYTES, TEST) else { return };
    let cgroup = match MemoryCgroup::new(32 << 20) {
        Ok(cgroup) => cgroup,
        Err(error) => return skip(TEST, format!("no memory cgroup: {error}")),
    };
    let positions = tap.positions();
    let mut captured = Captured::of(&file);
    let mut reader = cgroup.read(file.path(), READS).unwrap();
    let (mut last, mut dropped) = (None, false);
    loop {
        let done = reader.is_done();
        if done && !dropped {
            file.drop_cache();
            dropped = true;
        }
        let taken = tap.poll(SHORT, &mut |event| {
            assert!(positions.produced() > event.position, "the producer is past what was produced");
            assert!(positions.consumed() <= event.position, "an event counts as consumed only after it was taken");
            assert!(last.is_none_or(|last| last < event.position), "positions grow");
            last = Some(event.position);
            captured.take(&event);
        });
        let taken = taken.unwrap();
        assert!(last.is_none_or(|last| positions.consumed() > last));
        if done && taken == 0 {
            break;
        }
    }
    let counters = tap.counters();
    let (events, large) = (captured.events(), tap.large_folios());
    println!("{events} evictions of {} pages, {large} large folios, {counters:?}", captured.pages());
    assert_eq!(captured.wrong, 0, "pages with wrong bytes");
    assert!(events > PAGES, "the small cgroup must have evicted most of the file twice");
    assert!(counters.captured >= events);
    if counters.ring_full == 0 && counters.unreadable == 0 {
        assert_eq!(captured.pages() as u64, PAGES, "every page has left the cache at least once");
    }
}

#[test]
fn large_folios_are_taken_apart() {
    const TEST: &str = "large_folios_are_taken_apart";
    let _exclusive = exclusive();
    let Some(file) = KnownFile::new(0x5eed_0003, 4096, TEST) else { return };
    let Some(mut tap) = tap_on(&file, BpfTap::RING_BYTES, TEST) else { return };
    let mut captured = Captured::of(&file);
    file.read();
    let before = tap.large_folios();
    file.drop_cache();
    let large = tap.large_folios() - before;
    captured.drain(&mut tap);
    println!("{large} large folios, {} pages, {:?}", captured.pages(), tap.counters());
    assert_eq!(captured.wrong, 0, "pages with wrong bytes");
    assert_eq!(captured.pages(), 4096);
    if large == 0 {
        skip(TEST, "this kernel's file system has read the file without large folios (ext4 has them from 6.16)");
    }
}

#[test]
fn bytes_that_are_not_wanted_are_left_out_once() {
    const TEST: &str = "bytes_that_are_not_wanted_are_left_out_once";
    const PAGES: u64 = 1024;
    let _exclusive = exclusive();
    let Some(file) = KnownFile::new(0x5eed_0009, PAGES, TEST) else { return };
    let Some(mut tap) = tap_on(&file, BpfTap::RING_BYTES, TEST) else { return };
    let hints = tap.copy_hints().unwrap();
    let generation = file.generation();
    let mut lost_rounds = 0;
    let mut evicted = |hint: &dyn Fn(u32)| loop {
        file.read_page_by_page();
        let before = tap.counters();
        (0..PAGES as u32).for_each(hint);
        file.drop_cache();
        let (mut omitted, mut captured) = (Vec::new(), Captured::of(&file));
        let mut take = |event: Eviction<'_>| match event.page {
            None => omitted.push((event.generation, event.index)),
            Some(_) => captured.take(&event),
        };
        while tap.poll(Duration::ZERO, &mut take).unwrap() > 0 {}
        assert_eq!(captured.wrong, 0, "pages with wrong bytes");
        let after = tap.counters();
        if after.ring_full > before.ring_full {
            // Somebody has other files of the same disk reclaimed: their pages have filled the
            // ring.
            lost_rounds += 1;
            assert!(lost_rounds < 20, "{after:?}");
            continue;
        }
        assert_eq!(after.omitted - before.omitted, omitted.len() as u64);
        omitted.sort_unstable();
        return (omitted, captured.times);
    };
    let third = |index: &u32| index.is_multiple_of(3);
    let (omitted, times) = evicted(&|index| {
        hints.omit(generation.wrapping_add(1), index);
        if third(&index) {
            hints.omit(generation, index);
        }
    });
    let expected: Vec<_> = (0..PAGES as u32).filter(third).map(|index| (generation, index.into())).collect();
    // Two pages may have the same place in the table.
    println!("{} of {} pages without their bytes", omitted.len(), expected.len());
    assert!(omitted.len() > expected.len() * 9 / 10 && omitted.iter().all(|page| expected.contains(page)));
    for (index, times) in times.into_iter().enumerate() {
        let is_skipped = omitted.binary_search(&(generation, index as u64)).is_ok();
        assert_eq!(times, u32::from(!is_skipped), "page {index}");
    }
    // That was for one eviction; and what was said can be taken back.
    assert_eq!(evicted(&|_| ()), (vec![], vec![1; PAGES as usize]));
    let taken_back = |index| {
        hints.omit(generation, index);
        hints.copy(generation, index);
    };
    assert_eq!(evicted(&taken_back), (vec![], vec![1; PAGES as usize]));
    let all_taken_back = |index| {
        hints.omit(generation, index);
        hints.copy_all();
    };
    assert_eq!(evicted(&all_taken_back), (vec![], vec![1; PAGES as usize]));
}

#[test]
fn truncation_is_no_eviction_and_fadvise_is_one() {
    const TEST: &str = "truncation_is_no_eviction_and_fadvise_is_one";
    const PAGES: u64 = 1024;
    let _exclusive = exclusive();
    let Some(mut file) = KnownFile::new(0x5eed_0004, PAGES, TEST) else { return };
    let Some(mut tap) = tap_on(&file, BpfTap::RING_BYTES, TEST) else { return };

    // It may be gone from the directory: that changes nothing.
    file.unlink();
    let mut advised = Captured::of(&file);
    file.read();
    file.drop_cache();
    advised.drain(&mut tap);
    assert_eq!((advised.wrong, advised.events()), (0, PAGES), "POSIX_FADV_DONTNEED evicts what is clean");

    let mut truncated = Captured::of(&file);
    file.read();
    let before = tap.counters();
    file.file.set_len(0).unwrap();
    truncated.drain(&mut tap);
    let after = tap.counters();
    assert_eq!((truncated.wrong, truncated.events()), (0, 0), "truncation is no eviction");
    assert!(after.invalidated - before.invalidated >= PAGES, "{before:?} {after:?}");
}

#[test]
fn the_newest_bytes_are_captured_and_dirty_ones_never() {
    const TEST: &str = "the_newest_bytes_are_captured_and_dirty_ones_never";
    const PAGES: u64 = 64;
    let _exclusive = exclusive();
    let Some(file) = KnownFile::new(0x5eed_0005, PAGES, TEST) else { return };
    let Some(mut tap) = tap_on(&file, BpfTap::RING_BYTES, TEST) else { return };
    let generation = file.generation();
    for round in 0..4u64 {
        let newest = 0x5eed_1000 + round;
        file.read();
        for index in 0..PAGES {
            file.file.write_all_at(&content(newest, index), index * PAGE_SIZE as u64).unwrap();
        }
        // Dirty pages stay, whether or not they are on their way to the disk; clean ones go.
        file.drop_cache();
        file.file.sync_all().unwrap();
        file.drop_cache();
        let (mut events, mut wrong) = (0, 0);
        let mut take = |event: Eviction<'_>| {
            if event.generation == generation {
                events += 1;
                wrong += u64::from(event.page != Some(&content(newest, event.index)));
            }
        };
        while tap.poll(Duration::ZERO, &mut take).unwrap() > 0 {}
        assert_eq!((events, wrong), (PAGES, 0), "round {round}");
    }
}

#[test]
fn a_full_ring_counts_and_recovers() {
    const TEST: &str = "a_full_ring_counts_and_recovers";
    const PAGES: u64 = 512;
    const RING_BYTES: usize = 64 << 10;
    let _exclusive = exclusive();
    let Some(file) = KnownFile::new(0x5eed_0006, PAGES, TEST) else { return };
    let Some(mut tap) = tap_on(&file, RING_BYTES, TEST) else { return };
    let mut rounds = 0;
    let has_recovered = testbed::wait_until(WAIT_MAX, || {
        let mut captured = Captured::of(&file);
        let before = tap.counters();
        file.read();
        // Pages of other files that are evicted meanwhile fill the ring, too.
        captured.drain(&mut tap);
        file.drop_cache();
        let after = tap.counters();
        captured.drain(&mut tap);
        let room = (RING_BYTES / PAGE_SIZE) as u64;
        assert!(captured.events() < 2 * room, "{} events", captured.events());
        assert_eq!(captured.wrong, 0);
        assert!(after.ring_full - before.ring_full >= PAGES - 2 * room, "{before:?} {after:?}");
        rounds += u32::from(captured.events() >= 1);
        rounds == 3
    });
    assert!(has_recovered, "nothing is captured any more: {:?}", tap.counters());
}

#[test]
fn an_idle_tap_waits_and_a_dropped_one_is_gone() {
    const TEST: &str = "an_idle_tap_waits_and_a_dropped_one_is_gone";
    let _exclusive = exclusive();
    let Some(file) = KnownFile::new(0x5eed_0007, 16, TEST) else { return };
    let Some(mut tap) = tap_on(&file, BpfTap::RING_BYTES_MIN, TEST) else { return };
    let positions = tap.positions();
    file.read();
    // An eviction while we wait must end the wait, however long it could last.
    let generation = file.generation();
    let mut mine = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| file.drop_cache());
        while mine == 0 {
            let begun = std::time::Instant::now();
            tap.poll(Duration::from_secs(60), &mut |event| mine += u32::from(event.generation == generation)).unwrap();
            assert!(begun.elapsed() < Duration::from_secs(30), "woken by the clock, not by the event");
        }
    });
    drop(tap);
    let last = positions.produced();
    file.read();
    file.drop_cache();
    assert_eq!(positions.produced(), last, "nothing is captured any more");
}

#[test]
fn bad_ring_sizes_are_refused() {
    for bytes in [0, 1, 4096, 12_288, BpfTap::RING_BYTES + 1, BpfTap::RING_BYTES_MAX * 2, usize::MAX] {
        let error = BpfTap::load(tap::Target::default(), bytes).unwrap_err();
        assert!(matches!(error, tap::LoadError::RingBytes { .. }), "{error}");
        println!("{error}");
    }
}
