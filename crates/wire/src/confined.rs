//! Confines threads that parse network data.
//!
//! A fault in a parser must give away as little as possible. So such a thread drops its
//! capabilities, and a seccomp filter permits only the system calls that its [`Work`] needs. It
//! starts no program or process, mounts nothing, traces no process, loads nothing into the kernel,
//! and changes no rights, names or folders.
//!
//! Any other call fails with ENOSYS and ends nothing: after this error alone the C library tries
//! the older call with the same effect. Threads that such a thread starts are confined as well; all
//! others are unchanged. If the kernel has no seccomp, or the crate that makes the filters does not
//! support the processor, only the capabilities are dropped.
//!
//! All threads share one memory: this is a hurdle, not a wall.

use libc::c_long;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;
use std::sync::OnceLock;

/// The work of a thread, which determines its permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Serving incoming connections: no file is opened, and no connection made. So the backtrace of
    /// a panic lacks the names; its message and place are there.
    Serving,
    /// Making connections, and looking up names, which opens files for reading.
    Connecting,
    /// Serving a guest: the thread opens the image of its disk, by name and by handle.
    Placing,
}

/// No capability.
pub const NOTHING: CapabilitySet = CapabilitySet::empty();

/// These permit access to a Unix socket, or a file, of another user.
pub const FILES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::DAC_READ_SEARCH);

/// These are always permitted: using open files, waiting, memory, threads of this process, time,
/// and the end of a thread or the process after a panic.
const ALWAYS: &[c_long] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_ftruncate,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_restart_syscall,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    // For many places in our own memory at once.
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_membarrier,
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrusage,
    libc::SYS_getrandom,
    libc::SYS_uname,
    libc::SYS_sysinfo,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_capget,
];

/// These are also permitted for work that opens files: the resolver of names needs many.
const OPENING: &[c_long] = &[
    libc::SYS_readlinkat,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_statfs,
    libc::SYS_fstatfs,
    libc::SYS_fadvise64,
];

/// These are also permitted for [`Work::Connecting`]: sockets, and waiting for many of them.
const CONNECTING: &[c_long] = &[
    libc::SYS_socketpair,
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_pipe2,
];

/// These are also permitted for [`Work::Placing`]. A filter cannot see how openat2 opens a file.
const PLACING: &[c_long] = &[
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_mincore,
    libc::SYS_readahead,
    libc::SYS_pwrite64,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
];

/// The older forms of some of [`ALWAYS`], [`OPENING`] and [`PLACING`], which exist on this
/// processor only.
#[cfg(target_arch = "x86_64")]
const OLD: [&[c_long]; 3] = [
    &[libc::SYS_poll, libc::SYS_select, libc::SYS_epoll_wait, libc::SYS_time, libc::SYS_getrlimit],
    &[libc::SYS_stat, libc::SYS_lstat, libc::SYS_access, libc::SYS_readlink, libc::SYS_getdents],
    &[libc::SYS_open],
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: [&[c_long]; 3] = [&[]; 3];

/// Kinds of sockets for lenders and name servers. Other kinds belong to rarely used parts of the
/// kernel.
const FAMILIES: [libc::c_int; 5] = [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX, libc::AF_VSOCK, libc::AF_NETLINK];

/// Requests of ioctl: blocking mode, available bytes, whether it is a terminal, and the pages of a
/// lender that the kernel has taken (PAGEMAP_SCAN).
const REQUESTS: [u64; 5] = [libc::FIONBIO, libc::FIOCLEX, libc::FIONREAD, libc::TCGETS, 0xc060_6610];

/// Requests of prctl: a thread's name.
const NAMING: [libc::c_int; 2] = [libc::PR_SET_NAME, libc::PR_GET_NAME];

/// Flags that an open for reading does not have.
const CHANGING: libc::c_int = libc::O_ACCMODE | libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE & !libc::O_DIRECTORY;

/// Confines this thread to that work, for good. It keeps only the `needed` capabilities.
pub fn confine(work: Work, needed: CapabilitySet) {
    static PROGRAMS: [OnceLock<Option<BpfProgram>>; 3] = [const { OnceLock::new() }; 3];
    if let Ok(sets) = capabilities(None) {
        let left = CapabilitySets {
            effective: sets.effective & needed,
            permitted: sets.permitted & needed,
            inheritable: CapabilitySet::empty(),
        };
        let _ = set_capabilities(None, left);
    }
    // Makes rustix find out once how to read the clock, because it opens a file for this on older
    // kernels.
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Without this, an ordinary user may install no filter.
    let _ = set_no_new_privs(true);
    let made =
        || filter(work).inspect_err(|error| tracing::debug!(%error, "no filter for threads of the network")).ok();
    if let Some(program) = PROGRAMS[work as usize].get_or_init(made)
        && let Err(error) = seccompiler::apply_filter(program)
    {
        tracing::debug!(%error, "this kernel takes no filter for a thread of the network");
    }
}

/// The filter of that work.
fn filter(work: Work) -> Result<BpfProgram, BackendError> {
    // A call without rules is always permitted; one with rules only if one of them matches.
    let mut calls: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let additions: &[&[c_long]] = match work {
        Work::Serving => &[],
        Work::Connecting => &[OPENING, OLD[1], CONNECTING],
        Work::Placing => &[OPENING, OLD[1], PLACING, OLD[2]],
    };
    for call in [ALWAYS, OLD[0]].iter().chain(additions).copied().flatten() {
        calls.insert(*call, Vec::new());
    }
    calls.insert(libc::SYS_ioctl, when_any(1, &REQUESTS)?);
    calls.insert(libc::SYS_prctl, when_any(0, &NAMING.map(|name| name as u64))?);
    // Threads, not processes. A filter cannot see this for clone3; the C library falls back to
    // clone.
    let is_thread = SeccompCmpOp::MaskedEq(libc::CLONE_THREAD as u64);
    calls.insert(libc::SYS_clone, vec![when(0, is_thread, libc::CLONE_THREAD as u64)?]);
    // The limits and signals of this process only: abort sends a signal to itself.
    calls.insert(libc::SYS_prlimit64, when_any(0, &[0])?);
    calls.insert(libc::SYS_tgkill, when_any(0, &[std::process::id().into()])?);
    if work == Work::Connecting {
        calls.insert(libc::SYS_socket, when_any(0, &FAMILIES.map(|family| family as u64))?);
        let reads = |argument| when(argument, SeccompCmpOp::MaskedEq(CHANGING as u64), 0);
        calls.insert(libc::SYS_openat, vec![reads(2)?]);
        #[cfg(target_arch = "x86_64")]
        calls.insert(libc::SYS_open, vec![reads(1)?]);
    }
    let denied = SeccompAction::Errno(libc::ENOSYS as u32);
    SeccompFilter::new(calls, denied, SeccompAction::Allow, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// The rule that the lower 32 bits of an argument compare in this way with a value.
fn when(argument: u8, comparison: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, comparison, value)?])
}

/// The rules that an argument is one of these values.
fn when_any(argument: u8, values: &[u64]) -> Result<Vec<SeccompRule>, BackendError> {
    values.iter().map(|value| when(argument, SeccompCmpOp::Eq, *value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::thread::spawn;

    /// Whether it failed because the filter denies it.
    fn is_denied<T>(result: std::io::Result<T>) -> bool {
        result.err().and_then(|error| error.raw_os_error()) == Some(libc::ENOSYS)
    }

    /// Tries calls that no work needs, in a thread that must not succeed.
    fn tries_what_is_forbidden() {
        assert!(capabilities(None).unwrap().effective.is_empty());
        assert!(is_denied(Command::new("/bin/true").status()));
        assert!(is_denied(std::fs::create_dir(std::env::temp_dir().join("refused"))));
        let mount = rustix::mount::mount("none", "/mnt", "tmpfs", rustix::mount::MountFlags::empty(), None);
        assert_eq!(mount, Err(Errno::NOSYS));
        for call in [libc::SYS_execve, libc::SYS_ptrace, libc::SYS_bpf, libc::SYS_io_uring_setup, libc::SYS_clone3] {
            // SAFETY: the filter denies all of them. Without it they fail with another error for
            // these arguments.
            let result = unsafe { libc::syscall(call, -1, 0, 0, 0) };
            assert!(is_denied(if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }), "call {call}");
        }
        // Neither a signal to another process nor a new process.
        let parent = rustix::process::getppid().unwrap().as_raw_pid();
        // SAFETY: signal 0 is not delivered; it only tests the permission.
        assert_eq!(unsafe { libc::syscall(libc::SYS_tgkill, parent, parent, 0) }, -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSYS));
    }

    /// Does the things that every work needs, after the denied ones.
    fn works() {
        assert_eq!(spawn(|| vec![1u8; 1 << 24].len()).join().unwrap(), 1 << 24);
        std::thread::sleep(std::time::Duration::from_micros(1));
        // With a backtrace, which may lack names.
        assert!(
            spawn(|| panic!("a panic, as it is to be: {}", std::backtrace::Backtrace::force_capture())).join().is_err()
        );
        assert!(spawn(tries_what_is_forbidden).join().is_ok(), "threads of a confined thread are confined");
    }

    fn sends(mut near: impl Write, mut far: impl Read) {
        let mut got = [0; 5];
        near.write_all(b"bytes").unwrap();
        far.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"bytes");
    }

    /// Each in a thread of its own, which takes its confinement with it when it ends.
    #[test]
    fn a_confined_thread_does_its_work_and_nothing_else() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect(address).unwrap();
        let serving = move || {
            confine(Work::Serving, NOTHING);
            tries_what_is_forbidden();
            let server = listener.accept().unwrap().0;
            server.set_nonblocking(false).unwrap();
            sends(server.try_clone().unwrap(), &client);
            assert!(is_denied(File::open("/proc/meminfo")));
            assert!(is_denied(TcpStream::connect(address)) && is_denied(UnixStream::connect("/nowhere")));
            works();
        };
        spawn(serving).join().unwrap();

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connecting = move || {
            confine(Work::Connecting, NOTHING);
            tries_what_is_forbidden();
            let near = TcpStream::connect(("localhost", listener.local_addr().unwrap().port())).unwrap();
            sends(near, listener.accept().unwrap().0);
            assert!(std::fs::read_to_string("/proc/meminfo").unwrap().contains("MemTotal"));
            let file = std::env::temp_dir().join("refused");
            assert!(
                is_denied(std::fs::write(&file, "bytes")) && is_denied(File::options().write(true).open("/dev/null"))
            );
            let family = rustix::net::AddressFamily::from_raw(libc::AF_ALG as u16);
            assert_eq!(rustix::net::socket(family, rustix::net::SocketType::SEQPACKET, None).err(), Some(Errno::NOSYS));
            works();
        };
        spawn(connecting).join().unwrap();

        let placing = || {
            confine(Work::Placing, NOTHING);
            tries_what_is_forbidden();
            assert!(File::open("/proc/meminfo").is_ok() && is_denied(TcpStream::connect("127.0.0.1:1")));
            assert!(rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).is_ok());
            works();
        };
        spawn(placing).join().unwrap();
        assert!(Command::new("/bin/true").status().unwrap().success(), "others are as they were");
    }

    #[test]
    fn of_its_capabilities_a_thread_keeps_what_it_needs() {
        let before = capabilities(None).unwrap().effective;
        let kept = spawn(|| {
            confine(Work::Connecting, FILES);
            capabilities(None).unwrap()
        });
        let kept = kept.join().unwrap();
        assert_eq!((kept.effective, kept.permitted, kept.inheritable), (before & FILES, before & FILES, NOTHING));
        assert_eq!(capabilities(None).unwrap().effective, before, "others are as they were");
    }
}
