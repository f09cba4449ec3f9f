//! `page-server`: the lender alone against memcached, as servers of pages.
//!
//! Values of 4 KiB, one server core: all threads of either server stay on one processor, the client
//! on another, if there are two. memcached is Debian's, with one worker thread, and its text
//! protocol; `set` in batches with `noreply` on all but the last, `get` with many keys. The lender
//! is that of `pumapool lend --trust-network`, because memcached seals nothing either. Client code,
//! connections and the number of pending requests are the same ([`crate::dialects`]). The floor is
//! a server that stores nothing ([`crate::null_pages`]).

use crate::dialects::{Dialect, PageLoad};
use crate::figures::Series;
use crate::worker::Order;
use crate::world::{Security, Worker, World, pin};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use testbed::{Failure, Process, wait_until_ok};

/// The minimum: ours over memcached.
const WANTED: [(&str, f64); 4] =
    [("get_ratio", 1.1), ("put_ratio", 1.0), ("batch_get_ratio", 2.0), ("batch_put_ratio", 2.0)];
/// Pages of a request.
const BATCHES: [u32; 2] = [1, 32];
/// Sessions, and so pending requests.
const SESSIONS: u32 = 8;
/// Ours, memcached, and one that stores nothing.
const SERVERS: usize = 3;
/// Memory of the servers beyond the values.
const ROOM_BYTES: u64 = 128 << 20;
const RESERVE_BYTES: u64 = 32 << 20;
/// The unit of the kernel's processor times, independent of its internal one.
const TICKS_PER_S: f64 = 100.0;
/// Time limit for memcached to listen.
const LISTEN_MAX: Duration = Duration::from_secs(10);

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let pages: u32 = extent.choose(16_384, 4096, 256);
    let (rounds, ms) = (extent.choose(11, 5, 1), extent.choose(1000, 500, 50));
    let store_bytes = u64::from(SESSIONS * pages) * PAGE_SIZE as u64;
    let folder = world.directory("memcached")?;
    let (memcached, memcached_at) = memcached(&folder, store_bytes + ROOM_BYTES)?;
    // Stored pages have room in addition to those that replace them.
    let lender = world.lend_with(Security::Trusting, 2 * store_bytes + ROOM_BYTES, 2 * store_bytes, RESERVE_BYTES)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let (null, null_at) = world.null_pages()?;
    for server in [memcached.pid(), lender.pid(), null.pid()] {
        pin(Some(server), processors - 1).map_err(Failure::attempted("having a server stay on a processor"))?;
    }
    let mut worker = Worker::start(&world.interrupt, &[])?;
    worker.obey(&Order::Stay { processor: 0 })?;
    println!(
        "{SESSIONS} sessions with {pages} pages each, one request of each under way; {rounds} rounds of {ms} ms of gets and of puts"
    );

    let servers = [
        (Dialect::Pool, lender.address.to_string(), lender.pid()),
        (Dialect::Memcached, memcached_at, memcached.pid()),
        (Dialect::Pool, null_at, null.pid()),
    ];
    // For each size of a request: gets and puts a second, ours, memcached's, and the floor's.
    let mut speeds: [[[Series; SERVERS]; 2]; 2] = Default::default();
    let mut per_core: [Series; SERVERS] = Default::default();
    for round in 0..rounds {
        for (batch, speeds) in BATCHES.into_iter().zip(&mut speeds) {
            for index in (0..SERVERS).map(|index| (index + round) % SERVERS) {
                let (dialect, address, pid) = servers[index].clone();
                let seed = world.seed.wrapping_add(round as u64);
                let load = PageLoad { address, dialect, sessions: SESSIONS, pages, batch, ms, seed };
                let before = processor_seconds(pid)?;
                let report = worker.obey(&Order::Ask(load))?;
                let used = processor_seconds(pid)? - before;
                for (series, seconds) in speeds.iter_mut().zip(&report.phase_seconds) {
                    series[index].add(1.0 / seconds);
                }
                if batch == 1 {
                    // The first filling counts too: it is the same kind of work.
                    per_core[index].add((report.operations + u64::from(SESSIONS * pages)) as f64 / used);
                }
            }
        }
    }
    let mut figures = Map::new();
    for (batch, speeds) in BATCHES.into_iter().zip(&speeds) {
        for (name, [ours, theirs, floor]) in ["get", "put"].into_iter().zip(speeds) {
            let key = if batch == 1 { format!("{name}_ratio") } else { format!("batch_{name}_ratio") };
            let (ratio, floor_ratio) = (ours.over(theirs), floor.over(theirs));
            let wanted = WANTED.into_iter().find(|(wanted, _)| *wanted == key).map_or(1.0, |(_, value)| value);
            println!(
                "{name} of {batch:2}: {} pages/s, memcached {}: {} (at least {wanted} is wanted); kept nowhere {}: {}",
                ours.text(0),
                theirs.text(0),
                ratio.text(2),
                floor.text(0),
                floor_ratio.text(2)
            );
            figures.insert(format!("floor_{key}"), floor_ratio.median().into());
            figures.insert(format!("{key}_wanted"), wanted.into());
            figures.insert(format!("{key}_rounds"), ratio.json());
            figures.insert(key, ratio.median().into());
        }
    }
    let [ours, theirs, _] = per_core;
    println!(
        "gets and puts of 1 in a second of the server's processor: {}, memcached {}",
        ours.text(0),
        theirs.text(0)
    );
    figures.extend(crate::members(json!({
        "ops_per_core": ours.median(),
        "memcached_ops_per_core": theirs.median(),
        "sessions": SESSIONS,
        "pages": pages,
        "rounds": rounds,
        "phase_ms": ms,
    })));
    Ok(figures)
}

/// Starts memcached. It writes its port, which the kernel chooses, to a file.
fn memcached(folder: &Path, bytes: u64) -> Result<(Process, String), Failure> {
    let port_file = folder.join("port");
    let mut command = Command::new("memcached");
    command.args(["-u", "root", "-l", "127.0.0.1", "-p", "-1", "-t", "1"]);
    // Twice the values, because its slabs need additional room.
    command.args(["-m", &((2 * bytes) >> 20).to_string()]).env("MEMCACHED_PORT_FILENAME", &port_file);
    command.stdin(Stdio::null()).stderr(Stdio::null());
    let process = Process::spawn(command, &[]).map_err(|error| {
        Failure::Problem(format!("starting memcached: {error}; `make bench-deps` installs Debian's"))
    })?;
    let port = wait_until_ok(LISTEN_MAX, || {
        let text = fs::read_to_string(&port_file)?;
        let port = text.lines().find_map(|line| line.strip_prefix("TCP INET: ")?.trim().parse::<u16>().ok());
        port.ok_or_else(|| std::io::Error::other("memcached does not tell its port"))
    })?;
    Ok((process, format!("127.0.0.1:{port}")))
}

/// Processor time that a process has used.
fn processor_seconds(pid: u32) -> Result<f64, Failure> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).map_err(Failure::attempted(format!("reading {path}")))?;
    Ok(os::process::processor_ticks(&text) as f64 / TICKS_PER_S)
}
