//! `blast`: BLAST searches for five sequences in a database of nucleotides, which is made up with
//! lengths and repeats like those of real ones.

use super::plot::{Chart, Line, Mark};
use super::record::Records;
use super::report::{Column, Finding, Results};
use super::{ALL_FITS_GIB, BASELINE, Case, Kind, LOCAL_BYTES, PROGRAM_BYTES_MIN, Run, Study, Subject, compare};
use crate::program::{self, Program};
use crate::world::Extent;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;
use testbed::Failure;

/// The paper's values (2015, fig. 5c): bytes of the database, and the number of sequences to search
/// for.
const DATABASE_BYTES: u64 = 3 << 30;
const DATABASE_TINY_BYTES: u64 = 2 << 20;
const QUERIES: usize = 5;
/// The number of sequences in a quick run.
const QUERIES_QUICK: usize = 2;
const QUERY_LETTERS: usize = 600;
/// Letters in a byte of a database.
const LETTERS_PER_BYTE: u64 = 4;
/// Sequences of real databases are some hundred to some ten thousand letters long, most of them
/// short: powers of two between these.
const LENGTH_BITS: [f64; 2] = [8.0, 15.0];
const LINE_LETTERS: usize = 80;
/// The share of letters that are G or C, as in people.
const GC_SHARE: f64 = 0.41;
/// Repeats: families of them, letters of each, how many of a hundred letters are in one, and how
/// many of a hundred of those differ.
const FAMILIES: usize = 64;
const REPEAT_LETTERS: usize = 300;
const REPEATED_PERCENT: u32 = 45;
const DIFFERENT_PERCENT: u32 = 12;
/// Without the filter, and with it.
const WANTED: [f64; 2] = [1.3, 1.45];
/// Written when the database is complete.
const QUERIES_FILE: &str = "queries.fasta";

/// BLAST itself needs some ten MiB, however small the database is.
pub fn scale(asked: f64, _: Extent) -> f64 {
    asked.min(16.0)
}

pub fn run(run: &mut Run<'_>) -> Result<(), Failure> {
    run.variants_quick = ["exclusive", "non-inclusive, filter"];
    study(run, &compare)
}

pub fn study(run: &mut Run<'_>, study: &Study<'_>) -> Result<(), Failure> {
    program::check(&["makeblastdb", "blastn"])?;
    let world = run.world;
    let data_bytes = world.extent.choose(run.bytes(DATABASE_BYTES), run.bytes(DATABASE_BYTES), DATABASE_TINY_BYTES);
    world.check_room(data_bytes + data_bytes / 4)?;
    let fill = |directory: &Path| {
        let queries = directory.join(QUERIES_FILE);
        if queries.exists() {
            return Ok(());
        }
        fs::create_dir_all(directory).map_err(Failure::attempted(format!("making {}", directory.display())))?;
        let mut command = Command::new("makeblastdb");
        command.args(["-in", "-", "-dbtype", "nucl", "-title", "made up", "-out"]).arg(directory.join("database"));
        command.stdin(Stdio::piped());
        let mut program = Program::start(world, "makeblastdb", command, &[])?;
        let input =
            program.process().take_stdin().ok_or_else(|| Failure::Problem("makeblastdb reads nothing".to_owned()))?;
        let wanted = Sequences::new(world.seed).write(BufWriter::new(input), data_bytes * LETTERS_PER_BYTE);
        let wanted = wanted.map_err(Failure::attempted("making up a database"))?;
        program.finish()?;
        fs::write(&queries, wanted).map_err(Failure::attempted(format!("writing {}", queries.display())))
    };
    let local_bytes = run.bytes(LOCAL_BYTES).max(PROGRAM_BYTES_MIN);
    let lent_gib = world.extent.choose(&[1.0, 2.0, 3.0, ALL_FITS_GIB][..], &[ALL_FITS_GIB], &[ALL_FITS_GIB]);
    let subject =
        Subject { name: "blast", kind: Kind::Directory(&fill), local_bytes, beside_bytes: 0, data_bytes, lent_gib };
    study(run, &subject, &measure)
}

/// Searches for each of the sequences in turn: one pass over the database for each.
fn measure(run: &mut Run<'_>, case: &Case<'_>) -> Result<(), Failure> {
    let world = run.world;
    let group = world.group(case.cache_bytes)?;
    let queries = case.path.join(QUERIES_FILE);
    let text = fs::read_to_string(&queries).map_err(Failure::attempted(format!("reading {}", queries.display())))?;
    let queries: Vec<&str> = text.split('>').filter(|query| !query.is_empty()).collect();
    let queries = &queries[..world.extent.choose(queries.len(), QUERIES_QUICK, QUERIES_QUICK)];
    let look = || -> Result<f64, Failure> {
        let mut seconds = 0.0;
        for query in queries {
            let one = world.path("query.fasta");
            fs::write(&one, format!(">{query}")).map_err(Failure::attempted(format!("writing {}", one.display())))?;
            let mut command = Command::new("blastn");
            command.arg("-db").arg(case.path.join("database")).arg("-query").arg(&one).args(["-outfmt", "6"]);
            let begin = Instant::now();
            let found = program::run(world, "blastn", command, &[&group])?;
            seconds += begin.elapsed().as_secs_f64();
            if found.is_empty() {
                return Err(Failure::Problem("BLAST did not find a sequence that is in its database".to_owned()));
            }
        }
        Ok(seconds)
    };
    run.disk_for_filling()?;
    look()?;
    run.disk_as_streamed()?;
    // The filter has no record of this disk yet.
    look()?;
    let searches = queries.len() as f64;
    for round in 0..run.rounds {
        let (reads, bytes) = (world.disk.read_count()?, world.disk.read_bytes()?);
        let seconds = look()?;
        let values = [
            ("searches_per_h", searches * 3600.0 / seconds),
            ("disk_reads_per_search", (world.disk.read_count()? - reads) as f64 / searches),
            ("disk_mib_per_search", (world.disk.read_bytes()? - bytes) as f64 / f64::from(1 << 20) / searches),
        ];
        run.keep(case, round, values.map(|(key, value)| (key.to_owned(), value)).into())?;
    }
    Ok(())
}

/// A maker of sequences.
struct Sequences {
    random: fastrand::Rng,
    families: Vec<Vec<u8>>,
}

impl Sequences {
    fn new(seed: u64) -> Sequences {
        let mut random = fastrand::Rng::with_seed(seed);
        let families = (0..FAMILIES).map(|_| (0..REPEAT_LETTERS).map(|_| letter(&mut random)).collect()).collect();
        Sequences { random, families }
    }

    /// Writes so many letters, and returns the sequences to search for: parts of the written ones,
    /// with some letters changed.
    fn write(&mut self, mut to: impl Write, letters: u64) -> io::Result<String> {
        let (mut written, mut number, mut sequence) = (0, 0, Vec::new());
        let mut wanted = String::new();
        let mut found = 0;
        while written < letters || found < QUERIES {
            self.fill(&mut sequence);
            writeln!(to, ">s{number} made up")?;
            for line in sequence.chunks(LINE_LETTERS) {
                to.write_all(line)?;
                to.write_all(b"\n")?;
            }
            // Distributed over all of it.
            let due = found < QUERIES && written * QUERIES as u64 >= found as u64 * letters;
            if due && sequence.len() >= QUERY_LETTERS {
                let at = self.random.usize(..=sequence.len() - QUERY_LETTERS);
                let part: Vec<u8> =
                    sequence[at..][..QUERY_LETTERS].iter().map(|letter| self.changed(*letter)).collect();
                wanted.push_str(&format!(">q{found}\n{}\n", String::from_utf8_lossy(&part)));
                found += 1;
            }
            written += sequence.len() as u64;
            number += 1;
        }
        to.flush()?;
        Ok(wanted)
    }

    /// One sequence: new letters and repeats by turns.
    fn fill(&mut self, sequence: &mut Vec<u8>) {
        let bits = LENGTH_BITS[0] + self.random.f64() * (LENGTH_BITS[1] - LENGTH_BITS[0]);
        let len = bits.exp2() as usize;
        sequence.clear();
        while sequence.len() < len {
            if self.random.u32(..100) < REPEATED_PERCENT {
                let family = self.random.usize(..FAMILIES);
                for at in 0..REPEAT_LETTERS {
                    let letter = self.families[family][at];
                    sequence.push(self.changed(letter));
                }
            } else {
                sequence.extend((0..REPEAT_LETTERS).map(|_| letter(&mut self.random)));
            }
        }
        sequence.truncate(len);
    }

    fn changed(&mut self, old: u8) -> u8 {
        if self.random.u32(..100) < DIFFERENT_PERCENT { letter(&mut self.random) } else { old }
    }
}

fn letter(random: &mut fastrand::Rng) -> u8 {
    let pair = if random.f64() < GC_SHARE { *b"GC" } else { *b"AT" };
    pair[random.usize(..2)]
}

pub fn results(records: &Records) -> Results {
    const KEY: &str = "searches_per_h";
    let baseline = records.baseline(BASELINE, KEY);
    let all_fits = |variant: &str| records.over(KEY, (variant, ALL_FITS_GIB), (BASELINE, 0.0));
    // While not everything fits.
    let some = |variant: &str| {
        let some = records.xs(variant).into_iter().rev().find(|x| x + 1.0 < 3.0);
        some.and_then(|x| records.over(KEY, (variant, x), (BASELINE, 0.0)))
    };
    Results {
        charts: vec![Chart {
            name: "speed-up",
            title: "BLAST: speed-up over no Puma".to_owned(),
            y_label: "times the baseline",
            is_log: false,
            lines: Line::of_all(records, KEY, baseline),
            marks: vec![
                Mark { x: ALL_FITS_GIB, value: 1.45, label: "2015, filter, 1.45 ×" },
                Mark { x: ALL_FITS_GIB, value: 1.3, label: "2015, no filter, 1.3 ×" },
                Mark { x: ALL_FITS_GIB, value: 2.3, label: "2014, 2.3 ×" },
            ],
        }],
        columns: vec![
            Column { key: KEY, name: "searches/h", decimals: 0 },
            Column { key: "disk_reads_per_search", name: "reads of the disk for each", decimals: 0 },
            Column { key: "disk_mib_per_search", name: "MiB from the disk for each", decimals: 1 },
        ],
        findings: vec![
            Finding::at_least("exclusive, all fits, over no Puma", all_fits("exclusive"), WANTED[0], "1.3 ×"),
            Finding::at_least(
                "non-inclusive with filter, all fits, over no Puma",
                all_fits("non-inclusive, filter"),
                WANTED[1],
                "1.45 ×; 2014: 2.3 ×",
            ),
            Finding::at_most(
                "exclusive without filter, while not all fits, over no Puma",
                some("exclusive"),
                1.0,
                "slower until all fits",
            ),
        ],
        why: "Each search is a stream over the whole database, read through a mapping: a cache smaller than it helps nobody, and all of it is a matter of how \
              fast the stream is, and of the processor's share. From the disk it takes twice its size: it is read twice in part.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_looked_for_is_there_and_repeats_repeat() {
        let mut fasta = Vec::new();
        let queries = Sequences::new(7).write(&mut fasta, 300_000).unwrap();
        assert_eq!(queries.lines().filter(|line| line.len() == QUERY_LETTERS).count(), QUERIES);
        let text = String::from_utf8(fasta).unwrap();
        let letters = text.lines().filter(|line| !line.starts_with('>')).map(str::len).sum::<usize>();
        assert!((300_000..700_000).contains(&letters), "{letters}");
        let gc = text
            .lines()
            .filter(|line| !line.starts_with('>'))
            .flat_map(str::bytes)
            .filter(|letter| b"GC".contains(letter));
        let share = gc.count() as f64 / letters as f64;
        assert!((share - GC_SHARE).abs() < 0.05, "{share}");
        let mut again = Vec::new();
        assert_eq!(Sequences::new(7).write(&mut again, 300_000).unwrap(), queries);
    }
}
