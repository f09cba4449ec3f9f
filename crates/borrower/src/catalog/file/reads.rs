//! Methods of [`FileState`] that decide where a READ gets its pages, and when it must be repeated.

use super::{FileState, Filter, ReadTicket, Source, next_run};
use crate::catalog::entry::{Entry, Place, Standing, UNKNOWN, absent};
use crate::catalog::rules::{Rule, keeps};
use crate::policy::stream_room::Lending;
use page::{PageRange, Version};

impl FileState {
    /// A READ of the pages of `range`, out of the page cache, has arrived at `position` of the
    /// event stream. Fills `sources` with the source of each page. `standing` returns whether a
    /// place can be used. `filter` decides about pages that are read in a sequential stream.
    #[allow(clippy::too_many_arguments)] // the READ, the stream, the lenders and the policy
    pub fn begin_read(
        &mut self,
        range: PageRange,
        position: u64,
        consumed: u64,
        standing: impl Fn(Place) -> Standing,
        has_room: bool,
        filter: Filter,
        sources: &mut Vec<Source>,
    ) -> ReadTicket {
        sources.clear();
        let (sequential, lending) = match filter {
            Filter::Off => (false, Lending::Lent),
            Filter::Read(lending) | Filter::Evicted(lending) => {
                let streams = self.streams.get_or_insert_default();
                (streams.note(range), if streams.fit() { lending } else { Lending::Left })
            }
        };
        self.reads = self.reads.saturating_add(1);
        self.read_provisional |= self.is_provisional;
        let raced = self.is_changing(range);
        let held = self.quarantines.iter().any(|held| held.range.overlaps(range));
        let (mut cleared, mut in_groups) = (false, false);
        for wide_index in range.first..range.end {
            let Ok(index) = u32::try_from(wide_index) else {
                sources.push(Source::Backing);
                continue;
            };
            let mut entry = self.table.get(index);
            if let Entry::Busy { place, .. } | Entry::Present { place, .. } = entry {
                match standing(place) {
                    Standing::Valid if !(sequential && lending == Lending::Slower) => {}
                    Standing::Valid | Standing::Unavailable => {
                        sources.push(Source::Backing); // the lender's copy stays current
                        continue;
                    }
                    Standing::Lost => {
                        entry = UNKNOWN;
                        self.table.set(index, entry);
                    }
                }
            }
            sources.push(match entry {
                Entry::Absent { .. } => Source::Backing,
                Entry::Zero => Source::Zero,
                Entry::Hashed { hash, .. } => Source::Demoted(hash),
                Entry::Busy { place, version, .. } => Source::Busy(place, version),
                Entry::Present { place, version, group } => {
                    in_groups |= group != 0;
                    Source::Lender(place, version)
                }
            });
            let sequential = sequential && !lending.lends(wide_index);
            // Without room for an entry the page stays quarantined: it will not be lent.
            if held && !raced && has_room && self.is_quarantined(index) {
                cleared = true;
                self.table.set(index, Entry::Absent { cleared: self.quarantine, sequential });
            } else if let Entry::Absent { cleared, sequential: tagged } = entry
                && matches!(filter, Filter::Evicted(_))
                && tagged != sequential
                && (has_room || tagged)
            {
                self.table.set(index, Entry::Absent { cleared, sequential });
            }
        }
        if cleared && keeps(Rule::Clear) {
            self.taint(range, position, consumed);
        }
        let mut at = 0;
        while let Some(run) = next_run(sources, at) {
            at = run.end;
            // Pages in the gaps are read from the disk along with their neighbours, and are not
            // requested. The lender's copies stay current.
            let along = sources[run].iter_mut().filter(|source| matches!(source, Source::Lender(..)));
            along.for_each(|source| *source = Source::Backing);
        }
        // Only now the pages that will be requested from lenders are known.
        for (source, index) in sources.iter().zip(range.first..).take_while(|_| in_groups) {
            if matches!(source, Source::Lender(..))
                && let Entry::Present { group, .. } = self.table.get(index as u32)
            {
                self.table.moved(group, 0, 1);
            }
        }
        if let Some(streams) = &mut self.streams {
            let count = |is_it: fn(&Source) -> bool| sources.iter().filter(|source| is_it(source)).count() as u64;
            let backing = count(|source| matches!(source, Source::Backing));
            let lent = count(|source| matches!(source, Source::Lender(..) | Source::Busy(..)));
            streams.read_backing(backing, lent, sequential);
        }
        let stamp = self.stamp.filter(|_| self.is_settled());
        let (changes, moment) = (self.changes, self.moment());
        ReadTicket { range, changes, quarantine: self.quarantine, raced, moment, sequential, lending, stamp }
    }

    /// The lender no longer has the page: it gave the page away (exclusive), or answered that it
    /// does not have it. `ticket` is the READ that found this out, if one did.
    pub fn gone(&mut self, index: u32, version: Version, ticket: Option<&ReadTicket>) {
        if self.names(index, |known| known == version) {
            let cleared = ticket.filter(|ticket| !ticket.raced).map_or(0, |ticket| ticket.quarantine);
            self.table.set(index, absent(cleared));
        }
    }

    /// The lender reports that it no longer has the page. The report does not concern other
    /// lenders. Returns whether the page's entry named this lender.
    pub fn lost(&mut self, index: u32, version: Version, lender: u8) -> bool {
        let entry = self.table.get(index);
        let is_its = matches!(entry, Entry::Busy { place, version: known, .. } | Entry::Present { place, version: known, .. }
            if place.lender == lender && known == version);
        if is_its {
            self.gone(index, version, None);
        }
        is_its
    }

    /// The READ, the kernel's `request`, is about to be answered. Returns false if a change came in
    /// between. Then the whole range must be read again from the backing file, and cached copies of
    /// the first answer are not trusted.
    pub fn end_read(&mut self, ticket: &ReadTicket, request: u64, invalidated: impl FnMut(u32, Entry)) -> bool {
        self.reads = self.reads.saturating_sub(1);
        let moves = (self.changes - ticket.changes) as usize;
        let raced = ticket.raced
            || moves > self.recent.len()
            || keeps(Rule::Repeat) && self.recent.iter().rev().take(moves).any(|moved| moved.overlaps(ticket.range));
        if raced {
            self.quarantine(ticket.range, invalidated);
        } else if let Some(watch) = &mut self.watch {
            watch.read_answered(request, ticket.range);
        }
        !raced
    }

    /// A READ that has begun will not be answered.
    pub(crate) fn fail_read(&mut self) {
        self.reads = self.reads.saturating_sub(1);
    }
}
