//! `tpcc`: TPC-C on PostgreSQL, and the time that nine in ten New-Orders do not exceed.

use super::plot::{Chart, Line, Mark};
use super::postgres::{self, Reads};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{ALL_FITS_GIB, BASELINE, Case, LITTLE_GIB, LOCAL_BYTES, Run, compare, local_alone};
use crate::world::Extent;
use std::collections::BTreeMap;
use std::path::Path;
use testbed::Failure;

/// The paper's value (2015, fig. 5f), and the minimum whose data exceeds the memory in which
/// PostgreSQL starts.
const WAREHOUSES: f64 = 40.0;
pub const WAREHOUSES_MIN: f64 = 5.0;
/// Bytes of a warehouse, including indexes and rows that are added while it runs.
pub const WAREHOUSE_BYTES: u64 = 130 << 20;
/// Clients at once.
const THREADS: &str = "4";
const WANTED: f64 = 4.0;
const LITTLE: f64 = 1.12;

/// Not every fraction is a number of warehouses.
pub fn scale(asked: f64, _: Extent) -> f64 {
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
    compare(run, &run.directory("tpcc", LOCAL_BYTES, data_bytes, &fill), &|run, case| measure(run, case, &count))
}

fn measure(run: &mut Run<'_>, case: &Case<'_>, warehouses: &str) -> Result<(), Failure> {
    let world = run.world;
    let group = world.group(case.cache_bytes)?;
    let server = postgres::serve(run, case, &group, run.bytes(LOCAL_BYTES))?;
    ask(&server, warehouses, world.extent.choose(20, 6, 2))?;
    run.disk_as_measured()?;
    // Requests that the kernel passes at once after a change of the limit do not show the disk's
    // speed.
    ask(&server, warehouses, world.extent.choose(5, 2, 1))?;
    for round in 0..run.rounds {
        let before = Reads::now(world, case)?;
        let mut values = ask(&server, warehouses, world.extent.choose(20, 5, 3))?;
        values.extend(before.until_now(world, case)?);
        run.keep(case, round, values)?;
    }
    server.stop()
}

/// Fills a database.
pub fn make(server: &postgres::Server<'_>, warehouses: &str) -> Result<(), Failure> {
    server.go_tpc(&["tpcc", "prepare", "--warehouses", warehouses, "-T", THREADS, "--no-check"]).map(drop)
}

/// Runs it for so long, and returns its output about New-Orders.
pub fn ask(server: &postgres::Server<'_>, warehouses: &str, seconds: u32) -> Result<BTreeMap<String, f64>, Failure> {
    let time = format!("{seconds}s");
    let said = server.go_tpc(&["tpcc", "run", "--warehouses", warehouses, "-T", THREADS, "--time", &time])?;
    figures(&said)
        .ok_or_else(|| Failure::Problem(format!("go-tpc did not print the time of a New-Order, but {said:?}")))
}

/// Runs it until so many transactions are done, however long that takes.
pub fn warm_up(server: &postgres::Server<'_>, warehouses: &str, transactions: u32) -> Result<(), Failure> {
    let count = transactions.to_string();
    server.go_tpc(&["tpcc", "run", "--warehouses", warehouses, "-T", THREADS, "--count", &count]).map(drop)
}

fn figures(said: &str) -> Option<BTreeMap<String, f64>> {
    let line = said.lines().find(|line| line.starts_with("[Summary] NEW_ORDER - "))?;
    let figure = |key: &str| line.split(", ").find_map(|part| part.strip_prefix(key))?.parse::<f64>().ok();
    let p90_ms = figure("90th(ms): ")?;
    let values = [
        ("p90_ms", p90_ms),
        // A speed, so that the mean over rounds is meaningful.
        ("p90_per_s", 1000.0 / p90_ms),
        ("mean_ms", figure("Avg(ms): ")?),
        ("new_orders_per_min", figure("TPM: ")?),
    ];
    Some(values.map(|(key, value)| (key.to_owned(), value)).into())
}

pub fn results(records: &Records) -> Results {
    const KEY: &str = "p90_per_s";
    let over = |key: &str, variant: &str, x: f64| records.over(key, (variant, x), (BASELINE, 0.0));
    let little = |baseline: &str, over_it: &str| {
        let times = records.over("new_orders_per_min", ("non-inclusive", LITTLE_GIB), (baseline, 0.0));
        let what = format!("New-Orders in a minute, non-inclusive, with {LITTLE_GIB} GiB, {over_it}");
        Finding::at_least(&what, times, LITTLE, "1.12 ×")
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
                Mark { x: LITTLE_GIB, value: LITTLE, label: "1.12 ×" },
            ],
        }],
        columns: vec![
            Column { key: "p90_ms", name: "90th percentile of New-Order, ms", decimals: 1 },
            Column { key: "mean_ms", name: "mean, ms", decimals: 1 },
            Column { key: "new_orders_per_min", name: "New-Orders/min", decimals: 0 },
            Column { key: "gets", name: "gets", decimals: 0 },
            Column { key: "disk_reads", name: "reads of the disk", decimals: 0 },
        ],
        findings: vec![
            Finding::at_least(
                "90th percentile, exclusive, all fits, over no Puma",
                over(KEY, "exclusive", ALL_FITS_GIB),
                WANTED,
                "up to 4 ×",
            ),
            Finding::at_least(
                "90th percentile, non-inclusive, all fits, over no Puma",
                over(KEY, "non-inclusive", ALL_FITS_GIB),
                WANTED,
                "up to 4 ×",
            ),
            Finding::at_least(
                "New-Orders in a minute, non-inclusive, all fits, over no Puma",
                over("new_orders_per_min", "non-inclusive", ALL_FITS_GIB),
                1.0,
                "–",
            ),
            little(BASELINE, "over no Puma"),
            little(&local_alone(BASELINE), "over no Puma with the local memory alone"),
        ],
        why: "go-tpc keeps times with one significant digit, so percentiles are steps of up to a tenth, and an interval without a width says no more than \
              that they fell into one. Writes are not slowed down. Autovacuum is off: it would begin after a minute, and each round would be another measurement.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_go_tpc_says_is_understood() {
        let said = "[Current] NEW_ORDER - Takes(s): 5.0, Count: 9, TPM: 108.0, Sum(ms): 90.0, Avg(ms): 10.0, 50th(ms): 9.4, 90th(ms): 13.6\n\
                    [Summary] DELIVERY - Takes(s): 9.8, Count: 41, TPM: 251.0, Sum(ms): 900.0, Avg(ms): 22.0, 50th(ms): 20.0, 90th(ms): 30.4\n\
                    [Summary] NEW_ORDER - Takes(s): 9.9, Count: 467, TPM: 2830.3, Sum(ms): 8900.0, Avg(ms): 19.1, 50th(ms): 17.8, 90th(ms): 25.0\n";
        let values = figures(said).unwrap();
        assert_eq!((values["p90_ms"], values["p90_per_s"], values["mean_ms"]), (25.0, 40.0, 19.1));
        assert_eq!(values["new_orders_per_min"], 2830.3);
        assert_eq!(figures("[Summary] DELIVERY - Takes(s): 9.8"), None);
    }
}
