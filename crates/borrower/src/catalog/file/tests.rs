use super::*;
use crate::backing::Writers;

fn evict(state: &mut FileState, index: u32) -> Verdict {
    state.evict(index, 1, false, |_| Standing::Valid, true, true)
}

#[test]
fn what_lay_at_the_edge_of_a_hole_is_not_believed_when_the_file_was_forgotten() {
    let mut state = FileState::default();
    state.hole_begins(100, 3 * PAGE_SIZE as u64);
    assert_eq!((evict(&mut state, 0), evict(&mut state, 1)), (Verdict::Quarantined, Verdict::Put));
    // The kernel looks the file up again; the event of the page that was evicted before may still
    // come.
    state.forgotten();
    assert_eq!((evict(&mut state, 0), evict(&mut state, 1)), (Verdict::Quarantined, Verdict::Put));
}

#[test]
fn the_end_that_the_kernel_believes_in_is_unsure_where_it_may_have_been_moved_externally() {
    let at = |ctime_ns, size_bytes| Stamp { size_bytes, mtime_ns: ctime_ns, ctime_ns };
    let observe = |state: &mut FileState, now| {
        state.observe(state.moment(), now, Writers::None, |_, _| {});
        state.end_is_unsure()
    };
    let mut state = FileState::default();
    // The file's stamp was never observed, but the kernel was told its size.
    state.tell_size(100);
    assert!(observe(&mut state, at(1, 200)));
    state.end_moved(200);
    assert!(!observe(&mut state, at(1, 200)));
    assert!(!observe(&mut state, at(2, 200)) && observe(&mut state, at(3, 150)));
    assert!(observe(&mut state, at(4, 180)) && observe(&mut state, at(5, 170)), "it was never moved");
    // The file has grown externally once more, since the kernel has dropped its cached pages.
    state.kernel_dropped(state.kernel_stale().unwrap());
    assert!(observe(&mut state, at(6, 300)));
    state.end_moved(170);
    assert!(state.end_is_unsure());
    // The mount itself has made the file grow.
    state.kernel_dropped(state.kernel_stale().unwrap());
    state.end_moved(170);
    assert!(!state.end_is_unsure() && state.left().stamp.is_some());
}

#[test]
fn what_was_read_while_somebody_may_have_been_writing_is_dropped_and_not_believed() {
    let at = |ctime_ns| Stamp { size_bytes: 1 << 30, mtime_ns: ctime_ns, ctime_ns };
    let mut state = FileState::default();
    let mut sources = Vec::new();
    let mut read = |state: &mut FileState| {
        let range = PageRange { first: 0, end: 1 };
        let ticket = state.begin_read(range, 0, 0, |_| Standing::Valid, true, Filter::Off, &mut sources);
        state.end_read(&ticket, 0, |_, _| ())
    };
    let observe = |state: &mut FileState, stamp, writers| {
        let moment = state.moment();
        state.observe(moment, at(stamp), writers, |_, _| {});
        state.kernel_stale()
    };
    assert_eq!(observe(&mut state, 1, Writers::None), None);
    assert!(read(&mut state) && evict(&mut state, 0) == Verdict::Put, "no external writer was active");

    let first = observe(&mut state, 2, Writers::Perhaps);
    assert!(first.is_some() && !state.is_sure_of(at(2)) && state.left().stamp.is_none());
    state.kernel_dropped(first.unwrap());
    assert_eq!(observe(&mut state, 2, Writers::Perhaps), None, "nothing was read since");
    assert!(read(&mut state) && evict(&mut state, 0) == Verdict::Quarantined);
    assert_eq!(observe(&mut state, 2, Writers::Unasked), None);
    let second = observe(&mut state, 2, Writers::Perhaps);
    assert!(second > first);
    state.kernel_dropped(second.unwrap());
    assert!(read(&mut state));
    assert!(observe(&mut state, 2, Writers::None) > second && state.is_sure_of(at(2)));
    assert_eq!(evict(&mut state, 0), Verdict::Quarantined, "it was read before");
    assert!(read(&mut state) && evict(&mut state, 0) == Verdict::Put);
}

fn write(state: &mut FileState, page: u64, [before, after]: [Stamp; 2], position: u64) {
    let change = state.begin_change(PageRange { first: page, end: page + 1 }, before, |_, _| {});
    let [offset, end_offset] = [page, page + 1].map(|page| page * PAGE_SIZE as u64);
    let ended = Ended::Buffered { offset, end_offset, old_size_bytes: u64::MAX, position };
    state.end_change(change, ended, Some(after), 0, true);
}

#[test]
fn a_read_is_overtaken_by_changes_of_its_own_pages_only() {
    let stamp = Stamp { size_bytes: 1 << 30, mtime_ns: 1, ctime_ns: 1 };
    for (writes, of_page, overtaken) in [(100, 9, false), (100, 3, true), (RECENT_MAX as u64 / 2 + 1, 9, true)] {
        let (mut state, mut sources) = (FileState::default(), Vec::new());
        let mut begin = |state: &mut FileState, first| {
            let range = PageRange { first, end: first + 1 };
            state.begin_read(range, 0, 0, |_| Standing::Valid, true, Filter::Off, &mut sources)
        };
        write(&mut state, 3, [stamp; 2], 0);
        let [of_three, of_nine] = [begin(&mut state, 3), begin(&mut state, 8)];
        write(&mut state, of_page, [stamp; 2], 0);
        (1..writes).for_each(|_| write(&mut state, 1000, [stamp; 2], 0));
        assert!(state.recent.len() <= RECENT_MAX);
        assert_eq!(!state.end_read(&of_three, 0, |_, _| ()), overtaken, "{writes} writes of page {of_page}");
        let is_forgotten = writes > 100;
        assert_eq!(!state.end_read(&of_nine, 0, |_, _| ()), is_forgotten);
        write(&mut state, 3, [stamp; 2], 0);
        assert!(state.recent.is_empty(), "no READ is in progress");
        begin(&mut state, 3);
        state.fail_read();
        write(&mut state, 3, [stamp; 2], 0);
        assert!(state.recent.is_empty(), "no READ is in progress any more");
    }
}

#[test]
fn writes_after_the_clock_was_set_back_are_no_external_changes() {
    let at = |ctime_ns| Stamp { size_bytes: 1 << 30, mtime_ns: ctime_ns, ctime_ns };
    let place = Place { lender: 0, epoch: 0 };
    let mut state = FileState::default();
    write(&mut state, 0, [at(1), at(1000)], 0);
    state.put(5, place, Version(1), 0);
    assert!(state.put_done(5, Version(1), true));
    write(&mut state, 0, [at(1000), at(10)], 0);
    write(&mut state, 0, [at(10), at(20)], 0);
    assert!(matches!(state.table.get(5), Entry::Present { .. }), "the entries of lent pages stay");
}

#[test]
fn what_was_written_long_before_is_not_suspected_for_what_is_written_now() {
    let stamp = Stamp { size_bytes: 1 << 30, mtime_ns: 1, ctime_ns: 1 };
    let mut state = FileState::default();
    let pages = TAINT_PAGES_MAX * 2;
    (0..pages).for_each(|page| write(&mut state, page, [stamp; 2], 10 + page));
    // An event of the first page, taken after its write.
    let verdict =
        |state: &mut FileState, index, position| state.evict(index, position, false, |_| Standing::Valid, true, true);
    let last = pages as u32 - 1;
    assert_eq!(verdict(&mut state, last, 10 + pages - 2), Verdict::Tainted);
    assert_eq!(verdict(&mut state, 0, 10 + TAINT_PAGES_MAX), Verdict::Put);
}

#[test]
fn a_write_clears_a_quarantine_only_where_there_is_room() {
    for has_room in [true, false] {
        let stamp = Stamp { size_bytes: PAGE_SIZE as u64, mtime_ns: 1, ctime_ns: 1 };
        let mut state = FileState::default();
        let truncation = state.begin_change(PageRange { first: 0, end: u64::MAX }, stamp, |_, _| {});
        state.end_change(truncation, Ended::Other, Some(stamp), 0, has_room);
        let write = state.begin_change(PageRange { first: 0, end: 1 }, stamp, |_, _| {});
        let end_offset = PAGE_SIZE as u64;
        let ended = Ended::Buffered { offset: 0, end_offset, old_size_bytes: 0, position: 0 };
        state.end_change(write, ended, Some(stamp), 0, has_room);
        assert_eq!(evict(&mut state, 0), if has_room { Verdict::Put } else { Verdict::Quarantined });
    }
}

/// Reads a whole file of 4 MiB in one READ, evicts it, and reads it again. Returns the pages that
/// were put, and the pages that the second READ requests from the lender.
fn lent(lending: Lending, fits: bool) -> (usize, usize) {
    const PAGES: u32 = 1024;
    let place = Place { lender: 0, epoch: 0 };
    let (mut state, range, mut sources) = (FileState::default(), PageRange { first: 0, end: PAGES.into() }, Vec::new());
    let read = |state: &mut FileState, lending, sources: &mut Vec<Source>| {
        let filter = Filter::Evicted(lending);
        let ticket = state.begin_read(range, 0, 0, |_| Standing::Valid, true, filter, sources);
        assert!(ticket.sequential && state.end_read(&ticket, 0, |_, _| ()));
        ticket
    };
    read(&mut state, Lending::Left, &mut sources);
    if fits {
        state.looked_at(1024, Looked { sampled_pages: 64, fitting_pages: 64, far_pages: 0 });
    }
    let ticket = read(&mut state, lending, &mut sources);
    let mut put = 0;
    for index in 0..PAGES {
        let verdict = state.evict(index, 1, false, |_| Standing::Valid, true, true);
        let expected = if ticket.is_left(index.into()) { Verdict::Sequential } else { Verdict::Put };
        assert_eq!(verdict, expected);
        if verdict == Verdict::Put {
            put += 1;
            state.put(index, place, Version(1), 0);
            assert!(state.put_done(index, Version(1), true));
        }
    }
    read(&mut state, lending, &mut sources);
    (put, sources.iter().filter(|source| matches!(source, Source::Lender(..))).count())
}

#[test]
fn streams_that_fit_are_lent_as_it_is_said_and_no_others() {
    assert_eq!(lent(Lending::Left, true), (0, 0));
    assert_eq!(lent(Lending::Tried, true), (128, 128));
    assert_eq!(lent(Lending::Lent, true), (1024, 1024));
    assert_eq!(lent(Lending::Lent, false), (0, 0));
}

#[test]
fn streams_that_the_disk_is_faster_with_are_read_there_and_stay_known() {
    let place = Place { lender: 0, epoch: 0 };
    let (mut state, mut sources) = (FileState::default(), Vec::new());
    let mut read = |state: &mut FileState, first, pages, lending| {
        let range = PageRange { first, end: first + pages };
        let ticket = state.begin_read(range, 0, 0, |_| Standing::Valid, true, Filter::Evicted(lending), &mut sources);
        assert!(state.end_read(&ticket, 0, |_, _| ()));
        sources[0]
    };
    read(&mut state, 0, 1, Lending::Left);
    assert_eq!(state.evict(0, 1, false, |_| Standing::Valid, true, true), Verdict::Put);
    state.put(0, place, Version(1), 0);
    assert!(state.put_done(0, Version(1), true));
    let at_lender = Source::Lender(place, Version(1));
    assert_eq!(read(&mut state, 0, 1024, Lending::Slower), at_lender, "not known to fit");
    state.looked_at(1024, Looked { sampled_pages: 64, fitting_pages: 64, far_pages: 0 });
    assert_eq!(read(&mut state, 0, 1024, Lending::Slower), Source::Backing);
    assert_eq!(state.evict(0, 1, false, |_| Standing::Valid, true, true), Verdict::AlreadyLent);
    (0..100).for_each(|at| assert_eq!(read(&mut state, 1 << 20 | at << 12, 1, Lending::Slower), Source::Backing));
    assert_eq!(read(&mut state, 0, 1, Lending::Slower), at_lender, "at random");
}
