//! `tpcc`: TPC-C on PostgreSQL, and the time of a New-Order that nine in ten do not exceed.

use super::plot::{Chart, Line, Mark};
use super::postgres;
use super::record::{Mean, Records};
use super::report::{Column, Finding, Results};
use super::{ALL_FITS_GIB, BASELINE, Case, Run};
use std::collections::BTreeMap;
use std::path::Path;
use testbed::Failure;

/// The paper's (2015, fig. 5f), and the fewest whose data do not fit into the memory that PostgreSQL starts in.
const WAREHOUSES: f64 = 40.0;
pub const WAREHOUSES_MIN: f64 = 5.0;
/// Bytes of a warehouse, indexes and what is added while it runs included.
pub const WAREHOUSE_BYTES: u64 = 130 << 20;
/// Clients at once.
const THREADS: &str = "4";
const WANTED: f64 = 4.0;

/// Not every fraction is a number of warehouses.
pub fn scale(asked: f64) -> f64 {
    WAREHOUSES / (WAREHOUSES / asked).round().max(WAREHOUSES_MIN)
}

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    postgres::check()?;
    let world = run.world;
    let warehouses = world.extent.choose((WAREHOUSES / run.scale).round(), (WAREHOUSES / run.scale).round(), 1.0);
    let data_bytes = warehouses as u64 * WAREHOUSE_BYTES;
    world.check_room(3 * data_bytes)?;
    let origin = world.path("tpcc-origin");
    let count = warehouses.to_string();
    let fill = |directory: &Path| {
        postgres::prepare(world, &origin, data_bytes, |server| make(server, &count))?;
        postgres::copy(world, &origin, directory)
    };
    run.compare(&run.directory("tpcc", data_bytes, &fill), |run, case| measure(run, case, &count))
}

fn measure(run: &mut Run<'_>, case: &Case<'_>, warehouses: &str) -> Result<(), Failure> {
    let world = run.world;
    let group = world.group(case.cache_bytes)?;
    let server = postgres::serve(run, case, &group)?;
    ask(&server, warehouses, world.extent.choose(30, 10, 2))?;
    run.disk_as_measured()?;
    // What the kernel lets pass at once after a change of the limit is not the disk's speed.
    ask(&server, warehouses, world.extent.choose(5, 2, 1))?;
    for round in 0..run.rounds {
        let values = ask(&server, warehouses, world.extent.choose(20, 8, 3))?;
        run.keep(case, round, values)?;
    }
    server.stop()
}

/// Fills a database.
pub fn make(server: &postgres::Server<'_>, warehouses: &str) -> Result<(), Failure> {
    server.go_tpc(&["tpcc", "prepare", "--warehouses", warehouses, "-T", THREADS, "--no-check"]).map(drop)
}

/// Runs it for so long, and returns what it says of New-Orders.
pub fn ask(server: &postgres::Server<'_>, warehouses: &str, seconds: u32) -> Result<BTreeMap<String, f64>, Failure> {
    let time = format!("{seconds}s");
    let said = server.go_tpc(&["tpcc", "run", "--warehouses", warehouses, "-T", THREADS, "--time", &time])?;
    figures(&said)
        .ok_or_else(|| Failure::Problem(format!("go-tpc did not say how long a New-Order took, but {said:?}")))
}

fn figures(said: &str) -> Option<BTreeMap<String, f64>> {
    let line = said.lines().find(|line| line.starts_with("[Summary] NEW_ORDER - "))?;
    let figure = |key: &str| line.split(", ").find_map(|part| part.strip_prefix(key))?.parse::<f64>().ok();
    let p90_ms = figure("90th(ms): ")?;
    let values = [
        ("p90_ms", p90_ms),
        // Of which the mean over rounds is a speed.
        ("p90_per_s", 1000.0 / p90_ms),
        ("mean_ms", figure("Avg(ms): ")?),
        ("new_orders_per_min", figure("TPM: ")?),
    ];
    Some(values.map(|(key, value)| (key.to_owned(), value)).into())
}

pub fn results(records: &Records) -> Results {
    const KEY: &str = "p90_per_s";
    let over = |key: &str, variant: &str| -> Option<Mean> {
        let baseline = records.mean(BASELINE, 0.0, key, 1.0)?.mean;
        records.mean(variant, ALL_FITS_GIB, key, baseline)
    };
    let baseline = records.baseline(BASELINE, KEY);
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "TPC-C: 90th percentile of New-Order, speed-up over no Puma".to_owned(),
            y_label: "times as fast as the baseline",
            is_log: false,
            lines: Line::of_all(records, KEY, baseline),
            marks: vec![
                Mark { x: ALL_FITS_GIB, value: 4.0, label: "up to 4 ×" },
                Mark { x: 0.5, value: 1.12, label: "1.12 ×" },
            ],
        }],
        columns: vec![
            Column { key: "p90_ms", name: "90th percentile of New-Order, ms", decimals: 1 },
            Column { key: "mean_ms", name: "mean, ms", decimals: 1 },
            Column { key: "new_orders_per_min", name: "New-Orders/min", decimals: 0 },
        ],
        findings: vec![
            Finding::at_least(
                "90th percentile, exclusive, all fits, over no Puma",
                over(KEY, "exclusive"),
                WANTED,
                "up to 4 ×",
            ),
            Finding::at_least(
                "90th percentile, non-inclusive, all fits, over no Puma",
                over(KEY, "non-inclusive"),
                WANTED,
                "up to 4 ×",
            ),
            Finding::at_least(
                "New-Orders in a minute, non-inclusive, all fits, over no Puma",
                over("new_orders_per_min", "non-inclusive"),
                1.0,
                "–",
            ),
        ],
        why: "go-tpc keeps times with one significant digit, so percentiles are steps of up to a tenth. Writes are not slowed down.",
    }
}
