//! `pumapool advise`: watches a machine without Puma, and estimates whether Puma would help.

mod disk;
mod lender;
mod lending;
mod observed;
mod picture;
mod scope;
mod show;
mod verdict;

use crate::cli::advise::Options;
use crate::cli::size;
use crate::daemon::security;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use observed::Observed;
use scope::Scope;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tap::AccessTrace;
use verdict::{Disk, Findings, Pool};

/// Time between two reads of the ring. The ring has room for the events of half a second.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Runs the command.
pub fn run(options: &Options) -> Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("cannot listen for signals")?;
    }
    let span = Span { length: Duration::from_secs(options.seconds), stop: &stop };
    if options.lend {
        return lending::run(&span, options.json);
    }
    if !rustix::process::geteuid().is_root() {
        bail!("watching a file system needs BPF; run it as root");
    }
    options.picture.iter().try_for_each(|file| crate::commands::picture::check(file))?;
    let security = options.lender.as_ref().map(|lender| security::of(&options.security, std::slice::from_ref(lender)));
    let security = security.transpose()?;
    let scope = Scope::new(&options.paths)?;
    let mut trace = AccessTrace::load(scope.devices(), options.reads.map(Into::into)).context("cannot watch")?;
    let (observed, seconds) = observe(&mut trace, &scope, &span)?;
    let source = trace.source();
    let counters = trace.counters();
    drop(trace);
    // If the lender cannot be reached, the results of the watch are still of use.
    let pool = match options.lender.clone().zip(security) {
        Some((address, security)) => match lender::ping_us(&address, security) {
            Ok(us) => Pool::measured(us),
            Err(error) => {
                tracing::warn!("{error:#}. Assuming its latency instead");
                Pool::assumed()
            }
        },
        None => Pool::assumed(),
    };
    let disk = match observed.wait_us() {
        Some(us) => Some(Disk { us, is_waited: true }),
        None => disk::read_us(scope.samples()).map(|us| Disk { us, is_waited: false }),
    };
    let findings = Findings::new(&observed, seconds, source, counters, disk, pool, &options.size);
    if options.json {
        writeln!(std::io::stdout(), "{}", serde_json::to_string(&findings)?)?;
    } else {
        let colours = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        write!(std::io::stdout(), "{}", show::text(&findings, &options.paths, colours))?;
    }
    if let Some(file) = &options.picture {
        crate::commands::picture::save(&picture::draw(&findings), file)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Watches for the time of `span`. Returns the observations, and the seconds that the watch took.
fn observe(trace: &mut AccessTrace, scope: &Scope, span: &Span<'_>) -> Result<(Observed, f64)> {
    let mut observed = Observed::default();
    let (mut batch, mut threshold) = (Vec::new(), mrc::EVERY_PAGE);
    let mut failed = None;
    let seconds = span.pass(LOOK_EVERY, || {
        let taken = trace.take(&mut |seen| {
            if scope.holds(seen.device, seen.inode) {
                batch.push(seen);
            }
        });
        observed.note(&batch);
        batch.clear();
        if observed.threshold() < threshold {
            threshold = observed.threshold();
            failed = trace.set_threshold(threshold).err();
        }
        failed = failed.take().or(taken.err());
        let counts = observed.counts();
        (
            failed.is_none(),
            format!("{} read, {} missed", size::display(counts.read_bytes()), size::display(counts.missed_bytes())),
        )
    });
    match failed {
        Some(error) => Err(error).context("the watch failed"),
        None => {
            if scope.is_whole() {
                observed.count_reads(trace.counters().read_pages);
            }
            Ok((observed, seconds))
        }
    }
}

/// The duration of the watch; it ends earlier if `stop` is set.
struct Span<'a> {
    length: Duration,
    stop: &'a AtomicBool,
}

impl Span<'_> {
    /// Waits until the time is over, and calls `look` at this interval. `look` returns whether to
    /// continue, and a text for the progress bar. Returns the seconds that passed.
    fn pass(&self, every: Duration, mut look: impl FnMut() -> (bool, String)) -> f64 {
        let bar = ProgressBar::with_draw_target(Some(self.length.as_secs()), ProgressDrawTarget::stderr());
        // If indicatif refuses the template, only the progress bar looks different.
        let bar = match ProgressStyle::with_template("watching {wide_bar} {pos}/{len} s  {msg}") {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        let begin = Instant::now();
        loop {
            let elapsed = begin.elapsed();
            let (goes_on, word) = look();
            bar.set_message(word);
            bar.set_position(elapsed.as_secs());
            if !goes_on || elapsed >= self.length || self.stop.load(Relaxed) {
                bar.finish_and_clear();
                return elapsed.as_secs_f64();
            }
            std::thread::sleep(every.min(self.length - elapsed));
        }
    }
}
