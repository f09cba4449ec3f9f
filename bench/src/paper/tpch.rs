//! `tpch`: the 22 queries of TPC-H on PostgreSQL, one after the other.

use super::plot::{Chart, Line, Mark};
use super::postgres::{self, Reads};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{
    ALL_FITS_GIB, BASELINE, Case, DISK_BYTES_PER_S, DISK_READS_PER_S, LITTLE_GIB, LOCAL_BYTES, Run, compare,
    local_alone,
};
use crate::world::Extent;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;
use testbed::Failure;

/// The paper's value (2015, fig. 5e), and the minimum of go-tpc.
const SCALE_FACTOR: f64 = 3.0;
const SCALE_FACTOR_MIN: f64 = 1.0;
/// Bytes for each unit of it, including indexes.
const UNIT_BYTES: u64 = 1_900 << 20;
/// Queries; in a quick run one that needs little processor time, one table, and no index.
const QUERIES: &str = "q1,q2,q3,q4,q5,q6,q7,q8,q9,q10,q11,q12,q13,q14,q15,q16,q17,q18,q19,q20,q21,q22";
const QUERIES_QUICK: &str = "q6";
const TABLES: [&str; 8] = ["nation", "region", "part", "supplier", "partsupp", "customer", "orders", "lineitem"];
const TABLES_QUICK: [&str; 1] = ["lineitem"];
/// Without these, queries that look up parts and orders would read whole tables for each. Such
/// indexes are usual.
const INDEXES: [&str; 6] = [
    "create index on lineitem (l_partkey, l_suppkey)",
    "create index on lineitem (l_shipdate)",
    "create index on orders (o_custkey)",
    "create index on orders (o_orderdate)",
    "create index on partsupp (ps_suppkey)",
    "create index on customer (c_nationkey)",
];
/// The cost of a random page for the disk, in pages of a stream. The planner's own 4 assumes mostly
/// cached data: with it the planner looks up millions of rows one by one, which takes hours on such
/// a disk.
const RANDOM_PAGE_COST: u64 = DISK_BYTES_PER_S / 8192 / DISK_READS_PER_S as u64;
/// go-tpc uses MySQL's syntax for every database.
const DATE_ADD: &str =
    "create function date_add(date, interval) returns date language sql immutable as 'select ($1 + $2)::date'";
const WANTED: f64 = 3.0;
/// Queries an hour (2015), and the best result of 2014.
const PAPER_BASELINE: f64 = 248.0;
const PAPER: f64 = 791.0;
const PAPER_2014: f64 = 9.0;

/// Scale factors are whole numbers.
pub fn scale(asked: f64, _: Extent) -> f64 {
    SCALE_FACTOR / (SCALE_FACTOR / asked).round().max(SCALE_FACTOR_MIN)
}

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    postgres::check()?;
    // Each takes minutes if the disk is read.
    run.rounds = run.world.extent.choose(3, 2, 1);
    let world = run.world;
    let factor = SCALE_FACTOR / run.scale;
    let data_bytes = factor as u64 * UNIT_BYTES;
    world.check_room(2 * data_bytes)?;
    let factor = factor.to_string();
    let make = |server: &postgres::Server<'_>| {
        // Inserting rows by go-tpc itself takes twice as long as everything that is done here.
        let rows = world.path("tpch-rows");
        let output = ["--output-type", "csv", "--output-dir", &rows.to_string_lossy()];
        server.go_tpc(&[&["tpch", "prepare", "--sf", &factor][..], &output].concat())?;
        for table in world.extent.choose(&TABLES[..], &TABLES_QUICK, &TABLES_QUICK) {
            let file = rows.join(format!("{}.{table}.csv", postgres::DATABASE));
            let copy = format!("\\copy {table} from '{}' with (format csv, delimiter '|')", file.display());
            server.execute(postgres::DATABASE, &[&copy])?;
        }
        fs::remove_dir_all(&rows).map_err(Failure::attempted(format!("removing {}", rows.display())))?;
        let cost = format!("alter database {} set random_page_cost = {RANDOM_PAGE_COST}", postgres::DATABASE);
        server.execute(postgres::DATABASE, &[DATE_ADD, &cost])?;
        server.execute(postgres::DATABASE, world.extent.choose(&INDEXES[..], &[], &[]))
    };
    // Its tables are only read: each case finds them unchanged.
    let fill = |directory: &Path| postgres::prepare(world, directory, data_bytes, make);
    let mut subject = run.directory("tpch", LOCAL_BYTES, data_bytes, &fill);
    subject.lent_gib = world.extent.choose(&[LITTLE_GIB, ALL_FITS_GIB], &[ALL_FITS_GIB], &[ALL_FITS_GIB]);
    compare(run, &subject, &|run, case| measure(run, case, &factor))
}

fn measure(run: &mut Run<'_>, case: &Case<'_>, factor: &str) -> Result<(), Failure> {
    let world = run.world;
    let group = world.group(case.cache_bytes)?;
    let server = postgres::serve(run, case, &group, run.bytes(LOCAL_BYTES))?;
    let queries = world.extent.choose(QUERIES, QUERIES_QUICK, QUERIES_QUICK);
    let count = queries.split(',').count();
    let ask = || -> Result<f64, Failure> {
        let begin = Instant::now();
        let said =
            server.go_tpc(&["tpch", "run", "--sf", factor, "--queries", queries, "--count", &count.to_string()])?;
        let answered = said.lines().filter(|line| line.starts_with("[Summary] Q")).count();
        if answered != count {
            return Err(Failure::Problem(format!("go-tpc had answers to {answered} of {count} queries: {said}")));
        }
        Ok(begin.elapsed().as_secs_f64())
    };
    ask()?;
    run.disk_as_measured()?;
    for round in 0..run.rounds {
        let before = Reads::now(world, case)?;
        let per_h = count as f64 * 3600.0 / ask()?;
        let mut values = BTreeMap::from([("queries_per_h".to_owned(), per_h), ("queries".to_owned(), count as f64)]);
        values.extend(before.until_now(world, case)?);
        run.keep(case, round, values)?;
    }
    server.stop()
}

pub fn results(records: &Records) -> Results {
    const KEY: &str = "queries_per_h";
    let baseline = records.baseline(BASELINE, KEY);
    let all_fits = |variant: &str| records.over(KEY, (variant, ALL_FITS_GIB), (BASELINE, 0.0));
    let little = |baseline: &str, over_it: &str| {
        let times = records.over(KEY, ("non-inclusive", LITTLE_GIB), (baseline, 0.0));
        let what = format!("non-inclusive, with {LITTLE_GIB} GiB, {over_it}");
        Finding::at_least(&what, times, 1.05, "1.05 × at the least")
    };
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "TPC-H: speed-up over no Puma".to_owned(),
            y_label: "times the baseline",
            is_log: true,
            lines: Line::of_all(records, KEY, baseline),
            marks: vec![
                Mark { x: ALL_FITS_GIB, value: PAPER / PAPER_BASELINE, label: "2015, 3.2 ×" },
                Mark { x: ALL_FITS_GIB, value: PAPER_2014, label: "2014, up to 9 ×" },
            ],
        }],
        columns: vec![
            Column { key: KEY, name: "queries/h", decimals: 0 },
            Column { key: "queries", name: "different ones", decimals: 0 },
            Column { key: "gets", name: "gets", decimals: 0 },
            Column { key: "disk_reads", name: "reads of the disk", decimals: 0 },
        ],
        findings: vec![
            Finding::at_least(
                "exclusive, all fits, over no Puma",
                all_fits("exclusive"),
                WANTED,
                "3.2 ×; 2014: up to 9 ×",
            ),
            Finding::at_least(
                "non-inclusive, all fits, over no Puma",
                all_fits("non-inclusive"),
                WANTED,
                "3.2 ×; 2014: up to 9 ×",
            ),
            little(BASELINE, "over no Puma"),
            little(&local_alone(BASELINE), "over no Puma with the local memory alone"),
        ],
        why: "Queries are streams over tables and lookups in indexes by turns. A rough look asks only one of the 22, a stream (q6): all of them take some five \
              hours of this disk. The planner knows what a page at random costs the disk, for all variants alike. \
              What a mount needs beside the local memory is page cache of the baseline, and a working set of indexes that just does not fit makes that worth more than the \
              least that is lent: compare both baselines. \
              The database with its indexes is larger than what is lent at the most, and smaller than that and the local memory together: all fits for exclusive, and not quite \
              for non-inclusive.",
    }
}
