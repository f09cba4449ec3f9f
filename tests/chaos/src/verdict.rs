//! The result of a round, and whether it keeps the promise: no wrong byte, no error, no read slower
//! than the controls by [`READ_MAX`].

use crate::probe::Report;
use crate::scenario::Trouble;
use serde::Serialize;
use std::time::Duration;

/// No read may take this much longer than the slowest one of the controls, whatever happens to
/// lenders. The controls show how long the machine itself stood still.
pub const READ_MAX: Duration = Duration::from_secs(2);

/// Violations of one sort that are described.
pub const PRINTED_MAX: usize = 3;

/// The result of a round.
#[derive(Debug, Serialize)]
pub struct Outcome {
    /// The trouble of the lender.
    pub scenario: &'static str,
    /// The mode of the mount.
    pub mode: String,
    /// The duration of the load.
    pub seconds: f64,
    /// The number of harms to the lender.
    pub harm_count: u64,
    /// Runs of fsx.
    pub fsx_runs: u64,
    /// Runs of fio.
    pub fio_runs: u64,
    /// Reports of the probes: with a lender, without one, in a plain directory.
    pub reports: Vec<Report>,
    /// The mount's status at the end.
    pub status: Option<report::Mount>,
    /// What must not have happened, one line each.
    pub violations: Vec<String>,
}

impl Outcome {
    /// For a round that begins.
    pub fn new(scenario: &'static str, mode: String) -> Outcome {
        Outcome {
            scenario,
            mode,
            seconds: 0.0,
            harm_count: 0,
            fsx_runs: 0,
            fio_runs: 0,
            reports: Vec::new(),
            status: None,
            violations: Vec::new(),
        }
    }

    /// Records a failure, if there is one.
    pub fn note(&mut self, result: Result<(), String>) {
        self.violations.extend(result.err());
    }

    /// A summary in one line.
    pub fn line(&self) -> String {
        let verdict = if self.violations.is_empty() { "good" } else { "BAD" };
        let probe = self.reports.first();
        format!(
            "{:<9} {verdict}: {} for {:.0} s, {} times harmed; probe {} reads, {} wrong, {} errors, slowest {} ms; fsx {} runs, fio {}",
            self.scenario,
            self.mode,
            self.seconds,
            self.harm_count,
            probe.map_or(0, |report| report.reads),
            probe.map_or(0, |report| report.wrong_pages),
            probe.map_or(0, |report| report.error_count),
            probe.map_or(0, |report| report.max_us / 1000),
            self.fsx_runs,
            self.fio_runs,
        )
    }
}

/// Records the probes' findings that violate the promise: with a lender, and of the two controls.
/// The controls must be right, too, but their slow reads are no violation.
pub fn judge_probes(reports: &[Report], trouble: &Trouble, outcome: &mut Outcome) {
    for (place, report) in ["with a lender", "without a lender", "in a plain directory"].into_iter().zip(reports) {
        judge_content(place, report, trouble, outcome);
    }
    let Some((with_lender, controls)) = reports.split_first() else { return };
    let control_ms = controls.iter().map(|control| control.max_us / 1000).max().unwrap_or(0);
    let allowed_ms = READ_MAX.as_millis() as u64 + control_ms;
    for slow in with_lender.slow.iter().filter(|slow| slow.took_ms > allowed_ms).take(PRINTED_MAX) {
        outcome.violations.push(format!(
            "SLOW READ ({} in all; the slowest of the controls took {control_ms} ms): {} took {} ms [{}]",
            with_lender.slow_count,
            slow.what,
            slow.took_ms,
            trouble.before(slow.began_ms, slow.took_ms)
        ));
    }
}

fn judge_content(place: &str, report: &Report, trouble: &Trouble, outcome: &mut Outcome) {
    for (at_ms, wrong) in report.wrong.iter().take(PRINTED_MAX) {
        outcome.violations.push(format!(
            "WRONG BYTES ({place}, {} pages in all): {wrong} [{}]",
            report.wrong_pages,
            trouble.before(*at_ms, 0)
        ));
    }
    for error in report.errors.iter().take(PRINTED_MAX) {
        outcome.violations.push(format!("ERROR ({place}, {} in all): {error}", report.error_count));
    }
}

/// The table of all rounds.
pub fn table(outcomes: &[Outcome]) -> String {
    let head = [
        "scenario",
        "harm",
        "reads",
        "wrong",
        "errors",
        "p99 ms",
        "slowest ms",
        "no lender",
        "plain dir",
        "lent pages",
        "bad",
        "failed gets",
        "losses",
        "fsx",
        "fio",
        "mode",
    ];
    let mut rows = vec![head.map(str::to_owned)];
    for outcome in outcomes {
        let sum = |figure: fn(&Report) -> u64| outcome.reports.iter().map(figure).sum::<u64>().to_string();
        let ms = |at: usize, figure: fn(&Report) -> u64| {
            outcome.reports.get(at).map_or("-".to_owned(), |report| format!("{:.1}", figure(report) as f64 / 1000.0))
        };
        let borrower = |number: fn(&report::Borrower) -> u64| {
            outcome.status.as_ref().map_or(0, |status| number(&status.borrower)).to_string()
        };
        rows.push([
            outcome.scenario.to_owned(),
            outcome.harm_count.to_string(),
            sum(|report| report.reads),
            sum(|report| report.wrong_pages),
            sum(|report| report.error_count),
            ms(0, |report| report.p99_us),
            ms(0, |report| report.max_us),
            ms(1, |report| report.max_us),
            ms(2, |report| report.max_us),
            borrower(|of| of.lender_pages),
            borrower(|of| of.bad_pages),
            borrower(|of| of.get_failures),
            borrower(|of| of.lender_losses),
            outcome.fsx_runs.to_string(),
            outcome.fio_runs.to_string(),
            outcome.mode.clone(),
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |row: &[String; 16]| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 | 15 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    rows.iter().map(line).collect()
}
