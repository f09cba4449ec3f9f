//! `hit-throughput`: the number of reads in a second that hit the lender, with many readers, and
//! the number of bytes with large reads.
//!
//! Single pages by 16 threads, against the same from a FUSE server that does nothing; 256 KiB by
//! one thread and by 16, next to the speed of a single TCP connection on this machine.

use crate::figures::Series;
use crate::hit::{DISK_READS_PER_S, Lent};
use crate::worker::{Order, Report};
use crate::world::{Security, Worker, World, drop_cached};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use testbed::Failure;

/// The minimum: pages a second over those of the null server, and GiB a second by one thread.
const RATIO_WANTED: f64 = 0.6;
const GIBPS_WANTED: f64 = 1.0;
/// A large read.
const LARGE_BYTES: usize = 256 << 10;
/// Many threads.
const THREADS: usize = 16;
const GIB: f64 = (1u64 << 30) as f64;

/// Bytes of a read, and threads that read.
const LOADS: [(usize, usize); 3] = [(PAGE_SIZE, THREADS), (LARGE_BYTES, 1), (LARGE_BYTES, THREADS)];

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let len_bytes: u64 = extent.choose(256 << 20, 64 << 20, 8 << 20);
    let (rounds, ms) = (extent.choose(11, 7, 1), extent.choose(1000, 500, 50));
    world.disk.limit_reads(Some(DISK_READS_PER_S))?;
    let mut worker = Worker::start(&world.interrupt, &[])?;
    let keyed = Lent::fill(world, &mut worker, Security::Keyed, "keyed", len_bytes)?;
    let trusting = Lent::fill(world, &mut worker, Security::Trusting, "trusting", len_bytes)?;
    let null_at = world.directory("null")?;
    let null = world.null_server(&null_at, len_bytes)?;
    println!("{} MiB, each block once and at random; {rounds} rounds", len_bytes >> 20);

    // For each load: sealed, not sealed, and the null server.
    let mut speeds: [[Series; 3]; 3] = Default::default();
    let mut tcp = Series::default();
    for round in 0..rounds {
        let seed = world.seed.wrapping_add(round as u64);
        for ((block_bytes, threads), series) in LOADS.into_iter().zip(&mut speeds) {
            for index in (0..3).map(|index| (index + round) % 3) {
                let report = match index {
                    0 => keyed.hits(&mut worker, block_bytes, threads, seed)?,
                    1 => trusting.hits(&mut worker, block_bytes, threads, seed)?,
                    _ => {
                        let path = null.file();
                        drop_cached(&path)?;
                        worker.obey(&Order::Once { path, len_bytes, block_bytes, threads, seed })?
                    }
                };
                series[index].add(report.bytes as f64 / report.seconds);
            }
        }
        let order = Order::Talk {
            address: null.address.clone(),
            request_bytes: 0,
            answer_bytes: LARGE_BYTES,
            polls: false,
            ms,
        };
        let Report { bytes, seconds, .. } = worker.obey(&order)?;
        tcp.add(bytes as f64 / seconds / GIB);
    }
    let [small, one, many] = speeds;
    let iops = |speed: &Series| speed.times(1.0 / PAGE_SIZE as f64);
    let gibps = |speed: &Series| speed.times(1.0 / GIB);
    let ratio = small[0].over(&small[2]);
    for (name, which) in [("sealed", 0), ("not sealed", 1), ("null server", 2)] {
        println!(
            "{name:12} {} reads/s of 4 KiB by {THREADS}; of 256 KiB {} GiB/s by one, {} GiB/s by {THREADS}",
            iops(&small[which]).text(0),
            gibps(&one[which]).text(2),
            gibps(&many[which]).text(2)
        );
    }
    println!("one TCP stream: {} GiB/s", tcp.text(2));
    println!("4 KiB over those of the null server: {} (at least {RATIO_WANTED} is wanted)", ratio.text(2));
    println!("256 KiB by one thread: {:.2} GiB/s (at least {GIBPS_WANTED} are wanted)", gibps(&one[0]).median());
    println!("least share of hits in a pass: {:.3}, sealed {:.3}", trusting.hit_share(), keyed.hit_share());
    Ok(crate::members(json!({
        "iops_4k": iops(&small[0]).median(),
        "null_iops_4k": iops(&small[2]).median(),
        "ratio_4k": ratio.median(),
        "gibps_256k_1": gibps(&one[0]).median(),
        "gibps_256k_16": gibps(&many[0]).median(),
        "tcp_gibps": tcp.median(),
        "trusting_ratio_4k": small[1].over(&small[2]).median(),
        "trusting_gibps_256k_1": gibps(&one[1]).median(),
        "trusting_gibps_256k_16": gibps(&many[1]).median(),
        "null_gibps_256k_1": gibps(&one[2]).median(),
        "null_gibps_256k_16": gibps(&many[2]).median(),
        "ratio_4k_wanted": RATIO_WANTED,
        "gibps_256k_1_wanted": GIBPS_WANTED,
        "ratio": ratio.json(),
        "hit_share": keyed.hit_share(),
        "trusting_hit_share": trusting.hit_share(),
        "rounds": rounds,
        "file_bytes": len_bytes,
    })))
}
