//! Changes of files through the mount: the kernel's part before the request, the mount's order of
//! steps, and the kernel's part after the answer.

use crate::context::Context;
use crate::file::{BackingFile, Cached, FileModel, Inode, UNIT_BYTES, UNITS, encode};
use crate::kind::Kind;
use crate::node::{Doing, Node, Task, Wrong};
use crate::oracle::{EOF, Time};
use borrower::Change;
use borrower::core::{Changing, Outcome};

/// The number of steps for which the answer to a write waits until the kernel has dropped pages
/// (crates/mount/src/ops/data.rs, wait_for_drop).
const WAITS_MAX: u32 = 100;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Lock,
    Prepare,
    /// The pages hold the new bytes and are unlocked; the request has no number yet.
    Filled,
    Queued,
    /// A worker has read the request.
    Read,
    Begun,
    Applied,
    /// The answer waits until the kernel has dropped pages.
    Await {
        waits_left: u32,
    },
    Answer,
    Drop {
        next: usize,
    },
}

/// The result on the backing file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Went {
    Well,
    /// Only a part was written.
    Short,
    Wrong,
}

/// A change in progress.
pub struct Altering {
    kind: Kind,
    stage: Stage,
    unique: u64,
    /// The time when its pages were filled.
    filled: Time,
    /// Another daemon had it before.
    resent: bool,
    /// The value for the first unit of the file, if it is written.
    value: u64,
    /// The data of the request.
    data: Vec<u64>,
    changing: Option<Changing>,
    went: Went,
    overtaken: bool,
    /// Its answer has waited until the kernel had dropped its pages.
    has_waited: bool,
    size_before: usize,
    /// The size that the kernel had when the change began.
    kernel_size: usize,
    /// Pages that it holds a reference to or the lock of, and their numbers.
    pinned: Vec<(usize, u64)>,
    locked: Vec<usize>,
}

impl Altering {
    fn new(kind: Kind, value: u64) -> Altering {
        Altering {
            kind,
            stage: Stage::Lock,
            unique: 0,
            filled: 0,
            resent: false,
            value,
            data: Vec::new(),
            changing: None,
            went: Went::Well,
            overtaken: false,
            has_waited: false,
            size_before: 0,
            kernel_size: 0,
            pinned: Vec::new(),
            locked: Vec::new(),
        }
    }

    /// Returns a writeback of a page by the kernel.
    pub fn writeback(page: usize, units: Vec<u64>, unique: u64) -> Altering {
        Altering { stage: Stage::Queued, unique, ..Altering::new(Kind::Writeback { page, units }, 0) }
    }

    /// Returns whether it has filled that page since then, and is not sent yet.
    pub fn has_filled(&self, page: usize, since: Time) -> bool {
        self.stage == Stage::Filled && self.filled > since && self.pinned.iter().any(|(pinned, _)| *pinned == page)
    }

    /// Returns whether it is a writeback of the kernel.
    pub fn is_writeback(&self) -> bool {
        matches!(self.kind, Kind::Writeback { .. })
    }

    /// Returns whether it leaves that unit unchanged, also in the kernel's cache, as far as a
    /// program that stores there can see.
    pub fn leaves(&self, unit: usize) -> bool {
        self.is_copy() && self.result(unit).is_none()
    }

    /// Returns whether the backing file system makes the copy.
    pub fn is_copy(&self) -> bool {
        matches!(self.kind, Kind::Direct { copied: true, .. })
    }

    /// The daemon has died: the kernel sends the unanswered request again.
    pub fn send_again(&mut self) {
        if matches!(self.stage, Stage::Read | Stage::Begun | Stage::Applied | Stage::Await { .. } | Stage::Answer) {
            self.stage = Stage::Queued;
            self.resent = true;
            self.has_waited = false;
            self.changing = None;
        }
    }

    /// Returns whether its answer waits until the kernel has dropped its pages. The answer to a
    /// writeback must not, because the kernel waits for it.
    fn waits(&self) -> bool {
        let is_write = matches!(self.kind, Kind::Write { .. } | Kind::Direct { copied: false, .. });
        is_write && self.went != Went::Wrong && (self.overtaken || self.resent)
    }

    /// Returns the value that the change gives to a unit, if it touches the unit.
    fn result(&self, unit: usize) -> Option<u64> {
        let written = |first: usize, end: usize| match unit {
            _ if first <= unit && unit < end => Some(self.value + unit as u64),
            _ if self.size_before <= unit && unit < first => Some(0),
            _ => None,
        };
        match self.kind {
            Kind::Write { first, end } | Kind::Direct { first, end, .. } => written(first, end),
            Kind::Truncate { size } if unit >= size => Some(EOF),
            Kind::Truncate { .. } if unit >= self.size_before => Some(0),
            Kind::Punch { first, end } if first <= unit && unit < end && unit < self.size_before => Some(0),
            _ => None,
        }
    }
}

impl Node {
    /// Begins a change of a file.
    pub fn start_change(&mut self, context: &mut Context, file: usize, kind: Kind) {
        if self.files[file].is_written_externally {
            return; // A change on both sides at once promises nothing.
        }
        let value = context.number() * 4096;
        self.start(context, file, Doing::Change(Box::new(Altering::new(kind, value))));
    }

    /// Does one step of a change. Returns true when it has ended.
    pub fn advance_change(&mut self, context: &mut Context, task: &Task, change: &mut Altering) -> Result<bool, Wrong> {
        let produced = self.positions().0;
        let consumed = self.positions().1;
        let file = &mut self.files[task.file];
        let Some(inode) = &mut file.inode else { return Ok(true) };
        let is_below = matches!(change.stage, Stage::Begun | Stage::Applied);
        if is_below && context.random.u32(0..1000) < context.rates.stalls {
            return Ok(false);
        }
        match change.stage {
            Stage::Lock => {
                if inode.lock.is_none() {
                    inode.lock = Some(task.id);
                    change.stage = Stage::Prepare;
                }
            }
            Stage::Prepare => match prepare(context, file, task, change) {
                Prepared::Wait => {}
                Prepared::GivenUp => {
                    if let Some(inode) = &mut file.inode {
                        inode.lock = None;
                    }
                    return Ok(true);
                }
                Prepared::Filled => {
                    context.note(|| {
                        format!("file {} task {} has filled its pages: {:?}", task.file, task.id, change.kind)
                    });
                    change.filled = context.now;
                    change.stage = Stage::Filled;
                }
            },
            Stage::Filled => {
                self.unique += 1;
                change.unique = self.unique;
                change.stage = Stage::Queued;
                context.note(|| format!("file {} task {} sent as request {}", task.file, task.id, change.unique));
            }
            Stage::Queued => {
                change.data = data(inode, change);
                change.stage = Stage::Read;
            }
            Stage::Read => {
                if file.changing.is_some() {
                    return Ok(false);
                }
                file.changing = Some(task.id);
                if change.is_writeback() {
                    file.mapped_writes = true;
                }
                let announced = announce(change, file.backing.size);
                let known = &inode.file;
                let changing = self.core.begin_change(known, announced, file.backing.stamp());
                change.overtaken = changing.overtaken().is_some();
                context.note(|| {
                    format!("file {} request {} begins, overtaken: {}", task.file, change.unique, change.overtaken)
                });
                change.changing = Some(changing);
                change.stage = Stage::Begun;
            }
            Stage::Begun => {
                change.went = apply(context, file, change);
                change.stage = Stage::Applied;
            }
            Stage::Applied => {
                let after = file.backing.stamp();
                let outcome = if change.went == Went::Well { Outcome::Applied(after) } else { Outcome::Failed(after) };
                if let Some(changing) = change.changing.take() {
                    let mut bytes = vec![0; change.data.len() * UNIT_BYTES as usize];
                    encode(&change.data, &mut bytes);
                    let written = first_written(change).map(|first| (first as u64 * UNIT_BYTES, &bytes[..]));
                    let zeroed = self.core.end_change(&inode.file, changing, outcome, (produced, consumed), written);
                    if let Some(page) = zeroed.filter(|_| change.went == Went::Well) {
                        context.note(|| format!("file {} page {page} may be zeroed", task.file));
                        file.invalidate(page as usize, page as usize + 1, None);
                    }
                }
                file.changing = None;
                has_to_drop(file, change);
                // Drops that were in progress before do not count.
                linger_in_gap(file, change, context.now);
                context.note(|| format!("file {} request {} ended {:?}", task.file, change.unique, change.went));
                change.stage = if change.waits() { Stage::Await { waits_left: WAITS_MAX } } else { Stage::Answer };
            }
            Stage::Await { waits_left } => {
                if file.invalidation.is_none() && !file.invalidating {
                    inode.file.drop_waited();
                    change.has_waited = true;
                    file.oracle.expire(context.now, context.now);
                    change.stage = Stage::Answer;
                } else if waits_left == 0 {
                    change.stage = Stage::Answer;
                } else {
                    change.stage = Stage::Await { waits_left: waits_left - 1 };
                }
            }
            Stage::Answer => {
                answer(file, change);
                match change.kind {
                    Kind::Truncate { .. } | Kind::Punch { .. } | Kind::Direct { .. } => {
                        change.stage = Stage::Drop { next: first_page(change) };
                    }
                    _ => {
                        resolve(context, file, task, change);
                        return check_own(context, file, task, change).map(|()| true);
                    }
                }
            }
            Stage::Drop { next } => match self.drop_changed(task.file, change, next) {
                Some(next) => change.stage = Stage::Drop { next },
                None => {
                    resolve(context, &mut self.files[task.file], task, change);
                    return Ok(true);
                }
            },
        }
        Ok(false)
    }
}

impl Node {
    /// Drops the next page of a change after its answer, as [`Node::drop_page`] does. In a hole,
    /// whole pages are dropped whatever they hold. In the pages at the edges the kernel zeroes the
    /// part in the hole, and leaves them clean or dirty as they are.
    fn drop_changed(&mut self, file: usize, change: &Altering, next: usize) -> Option<usize> {
        let (first, end) = match change.kind {
            Kind::Punch { first, end } => (first, end),
            Kind::Direct { first, end, copied: true } => (first / UNITS * UNITS, end.next_multiple_of(UNITS)),
            _ => return self.drop_page(file, next, last_page(change)),
        };
        let mixed = self.files[file].mixed;
        let inode = self.files[file].inode.as_mut()?;
        if next >= last_page(change).min(inode.pages.len()) {
            return None;
        }
        if inode.pages[next].is_some_and(|cached| cached.locked || cached.writeback) {
            return Some(next);
        }
        if change.went == Went::Well {
            let whole = first <= next * UNITS && (next + 1) * UNITS <= end;
            match &mut inode.pages[next] {
                page if whole => *page = None,
                Some(cached) => {
                    // A program may have stored there after the hole was punched, and the page may
                    // have been written back and read again.
                    cached.is_torn |= mixed;
                    let in_hole = (0..UNITS).filter(|at| (first..end).contains(&(next * UNITS + at)));
                    in_hole.for_each(|at| cached.units[at] = 0);
                }
                None => {}
            }
        }
        Some(next + 1)
    }
}

/// Bytes that a mapping has left behind the end may become visible once a change moves the end
/// beyond them, until the mount has had the pages dropped.
fn linger_in_gap(file: &mut FileModel, change: &Altering, now: Time) {
    let (Kind::Write { first, .. } | Kind::Direct { first, .. }, Some(inode)) = (&change.kind, &file.inode) else {
        return;
    };
    for unit in change.size_before..(*first).min(change.size_before.next_multiple_of(UNITS)) {
        if let Some(cached) = inode.pages[unit / UNITS] {
            file.oracle.linger(unit, cached.units[unit % UNITS], now);
        }
    }
}

enum Prepared {
    /// Another operation blocks it.
    Wait,
    /// The result would be too complicated for the model.
    GivenUp,
    Filled,
}

/// The kernel's part before the request.
fn prepare(context: &mut Context, file: &mut FileModel, task: &Task, change: &mut Altering) -> Prepared {
    let Some(inode) = &mut file.inode else { return Prepared::GivenUp };
    change.size_before = file.backing.size;
    change.kernel_size = inode.size;
    match change.kind {
        Kind::Write { first, end } => {
            let pages = first / UNITS..end.div_ceil(UNITS);
            if inode.size != file.backing.size || end > inode.size && inode.is_dirty_from(inode.size / UNITS) {
                // An external change of the size is not known yet; or a dirty page would meet the
                // new end.
                return Prepared::GivenUp;
            }
            let busy = |page: usize| {
                inode.temporary[page] || inode.pages[page].is_some_and(|cached| cached.locked || cached.writeback)
            };
            if pages.clone().any(busy) {
                return Prepared::Wait;
            }
            if pages.clone().any(|page| inode.pages[page].is_some_and(|cached| cached.dirty)) {
                return Prepared::GivenUp;
            }
            for page in pages {
                let whole = first <= page * UNITS && (page + 1) * UNITS <= end;
                let number = context.number();
                let cached = inode.pages[page].filter(|cached| cached.uptodate);
                if cached.is_none() && !whole {
                    // The page is covered in part and not up to date. So it stays locked until the
                    // answer, and is not cached then.
                    inode.pages[page] = Some(Cached { locked: true, ..Cached::default() });
                    change.locked.push(page);
                    continue;
                }
                let mut cached = cached.unwrap_or(Cached { uptodate: true, ..Cached::default() });
                for at in 0..UNITS {
                    let unit = page * UNITS + at;
                    if first <= unit && unit < end {
                        cached.units[at] = change.value + unit as u64;
                    }
                }
                cached.pins += 1;
                cached.number = number;
                inode.pages[page] = Some(cached);
                change.pinned.push((page, number));
            }
            inode.size_unstable = end > inode.size;
        }
        Kind::Direct { first, end, copied: true }
            if !may_be_copied(first, end, inode.may_be_stored_to, &file.backing) =>
        {
            // The kernel copies through its cache: that is a write.
            return Prepared::GivenUp;
        }
        Kind::Truncate { .. } | Kind::Punch { .. } | Kind::Direct { .. } => {
            if inode.is_dirty() || inode.size != file.backing.size {
                return Prepared::GivenUp;
            }
            inode.no_stores = !matches!(change.kind, Kind::Punch { .. } | Kind::Direct { copied: true, .. });
            if let Kind::Truncate { .. } = change.kind {
                inode.no_writeback = true;
                inode.size_unstable = true;
            }
        }
        Kind::Writeback { .. } | Kind::Attributes => {}
    }
    linger_in_gap(file, change, context.now);
    let Some(inode) = &mut file.inode else { return Prepared::GivenUp };
    // Also announce the bytes that a mapping has left where the file reaches now, until the
    // change's own drop.
    let reaches = match change.kind {
        Kind::Truncate { size } => size,
        Kind::Direct { end, .. } => end,
        _ => 0,
    };
    for unit in inode.size..reaches.min(inode.size.next_multiple_of(UNITS)) {
        if let Some(cached) = inode.pages[unit / UNITS] {
            file.oracle.announce(task.id, unit, cached.units[unit % UNITS]);
        }
    }
    for unit in 0..file.backing.units.len() {
        if let Some(value) = change.result(unit) {
            file.oracle.announce(task.id, unit, value);
            let is_past_cache = matches!(change.kind, Kind::Direct { .. });
            if value == EOF || is_past_cache && unit >= change.size_before {
                // A READ may meet the new end while the kernel still has the old one; or the kernel
                // has the new end before it has dropped its pages. In between are zeros.
                file.oracle.announce(task.id, unit, 0);
            }
        }
    }
    Prepared::Filled
}

/// Returns whether the mount lets the backing file system copy (crates/mount/src/ops/space.rs).
fn may_be_copied(first: usize, end: usize, may_be_stored_to: bool, backing: &BackingFile) -> bool {
    let (offset, len) = (first as u64 * UNIT_BYTES, (end - first) as u64 * UNIT_BYTES);
    borrower::may_be_copied_below(offset, len, backing.size <= end, may_be_stored_to)
}

/// Returns the data of a write request: the kernel copies them from its pages when the request is
/// read.
fn data(inode: &Inode, change: &Altering) -> Vec<u64> {
    let (first, end) = match &change.kind {
        Kind::Write { first, end } | Kind::Direct { first, end, .. } => (*first, *end),
        Kind::Writeback { units, .. } => return units.clone(),
        _ => return Vec::new(),
    };
    let in_page = |unit: usize| {
        let (_, number) = change.pinned.iter().find(|(page, _)| *page == unit / UNITS)?;
        let cached = inode.pages[unit / UNITS].filter(|cached| cached.number == *number)?;
        Some(cached.units[unit % UNITS])
    };
    (first..end).map(|unit| in_page(unit).unwrap_or(change.value + unit as u64)).collect()
}

/// Returns the announcement of the mount to the borrower before the change
/// (crates/mount/src/ops/data.rs, attributes.rs, space.rs).
fn announce(change: &Altering, size: usize) -> Change {
    let bytes = |unit: usize| unit as u64 * UNIT_BYTES;
    let buffered = |first: usize, end: usize| match change.resent {
        // The change may have been applied, and overtaken.
        true => Change::Suspect { start: bytes(first), end: bytes(end) },
        false => Change::Buffered {
            offset: bytes(first),
            len: bytes(end - first),
            request: change.unique,
            writeback: change.is_writeback(),
        },
    };
    match &change.kind {
        Kind::Write { first, end } => buffered(*first, *end),
        Kind::Writeback { page, units } => buffered(page * UNITS, page * UNITS + units.len()),
        Kind::Truncate { size } => Change::Other { start: bytes(*size), end: u64::MAX },
        Kind::Punch { first, end } => Change::Hole { start: bytes(*first), end: bytes((*end).min(size.max(*first))) },
        Kind::Direct { first, end, .. } => Change::Other { start: bytes(*first), end: bytes(*end) },
        Kind::Attributes => Change::Attributes,
    }
}

/// Returns the first unit that the request's data are written to, if it writes.
fn first_written(change: &Altering) -> Option<usize> {
    match &change.kind {
        Kind::Write { first, .. } | Kind::Direct { first, copied: false, .. } => Some(*first),
        Kind::Writeback { page, .. } => Some(page * UNITS),
        Kind::Truncate { .. } | Kind::Punch { .. } | Kind::Direct { .. } | Kind::Attributes => None,
    }
}

/// The change is applied to the backing file, or fails.
fn apply(context: &mut Context, file: &mut FileModel, change: &Altering) -> Went {
    let backing = &mut file.backing;
    let mut went = Went::Well;
    // A second attempt that fails after a first one that was applied is a change without any
    // report: not modelled.
    if !change.resent && context.rates.fails(&mut context.random) {
        went = if context.random.bool() { Went::Short } else { Went::Wrong };
    }
    let values = &change.data;
    let first = match &change.kind {
        // A copy is all or nothing.
        Kind::Direct { copied: true, .. } if went != Went::Well => return Went::Wrong,
        Kind::Write { first, .. } | Kind::Direct { first, .. } => *first,
        Kind::Writeback { page, .. } => page * UNITS,
        kind => {
            if went != Went::Well && *kind != Kind::Attributes {
                return Went::Wrong;
            }
            match *kind {
                Kind::Truncate { size } => backing.truncate(size),
                Kind::Punch { first, end } => {
                    let size = backing.size;
                    backing.units[first.min(size)..end.min(size)].fill(0);
                }
                _ => {}
            }
            backing.changed = context.now;
            return Went::Well;
        }
    };
    let count = match went {
        Went::Well => values.len(),
        Went::Short => context.random.usize(0..values.len()),
        Went::Wrong => 0,
    };
    if count == 0 {
        return Went::Wrong;
    }
    backing.write(first, &values[..count]);
    backing.changed = context.now;
    // For a writeback the kernel does not check how much of a page was written, so a short write is
    // an error.
    if went == Went::Short && change.is_writeback() { Went::Wrong } else { went }
}

/// Requests the drops after a change (crates/mount/src/ops/data.rs, drop_stale).
fn has_to_drop(file: &mut FileModel, change: &Altering) {
    let (first, end) = match &change.kind {
        Kind::Write { first, end } | Kind::Direct { first, end, copied: false } => (*first, *end),
        Kind::Writeback { page, .. } => (page * UNITS, (page + 1) * UNITS),
        _ => return,
    };
    let failed = change.went == Went::Wrong;
    let size = change.size_before;
    if change.overtaken || change.resent || failed && change.is_writeback() {
        file.invalidate(first / UNITS, end.div_ceil(UNITS), None);
    }
    if !failed && file.mapped_writes && size < first && !size.is_multiple_of(UNITS) {
        file.invalidate(size / UNITS, first.div_ceil(UNITS), None);
    }
}

/// The kernel gets its answer.
fn answer(file: &mut FileModel, change: &Altering) {
    let Some(inode) = &mut file.inode else { return };
    for page in &change.locked {
        inode.pages[*page] = None;
    }
    for (page, number) in &change.pinned {
        if let Some(cached) = inode.pages[*page].as_mut().filter(|cached| cached.number == *number) {
            cached.pins -= 1;
            if change.went != Went::Well {
                // Stores through a mapping meanwhile are lost with it. (The kernel keeps the page
                // dirty, and reads into it.)
                (cached.uptodate, cached.dirty) = (false, false);
            }
        }
    }
    let end = match change.kind {
        Kind::Writeback { page, .. } => {
            inode.temporary[page] = false;
            if let Some(cached) = &mut inode.pages[page] {
                cached.writeback = false;
            }
            return;
        }
        Kind::Attributes => return,
        Kind::Truncate { size } if change.went == Went::Well => {
            for page in inode.pages.iter_mut().skip(size.div_ceil(UNITS)) {
                if page.is_some_and(|cached| !cached.locked) {
                    *page = None;
                }
            }
            size
        }
        Kind::Write { end, .. } | Kind::Direct { end, .. } if change.went == Went::Well => end.max(inode.size),
        // After a short write the kernel knows how many bytes were written.
        Kind::Write { .. } | Kind::Direct { .. } => file.backing.size.max(inode.size),
        _ => inode.size,
    };
    if end != inode.size {
        inode.size = end;
    }
    inode.size_version += 1;
    inode.size_unstable = false;
}

fn first_page(change: &Altering) -> usize {
    match change.kind {
        Kind::Punch { first, .. } | Kind::Direct { first, .. } => first / UNITS,
        _ => 0,
    }
}

fn last_page(change: &Altering) -> usize {
    match change.kind {
        Kind::Punch { end, .. } | Kind::Direct { end, .. } => end.div_ceil(UNITS),
        _ => usize::MAX,
    }
}

/// The change has ended: reads must return the file's contents now.
fn resolve(context: &mut Context, file: &mut FileModel, task: &Task, change: &Altering) {
    let lingers = file.invalidation.is_some() || file.invalidating;
    let kernel_size = file.inode.as_ref().map_or(0, |inode| inode.size);
    if let Kind::Writeback { page, units } = &change.kind {
        let cached = file.inode.as_ref().and_then(|inode| inode.pages[*page]);
        // Stores are lost, unless they are repeated.
        if change.went != Went::Well && !cached.is_some_and(|cached| cached.dirty) {
            for unit in page * UNITS..page * UNITS + units.len() {
                file.oracle.resolve(task.id, unit, file.backing.read(unit), context.now, lingers, true);
            }
        }
    } else {
        for unit in 0..file.backing.units.len() {
            if change.result(unit).is_some() {
                let overtaken = change.overtaken || change.resent;
                // Drops that were requested after its wait do not concern the change.
                let lingers = overtaken && lingers && !change.has_waited;
                let fresh = match change.kind {
                    // A failed change has put nothing into the kernel's page.
                    _ if change.went != Went::Well => false,
                    // A punched hole does not show bytes behind the end that the kernel has.
                    Kind::Punch { .. } => unit < kernel_size,
                    Kind::Write { first, end } | Kind::Direct { first, end, .. } => first <= unit && unit < end,
                    _ => true,
                };
                file.oracle.resolve(task.id, unit, file.backing.read(unit), context.now, lingers, fresh);
            }
        }
        file.oracle.end(task.id, context.now);
    }
    if !lingers {
        file.oracle.expire(context.now, context.now);
    }
    if let Some(inode) = &mut file.inode
        && inode.lock == Some(task.id)
    {
        release(inode);
    }
}

/// If the answer to a write has waited for the drop, the program reads its own bytes at once. So
/// the check does not depend on a later random read.
fn check_own(context: &Context, file: &FileModel, task: &Task, change: &Altering) -> Result<(), Wrong> {
    let (Kind::Write { first, end }, Some(inode)) = (&change.kind, &file.inode) else { return Ok(()) };
    if !change.has_waited || change.went != Went::Well {
        return Ok(());
    }
    for unit in *first..*end {
        let value = inode.seen(unit / UNITS, unit % UNITS);
        let is_seen = inode.pages[unit / UNITS].is_some_and(|cached| cached.uptodate && !cached.is_torn);
        if is_seen && !file.oracle.accepts(unit, value, context.now + 1, file.oracle.opened()) {
            return Err(Wrong(format!(
                "machine {}, file {}: the program that wrote unit {unit} by request {} reads {value}; {}",
                context.node,
                task.file,
                change.unique,
                file.oracle.explain(unit)
            )));
        }
    }
    Ok(())
}

fn release(inode: &mut Inode) {
    inode.lock = None;
    inode.no_writeback = false;
    inode.no_stores = false;
}
