//! Loads BPF programs, and explains in one line why one cannot be loaded.
//!
//! A mount without the tap is slower, not wrong, so no failure here is fatal. Each error names what
//! was attempted, what happened and what to do.

use libbpf_rs::{MapCore, Object, ObjectBuilder, OpenMapMut, OpenObject, PrintLevel, ProgramMut, set_print};
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The file in which a kernel describes the types that it was built with.
const KERNEL_TYPES: &str = "/sys/kernel/btf/vmlinux";

/// The maximum number of bytes of libbpf's messages that are kept while loading. The end of a
/// verifier's log has the reason, and one log can be megabytes long.
const MESSAGES_BYTES_MAX: usize = 64 * 1024;

/// Why there is no tap.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The ring's size is not a power of two within the bounds.
    #[error(
        "the eviction ring cannot have {bytes} bytes: choose a power of two from {} to {}",
        crate::BpfTap::RING_BYTES_MIN,
        crate::BpfTap::RING_BYTES_MAX
    )]
    RingBytes {
        /// The requested size.
        bytes: usize,
    },
    /// The kernel does not describe its types (BTF), so the programs cannot be fitted to it.
    #[error(
        "fitting the eviction tap to this kernel failed: {KERNEL_TYPES} is missing; use a kernel built with \
         CONFIG_DEBUG_INFO_BTF=y and mount sysfs"
    )]
    NoKernelTypes,
    /// The rights to load BPF programs are missing.
    #[error(
        "{attempt} was not permitted; run as root, or with CAP_BPF, CAP_PERFMON and CAP_SYS_ADMIN, and not under \
         kernel lockdown \"confidentiality\" or a seccomp filter without bpf(2)"
    )]
    NotPermitted {
        /// The refused operation.
        attempt: &'static str,
    },
    /// The kernel hides from us which page frames our own pages are in.
    #[error(
        "looking up page frames in /proc/self/pagemap failed: they are hidden from us; run as root or with \
         CAP_SYS_ADMIN"
    )]
    FramesHidden,
    /// The kernel has no such tracepoint.
    #[error(
        "attaching the eviction tap failed: the kernel has no tracepoint mm_filemap_delete_from_page_cache; use \
         Linux 6.1 or newer, built with CONFIG_TRACEPOINTS and CONFIG_BPF_EVENTS"
    )]
    NoTracepoint,
    /// The program does not fit this kernel: a structure has changed, or its verifier wants more.
    #[error(
        "{attempt} failed: the kernel refused the program ({detail}); the tap is made for Linux 6.1 to 6.18 on \
         x86-64: report this kernel's version"
    )]
    Refused {
        /// The refused operation.
        attempt: &'static str,
        /// The line of the kernel's answer that has the reason.
        detail: String,
    },
    /// The kernel's memory map was not found, or not beyond doubt.
    #[error(
        "finding the kernel's memory map failed: {detail}; the tap needs an x86-64 kernel with \
         CONFIG_SPARSEMEM_VMEMMAP: report this kernel's version and configuration"
    )]
    MemoryMap {
        /// The mismatch.
        detail: String,
    },
    /// A system call failed.
    #[error("{attempt} failed: {source}; see the system's limits")]
    System {
        /// The attempted operation.
        attempt: &'static str,
        /// The error.
        source: io::Error,
    },
}

/// One loading at a time: libbpf's messages go through one place of the process.
static LOADING: Mutex<()> = Mutex::new(());

/// libbpf's messages during the current loading.
static MESSAGES: Mutex<String> = Mutex::new(String::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Neither mutex protects data that a panic could leave half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn keep_message(_: PrintLevel, message: String) {
    let mut messages = locked(&MESSAGES);
    messages.push_str(&message);
    if messages.len() > MESSAGES_BYTES_MAX {
        let cut = messages.len() - MESSAGES_BYTES_MAX / 2;
        let cut = (cut..messages.len()).find(|&at| messages.is_char_boundary(at)).unwrap_or(messages.len());
        messages.drain(..cut);
    }
}

/// Keeps libbpf's messages off the user's terminal, for [`telling_line`].
struct Quiet {
    previous: Option<(PrintLevel, libbpf_rs::PrintCallback)>,
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Quiet {
    fn new() -> Quiet {
        let one_at_a_time = locked(&LOADING);
        locked(&MESSAGES).clear();
        Quiet { previous: set_print(Some((PrintLevel::Warn, keep_message))), _one_at_a_time: one_at_a_time }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        set_print(self.previous);
    }
}

/// Opens the object in `bytes`, lets `prepare` set it up, and loads it into the kernel.
pub(crate) fn load(
    bytes: &[u8],
    attempt: &'static str,
    prepare: impl FnOnce(&mut OpenObject) -> libbpf_rs::Result<()>,
) -> Result<Object, LoadError> {
    let _quiet = Quiet::new();
    let loaded = ObjectBuilder::default().open_memory(bytes).and_then(|mut object| {
        prepare(&mut object)?;
        object.load()
    });
    loaded.map_err(|error| explain(attempt, &error, &locked(&MESSAGES), Path::new(KERNEL_TYPES).exists()))
}

/// Runs `attach` without libbpf's messages on the terminal.
pub(crate) fn attach(program: &ProgramMut<'_>, attempt: &'static str) -> Result<libbpf_rs::Link, LoadError> {
    let _quiet = Quiet::new();
    program.attach().map_err(|error| match error.kind() {
        libbpf_rs::ErrorKind::NotFound => LoadError::NoTracepoint,
        _ => explain(attempt, &error, &locked(&MESSAGES), true),
    })
}

fn explain(attempt: &'static str, error: &libbpf_rs::Error, messages: &str, has_kernel_types: bool) -> LoadError {
    if !has_kernel_types {
        return LoadError::NoKernelTypes;
    }
    // The verifier answers EACCES for programs that it rejects, which has nothing to do with
    // rights; but then its log has the reason.
    if let Some(detail) = telling_line(messages) {
        return LoadError::Refused { attempt, detail };
    }
    match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => LoadError::NotPermitted { attempt },
        _ => LoadError::System { attempt, source: io::Error::other(format!("{error:#}")) },
    }
}

/// Returns the line of the verifier's log with the reason, if there is such a log.
fn telling_line(messages: &str) -> Option<String> {
    let log = messages.split_once("BEGIN PROG LOAD LOG --")?.1;
    let log = log.split_once("-- END PROG LOAD LOG").map_or(log, |(log, _)| log);
    let lines = || log.lines().map(str::trim);
    lines()
        .find(|line| line.contains("failed to resolve CO-RE"))
        .or_else(|| lines().rfind(|line| !line.is_empty() && !line.starts_with("processed ")))
        .map(str::to_owned)
}

/// Returns the program with this name.
pub(crate) fn program<'a>(object: &'a Object, name: &'static str) -> Result<ProgramMut<'a>, LoadError> {
    object.progs_mut().find(|program| program.name() == name).ok_or_else(|| missing(name))
}

/// Returns the map with this name; `.rodata` and `.bss` are found by their section (libbpf puts the
/// object's name before it).
pub(crate) fn map<'a>(object: &'a Object, name: &'static str) -> Result<libbpf_rs::Map<'a>, LoadError> {
    object.maps().find(|map| is_called(map.name(), name)).ok_or_else(|| missing(name))
}

fn is_called(full: &OsStr, name: &str) -> bool {
    let full = full.to_string_lossy();
    full == name || (name.starts_with('.') && full.ends_with(name))
}

/// Returns a map of an object that is not loaded yet.
pub(crate) fn open_map<'a>(object: &'a mut OpenObject, name: &str) -> libbpf_rs::Result<OpenMapMut<'a>> {
    object
        .maps_mut()
        .find(|map| is_called(map.name(), name))
        .ok_or_else(|| libbpf_rs::Error::from(io::Error::other(format!("the object has no map {name}"))))
}

fn missing(name: &'static str) -> LoadError {
    LoadError::System { attempt: name, source: io::Error::other("not part of the BPF object that was built in") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: &str = "libbpf: prog 'tap': BPF program load failed: Invalid argument\n\
        libbpf: prog 'tap': -- BEGIN PROG LOAD LOG --\n\
        0: R1=ctx() R10=fp0\n\
        1: <invalid CO-RE relocation>\n\
        failed to resolve CO-RE relocation <byte_off> [9] struct folio.index (0:1 @ offset 8)\n\
        processed 2 insns (limit 1000000) max_states_per_insn 0\n\
        -- END PROG LOAD LOG --\n\
        libbpf: prog 'tap': failed to load: -22\n";

    fn denied() -> libbpf_rs::Error {
        libbpf_rs::Error::from(io::Error::from(io::ErrorKind::PermissionDenied))
    }

    #[test]
    fn a_verifier_log_is_no_question_of_rights() {
        let error = explain("loading the tap", &denied(), REFUSED, true);
        assert!(
            matches!(&error, LoadError::Refused { detail, .. } if detail.contains("struct folio.index")),
            "{error}"
        );
        let plain = REFUSED.replace("failed to resolve CO-RE", "R2 is no pointer, not");
        assert!(telling_line(&plain).unwrap().starts_with("R2 is no pointer"));
    }

    #[test]
    fn no_log_means_rights_or_system() {
        assert!(matches!(explain("x", &denied(), "libbpf: Error in map", true), LoadError::NotPermitted { .. }));
        assert!(matches!(explain("x", &denied(), "", false), LoadError::NoKernelTypes));
        let other = libbpf_rs::Error::from(io::Error::from(io::ErrorKind::OutOfMemory));
        assert!(matches!(explain("x", &other, "", true), LoadError::System { .. }));
    }

    #[test]
    fn messages_stay_bounded() {
        let _quiet = Quiet::new();
        for _ in 0..100 {
            keep_message(PrintLevel::Warn, "ä".repeat(1000));
        }
        let kept = locked(&MESSAGES).len();
        assert!(kept > 0 && kept <= MESSAGES_BYTES_MAX, "{kept}");
    }

    #[test]
    fn every_error_is_one_line() {
        let errors = [
            LoadError::RingBytes { bytes: 3 },
            LoadError::NoKernelTypes,
            LoadError::NotPermitted { attempt: "loading" },
            LoadError::FramesHidden,
            LoadError::NoTracepoint,
            LoadError::Refused { attempt: "loading", detail: "d".into() },
            LoadError::MemoryMap { detail: "d".into() },
            LoadError::System { attempt: "mapping", source: io::Error::from_raw_os_error(12) },
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.contains('\n') && !text.contains("  ") && text.len() > 40, "{text:?}");
        }
    }
}
