//! `slides`: fragments of a file at random places, while the lender has nothing, or everything, and
//! while local memory is free, or full.

use super::plot::{Chart, Line, Mark};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{Case, FILLING_THREADS, FULL_SHARE, LOCAL_BYTES, Run};
use crate::worker::Order;
use crate::world::{Extent, Lender, SETTLE_MAX, Worker};
use page::PAGE_SIZE;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use testbed::{Failure, wait_until};

/// Fragments, in bytes.
const FRAGMENTS_BYTES: [usize; 9] = [512, 1 << 10, 2 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20];
const FRAGMENTS_QUICK_BYTES: [usize; 3] = [1 << 10, 64 << 10, 8 << 20];
/// Bytes of a round: 32 MB of fragments in the slides; at least 64 fragments, so that the disk's
/// burst after a change does not matter; and no more than some seconds' worth.
const TOTAL_BYTES: u64 = 32 << 20;
const FRAGMENTS: RangeInclusive<u64> = 64..=512;
/// A lender with nearly no memory: otherwise the pages that are read could be lent, and would be
/// there for the next round.
const EMPTY_GIB: f64 = 0.01;
/// The papers' sizes: memory of the client; of the lender, in GiB; and the file, which the slides
/// do not state.
const CLIENT_BYTES: u64 = LOCAL_BYTES / 2;
const LENT_GIB: f64 = 4.0;
const FILE_BYTES: u64 = 1 << 30;
/// Evicted at once: a quarter of the tap's ring.
const EVICT_BYTES: u64 = 8 << 20;

/// The content of the lender.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lent {
    /// There is no Puma.
    NoPuma,
    Nothing,
    All,
}

/// The variants, and whether local memory is full of other data.
const VARIANTS: [(&str, Lent, bool); 5] = [
    ("no Puma", Lent::NoPuma, false),
    ("lender empty", Lent::Nothing, false),
    ("lender has all", Lent::All, false),
    ("no Puma, memory full", Lent::NoPuma, true),
    ("lender has all, memory full", Lent::All, true),
];

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    let (cache_bytes, data_bytes) = (run.bytes(CLIENT_BYTES), run.bytes(FILE_BYTES));
    let other = run.world.file("other", cache_bytes)?;
    let tiny = &FRAGMENTS_BYTES[3..4];
    // A quick run leaves out full memory, which makes no difference.
    let is_quick = run.world.extent == Extent::Quick;
    for (variant, lent, is_full) in VARIANTS.into_iter().filter(|(.., is_full)| !(is_quick && *is_full)) {
        for fragment_bytes in run.world.extent.choose(&FRAGMENTS_BYTES[..], &FRAGMENTS_QUICK_BYTES, tiny) {
            let x = *fragment_bytes as f64 / 1024.0;
            if run.has(variant, x) {
                continue;
            }
            // A new one for each, because reads fill the lender.
            let lender = match lent {
                Lent::NoPuma => None,
                Lent::Nothing => Some(run.lend(EMPTY_GIB)?),
                Lent::All => Some(run.lend(LENT_GIB)?),
            };
            let options = ["--strategy", "non-inclusive", "--gate", "off"];
            let side = run.world.mount("slides", data_bytes, lender.as_ref().map(|lender| lender.address), &options)?;
            side.drop_cached()?;
            let path = if lender.is_some() { side.file.clone() } else { side.backing.clone() };
            let case = Case { variant, x, cache_bytes, data_bytes, path, side: Some(&side), lender: lender.as_ref() };
            if lent == Lent::All {
                preload(run, &case)?;
            }
            let mut worker = run.world.worker(cache_bytes)?;
            if is_full {
                run.disk_for_filling()?;
                worker.obey(&Order::Pass { path: other.clone(), len_bytes: cache_bytes })?;
            }
            measure(run, &case, &mut worker, *fragment_bytes)?;
            drop(worker);
            side.end()?;
        }
    }
    Ok(())
}

/// Fills the lender with every page: read once, at random, then evicted.
fn preload(run: &Run<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let Some(side) = case.side else { return Ok(()) };
    run.disk_for_filling()?;
    let mut worker = Worker::start(&run.world.interrupt, &[])?;
    let (path, len_bytes, block_bytes) = (case.path.clone(), case.data_bytes, PAGE_SIZE);
    let (threads, seed) = (FILLING_THREADS, run.world.seed);
    worker.obey(&Order::Once { path, len_bytes, block_bytes, threads, seed })?;
    for at in (0..case.data_bytes).step_by(EVICT_BYTES as usize) {
        side.evict(at, EVICT_BYTES)?;
        side.settle()?;
    }
    // Pages in the tap's ring do not count as pending yet.
    let pages = case.data_bytes / PAGE_SIZE as u64;
    let lent_pages = || case.lender.map_or(Ok(0), Lender::stored_pages);
    if !wait_until(SETTLE_MAX, || lent_pages().is_ok_and(|lent| lent as f64 >= FULL_SHARE * pages as f64)) {
        let lent = lent_pages()?;
        return Err(Failure::Problem(format!("the lender has {lent} of {pages} pages, after all were evicted")));
    }
    Ok(())
}

fn measure(run: &mut Run<'_>, case: &Case<'_>, worker: &mut Worker<'_>, fragment_bytes: usize) -> Result<(), Failure> {
    run.disk_as_measured()?;
    let mut read = |seed: u64, total_bytes: u64| {
        let (path, len_bytes) = (case.path.clone(), case.data_bytes);
        worker.obey(&Order::Fragments { path, len_bytes, fragment_bytes, total_bytes, mean_bytes: 0, seed })
    };
    let count = (run.bytes(TOTAL_BYTES) / fragment_bytes as u64).clamp(*FRAGMENTS.start(), *FRAGMENTS.end());
    let (total_bytes, seed) = (count * fragment_bytes as u64, run.world.seed);
    // Requests that the kernel passes at once after a change of the limit do not show the disk's
    // speed.
    read(seed, total_bytes)?;
    for round in 0..run.rounds {
        let report = read(seed.wrapping_add(round as u64 + 1), total_bytes)?;
        let mb_per_s = report.bytes as f64 / report.seconds / 1e6;
        run.keep(case, round, BTreeMap::from([("mb_per_s".to_owned(), mb_per_s)]))?;
    }
    Ok(())
}

pub fn results(records: &Records) -> Results {
    let over = |variant: &str, floor: &str, x: f64| records.over("mb_per_s", (variant, x), (floor, x));
    let line = |variant: &str, floor: &str| {
        let points = records.xs(variant).into_iter().filter_map(|x| Some((x, over(variant, floor, x)?)));
        Line { name: variant.to_owned(), points: points.collect() }
    };
    let [(alone, ..), (empty, ..), (all, ..), (alone_full, ..), (all_full, ..)] = VARIANTS;
    let slowest = line(empty, alone).points.into_iter().map(|(_, mean)| mean);
    let slowest = slowest.min_by(|one, other| one.mean.total_cmp(&other.mean));
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "Fragments at random places: speed-up over no Puma".to_owned(),
            y_label: "times without Puma (logarithmic)",
            is_log: true,
            lines: vec![line(empty, alone), line(all, alone), line(all_full, alone_full)],
            marks: vec![
                Mark { x: 1.0, value: 8.0, label: "all lent, 8 ×" },
                Mark { x: 1.0, value: 6.0, label: "memory full, 6 ×" },
            ],
        }],
        columns: vec![Column { key: "mb_per_s", name: "MB/s", decimals: 2 }],
        findings: vec![
            Finding::at_least("lender empty, at the size where it is slowest", slowest, 0.97, "no measurable cost"),
            Finding::at_least("lender has all, fragments of 1 KiB", over(all, alone, 1.0), 8.0, "up to 8 ×"),
            Finding::at_least(
                "lender has all, memory full, fragments of 1 KiB",
                over(all_full, alone_full, 1.0),
                6.0,
                "up to 6 ×",
            ),
        ],
        why: "A large fragment is a stream, which the disk is good at, and the network no better: the gain ends where a fragment takes the disk longer to \
              transfer than to find. The slides' disk was a virtual one, and their network took 600 µs for a round trip.",
    }
}
