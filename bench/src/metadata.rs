//! `metadata`: names and small files, through the mount against the backing directory, and against
//! two other pass-through FUSE file systems, bindfs and mergerfs, as packaged by Debian and with
//! their defaults.
//!
//! [`crate::tree`] describes the load. Ratios are geometric means over its phases, so that all
//! count equally. Each round has a directory of its own, far from all others on the disk
//! ([`spread_directories`]).

use crate::figures::{Series, geometric_mean};
use crate::tree::PHASES;
use crate::worker::Order;
use crate::world::{Side, Worker, World, spread_directories};
use serde_json::{Map, Value, json};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use testbed::{Failure, Process, wait_until};

/// The minimum: our speed over that of the better peer, and over that of the backing directory.
const PEER_WANTED: f64 = 1.5;
const NATIVE_WANTED: f64 = 0.4;
/// The peers. Both are called with source and mountpoint, and stay in the foreground.
const PEERS: [(&str, &[&str]); 2] = [("bindfs", &["-f"]), ("mergerfs", &["-f"])];
/// Time limit for a peer to mount.
const MOUNT_MAX: Duration = Duration::from_secs(10);

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let (files, rounds) = (extent.choose(50_000, 5000, 200), extent.choose(3, 3, 1));
    let side = world.mount("mounted", 0, None, &[])?;
    let peers = PEERS.map(|(name, options)| Peer::mount(world, name, options));
    let native = world.directory("native")?;
    spread_directories(&side.source)?;
    spread_directories(&native)?;
    let mut places = vec![("pumapool", side.at.clone()), ("below", native)];
    for peer in &peers {
        match peer {
            Ok(peer) => places.push((peer.name, peer.at.clone())),
            Err(error) => return Err(Failure::Problem(error.to_string())),
        }
    }
    println!("{files} files; {rounds} rounds");
    let mut worker = Worker::start(&world.interrupt, &[])?;
    let mut speeds: Vec<[Series; PHASES.len()]> = places.iter().map(|_| Default::default()).collect();
    for round in 0..rounds {
        for index in (0..places.len()).map(|index| (index + round) % places.len()) {
            // The measurement must not include writeback of other programs' data.
            rustix::fs::sync();
            let (name, at) = &places[index];
            let directory = at.join(format!("{name}-{round}-{}", world.seed));
            let report = worker.obey(&Order::Tree { directory, files })?;
            for (series, seconds) in speeds[index].iter_mut().zip(&report.phase_seconds) {
                series.add(files as f64 / seconds);
            }
        }
    }
    for ((name, _), speeds) in places.iter().zip(&speeds) {
        let figures = PHASES.iter().zip(speeds).map(|(phase, speed)| format!("{phase} {}", speed.text(0)));
        println!("{name:9} files/s: {}", figures.collect::<Vec<_>>().join(", "));
    }
    let over = |other: usize| {
        geometric_mean(speeds[0].iter().zip(&speeds[other]).map(|(own, other)| own.over(other).median()))
    };
    let native_ratio = over(1);
    let ratios: Vec<(&str, f64)> = (2..places.len()).map(|index| (places[index].0, over(index))).collect();
    let best_peer_ratio = ratios.iter().map(|(_, ratio)| *ratio).fold(f64::INFINITY, f64::min);
    println!("over the backing directory: {native_ratio:.2} (at least {NATIVE_WANTED} is wanted)");
    for (name, ratio) in &ratios {
        println!("over {name}: {ratio:.2} (at least {PEER_WANTED} is wanted)");
    }
    let phases = PHASES.iter().enumerate().map(|(phase, name)| {
        let of = |index: usize| speeds[0][phase].over(&speeds[index][phase]).json();
        (format!("{name}_native_ratio"), of(1))
    });
    let mut figures: Map<String, Value> = phases.collect();
    figures.extend(ratios.iter().map(|(name, ratio)| (format!("{name}_ratio"), (*ratio).into())));
    figures.extend(crate::members(json!({
        "native_ratio": native_ratio,
        "best_peer_ratio": best_peer_ratio,
        "native_ratio_wanted": NATIVE_WANTED,
        "best_peer_ratio_wanted": PEER_WANTED,
        "files": files,
        "rounds": rounds,
    })));
    drop(peers);
    Side::end(side)?;
    Ok(figures)
}

/// Another file system. Dropping it unmounts.
struct Peer {
    name: &'static str,
    at: PathBuf,
    _process: Process,
}

impl Peer {
    fn mount(world: &World, name: &'static str, options: &[&str]) -> Result<Peer, Failure> {
        let (source, at) = (world.directory(&format!("{name}-below"))?, world.directory(&format!("{name}-mounted"))?);
        spread_directories(&source)?;
        let mut command = Command::new(name);
        command.args(options).args([&source, &at]).stdin(Stdio::null()).stderr(Stdio::null());
        let process = Process::spawn(command, &[]).map_err(|error| {
            Failure::Problem(format!("starting {name}: {error}; `make bench-deps` installs Debian's"))
        })?;
        let device = |path: &Path| std::fs::metadata(path).map(|metadata| metadata.dev()).ok();
        // From here on it is unmounted, also if it does not mount.
        let peer = Peer { name, at, _process: process };
        if wait_until(MOUNT_MAX, || device(&peer.at).is_some_and(|found| Some(found) != device(&source))) {
            return Ok(peer);
        }
        Err(Failure::Problem(format!("{name} did not mount {} within {MOUNT_MAX:?}", source.display())))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _not_mounted_then = fuse::mounting::unmount(&self.at, true);
    }
}
