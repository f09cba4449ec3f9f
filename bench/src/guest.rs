//! `guest`: the cost of giving evictions to the host for the evicting machine
//! (`pumapool host-cache guest`).
//!
//! Pages of a file on the disk are evicted at once in four states: with no tap, with a tap whose
//! pages nobody uses, with a guest's daemon that is connected to its host, and with the same daemon
//! without its host. The host runs on this machine, too. It has no hashes of this disk, so it
//! refuses every page after it has received it, like one whose image was changed.

use crate::figures::Series;
use crate::tap::was_evicted;
use crate::worker::Order;
use crate::world::{Worker, World, filesystem_of};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Duration;
use tap::{BpfTap, EvictionSource, Target};
use testbed::{Failure, Process, ask_daemon, wait_until};

/// The maximum: the time of an eviction over that with the tap alone, and, with no host, over that
/// with no tap.
const OVER_TAP_WANTED: f64 = 1.2;
/// Evicted at once: half the ring.
const EVICT_BYTES: u64 = 16 << 20;
const RING_BYTES: usize = 32 << 20;
const RING: &str = "32MiB";
/// Size of the host's image.
const IMAGE_BYTES: u64 = 1 << 20;
const POLL: Duration = Duration::from_millis(50);
/// Time limits for a daemon's answer; until guest and host are connected or disconnected; until all
/// is sent.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Attempts to measure one figure.
const TRIES_MAX: u32 = 4;

#[derive(Clone, Copy)]
enum With {
    Nothing,
    Tap,
    Host,
    NoHost,
}

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let (rounds, times) = (extent.choose(9, 5, 1), extent.choose(15, 7, 2));
    let evict_bytes = extent.choose(EVICT_BYTES, EVICT_BYTES, 1 << 20);
    let wanted_pages = times as u64 * evict_bytes / PAGE_SIZE as u64;
    let file = world.file("evicted", evict_bytes)?;
    let disk = filesystem_of(&file).map_err(Failure::attempted("finding the disk"))?;
    let (images, served) = (world.directory("images")?, world.directory("served")?);
    let image = images.join("disk.img");
    std::fs::File::create(&image)
        .and_then(|image| image.set_len(IMAGE_BYTES))
        .map_err(Failure::attempted("making an image"))?;
    let mut worker = Worker::start(&world.interrupt, &[])?;
    println!("{} MiB evicted at once, {times} times in each of {rounds} rounds", evict_bytes >> 20);
    let mut measured: [Series; 4] = Default::default();
    for round in 0..rounds {
        let mut order = [With::Nothing, With::Tap, With::Host, With::NoHost];
        order.rotate_left(round % 4);
        for with in order {
            let mut evict = || {
                let order = Order::Evict { path: file.clone(), len_bytes: evict_bytes, times };
                worker.obey(&order).map(|report| report.p50_ns as f64)
            };
            let ns = undisturbed(|| match with {
                With::Nothing => evict().map(Some),
                With::Tap => {
                    let alone = Alone::start(&file)?;
                    let ns = evict()?;
                    Ok(alone.has_seen(wanted_pages)?.then_some(ns))
                }
                With::Host => {
                    let host = world.serve_images(&images, &served)?;
                    let guest = Guest::start(world, &disk)?;
                    let ns = evict()?;
                    let has_sent = guest.has_sent(wanted_pages)?;
                    drop(guest);
                    host.end().map_err(Failure::Problem)?;
                    Ok(has_sent.then_some(ns))
                }
                With::NoHost => {
                    let host = world.serve_images(&images, &served)?;
                    let guest = Guest::start(world, &disk)?;
                    host.end().map_err(Failure::Problem)?;
                    guest.wait_until_connected(false)?;
                    evict().map(Some)
                }
            })?;
            measured[with as usize].add(ns);
        }
    }
    let [nothing, tap, host, no_host] = &measured;
    let (over_tap, over_nothing) = (host.over(tap), no_host.over(nothing));
    println!(
        "evicting a page: {} ns with no tap, {} ns with the tap alone, {} ns with a host, {} ns when it has gone",
        nothing.text(0),
        tap.text(0),
        host.text(0),
        no_host.text(0)
    );
    println!("with a host over the tap alone: {} (at most {OVER_TAP_WANTED} is wanted)", over_tap.text(2));
    println!("without a host over no tap: {}", over_nothing.text(2));
    Ok(crate::members(json!({
        "over_tap_ratio": over_tap.median(),
        "over_tap_ratio_wanted": OVER_TAP_WANTED,
        "no_host_ratio": over_nothing.median(),
        "over_tap_rounds": over_tap.json(),
        "no_host_rounds": over_nothing.json(),
        "nothing_ns": nothing.json(),
        "tap_ns": tap.json(),
        "host_ns": host.json(),
        "no_host_ns": no_host.json(),
        "rounds": rounds,
    })))
}

/// A tap whose pages nobody uses.
struct Alone {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<io::Result<tap::Counters>>>,
}

impl Alone {
    fn start(file: &Path) -> Result<Alone, Failure> {
        let device =
            rustix::fs::stat(file).map_err(|errno| Failure::attempted("looking at the file")(errno.into()))?.st_dev;
        let stop = Arc::new(AtomicBool::new(false));
        let (report, reported) = sync_channel(1);
        let is_over = stop.clone();
        let run = move || {
            let loaded =
                BpfTap::load_with_added(Target { device, ..Target::default() }, RING_BYTES).map_err(io::Error::other);
            let _ = report.send(());
            let (mut tap, mut added) = loaded?;
            loop {
                // Read before the ring is read: all evictions until then are taken.
                let is_last = is_over.load(Ordering::Acquire);
                added.take(&mut |_| {})?;
                tap.poll(POLL, &mut |eviction| {
                    std::hint::black_box(eviction.page.copied());
                })?;
                if is_last {
                    return Ok(tap.counters());
                }
            }
        };
        let thread = std::thread::Builder::new().name("tap".into()).spawn(run);
        let thread = thread.map_err(Failure::attempted("starting a thread"))?;
        let _ = reported.recv();
        Ok(Alone { stop, thread: Some(thread) })
    }

    /// Whether it has seen all, and nothing else.
    fn has_seen(mut self, wanted_pages: u64) -> Result<bool, Failure> {
        let ended = self.join().ok_or_else(|| Failure::Problem("the tap's thread has panicked".to_owned()))?;
        let counters = ended.map_err(Failure::attempted("tapping"))?;
        had_room(counters.captured, counters.ring_full, wanted_pages)
    }

    fn join(&mut self) -> Option<io::Result<tap::Counters>> {
        self.stop.store(true, Ordering::Release);
        self.thread.take()?.join().ok()
    }
}

impl Drop for Alone {
    /// Also after a failure: the next measurement must not be tapped.
    fn drop(&mut self) {
        let _ = self.join();
    }
}

/// A guest's daemon.
struct Guest {
    process: Process,
}

impl Guest {
    /// Waits until it is connected to its host.
    fn start(world: &World, disk: &Path) -> Result<Guest, Failure> {
        let guest = Guest { process: world.start_guest(disk, RING)? };
        guest.wait_until_connected(true)?;
        Ok(guest)
    }

    fn status(&self) -> Result<report::Guest, Failure> {
        ask_daemon(self.process.pid(), ANSWER_MAX)
    }

    fn wait_until_connected(&self, wanted: bool) -> Result<(), Failure> {
        if wait_until(ANSWER_MAX, || self.status().is_ok_and(|status| status.connected == wanted)) {
            return Ok(());
        }
        Err(Failure::Problem(format!("the guest's daemon has the status {:?}", self.status()?)))
    }

    /// Whether all evictions were sent to its host, and nothing else.
    fn has_sent(&self, wanted_pages: u64) -> Result<bool, Failure> {
        let is_sent = |status: &report::Guest| was_evicted(status.guest.sent_pages, wanted_pages);
        wait_until(ANSWER_MAX, || self.status().is_ok_and(|status| is_sent(&status)));
        let status = self.status()?;
        let had_room = had_room(status.guest.evicted_pages, status.guest.ring_full_pages, wanted_pages)?;
        if !had_room || is_sent(&status) {
            return Ok(had_room);
        }
        Err(Failure::Problem(format!("only {} pages of {wanted_pages} were sent to the host", status.guest.sent_pages)))
    }
}

/// Whether the ring has had room for all. It has for the evictions of this bench. But the tap sees
/// all of the disk's file system, and the kernel may evict other pages meanwhile. A page without
/// room costs little, which is not the subject here.
fn had_room(captured: u64, lost: u64, wanted_pages: u64) -> Result<bool, Failure> {
    if lost > 0 {
        println!(
            "the tap captured {captured} pages, of which {wanted_pages} were evicted here, and had no room for {lost}"
        );
    } else if !was_evicted(captured, wanted_pages) {
        return Err(Failure::Problem(format!("the tap captured {captured} pages of {wanted_pages}")));
    }
    Ok(lost == 0)
}

/// Measures until no other evictions interfere.
fn undisturbed(mut measure: impl FnMut() -> Result<Option<f64>, Failure>) -> Result<f64, Failure> {
    for _ in 0..TRIES_MAX {
        if let Some(ns) = measure()? {
            return Ok(ns);
        }
    }
    let message = "the kernel evicts other files of this disk all the time; try --dir with a directory on another one";
    Err(Failure::Problem(message.to_owned()))
}
