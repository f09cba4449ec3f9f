//! A process for tests/vm/numa whose memory is placed: each thread is bound to a processor, uses
//! memory and checks every byte.
//!
//!   probe REPORT MIB local|first|shared
//!
//! MIB is each thread's part. With `local` each thread touches its own part first, and uses it.
//! With `first` the first thread touches all of it. With `shared` the first thread touches all of
//! it, and all threads use all. On SIGUSR1 the process writes the node of each page, as the kernel
//! reports it (get_mempolicy(2)), to REPORT. On SIGUSR2 the threads free their parts and take new
//! ones first. The process ends when a byte has a wrong value.

use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Barrier, RwLock};
use std::time::Duration;

const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;
const WORDS: usize = PAGE / 8;
/// Between two rounds of a thread, so that other programs can run.
const PAUSE: Duration = Duration::from_millis(5);
const MPOL_F_NODE: libc::c_int = 1;
const MPOL_F_ADDR: libc::c_int = 2;

/// Memory of so many pages. It begins at an address where a huge page can begin, so no two threads
/// share one.
struct Part(usize, usize, usize);

impl Part {
    fn new(pages: usize) -> Part {
        let (rights, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE + HUGE_PAGE, rights, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        Part((at as usize).next_multiple_of(HUGE_PAGE), pages, at as usize)
    }

    fn word(&self, page: usize) -> &AtomicUsize {
        // SAFETY: within the mapping, aligned, and only ever used as this type.
        unsafe { &*((self.0 + page * PAGE) as *const AtomicUsize) }
    }

    fn touch(&self) {
        (0..self.1).for_each(|page| self.word(page).store(self.0 + page * WORDS, SeqCst));
    }

    fn check(&self) {
        for page in 0..self.1 {
            // The value stays the same; but it is written.
            let word = self.word(page).load(SeqCst);
            self.word(page).store(word, SeqCst);
            assert_eq!(word, self.0 + page * WORDS, "a page is not what it was");
        }
    }

    fn nodes(&self) -> BTreeMap<i32, usize> {
        let mut nodes = BTreeMap::new();
        for page in 0..self.1 {
            let mut node: libc::c_int = -1;
            let none = std::ptr::null_mut::<libc::c_ulong>();
            // SAFETY: it writes the node's number, and nothing else.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_get_mempolicy,
                    &raw mut node,
                    none,
                    0,
                    self.0 + page * PAGE,
                    MPOL_F_NODE | MPOL_F_ADDR,
                )
            };
            assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
            *nodes.entry(node).or_default() += 1;
        }
        nodes
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: what `new` mapped, once.
        unsafe { libc::munmap(self.2 as *mut _, self.1 * PAGE + HUGE_PAGE) };
    }
}

fn node_of_this_thread() -> u32 {
    let (mut cpu, mut node) = (0u32, 0u32);
    // SAFETY: the kernel writes the two numbers.
    unsafe { libc::syscall(libc::SYS_getcpu, &raw mut cpu, &raw mut node, std::ptr::null_mut::<u8>()) };
    node
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    // Other programs read the following output.
    let [_, report, mib, mode, ..] = &arguments[..] else { panic!("probe REPORT MIB local|first|shared") };
    let pages = mib.parse::<usize>().unwrap() << 20 >> 12;
    let cpus = std::thread::available_parallelism().unwrap().get();
    // The first thread allocates the memory; `mode` determines which threads touch it.
    let parts: Vec<RwLock<Part>> = (0..cpus).map(|_| RwLock::new(Part::new(pages))).collect();
    if mode != "local" {
        pin(0);
        parts.iter().for_each(|part| part.read().unwrap().touch());
    }
    let (ready, round, reuse) = (Barrier::new(cpus + 1), AtomicUsize::new(0), Barrier::new(cpus + 1));
    let ends = AtomicBool::new(false);
    let nodes: Vec<AtomicUsize> = (0..cpus).map(|_| AtomicUsize::new(0)).collect();
    let mut signals = Signals::new([SIGUSR1, SIGUSR2, SIGTERM]).unwrap();
    std::thread::scope(|scope| {
        for cpu in 0..cpus {
            let (parts, ready, round, reuse, nodes, ends) = (&parts, &ready, &round, &reuse, &nodes, &ends);
            scope.spawn(move || {
                pin(cpu);
                nodes[cpu].store(node_of_this_thread() as usize, SeqCst);
                if mode == "local" {
                    parts[cpu].read().unwrap().touch();
                }
                ready.wait();
                let mut seen = 0;
                while !ends.load(SeqCst) {
                    if round.load(SeqCst) > seen {
                        seen += 1;
                        *parts[cpu].write().unwrap() = Part::new(pages);
                        parts[cpu].read().unwrap().touch();
                        reuse.wait();
                    }
                    let used = if mode == "shared" { 0..cpus } else { cpu..cpu + 1 };
                    used.for_each(|part| parts[part].read().unwrap().check());
                    std::thread::sleep(PAUSE);
                }
            });
        }
        ready.wait();
        println!("READY");
        for signal in signals.forever() {
            if signal == SIGTERM {
                ends.store(true, SeqCst);
                break;
            }
            if signal == SIGUSR2 {
                round.fetch_add(1, SeqCst);
                reuse.wait();
            }
            let threads: Vec<serde_json::Value> = (0..cpus)
                .map(|cpu| {
                    let part = parts[cpu].read().unwrap();
                    serde_json::json!({ "node": nodes[cpu].load(SeqCst), "pages_by_node": part.nodes() })
                })
                .collect();
            std::fs::write(format!("{report}.new"), serde_json::to_vec(&threads).unwrap()).unwrap();
            std::fs::rename(format!("{report}.new"), report).unwrap();
        }
    });
}

fn pin(cpu: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).unwrap();
}
