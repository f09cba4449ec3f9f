//! Detection of external changes, so that the kernel may cache attributes for longer.
//!
//! Without it the kernel asks for the attributes of a file again after a second
//! ([`crate::Config::attr_timeout`]), each time with a request to the daemon. Such requests are
//! most of the work of `git status`, a build, or `ls -l`. fanotify(7) (root, a local backing file
//! system) reports accesses by other processes to a file whose attributes were requested twice. The
//! mount then makes the kernel forget them, about [`PERIOD`] later instead of a second.
//! docs/design/consistency.md (Attributes) has the argument, and the changes that are not reported.
//!
//! Invariants:
//! - Before the attributes are read that the kernel may cache for long, the backing inode is
//!   marked, and no other process has it open for writing. fanotify reports later opens. (It does
//!   not report all writes: those through mappings and of the kernel's asynchronous I/O are
//!   missing.)
//! - The kernel may cache only the answers to GETATTR and STATX for long, because it drops such an
//!   answer if it was told to forget the attributes meanwhile (`fuse_change_attributes`,
//!   fs/fuse/inode.c). It does not drop an answer that introduces the inode (LOOKUP), or that is
//!   the result of a change.
//! - A successor does not have the events of this daemon: it first makes the kernel forget all
//!   attributes.
//! - Events of the daemon's own workers are ignored, recognized by their threads: the kernel has
//!   requested these operations itself.

mod events;

use crate::filesystem::Passthrough;
use crate::inode::{Inode, Inodes};
use crate::lifecycle::config::Config;
use crate::ops::credentials::Privilege;
use crate::system::{Fanotify, FileHandle, ProcPath, is_open_for_writing, thread_id};
use events::{Event, decode};
use fuse::{Errno, Notifier};
use hashbrown::HashSet;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags, Statx, openat};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time between two reads of the events. Each read costs a wake on a processor that the mount's
/// users need, too.
const PERIOD: Duration = Duration::from_millis(10);
/// Shortest time between two requests to the kernel to forget all attributes. (It takes some
/// microseconds for each inode, and more events may be lost meanwhile.)
const ALL_PERIOD: Duration = Duration::from_secs(1);
/// Limit on the marked files. Each mark costs some 150 bytes of kernel memory. It holds the inode,
/// and so does the daemon's descriptor.
const MARKS_MAX: usize = 256 << 10;
/// Bytes of events that are read at once, and the number of reads before the events are handled.
const EVENTS_BYTES: usize = 64 << 10;
const READS_MAX: usize = 32;
/// Time limit for an open to wait until earlier events are handled; usually some microseconds.
const CATCH_UP_WAIT: Duration = Duration::from_millis(10);

/// From linux/fanotify.h: bytes, attributes or number of names have changed; the file was opened,
/// or has another name.
const EVENTS: u64 = 0x2 | 0x4 | 0x20 | 0x800;
/// A directory was opened.
const OPENED: u64 = 0x20 | 0x4000_0000;

/// Whether fanotify reports changes of a file.
#[derive(Default)]
pub(crate) struct Marked(AtomicU8);

impl Marked {
    const YES: u8 = 1;
    const CANNOT_BE: u8 = 2;

    /// Whether the file is marked.
    pub(crate) fn is_marked(&self) -> bool {
        self.is(Marked::YES)
    }

    fn is(&self, what: u8) -> bool {
        self.0.load(Ordering::Acquire) == what
    }
}

/// The nodes whose attributes the kernel must forget.
#[derive(Default)]
struct Changes {
    all: bool,
    nodes: HashSet<u64>,
}

/// The detection of external changes, which may be off.
pub(crate) struct ExternalChanges {
    fanotify: Option<Fanotify>,
    marks: AtomicUsize,
    /// The workers' threads.
    own: Mutex<HashSet<i32>>,
    /// Nodes whose attributes must be forgotten for other reasons.
    asked: Mutex<Changes>,
    /// A thread holds this while it passes events on to the kernel.
    notifying: Mutex<()>,
    wake: OwnedFd,
    closing: AtomicBool,
}

impl ExternalChanges {
    /// Starts the detection. `source` is SOURCE, open for reading. `resumed`: the kernel may
    /// already cache attributes from the previous daemon.
    pub(crate) fn start(
        source: &OwnedFd,
        config: &Config,
        privilege: Privilege,
        resumed: bool,
    ) -> io::Result<ExternalChanges> {
        let wanted = privilege == Privilege::Root && !config.attr_timeout.is_zero();
        let fanotify = match wanted.then(|| start(source)) {
            Some(Ok(fanotify)) => Some(fanotify),
            Some(Err(errno)) => {
                tracing::info!(
                    %errno,
                    "changes beside the mount are not told here: the kernel asks for attributes again when --attribute-timeout is over"
                );
                None
            }
            None => None,
        };
        Ok(ExternalChanges {
            fanotify,
            marks: AtomicUsize::new(0),
            own: Mutex::default(),
            asked: Mutex::new(Changes { all: resumed, ..Changes::default() }),
            notifying: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closing: AtomicBool::new(false),
        })
    }

    /// Registers the calling thread as a worker, until the result is dropped.
    pub(crate) fn own_thread(&self) -> OwnThread<'_> {
        self.own.lock().insert(thread_id());
        OwnThread(self)
    }

    /// Makes the kernel ask for the attributes of a file again, if it may cache them for long.
    pub(crate) fn ask_again(&self, inode: &Inode) {
        if inode.marked.is_marked() {
            self.asked.lock().nodes.insert(inode.nodeid);
            self.wake();
        }
    }

    /// Requests events for a file from here on. Returns whether that worked.
    fn mark(&self, inode: &Inode) -> bool {
        inode.marked.is_marked()
            || !inode.marked.is(Marked::CANNOT_BE)
                && self.marks.load(Ordering::Relaxed) < MARKS_MAX
                && self.mark_again(inode)
    }

    fn mark_again(&self, inode: &Inode) -> bool {
        let Some(fanotify) = self.fanotify.as_ref().filter(|_| inode.device.is_source()) else { return false };
        // The node is held by a descriptor now, and is found by its handle when it is forgotten. So
        // no mark is left behind.
        let Some(fd) = inode.held() else { return false };
        match fanotify.mark(ProcPath::new(&*fd).path(), EVENTS) {
            Ok(()) => {
                if inode.marked.0.swap(Marked::YES, Ordering::AcqRel) != Marked::YES {
                    self.marks.fetch_add(1, Ordering::Relaxed);
                }
                true
            }
            Err(Errno::NOMEM | Errno::NOSPC) => false,
            Err(errno) => {
                tracing::debug!(%errno, node = inode.nodeid, "changes of a file are not told");
                inode.marked.0.store(Marked::CANNOT_BE, Ordering::Release);
                false
            }
        }
    }

    /// Removes the mark of a node that the kernel has forgotten.
    pub(crate) fn forgotten(&self, inode: &Inode, inodes: &Inodes) {
        let Some(fanotify) = self.fanotify.as_ref().filter(|_| inode.marked.is_marked()) else { return };
        self.marks.fetch_sub(1, Ordering::Relaxed);
        if let Ok(anchor) = inodes.anchor_once(inode) {
            // An inode has only one mark, which may have been removed for another node.
            let _ = fanotify.unmark(ProcPath::new(&anchor).path(), EVENTS);
        }
        // The kernel may know the inode again as another node, which may have marked it before.
        if let Some(again) = inodes.of_handle(inode.handle_hash()).and_then(|node| inodes.get(node).ok()) {
            self.mark_again(&again);
            self.ask_again(&again);
        }
    }

    /// Handles all events until now, so that none of them makes the kernel forget the file's
    /// attributes later. Must be called after the kernel has forgotten the attributes. Otherwise,
    /// if this happened during a READ, the kernel would not learn the end of the file from the
    /// answer (`fuse_read_update_size`).
    pub(crate) fn catch_up(&self, filesystem: &Passthrough, inode: &Inode) {
        let Some(fanotify) = self.fanotify.as_ref().filter(|_| inode.marked.is_marked()) else { return };
        let Some(_notifying) = self.notifying.try_lock_for(CATCH_UP_WAIT) else { return };
        let mut changes = Changes::default();
        self.read(fanotify, &mut vec![0; EVENTS_BYTES], filesystem, &mut changes);
        changes.nodes.remove(&inode.nodeid);
        let is_more = changes.all || !changes.nodes.is_empty();
        let mut asked = self.asked.lock();
        asked.nodes.remove(&inode.nodeid);
        asked.all |= changes.all;
        asked.nodes.extend(changes.nodes);
        drop(asked);
        if is_more {
            self.wake();
        }
    }

    /// Number of marked files.
    pub(crate) fn marks(&self) -> usize {
        self.marks.load(Ordering::Relaxed)
    }

    /// Ends [`ExternalChanges::run`].
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The work of the thread. Returns after [`ExternalChanges::close`].
    pub(crate) fn run(&self, filesystem: &Passthrough, notifier: &Notifier) {
        let mut buffer = vec![0; EVENTS_BYTES];
        let mut all_forgotten: Option<Instant> = None;
        while !self.closing.load(Ordering::Acquire) {
            let notifying = self.notifying.lock();
            let mut changes = std::mem::take(&mut *self.asked.lock());
            if let Some(fanotify) = &self.fanotify {
                self.read(fanotify, &mut buffer, filesystem, &mut changes);
            }
            let is_due = changes.all && all_forgotten.is_none_or(|then| then.elapsed() >= ALL_PERIOD);
            if is_due {
                all_forgotten = Some(Instant::now());
                changes.nodes.extend(filesystem.inodes.ids());
            }
            for node in changes.nodes {
                // A negative place: the attributes only. On any error, the kernel does not
                // know it, or the mount is gone.
                let _ = notifier.inval_inode(node, -1, 0);
            }
            drop(notifying);
            let Some(fanotify) = &self.fanotify else { return };
            let is_due_later = changes.all && !is_due;
            self.asked.lock().all |= is_due_later;
            if !is_due_later {
                self.wait(fanotify);
            }
            // Wait, so that events that arrive together are handled together.
            std::thread::sleep(PERIOD);
        }
    }

    /// Waits for events or requests.
    fn wait(&self, fanotify: &Fanotify) {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(fanotify, PollFlags::IN)];
        while poll(&mut fds, None) == Err(Errno::INTR) {}
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    fn read(&self, fanotify: &Fanotify, buffer: &mut [u8], filesystem: &Passthrough, changes: &mut Changes) {
        for _ in 0..READS_MAX {
            let len = match rustix::io::read(fanotify, &mut *buffer) {
                Ok(len) if len > 0 => len,
                Err(Errno::INTR) => continue,
                _ => return,
            };
            let own = self.own.lock();
            for event in decode(&buffer[..len]) {
                match event {
                    Event::Lost => changes.all = true,
                    Event::Done { thread, .. } if own.contains(&thread) => {}
                    Event::Done { handle, .. } => changes.nodes.extend(filesystem.inodes.of_handle(handle)),
                }
            }
        }
    }
}

/// The registration of a worker's thread.
pub(crate) struct OwnThread<'a>(&'a ExternalChanges);

impl Drop for OwnThread<'_> {
    fn drop(&mut self) {
        self.0.own.lock().remove(&thread_id());
    }
}

fn start(source: &OwnedFd) -> Result<Fanotify, Errno> {
    if !crate::backing::device::is_local(source) {
        return Err(Errno::OPNOTSUPP);
    }
    let fanotify = Fanotify::new()?;
    // Check that the handles in these events are equal to the daemon's handles of the inodes.
    let own = Event::Done { thread: thread_id(), handle: FileHandle::of(source)?.0.hash() };
    let path = ProcPath::new(source);
    fanotify.mark(path.path(), OPENED)?;
    drop(openat(source, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?);
    let mut buffer = vec![0; EVENTS_BYTES];
    let len = rustix::io::read(&fanotify, &mut *buffer)?;
    fanotify.unmark(path.path(), OPENED)?;
    if decode(&buffer[..len]).any(|event| event == own) { Ok(fanotify) } else { Err(Errno::OPNOTSUPP) }
}

impl Passthrough {
    /// Whether all changes of a file by others from here on will be reported, so that the kernel
    /// may cache its attributes for long. Must be called before these attributes are read.
    pub(crate) fn is_reported(&self, inode: &Inode) -> bool {
        // A file that is open on the mount may be passed through, and then its writes are not seen.
        // And the process that has it open usually changes it itself. (Directories are looked up
        // each second in any case, which also returns their attributes.)
        if inode.kind != FileType::RegularFile || inode.is_open() || !self.external_changes.mark(inode) {
            return false;
        }
        let Some(fd) = inode.held() else { return false };
        // Check again: later opens are reported, because the file is marked now.
        !is_open_for_writing(ProcPath::new(&*fd).path()) && !inode.is_open()
    }

    /// How long the kernel may cache attributes. `is_reported` is the result of
    /// [`Passthrough::is_reported`] before they were read.
    pub(crate) fn attr_timeout(&self, now: &Statx, is_reported: bool) -> Duration {
        // A write clears set-id bits of the mode, and the kernel does not get that event.
        let gives_rights = Mode::from_raw_mode(now.stx_mode.into()).intersects(Mode::SUID | Mode::SGID);
        if is_reported && !gives_rights { self.attr_timeout.max(self.reported_attr_timeout) } else { self.attr_timeout }
    }
}
