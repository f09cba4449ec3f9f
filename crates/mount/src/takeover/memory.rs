//! Writing the state memory (see [`super::layout`] for what is where).
//!
//! Cost: plain stores into a shared mapping, no system call. Each slot has one owner, which is
//! dropped last, so no late writer stores into a slot that has been reused. An item without a slot
//! is served normally, but does not survive the daemon.

use super::layout::{self, DecodeError, State, WORD, header, intent, node, open};
use borrower::{FileIdentity, Stamp};
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FlockOperation, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_lock, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::ffi::CStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time limit for the previous daemon to end.
const CLAIM_LIMIT: Duration = Duration::from_secs(2);
/// Time between two checks of that.
const CLAIM_AGAIN: Duration = Duration::from_millis(10);

/// The free slots of one kind, below the highest one that was ever used.
#[derive(Default)]
struct Free {
    slots: Vec<u32>,
    used: u32,
}

/// The mapping.
pub(crate) struct Memory {
    fd: OwnedFd,
    start: NonNull<u8>,
    nodes: Mutex<Free>,
    opens: Mutex<Free>,
    intents: Mutex<Vec<u32>>,
    full: AtomicBool,
    frozen: AtomicBool,
}

// SAFETY: the mapping is reached through atomic words only, and lives as long as the value.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// The header: properties of the whole mount.
pub(crate) struct Header<'a> {
    pub minor: u32,
    pub capabilities: u64,
    pub write_back: bool,
    pub root: bool,
    pub own_device: u64,
    pub source: &'a Path,
    pub mountpoint: &'a Path,
}

impl Memory {
    /// Creates an empty state memory.
    pub(crate) fn create() -> io::Result<Memory> {
        let fd = memfd_create("pumapool-state", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, layout::TOTAL_BYTES as u64)?;
        // So no process can truncate the file under a mapping.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        claim(&fd)?;
        let memory = Memory::map(fd)?;
        memory.intents.lock().extend((0..layout::INTENTS as u32).rev());
        Ok(memory)
    }

    /// Takes over the memory of a daemon that has ended, and decodes its state. Fails if that
    /// daemon still runs. [`Memory::node_at`] and [`Memory::open_at`] claim the used slots.
    pub(crate) fn take_over(fd: OwnedFd) -> io::Result<(Memory, State)> {
        if fstat(&fd)?.st_size != layout::TOTAL_BYTES as i64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, DecodeError::Short));
        }
        claim(&fd)?;
        let memory = Memory::map(fd)?;
        let state = memory.read()?;
        let unused = |used: u32, taken: &mut dyn Iterator<Item = u32>| {
            let mut is_free = vec![true; used as usize];
            taken.for_each(|slot| is_free[slot as usize] = false);
            Free { slots: (0..used).filter(|slot| is_free[*slot as usize]).collect(), used }
        };
        *memory.nodes.lock() = unused(state.nodes_used, &mut state.nodes.iter().map(|node| node.slot));
        *memory.opens.lock() = unused(state.opens_used, &mut state.opens.iter().map(|open| open.slot));
        *memory.intents.lock() =
            unused(layout::INTENTS as u32, &mut state.intents.iter().map(|intent| intent.slot)).slots;
        memory.word(layout::HEADER_AT, header::SERVED).store(0, Ordering::Release);
        memory.word(layout::HEADER_AT, header::TAKEOVERS).fetch_add(1, Ordering::Release);
        Ok((memory, state))
    }

    /// Takes the lock as soon as the remaining threads of the previous daemon have ended. These may
    /// wait for requests that this daemon serves. A lock that is already taken stays.
    pub(crate) fn claim_when_free(self: &Arc<Memory>) {
        if fcntl_lock(&self.fd, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return;
        }
        let warn =
            |error: io::Error| tracing::warn!(%error, "cannot prevent another daemon from serving this mount, too");
        // Use the descriptor itself, because closing a copy would release the lock
        // (fcntl_locking(2)).
        let memory = self.clone();
        let wait = move || {
            while let Err(errno) = fcntl_lock(&memory.fd, FlockOperation::LockExclusive) {
                if errno != Errno::INTR {
                    return warn(errno.into());
                }
            }
        };
        let started = std::thread::Builder::new().name("claim".to_owned()).spawn(wait);
        started.map_or_else(warn, drop);
    }

    /// Decodes the state while no process uses the memory.
    fn read(&self) -> io::Result<State> {
        let used = self.header(header::NODES_USED).load(Ordering::Acquire) as usize;
        let len = layout::NODES_AT + used.min(layout::NODES_MAX) * layout::NODE_BYTES;
        // SAFETY: `len` lies within the mapping, which is initialized (zero where nothing was
        // written). Its writer is dead, and nobody has a slot of this mapping yet, so no byte
        // changes while the slice lives.
        let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), len) };
        layout::decode(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    fn map(fd: OwnedFd) -> io::Result<Memory> {
        // SAFETY: a fresh mapping at an address of the kernel's choice; no existing memory is
        // touched. The file cannot shrink.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                layout::TOTAL_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &fd,
                0,
            )?
        };
        let start = NonNull::new(start.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Memory {
            fd,
            start,
            nodes: Mutex::default(),
            opens: Mutex::default(),
            intents: Mutex::default(),
            full: AtomicBool::new(false),
            frozen: AtomicBool::new(false),
        })
    }

    /// The descriptor, to be held by the supervisor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn word(&self, at: usize, index: usize) -> &AtomicU64 {
        let offset = at + index * WORD;
        assert!(offset + WORD <= layout::TOTAL_BYTES);
        // SAFETY: within the mapping, aligned because `at` is, and reached by atomic operations
        // only.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast()) }
    }

    pub(crate) fn header(&self, index: usize) -> &AtomicU64 {
        self.word(layout::HEADER_AT, index)
    }

    /// Writes the header of a new mount, before its first request.
    pub(crate) fn begin(&self, about: &Header<'_>) {
        for (at, path, len) in [
            (layout::SOURCE_AT, about.source, header::SOURCE_BYTES),
            (layout::MOUNTPOINT_AT, about.mountpoint, header::MOUNTPOINT_BYTES),
        ] {
            let bytes = path.as_os_str().as_bytes();
            let bytes = &bytes[..bytes.len().min(layout::PATH_BYTES_MAX)];
            self.store_bytes(at, 0, bytes);
            self.header(len).store(bytes.len() as u64, Ordering::Release);
        }
        for (index, value) in [
            (header::MAGIC, layout::MAGIC),
            (header::VERSION, layout::VERSION),
            (header::MINOR, about.minor.into()),
            (header::CAPABILITIES, about.capabilities),
            (header::WRITE_BACK, about.write_back.into()),
            (header::ROOT, about.root.into()),
            (header::OWN_DEVICE, about.own_device),
            (header::COMPLETE, 1),
        ] {
            self.header(index).store(value, Ordering::Release);
        }
    }

    /// From now on dropped slots stay unchanged, because they belong to the successor.
    pub(crate) fn freeze(&self) {
        self.frozen.store(true, Ordering::Release);
    }

    /// Whether the slots belong to the successor.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Acquire)
    }

    /// Records that this daemon has answered a request.
    pub(crate) fn served(&self) {
        let served = self.header(header::SERVED);
        if served.load(Ordering::Relaxed) == 0 {
            served.store(1, Ordering::Relaxed);
        }
    }

    /// Records the device with this index.
    pub(crate) fn record_device(&self, index: usize, device: u64) {
        if index < layout::DEVICES_MAX {
            self.header(header::FIRST_DEVICE + index).store(device, Ordering::Release);
            self.header(header::DEVICES).fetch_max(index as u64 + 1, Ordering::Release);
        }
    }

    fn store_bytes(&self, at: usize, index: usize, bytes: &[u8]) {
        for (word, chunk) in bytes.chunks(WORD).enumerate() {
            let mut value = [0; WORD];
            value[..chunk.len()].copy_from_slice(chunk);
            self.word(at, index + word).store(u64::from_ne_bytes(value), Ordering::Release);
        }
    }

    fn take(&self, free: &Mutex<Free>, max: usize, used_word: usize, what: &str) -> Option<u32> {
        let mut free = free.lock();
        if let Some(slot) = free.slots.pop() {
            return Some(slot);
        }
        if free.used as usize == max {
            if !self.full.swap(true, Ordering::Relaxed) {
                tracing::warn!("more than {max} {what}: those beyond would be lost if this daemon had to be replaced");
            }
            return None;
        }
        let slot = free.used;
        free.used += 1;
        self.header(used_word).store(free.used.into(), Ordering::Release);
        Some(slot)
    }

    /// Takes a slot for a node. `None` if there are too many.
    pub(crate) fn take_node(self: &Arc<Memory>) -> Option<NodeSlot> {
        let index = self.take(&self.nodes, layout::NODES_MAX, header::NODES_USED, "inodes")?;
        Some(self.node_at(index))
    }

    /// The slot of a node that was taken over.
    pub(crate) fn node_at(self: &Arc<Memory>, index: u32) -> NodeSlot {
        NodeSlot { memory: self.clone(), index }
    }

    /// Takes a slot for an open file. `None` if there are too many.
    pub(crate) fn take_open(self: &Arc<Memory>) -> Option<OpenSlot> {
        let index = self.take(&self.opens, layout::OPENS_MAX, header::OPENS_USED, "open files")?;
        Some(self.open_at(index))
    }

    /// The slot of an open file that was taken over.
    pub(crate) fn open_at(self: &Arc<Memory>, index: u32) -> OpenSlot {
        OpenSlot { memory: self.clone(), index }
    }

    /// Takes a slot for a worker's intents. `None` only if consecutively killed daemons have left
    /// hundreds of them.
    pub(crate) fn take_intent(self: &Arc<Memory>) -> Option<IntentSlot> {
        let index = self.intents.lock().pop()?;
        Some(IntentSlot { memory: self.clone(), index })
    }

    /// The slot of an unfinished operation, to be cleared when its request is answered.
    pub(crate) fn intent_at(self: &Arc<Memory>, index: u32) -> IntentSlot {
        IntentSlot { memory: self.clone(), index }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and every slot holds this value alive.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), layout::TOTAL_BYTES) };
    }
}

/// Takes the lock of the daemon that serves the mount, until this process ends: two daemons would
/// destroy each other's state. If only remaining threads of a killed daemon hold the lock,
/// [`Memory::claim_when_free`] takes it later.
fn claim(fd: &OwnedFd) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match fcntl_lock(fd, FlockOperation::NonBlockingLockExclusive) {
            // Its remaining threads wait in the kernel for answers of this daemon.
            Err(Errno::AGAIN | Errno::ACCESS) if holder_is_dying(fd) => return Ok(()),
            Err(Errno::AGAIN | Errno::ACCESS) if start.elapsed() < CLAIM_LIMIT => std::thread::sleep(CLAIM_AGAIN),
            Err(Errno::AGAIN | Errno::ACCESS) => {
                let why = "another daemon still serves it; end that one first";
                return Err(io::Error::new(io::ErrorKind::ResourceBusy, why));
            }
            result => return Ok(result?),
        }
    }
}

/// Whether the process that holds the lock was killed, and only threads that wait in the kernel are
/// left of it.
fn holder_is_dying(fd: &OwnedFd) -> bool {
    use rustix::fd::AsRawFd;
    // SAFETY: all fields are integers, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    // SAFETY: the call reads and writes `lock` only, which outlives it.
    let result = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLK, &mut lock) };
    if result != 0 || lock.l_type == libc::F_UNLCK as libc::c_short {
        return false;
    }
    os::process::is_dying(lock.l_pid)
}

/// A node's slot.
pub(crate) struct NodeSlot {
    memory: Arc<Memory>,
    index: u32,
}

impl NodeSlot {
    fn word(&self, index: usize) -> &AtomicU64 {
        self.memory.word(layout::NODES_AT + self.index as usize * layout::NODE_BYTES, index)
    }

    /// Fills the slot for a node with one lookup. After the last store the slot is valid.
    pub(crate) fn fill(
        &self,
        nodeid: u64,
        identity: FileIdentity,
        key: u32,
        kind: u32,
        flags: u64,
        handle: Option<(i32, &[u8])>,
    ) {
        let (handle_kind, handle_bytes) = handle.unwrap_or_default();
        self.memory.store_bytes(
            layout::NODES_AT + self.index as usize * layout::NODE_BYTES,
            node::HANDLE_BYTES,
            &handle_bytes[..handle_bytes.len().min(layout::HANDLE_BYTES_MAX)],
        );
        for (index, value) in [
            (node::LOOKUPS, 1),
            (node::DEVICE, identity.device),
            (node::INODE, identity.inode),
            (node::GENERATION, identity.generation),
            (node::KEY_AND_KIND, u64::from(kind) << 32 | u64::from(key)),
            (node::FLAGS, flags),
            (node::STAMP_SEQUENCE, 0),
            (node::HANDLE, u64::from(handle_kind as u32) | (handle_bytes.len() as u64) << 32),
            (node::BACKING, 0),
            (node::NAME_LEN, 0),
            (node::NODE, nodeid),
        ] {
            self.word(index).store(value, Ordering::Release);
        }
    }

    /// Frees the slot: the kernel has forgotten the node.
    pub(crate) fn clear(&self) {
        self.word(node::NODE).store(0, Ordering::Release);
    }

    /// Number of lookups of the node, minus those that the kernel has given back.
    pub(crate) fn lookups(&self) -> &AtomicU64 {
        self.word(node::LOOKUPS)
    }

    pub(crate) fn set_flag(&self, flag: u64) {
        if self.word(node::FLAGS).load(Ordering::Relaxed) & flag == 0 {
            self.word(node::FLAGS).fetch_or(flag, Ordering::Release);
        }
    }

    pub(crate) fn clear_flag(&self, flag: u64) {
        if self.word(node::FLAGS).load(Ordering::Relaxed) & flag != 0 {
            self.word(node::FLAGS).fetch_and(!flag, Ordering::Release);
        }
    }

    /// Records the kernel's id of the backing file for passthrough, if there is one.
    pub(crate) fn record_backing(&self, backing: Option<u32>) {
        self.word(node::BACKING).store(backing.unwrap_or(0).into(), Ordering::Release);
    }

    /// Records the stamp of the file, if the kernel's cache is not older than it; `None` if this is
    /// unknown. Only one caller at a time.
    pub(crate) fn record_stamp(&self, stamp: Option<Stamp>) {
        let sequence = self.word(node::STAMP_SEQUENCE);
        let before = sequence.load(Ordering::Relaxed);
        let Some(stamp) = stamp else { return sequence.store(before | 1, Ordering::Release) };
        let (mtime, ctime) = (stamp.mtime_ns as u128, stamp.ctime_ns as u128);
        let words = [stamp.size_bytes, mtime as u64, (mtime >> 64) as u64, ctime as u64, (ctime >> 64) as u64];
        let is_whole = before != 0 && before.is_multiple_of(2);
        if is_whole && (0..).zip(words).all(|(at, word)| self.word(node::STAMP + at).load(Ordering::Relaxed) == word) {
            return;
        }
        sequence.store(before | 1, Ordering::Release);
        for (at, word) in (0..).zip(words) {
            self.word(node::STAMP + at).store(word, Ordering::Release);
        }
        sequence.store((before | 1) + 1, Ordering::Release);
    }

    /// Records the name that the kernel may cache for long, if there is one. Returns false if the
    /// name is too long. Only one caller at a time.
    pub(crate) fn record_name(&self, name: Option<(u64, &CStr)>) -> bool {
        self.word(node::NAME_LEN).store(0, Ordering::Release);
        let Some((parent, name)) = name else { return true };
        let bytes = name.to_bytes();
        if bytes.is_empty() || bytes.len() > layout::NAME_BYTES_MAX {
            return false;
        }
        self.word(node::NAME_PARENT).store(parent, Ordering::Release);
        let at = layout::NODES_AT + self.index as usize * layout::NODE_BYTES;
        self.memory.store_bytes(at, node::NAME_BYTES, bytes);
        self.word(node::NAME_LEN).store(bytes.len() as u64, Ordering::Release);
        true
    }
}

impl Drop for NodeSlot {
    fn drop(&mut self) {
        if !self.memory.is_frozen() {
            self.clear();
            self.memory.nodes.lock().slots.push(self.index);
        }
    }
}

/// The slot of an open file.
pub(crate) struct OpenSlot {
    memory: Arc<Memory>,
    index: u32,
}

impl OpenSlot {
    fn word(&self, index: usize) -> &AtomicU64 {
        self.memory.word(layout::OPENS_AT + self.index as usize * layout::OPEN_BYTES, index)
    }

    pub(crate) fn fill(&self, handle: u64, nodeid: u64, is_directory: bool, uid: u32, flags: u32) {
        for (index, value) in [
            (open::NODE, nodeid),
            (open::IS_DIRECTORY, is_directory.into()),
            (open::USER, (u64::from(uid) + 1) | u64::from(flags) << open::FLAGS_SHIFT),
            (open::HANDLE, handle),
        ] {
            self.word(index).store(value, Ordering::Release);
        }
    }
}

impl Drop for OpenSlot {
    fn drop(&mut self) {
        if !self.memory.is_frozen() {
            self.word(open::HANDLE).store(0, Ordering::Release);
            self.memory.opens.lock().slots.push(self.index);
        }
    }
}

/// A worker's slot for intents. Its content outlives the worker, until the request is answered.
pub(crate) struct IntentSlot {
    memory: Arc<Memory>,
    index: u32,
}

impl IntentSlot {
    fn word(&self, index: usize) -> &AtomicU64 {
        self.memory.word(layout::INTENTS_AT + self.index as usize * layout::INTENT_BYTES, index)
    }

    /// Records that the request is about to be applied.
    pub(crate) fn begin(&self, request: u64, opcode: u32, subject: u64) {
        self.clear();
        for (index, value) in [
            (intent::REQUEST, request),
            (intent::OPCODE, opcode.into()),
            (intent::SUBJECT, subject),
            (intent::PHASE, intent::BEGUN),
        ] {
            self.word(index).store(value, Ordering::Release);
        }
    }

    /// Records the result of the request.
    pub(crate) fn done(&self, errno: i32, value: u64) {
        for (index, value) in [(intent::ERRNO, errno as u64), (intent::VALUE, value), (intent::PHASE, intent::DONE)] {
            self.word(index).store(value, Ordering::Release);
        }
    }

    /// Frees the slot after the answer.
    pub(crate) fn clear(&self) {
        self.word(intent::PHASE).store(intent::NONE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_writes_the_next_reads() {
        let memory = Arc::new(Memory::create().unwrap());
        let (source, mountpoint) = (Path::new("/a/source"), Path::new("/mnt"));
        memory.begin(&Header {
            minor: 40,
            capabilities: 1 << 39,
            write_back: true,
            root: true,
            own_device: 77,
            source,
            mountpoint,
        });
        memory.record_device(1, 5);
        let identity = FileIdentity { device: 1, inode: 2, generation: 3 };
        let stamp = Stamp { size_bytes: 9, mtime_ns: -5, ctime_ns: i128::MAX };
        let slots: Vec<_> = (0..3).map(|_| memory.take_node().unwrap()).collect();
        for (number, slot) in (10..).zip(&slots) {
            slot.fill(number, identity, 4, 0o100_000, node::DELETED, Some((1, &[7; 20])));
            slot.record_stamp(Some(stamp));
            slot.record_backing(Some(7));
            assert!(slot.record_name(Some((1, c"a name"))) && !slot.record_name(Some((1, &c"x".repeat(300)))));
            slot.record_name(Some((1, c"a name")));
        }
        slots[2].record_stamp(None);
        slots[1].clear();
        let open = memory.take_open().unwrap();
        open.fill(3, 10, true, 1000, 2);
        let intent = memory.take_intent().unwrap();
        intent.begin(8, 9, 10);
        intent.done(2, 11);
        let fd = rustix::io::dup(memory.fd()).unwrap();
        let (successor, state) = Memory::take_over(fd).unwrap();
        assert_eq!((state.source.as_path(), state.mountpoint.as_path()), (source, mountpoint));
        assert_eq!((state.own_device, state.devices.as_slice(), state.write_back), (77, &[0, 5][..], true));
        let found: Vec<_> = state.nodes.iter().map(|node| (node.nodeid, node.stamp)).collect();
        assert_eq!(found, [(10, Some(stamp)), (12, None)]);
        let first = &state.nodes[0];
        assert_eq!((first.identity, first.key, first.kind, first.flags), (identity, 4, 0o100_000, node::DELETED));
        assert_eq!(first.handle, Some((1, vec![7; 20])));
        assert_eq!((&first.name, first.backing), (&Some((1, c"a name".to_owned())), Some(7)));
        assert_eq!(state.opens.iter().map(|open| (open.uid, open.flags)).collect::<Vec<_>>(), [(Some(1000), 2)]);
        assert_eq!(state.intents[0].done, Some((2, 11)));
        let successor = Arc::new(successor);
        assert_eq!(successor.take_node().unwrap().index, 1, "the free slot, and no other");
        assert_ne!(successor.take_intent().unwrap().index, state.intents[0].slot);
    }

    /// Another process with that memory, which runs `then` and writes a line.
    fn with_other(memory: &Memory, then: &str) -> (std::process::Child, String) {
        use std::io::BufRead;
        let path = format!("/proc/{}/fd/{}", std::process::id(), rustix::fd::AsRawFd::as_raw_fd(&memory.fd));
        let script = format!("import fcntl, sys, time\nfile = open({path:?}, 'r+b')\n{then}");
        let mut python = std::process::Command::new("python3");
        let pipe = std::process::Stdio::piped;
        let mut child = python.args(["-c", &script]).stdin(pipe()).stdout(pipe()).spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (child, line)
    }

    #[test]
    fn what_could_not_be_claimed_at_first_is_claimed_when_the_one_before_is_gone() {
        let fd = memfd_create("pumapool-state", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, layout::TOTAL_BYTES as u64).unwrap();
        let memory = Arc::new(Memory::map(fd).unwrap());
        let hold = "fcntl.lockf(file, fcntl.LOCK_EX)\nprint('holds it', flush=True)\nsys.stdin.read()";
        let (mut before, line) = with_other(&memory, hold);
        assert_eq!(line, "holds it\n");
        assert!(!holder_is_dying(&memory.fd));
        memory.claim_when_free();
        before.kill().unwrap();
        before.wait().unwrap();
        // It has it only until somebody else wants it, unless we do.
        let try_it = "for _ in range(3000):
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print('held', flush=True)
        sys.exit()
    fcntl.lockf(file, fcntl.LOCK_UN)
    time.sleep(0.01)
print('free')";
        let (mut after, line) = with_other(&memory, try_it);
        after.wait().unwrap();
        assert_eq!(line, "held\n");
    }

    trait Repeat {
        fn repeat(&self, times: usize) -> std::ffi::CString;
    }

    impl Repeat for CStr {
        fn repeat(&self, times: usize) -> std::ffi::CString {
            std::ffi::CString::new(self.to_bytes().repeat(times)).unwrap()
        }
    }
}
