//! What the access trace sees of a file that is read, written and evicted.

use crate::setup::{KnownFile, exclusive, skip};
use page::PAGE_SIZE;
use std::os::unix::fs::{FileExt, MetadataExt};
use tap::{AccessTrace, LoadError, ReadsSource, Seen, SeenKind};

/// An access trace on the file's file system; `None` (and a line that says so) where there can be
/// none.
fn trace_on(file: &KnownFile, source: ReadsSource, test: &str) -> Option<AccessTrace> {
    match AccessTrace::load(&[file.file.metadata().unwrap().dev()], Some(source)) {
        Ok(trace) => Some(trace),
        Err(error @ (LoadError::NotPermitted { .. } | LoadError::NoKernelTypes | LoadError::NoTracepoint)) => {
            skip(test, error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// What was seen of the file, its kinds told from each other by the predicate.
fn count(seen: &[Seen], kind: impl Fn(SeenKind) -> bool) -> u64 {
    seen.iter().filter(|seen| kind(seen.kind)).map(|seen| u64::from(seen.pages)).sum()
}

#[test]
fn reads_writes_and_evictions_are_told_apart() {
    const TEST: &str = "reads_writes_and_evictions_are_told_apart";
    const PAGES: u64 = 512;
    let _exclusive = exclusive();
    for source in [ReadsSource::PageCache, ReadsSource::SystemCalls] {
        let Some(file) = KnownFile::new(0x5eed_0021, PAGES, TEST) else { return };
        let Some(mut trace) = trace_on(&file, source, TEST) else { return };
        let metadata = file.file.metadata().unwrap();
        let (inode, device) = (metadata.ino(), AccessTrace::device(metadata.dev()));
        let take = |trace: &mut AccessTrace| {
            let mut seen = Vec::new();
            trace.take(&mut |event| seen.extend((event.inode == inode).then_some(event))).unwrap();
            assert!(seen.iter().all(|event| event.device == device));
            seen
        };
        // Missed once, hit once.
        file.read_page_by_page();
        file.read_page_by_page();
        let seen = take(&mut trace);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Added), PAGES);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Read), 2 * PAGES, "{source:?}");
        let waited = count(&seen, |kind| matches!(kind, SeenKind::Waited(time) if time.as_nanos() > 0));
        assert_eq!(waited, if source == ReadsSource::PageCache { PAGES } else { 0 });
        file.drop_cache();
        let seen = take(&mut trace);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Evicted), PAGES);

        // Of a sample only its own pages are told of, the same as the crate mrc has in it.
        let threshold = mrc::EVERY_PAGE / 4;
        trace.set_threshold(threshold).unwrap();
        let before = trace.counters();
        file.read_page_by_page();
        file.drop_cache();
        let seen = take(&mut trace);
        let sampled = |index| mrc::Key::new(mrc::file(device.into(), inode), index).is_below(threshold);
        let expected = (0..PAGES).filter(|index| sampled(*index)).count() as u64;
        assert_eq!(count(&seen, |kind| kind == SeenKind::Added), PAGES);
        for wanted in [SeenKind::Read, SeenKind::Evicted] {
            assert_eq!(count(&seen, |kind| kind == wanted), expected, "{wanted:?}");
            assert!(seen.iter().filter(|event| event.kind == wanted).all(|event| sampled(event.index)));
        }
        assert!(trace.counters().read_pages >= before.read_pages + PAGES);

        // A large read is seen once, whatever pieces the kernel makes of it.
        trace.set_threshold(mrc::EVERY_PAGE).unwrap();
        let mut buffer = vec![0; PAGES as usize * PAGE_SIZE];
        for _ in 0..2 {
            file.file.read_exact_at(&mut buffer, 0).unwrap();
        }
        let seen = take(&mut trace);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Read), 2 * PAGES, "{source:?}");

        // What is mapped is seen as it is touched for the first time.
        let length = PAGES as usize * PAGE_SIZE;
        let flags = rustix::mm::MapFlags::SHARED;
        // SAFETY: a new mapping of a file that has that length, read and unmapped before anything
        // shortens it.
        unsafe {
            let map = rustix::mm::mmap(std::ptr::null_mut(), length, rustix::mm::ProtFlags::READ, flags, &file.file, 0);
            let map = map.unwrap();
            map.cast::<u8>().read_volatile();
            rustix::mm::munmap(map, length).unwrap();
        }
        assert!(count(&take(&mut trace), |kind| kind == SeenKind::Mapped) > 0);

        // A buffer that is larger than the file reads what there is.
        let mut large = vec![0; 4 * length];
        assert_eq!(file.file.read_at(&mut large, 0).unwrap(), length);
        assert_eq!(file.file.read_at(&mut large, (length - PAGE_SIZE) as u64).unwrap(), PAGE_SIZE);
        assert_eq!(count(&take(&mut trace), |kind| kind == SeenKind::Read), PAGES + 1, "{source:?}");

        // What is written whole was not missed, also by who has missed a page just before, which
        // was.
        file.drop_cache();
        take(&mut trace);
        file.file.read_exact_at(&mut buffer[..PAGE_SIZE], (PAGES / 2) * PAGE_SIZE as u64).unwrap();
        file.file.write_all_at(&file.content[PAGES as usize / 2], PAGES / 2 * PAGE_SIZE as u64).unwrap();
        let seen = take(&mut trace);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Written), 0, "{source:?}: {seen:?}");
        file.drop_cache();
        file.file.read_exact_at(&mut buffer[..PAGE_SIZE], (PAGES - 1) * PAGE_SIZE as u64).unwrap();
        file.drop_cache();
        take(&mut trace);
        for index in 0..PAGES {
            file.file.write_all_at(&file.content[index as usize], index * PAGE_SIZE as u64).unwrap();
        }
        let seen = take(&mut trace);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Added), PAGES);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Written), PAGES);
        // Truncated, it is not evicted.
        file.file.set_len(0).unwrap();
        let seen = take(&mut trace);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Invalidated), PAGES);
        assert_eq!(count(&seen, |kind| kind == SeenKind::Evicted), 0);
        assert_eq!(trace.counters().ring_full, 0);
    }
}
