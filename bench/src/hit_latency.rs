//! `hit-latency`: the cost of a read that misses locally and hits the lender, one at a time.
//!
//! Its floors are the same read answered by a FUSE server that does nothing
//! ([`crate::null_server`]), and the same bytes over TCP: 32 for the request, and a page for the
//! response. A hit needs both, one after the other, so their sum is the minimum, with one
//! exception: a hit is polled for, while both sides of TCP sleep until something arrives. So there
//! is a third floor, TCP with both sides polling.

use crate::figures::Series;
use crate::hit::{DISK_READS_PER_S, Lent};
use crate::worker::{Order, Report};
use crate::world::{Security, Worker, World};
use page::PAGE_SIZE;
use serde_json::{Map, Value, json};
use testbed::Failure;

/// The maximum: a hit over the sum of its floors.
const RATIO_WANTED: f64 = 1.35;
/// The maximum with security on.
const SEALED_RATIO_WANTED: f64 = 1.5;
/// Bytes of the request over TCP: the protocol's header and key for a page.
const ASKED_BYTES: usize = 32;

/// Hits without and with security, and the three floors.
const KINDS: usize = 5;

/// Runs the bench.
pub fn run(world: &World) -> Result<Map<String, Value>, Failure> {
    let extent = world.extent;
    let len_bytes: u64 = extent.choose(64 << 20, 16 << 20, 4 << 20);
    // Many and short: the scheduler's placement of communicating threads decides, and it differs
    // each time.
    let (rounds, ms) = (extent.choose(41, 25, 1), extent.choose(500, 200, 50));
    world.disk.limit_reads(Some(DISK_READS_PER_S))?;
    let mut worker = Worker::start(&world.interrupt, &[])?;
    let trusting = Lent::fill(world, &mut worker, Security::Trusting, "trusting", len_bytes)?;
    let keyed = Lent::fill(world, &mut worker, Security::Keyed, "keyed", len_bytes)?;
    let null_at = world.directory("null")?;
    let null = world.null_server(&null_at, len_bytes)?;
    println!("{} MiB, each page once and at random, by one thread; {rounds} rounds", len_bytes >> 20);

    let mut kinds: [Kind; KINDS] = Default::default();
    for round in 0..rounds {
        let seed = world.seed.wrapping_add(round as u64);
        // By turns, and each equally often first.
        for index in (0..KINDS).map(|index| (index + round) % KINDS) {
            let report = match index {
                0 => trusting.hits(&mut worker, PAGE_SIZE, 1, seed)?,
                1 => keyed.hits(&mut worker, PAGE_SIZE, 1, seed)?,
                2 => {
                    let path = null.file();
                    crate::world::drop_cached(&path)?;
                    worker.obey(&Order::Once { path, len_bytes, block_bytes: PAGE_SIZE, threads: 1, seed })?
                }
                _ => {
                    let (address, request_bytes, answer_bytes) = (null.address.clone(), ASKED_BYTES, PAGE_SIZE);
                    worker.obey(&Order::Talk { address, request_bytes, answer_bytes, polls: index == 4, ms })?
                }
            };
            kinds[index].add(&report);
        }
    }
    let [plain, sealed, fuse, tcp, polled] = kinds;
    let floor_us = fuse.p50_us.plus(&tcp.p50_us);
    let (ratio, sealed_ratio) = (plain.p50_us.over(&floor_us), sealed.p50_us.over(&floor_us));
    // The ratio of the medians, not the median of the rounds' ratios: measurements of a round are
    // not paired with each other.
    let of_medians = |kind: &Kind, tcp: &Kind| kind.p50_us.median() / (fuse.p50_us.median() + tcp.p50_us.median());
    let (ratio_p50, sealed_ratio_p50) = (of_medians(&plain, &tcp), of_medians(&sealed, &tcp));
    let (polled_ratio_p50, sealed_polled_ratio_p50) = (of_medians(&plain, &polled), of_medians(&sealed, &polled));
    let named =
        [("a hit", &plain), ("a hit, sealed", &sealed), ("null FUSE", &fuse), ("TCP", &tcp), ("TCP, polled", &polled)];
    for (name, kind) in named {
        println!("{name:14} p50 {} µs, p99 {} µs", kind.p50_us.text(1), kind.p99_us.text(1));
    }
    println!(
        "p50 over the sum of the floors: {ratio_p50:.2} (at most {RATIO_WANTED} is wanted); by rounds {}",
        ratio.text(2)
    );
    println!(
        "the same with security on: {sealed_ratio_p50:.2} (at most {SEALED_RATIO_WANTED} is wanted); by rounds {}",
        sealed_ratio.text(2)
    );
    println!("over null FUSE and TCP that is polled for: {polled_ratio_p50:.2}, sealed {sealed_polled_ratio_p50:.2}");
    println!("least share of hits in a pass: {:.3}, sealed {:.3}", trusting.hit_share(), keyed.hit_share());
    Ok(crate::members(json!({
        "hit_p50_us": plain.p50_us.median(),
        "hit_p99_us": plain.p99_us.median(),
        "fuse_floor_p50_us": fuse.p50_us.median(),
        "tcp_floor_p50_us": tcp.p50_us.median(),
        "tcp_polled_floor_p50_us": polled.p50_us.median(),
        "polled_ratio_p50": polled_ratio_p50,
        "sealed_polled_ratio_p50": sealed_polled_ratio_p50,
        "ratio_p50": ratio_p50,
        "sealed_ratio_p50": sealed_ratio_p50,
        "sealed_hit_p50_us": sealed.p50_us.median(),
        "sealed_hit_p99_us": sealed.p99_us.median(),
        "ratio_wanted": RATIO_WANTED,
        "sealed_ratio_wanted": SEALED_RATIO_WANTED,
        "ratio": ratio.json(),
        "sealed_ratio": sealed_ratio.json(),
        "hit_share": keyed.hit_share(),
        "trusting_hit_share": trusting.hit_share(),
        "rounds": rounds,
        "file_bytes": len_bytes,
    })))
}

/// The figures of one kind of read.
#[derive(Default)]
struct Kind {
    p50_us: Series,
    p99_us: Series,
}

impl Kind {
    fn add(&mut self, report: &Report) {
        self.p50_us.add(report.p50_ns as f64 / 1e3);
        self.p99_us.add(report.p99_ns as f64 / 1e3);
    }
}
