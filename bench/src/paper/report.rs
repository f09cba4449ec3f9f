//! RESULTS.md, the CSV files and the charts: all of them are made from the stored records, nothing
//! by hand.

use super::plot::Chart;
use super::record::{Mean, Records};
use super::{Axis, Experiment};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use testbed::Failure;

/// The results of an experiment.
pub struct Results {
    pub charts: Vec<Chart>,
    /// The columns of the table.
    pub columns: Vec<Column>,
    /// The papers' statements, and whether our results confirm them.
    pub findings: Vec<Finding>,
    /// The reasons, as far as they are known.
    pub why: &'static str,
}

/// A column of the table.
pub struct Column {
    pub key: &'static str,
    pub name: &'static str,
    pub decimals: usize,
}

/// A statement of the papers next to our result.
pub struct Finding {
    pub text: String,
    /// `None`: it was not measured, or the confidence interval contains both.
    pub holds: Option<bool>,
}

impl Finding {
    /// A ratio with a minimum.
    pub fn at_least(what: &str, ratio: Option<Mean>, wanted: f64, paper: &str) -> Finding {
        let text = match ratio {
            Some(ratio) => format!("{what}: {} × (at least {wanted:.2} is wanted; the paper: {paper})", ratio.text(2)),
            None => format!("{what}: not measured (the paper: {paper})"),
        };
        Finding { text, holds: ratio.and_then(|ratio| ratio.is_at_least(wanted)) }
    }

    /// A ratio with a maximum.
    pub fn at_most(what: &str, ratio: Option<Mean>, wanted: f64, paper: &str) -> Finding {
        let text = match ratio {
            Some(ratio) => format!("{what}: {} × (at most {wanted:.2} is wanted; the paper: {paper})", ratio.text(2)),
            None => format!("{what}: not measured (the paper: {paper})"),
        };
        Finding { text, holds: ratio.and_then(|ratio| ratio.is_at_most(wanted)) }
    }
}

/// Writes everything again.
pub fn write(results: &Path, experiments: &[Experiment]) -> Result<(), Failure> {
    let mut page = String::from(
        "# The papers' experiments, again\n\nMade by `bench/paper/run` from what is kept in `raw/`: do not edit. Figures are means of rounds with their 95 % \
         confidence interval (Student's t); a ratio's has those of both in it. Of a finding, \"yes\" and \"**no**\" stand where the whole \
         interval is on one side of what is wanted, \"–\" where it is on both, or nothing was measured. Where nothing else is said, the disk is \
         this machine's, slowed down to 166 reads and 100 MB a second, as a disk of 7200 rpm does them (where there is only one stream, to 100 MB a \
         second alone: such a disk does not seek then); borrower and lender have control groups of their own on one machine, TCP between them, \
         and a pool key. A mount that a program writes through has some memory beside; whoever has no mount, has as much more himself. Where programs \
         only read (random-read, sequential-read, slides, dynamic, blast, and what latency has of these), the mount's own memory, some 34 MiB and a ring \
         of 32 MiB at any scale, is not given to the baseline.\n\nAll rounds of a point share one mount, one lender and one filling of the caches \
         (but in dynamic), and points are measured one after the other, but where it says otherwise. So an interval says how much rounds differ, and nothing of how much two mounts, \
         or two hours of this machine, do.\n",
    );
    let mut png = true;
    for experiment in experiments {
        let Some(records) = Records::read(results, experiment.name)? else { continue };
        png &= one(&mut page, results, experiment, &records)?;
    }
    let path = results.join("RESULTS.md");
    fs::write(&path, page).map_err(Failure::attempted(format!("writing {}", path.display())))?;
    if !png {
        println!("There is no font here to draw the charts as PNG with.");
    }
    println!("Results in {}", path.display());
    Ok(())
}

/// Adds an experiment. Returns false if its charts are missing as PNG.
fn one(page: &mut String, results: &Path, experiment: &Experiment, records: &Records) -> Result<bool, Failure> {
    let header = &records.header;
    let told = |key: &str| header.conditions[key].as_str().unwrap_or("?").to_owned();
    let mut revisions: Vec<&str> = records.points.iter().map(|point| point.revision.as_str()).collect();
    revisions.dedup();
    let conditions = format!(
        "{}, begun {}, Linux {}, {} × {}; {}, sizes of the paper divided by {}, seed {}",
        revisions.join(" and "),
        told("date"),
        told("kernel"),
        header.conditions["processors"],
        told("processor"),
        header.extent,
        (header.scale * 10.0).round() / 10.0,
        header.seed
    );
    let mut places: Vec<&str> = records.points.iter().filter_map(|point| point.place.as_deref()).collect();
    places.dedup();
    let mut all_conditions = [&[conditions.as_str()], &places[..]].concat().join("; ");
    let on_its_own = records.points.iter().filter(|point| point.on_its_own).count();
    if on_its_own > 0 {
        let _infallible =
            write!(all_conditions, "; {on_its_own} of {} rounds while others were measured", records.points.len());
    }
    let said = (experiment.results)(records);
    let name = experiment.name;
    let _infallible = write!(
        page,
        "\n## {name}\n{} ({}).\n\nMeasured: {all_conditions}.\n",
        capital(experiment.about),
        experiment.source
    );
    let mut png = true;
    for chart in &said.charts {
        let svg = chart.draw(&conditions, &experiment.x);
        let file = format!("{name}-{}.svg", chart.name);
        fs::write(results.join(&file), &svg).map_err(Failure::attempted(format!("writing {file}")))?;
        png &= charts::render(&svg, &results.join(&file).with_extension("png")).map_err(Failure::Problem)?;
        let _infallible = write!(page, "\n![{}]({file})\n", chart.title);
    }
    page.push('\n');
    for finding in &said.findings {
        let mark = finding.holds.map_or("–", |holds| if holds { "yes" } else { "**no**" });
        let _infallible = writeln!(page, "- {mark}: {}", finding.text);
    }
    let _infallible = write!(page, "\n{}\n", said.why);
    table(page, &experiment.x, records, &said.columns);
    let path = results.join(format!("{name}.csv"));
    fs::write(&path, csv(&experiment.x, records, &said.columns))
        .map_err(Failure::attempted(format!("writing {}", path.display())))?;
    Ok(png)
}

/// A text as the beginning of a sentence.
pub fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// Variants in the order of their measurement, with their sizes.
fn rows(records: &Records) -> Vec<(&str, f64)> {
    let mut variants: Vec<&str> = Vec::new();
    for point in &records.points {
        if !variants.contains(&point.variant.as_str()) {
            variants.push(&point.variant);
        }
    }
    variants.into_iter().flat_map(|variant| records.xs(variant).into_iter().map(move |size| (variant, size))).collect()
}

fn table(page: &mut String, x: &Axis, records: &Records, columns: &[Column]) {
    let names: Vec<&str> = columns.iter().map(|column| column.name).collect();
    let _infallible =
        write!(page, "\n| variant | {} | {} |\n|---|---|{}\n", x.name, names.join(" | "), "---|".repeat(columns.len()));
    for (variant, at) in rows(records) {
        let _infallible = write!(page, "| {variant} | {at} |");
        for column in columns {
            let mean = records.mean(variant, at, column.key, 1.0);
            let _infallible = write!(page, " {} |", mean.map_or("–".to_owned(), |mean| mean.text(column.decimals)));
        }
        page.push('\n');
    }
}

fn csv(x: &Axis, records: &Records, columns: &[Column]) -> String {
    let mut text = format!("variant,{},rounds", x.key);
    for column in columns {
        let _infallible = write!(text, ",{0},{0}_ci95", column.key);
    }
    for (variant, at) in rows(records) {
        let rounds = records.points.iter().filter(|point| point.variant == variant && point.x == at).count();
        let _infallible = write!(text, "\n\"{variant}\",{at},{rounds}");
        for column in columns {
            let mean = records.mean(variant, at, column.key, 1.0);
            let _infallible =
                write!(text, ",{}", mean.map_or(",".to_owned(), |mean| format!("{},{}", mean.mean, mean.off)));
        }
    }
    text.push('\n');
    text
}
