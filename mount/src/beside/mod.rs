//! Being told of changes below that are made beside the mount, so that the kernel may believe attributes for longer.
//!
//! Without it the kernel asks for the attributes of a file again after a second ([`crate::Config::attr_timeout`]), each time a trip to the daemon;
//! that is what `git status`, a build, or `ls -l` mostly does. With fanotify(7) (Linux 5.17, root, a local file system below) we hear of what
//! others change in the directories that the kernel knows, and have it forget what it believes of that: some [`PERIOD`] after the change,
//! instead of a second. What nobody tells of (stores through mappings, and what is changed by a hard link made meanwhile, see
//! [`ATTR_TIMEOUT`]) shows when the time is over.
//!
//! What must stay true:
//! - A directory is marked before the attributes are looked at that the kernel may believe for long.
//! - An answer that was being made when a change was told of may arrive after the kernel was told to forget: so it is told once more
//!   when all such answers have arrived (`flights.rs`). Of nodes that it knows it drops such answers by itself (`fuse_change_attributes`,
//!   fs/fuse/inode.c), but not of those that it gets to know by them.
//! - A successor does not know what was told to us: it begins with having the kernel forget all attributes.
//! - Our workers' own changes are no news: the kernel knows of each from who has asked for it. They are told by the thread.

mod changes;
mod events;
mod flights;

use crate::filesystem::Passthrough;
use crate::inode::{Believed, Inode, Inodes};
use crate::system::{Fanotify, FileHandle, thread_id};
use changes::{Again, Changes};
use flights::{Flight, Flights};
use fuse::{Errno, Notifier, abi::opcode};
use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags, Statx, openat};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

/// How long the kernel believes attributes of which we are told when somebody changes them.
pub(crate) const ATTR_TIMEOUT: Duration = Duration::from_secs(60);
/// How often we look at what is told: each look is a wake, on a processor that the mount's users want, too.
const PERIOD: Duration = Duration::from_millis(10);
/// Directories that are marked at most. Each mark is some 100 bytes of the kernel's, and holds the inode.
const DIRECTORIES_MAX: usize = 64 << 10;
/// Bytes of events that are read at once.
const EVENTS_BYTES: usize = 64 << 10;

/// From linux/fanotify.h. A name appeared in a directory, or went.
const NAMES: u64 = 0x40 | 0x80 | 0x100 | 0x200;
/// Bytes or attributes changed.
const CHANGED: u64 = 0x2 | 0x4;
/// Of files in the directory and of the directory itself, directories among them.
const OF_CHILDREN_TOO: u64 = 0x0800_0000 | 0x4000_0000;
const OPENED: u64 = 0x20;

/// What is known of whether changes in a directory are told.
#[derive(Default)]
pub(crate) struct Marked(AtomicU8);

impl Marked {
    const YES: u8 = 1;
    const CANNOT_BE: u8 = 2;

    fn is(&self, what: u8) -> bool {
        self.0.load(Ordering::Acquire) == what
    }
}

/// Who tells us.
struct Group {
    fanotify: Fanotify,
    /// The directories that are marked: of each, by the hash of its handle, the node that has had it marked.
    marks: Mutex<HashMap<u64, u64>>,
}

/// Being told of changes beside the mount, or not.
pub(crate) struct Beside {
    group: Option<Group>,
    flights: Flights,
    /// The workers' threads.
    own: Mutex<HashSet<i32>>,
    /// What is to be forgotten for other reasons.
    asked: Mutex<Changes>,
    wake: OwnedFd,
    closing: AtomicBool,
}

impl Beside {
    /// `source` is SOURCE, open for reading. `wanted`: that the kernel believes anything for long at all. `resumed`: it may believe already what a
    /// daemon before this one has said.
    pub(crate) fn start(source: &OwnedFd, wanted: bool, resumed: bool) -> io::Result<Beside> {
        let group = match wanted.then(|| Group::start(source)) {
            Some(Ok(group)) => Some(group),
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
            group,
            flights: Flights::default(),
            own: Mutex::default(),
            asked: Mutex::new(Changes { all: resumed, ..Changes::default() }),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            closing: AtomicBool::new(false),
        })
    }

    /// The calling thread is a worker's.
    pub(crate) fn is_own_thread(&self) {
        self.own.lock().insert(thread_id());
    }

    /// A request of that kind is going to be answered: hold what is returned until it is.
    pub(crate) fn flight(&self, code: u32) -> Option<Flight<'_>> {
        let tells_attributes = matches!(
            code,
            opcode::LOOKUP
                | opcode::GETATTR
                | opcode::STATX
                | opcode::SETATTR
                | opcode::SYMLINK
                | opcode::MKNOD
                | opcode::MKDIR
                | opcode::LINK
                | opcode::CREATE
                | opcode::TMPFILE
                | opcode::READDIRPLUS
        );
        (self.group.is_some() && tells_attributes).then(|| self.flights.begin())
    }

    /// Has the kernel ask for the attributes of a node again.
    pub(crate) fn ask_again(&self, node: u64) {
        if self.group.is_some() {
            self.asked.lock().nodes.insert(node);
            self.wake();
        }
    }

    /// Has changes in a directory told from here on, and of its own attributes. Returns whether they are.
    pub(crate) fn mark(&self, directory: &Inode, inodes: &Inodes) -> bool {
        if directory.marked.is(Marked::YES) {
            return true;
        }
        let Some(group) = &self.group else { return false };
        if directory.kind != FileType::Directory
            || directory.marked.is(Marked::CANNOT_BE)
            || !directory.device.is_source()
        {
            return false;
        }
        let mut marks = group.marks.lock();
        if marks.len() >= DIRECTORIES_MAX {
            return false;
        }
        let marked =
            inodes.anchor(directory).and_then(|anchor| group.fanotify.mark(anchor, NAMES | CHANGED | OF_CHILDREN_TOO));
        match marked {
            Ok(()) => {
                marks.insert(directory.handle_hash(), directory.nodeid);
                directory.marked.0.store(Marked::YES, Ordering::Release);
                true
            }
            Err(errno) => {
                tracing::debug!(%errno, node = directory.nodeid, "changes in a directory are not told");
                directory.marked.0.store(Marked::CANNOT_BE, Ordering::Release);
                false
            }
        }
    }

    /// The kernel has forgotten the node.
    pub(crate) fn forgotten(&self, inode: &Inode, inodes: &Inodes) {
        let Some(group) = self.group.as_ref().filter(|_| inode.marked.is(Marked::YES)) else { return };
        let mut marks = group.marks.lock();
        // Unless it knows the directory again, as another node.
        if marks.get(&inode.handle_hash()) == Some(&inode.nodeid) {
            marks.remove(&inode.handle_hash());
            // Of what was removed below there is none any more.
            let _ = inodes
                .anchor(inode)
                .and_then(|anchor| group.fanotify.unmark(anchor, NAMES | CHANGED | OF_CHILDREN_TOO));
        }
    }

    /// How many directories are marked.
    pub(crate) fn directories(&self) -> usize {
        self.group.as_ref().map_or(0, |group| group.marks.lock().len())
    }

    /// Ends [`Beside::run`].
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// The thread's work. Returns after [`Beside::close`].
    pub(crate) fn run(&self, filesystem: &Passthrough, notifier: &Notifier) {
        let mut buffer = vec![0; EVENTS_BYTES];
        let mut again = Again::default();
        while !self.closing.load(Ordering::Acquire) {
            let mut changes = std::mem::take(&mut *self.asked.lock());
            if let Some(group) = &self.group {
                self.read(group, &mut buffer, filesystem, &mut changes);
            }
            // Looked at before, as an answer may arrive meanwhile.
            let may_be_under_way = self.flights.now().is_some();
            forget(&changes, filesystem, notifier);
            forget(&again.told(changes, may_be_under_way, &self.flights), filesystem, notifier);
            let Some(group) = &self.group else { return };
            self.wait(group, again.is_waiting());
        }
    }

    /// Until something is told, or asked for, or (`soon`) not for long.
    fn wait(&self, group: &Group, soon: bool) {
        let period = Timespec { tv_sec: 0, tv_nsec: PERIOD.as_nanos() as i64 };
        let wait = |fds: &mut [PollFd<'_>], limit| while poll(fds, limit) == Err(Errno::INTR) {};
        let wake = || PollFd::new(&self.wake, PollFlags::IN);
        if !soon {
            wait(&mut [wake(), PollFd::new(&group.fanotify, PollFlags::IN)], None);
        }
        // What comes together is looked at together.
        wait(&mut [wake()], Some(&period));
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    fn read(&self, group: &Group, buffer: &mut [u8], filesystem: &Passthrough, changes: &mut Changes) {
        // As many as the queue holds: those that come meanwhile are for the next time.
        for _ in 0..Fanotify::QUEUE_EVENTS {
            let len = match rustix::io::read(&group.fanotify, &mut *buffer) {
                Ok(len) if len > 0 => len,
                Err(Errno::INTR) => continue,
                _ => return,
            };
            let own = self.own.lock();
            for event in events::decode(&buffer[..len]) {
                if event.is_overflow() {
                    changes.all = true;
                } else if !own.contains(&event.process) {
                    let changes_names = event.changes_names();
                    for subject in event.subjects() {
                        let Some(node) = filesystem.inodes.of_handle(subject.handle) else { continue };
                        match subject.name {
                            // Of a file in it: told of in a record of its own.
                            Some(_) if !changes_names => continue,
                            Some(name) => {
                                changes.names.insert((node, name.to_owned()));
                            }
                            None => {}
                        }
                        changes.nodes.insert(node);
                    }
                }
            }
        }
    }
}

/// Whatever the error: the kernel does not know it, or the mount is gone.
fn forget(changes: &Changes, filesystem: &Passthrough, notifier: &Notifier) {
    // A negative place: the attributes alone.
    let forget = |node: &u64| {
        let _ = notifier.inval_inode(*node, -1, 0);
    };
    if changes.all {
        filesystem.inodes.ids().iter().for_each(forget);
    } else {
        changes.nodes.iter().for_each(forget);
    }
    for (parent, name) in &changes.names {
        let _ = notifier.inval_entry(*parent, name, false);
    }
}

impl Group {
    fn start(source: &OwnedFd) -> Result<Group, Errno> {
        if !crate::device::is_local(source) {
            return Err(Errno::OPNOTSUPP);
        }
        let group = Group { fanotify: Fanotify::new()?, marks: Mutex::default() };
        group.try_out(source)?;
        Ok(group)
    }

    /// Whether a directory is called the same by those events as by us.
    fn try_out(&self, source: &OwnedFd) -> Result<(), Errno> {
        let own = FileHandle::of(source)?.0.hash();
        self.fanotify.mark(source, OPENED | OF_CHILDREN_TOO)?;
        drop(openat(source, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?);
        let mut buffer = vec![0; EVENTS_BYTES];
        let len = rustix::io::read(&self.fanotify, &mut *buffer)?;
        self.fanotify.unmark(source, OPENED | OF_CHILDREN_TOO)?;
        let is_known = events::decode(&buffer[..len])
            .any(|event| event.process == thread_id() && event.subjects().any(|subject| subject.handle == own));
        if is_known { Ok(()) } else { Err(Errno::OPNOTSUPP) }
    }
}

impl Passthrough {
    /// Has changes told that concern the attributes of a node, where that can be; to be called before they are looked at. Returns whether they
    /// are. Of a file they are told by the directory that its name is in.
    pub(crate) fn is_told(&self, inode: &Inode) -> bool {
        let parent = match inode.kind {
            FileType::Directory => return self.beside.mark(inode, &self.inodes),
            FileType::RegularFile => match &*inode.name.lock() {
                Believed::Name(name) => name.parent,
                _ => return false,
            },
            _ => return false,
        };
        self.inodes.get(parent).is_ok_and(|parent| self.beside.mark(&parent, &self.inodes))
    }

    /// How long the kernel may believe attributes. `told`: that their changes were told from before they were looked at.
    pub(crate) fn attr_timeout(&self, inode: &Inode, now: &Statx, told: bool) -> Duration {
        // Another name may be in another directory. A mode that gives rights away goes with a write, of which the kernel is not told that. And what is
        // passed through may be stored to by mappings that it knows nothing of.
        let only_as_told = match inode.kind {
            FileType::RegularFile => {
                now.stx_nlink == 1
                    && !Mode::from_raw_mode(now.stx_mode.into()).intersects(Mode::SUID | Mode::SGID)
                    && !inode.passing.lock().was_passed()
            }
            _ => true,
        };
        if told && only_as_told { self.attr_timeout.max(ATTR_TIMEOUT) } else { self.attr_timeout }
    }
}
