//! Detection of external changes, so that the kernel may cache attributes for longer.
//!
//! Without it the kernel asks for the attributes of a file again after a second
//! ([`crate::Config::attr_timeout`]), each time a trip to the daemon; that is what `git status`, a
//! build, or `ls -l` mostly does. With fanotify(7) (root, a local file system below) we hear of
//! what others do to a file whose attributes were asked for a second time, and have the kernel
//! forget what it believes of it: some [`PERIOD`] later, instead of a second.
//! docs/design/consistency.md (Attributes) has the argument, and what nobody tells of.
//!
//! Invariants:
//! - The inode below is marked, and nobody has it open for writing, before the attributes are
//!   looked at that the kernel may believe for long. The kernel tells us of later opens. (Not all
//!   writes are told of: those through mappings are not, nor those of the kernel's asynchronous
//!   I/O.)
//! - Only the answers to GETATTR and STATX are believed for long: the kernel drops one that it has
//!   been told to forget meanwhile (`fuse_change_attributes`, fs/fuse/inode.c). It does not where
//!   the answer has it know the inode at all (LOOKUP), or is the outcome of a change.
//! - A successor does not know what was told to us: it begins with having the kernel forget all
//!   attributes.
//! - Our workers' own doings are no news: the kernel knows of each from who has asked for it. They
//!   are told by the thread.

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

/// How often we look at what is told: each look is a wake, on a processor that the mount's users
/// want, too.
const PERIOD: Duration = Duration::from_millis(10);
/// How often the kernel is told to forget all, at the most. (Some microseconds for each inode;
/// meanwhile more events may be lost.)
const ALL_PERIOD: Duration = Duration::from_secs(1);
/// Files that are marked at most. Each mark is some 150 bytes of the kernel's, and holds the inode,
/// as the descriptor does that we have of it.
const MARKS_MAX: usize = 256 << 10;
/// Bytes of events that are read at once, and how often before what they tell is passed on.
const EVENTS_BYTES: usize = 64 << 10;
const READS_MAX: usize = 32;
/// How long an open waits at most until what is told is passed on: some microseconds mostly.
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

    /// Whether it is.
    pub(crate) fn is_marked(&self) -> bool {
        self.is(Marked::YES)
    }

    fn is(&self, what: u8) -> bool {
        self.0.load(Ordering::Acquire) == what
    }
}

/// The nodes whose attributes the kernel is to forget.
#[derive(Default)]
struct Changes {
    all: bool,
    nodes: HashSet<u64>,
}

/// The detection of external changes, which may be off.
pub(crate) struct Beside {
    fanotify: Option<Fanotify>,
    marks: AtomicUsize,
    /// The workers' threads.
    own: Mutex<HashSet<i32>>,
    /// Nodes whose attributes must be forgotten for other reasons.
    asked: Mutex<Changes>,
    /// A thread holds this while it passes events on to the kernel.
    telling: Mutex<()>,
    wake: OwnedFd,
    closing: AtomicBool,
}

impl Beside {
    /// `source` is SOURCE, open for reading. `resumed`: the kernel may believe already what a
    /// daemon before this one has said.
    pub(crate) fn start(source: &OwnedFd, config: &Config, privilege: Privilege, resumed: bool) -> io::Result<Beside> {
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
        Ok(Beside {
            fanotify,
            marks: AtomicUsize::new(0),
            own: Mutex::default(),
            asked: Mutex::new(Changes { all: resumed, ..Changes::default() }),
            telling: Mutex::default(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closing: AtomicBool::new(false),
        })
    }

    /// The calling thread is a worker's, until it is dropped.
    pub(crate) fn own_thread(&self) -> OwnThread<'_> {
        self.own.lock().insert(thread_id());
        OwnThread(self)
    }

    /// Has the kernel ask for the attributes of a file again, if it may believe them for long.
    pub(crate) fn ask_again(&self, inode: &Inode) {
        if inode.marked.is_marked() {
            self.asked.lock().nodes.insert(inode.nodeid);
            self.wake();
        }
    }

    /// Has told from here on what others do to a file. Returns whether it is.
    fn mark(&self, inode: &Inode) -> bool {
        inode.marked.is_marked()
            || !inode.marked.is(Marked::CANNOT_BE)
                && self.marks.load(Ordering::Relaxed) < MARKS_MAX
                && self.mark_again(inode)
    }

    fn mark_again(&self, inode: &Inode) -> bool {
        let Some(fanotify) = self.fanotify.as_ref().filter(|_| inode.device.is_source()) else { return false };
        // Held by a descriptor now, and found by its handle when it is forgotten: so no mark is
        // left behind.
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

    /// The kernel has forgotten the node.
    pub(crate) fn forgotten(&self, inode: &Inode, inodes: &Inodes) {
        let Some(fanotify) = self.fanotify.as_ref().filter(|_| inode.marked.is_marked()) else { return };
        self.marks.fetch_sub(1, Ordering::Relaxed);
        if let Ok(anchor) = inodes.anchor_once(inode) {
            // An inode has one mark: gone, if it was removed for another node.
            let _ = fanotify.unmark(ProcPath::new(&anchor).path(), EVENTS);
        }
        // The kernel may know the inode again, as another node, which may have had it marked before
        // that.
        if let Some(again) = inodes.of_handle(inode.handle_hash()).and_then(|node| inodes.get(node).ok()) {
            self.mark_again(&again);
            self.ask_again(&again);
        }
    }

    /// The kernel is not told any more of what others have done to the file until now. To be called
    /// once it has forgotten the file's attributes anyway: told of it in the midst of a READ, it
    /// would not learn from the answer that the file ends there (`fuse_read_update_size`).
    pub(crate) fn catch_up(&self, filesystem: &Passthrough, inode: &Inode) {
        let Some(fanotify) = self.fanotify.as_ref().filter(|_| inode.marked.is_marked()) else { return };
        let Some(_telling) = self.telling.try_lock_for(CATCH_UP_WAIT) else { return };
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

    /// Ends [`Beside::run`].
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The work of the thread. Returns after [`Beside::close`].
    pub(crate) fn run(&self, filesystem: &Passthrough, notifier: &Notifier) {
        let mut buffer = vec![0; EVENTS_BYTES];
        let mut all_forgotten: Option<Instant> = None;
        while !self.closing.load(Ordering::Acquire) {
            let telling = self.telling.lock();
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
            drop(telling);
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

    /// Until something is told, or asked for.
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

/// A worker's thread.
pub(crate) struct OwnThread<'a>(&'a Beside);

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
    // Whether an inode is called the same by those events as by us.
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
    /// Whether what others do to a file from here on is told, and nobody does anything already that
    /// is not. To be called before the attributes are looked at that the kernel is to believe for
    /// long.
    pub(crate) fn is_told(&self, inode: &Inode) -> bool {
        // Others may write more than we see to a file that is open here as well, passed through;
        // and the process that has it open mostly changes it itself. (Directories are looked up
        // each second in any case, and so their attributes come.)
        if inode.kind != FileType::RegularFile || inode.is_open() || !self.beside.mark(inode) {
            return false;
        }
        let Some(fd) = inode.held() else { return false };
        // Asked once more: for who opens it from here on, it is marked, and asked for again.
        !is_open_for_writing(ProcPath::new(&*fd).path()) && !inode.is_open()
    }

    /// How long the kernel may believe attributes. `told`: what [`Passthrough::is_told`] said
    /// before they were looked at.
    pub(crate) fn attr_timeout(&self, now: &Statx, told: bool) -> Duration {
        // A mode that gives rights away goes with a write, of which the kernel is not told that.
        let gives_rights = Mode::from_raw_mode(now.stx_mode.into()).intersects(Mode::SUID | Mode::SGID);
        if told && !gives_rights { self.attr_timeout.max(self.told_attr_timeout) } else { self.attr_timeout }
    }
}
