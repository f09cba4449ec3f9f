//! `pumapool advise`: whether Puma would help here, from what happens without it.

mod disk;
mod lender;
mod lending;
mod observed;
mod picture;
mod scope;
mod show;
mod verdict;

use crate::cli::{addresses, size};
use crate::daemon::security;
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use observed::Observed;
use scope::Scope;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tap::Watch;
use verdict::{Disk, Findings, Pool};
use wire::address::Address;

/// Between two looks at what was seen. The ring holds what half a second brings.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Options of `advise`.
#[derive(clap::Args)]
pub struct Options {
    /// What to watch: directories or files; the mount point of a file system for all of it.
    #[arg(required_unless_present = "lend")]
    paths: Vec<PathBuf>,

    /// Say how much this machine could lend, instead.
    #[arg(long, conflicts_with_all = ["paths", "lender", "size", "picture"])]
    lend: bool,

    /// How long to watch. Ctrl-C ends it earlier, with what was seen.
    #[arg(long = "for", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,

    /// A lender, to measure how far away it is; without one, a figure is assumed.
    #[arg(long, value_name = "ADDR", value_parser = addresses::peer)]
    lender: Option<Address>,

    /// A size of the pool to speak of; may be given several times. Without it, sizes that fit what
    /// is seen.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    size: Vec<u64>,

    /// Draw the curve into a file, too: an .svg, or a .png.
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,

    /// As one JSON object.
    #[arg(long)]
    json: bool,

    /// How reads are seen; for tests.
    #[arg(long, hide = true, value_enum)]
    reads: Option<Reads>,

    #[command(flatten)]
    security: security::Options,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Reads {
    PageCache,
    SystemCalls,
}

impl From<Reads> for tap::ReadsSource {
    fn from(reads: Reads) -> tap::ReadsSource {
        match reads {
            Reads::PageCache => tap::ReadsSource::PageCache,
            Reads::SystemCalls => tap::ReadsSource::SystemCalls,
        }
    }
}

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
        bail!("watching a file system needs BPF: run it as root");
    }
    options.picture.iter().try_for_each(|file| crate::commands::picture::check(file))?;
    let security = options.lender.as_ref().map(|lender| options.security.security(std::slice::from_ref(lender)));
    let security = security.transpose()?;
    let scope = Scope::new(&options.paths)?;
    let mut watch = Watch::load(scope.devices(), options.reads.map(Into::into)).context("cannot watch")?;
    let (observed, seconds) = observe(&mut watch, &scope, &span)?;
    let source = watch.source();
    let counters = watch.counters();
    drop(watch);
    // A lender that cannot be reached is no reason to lose what was seen.
    let pool = match options.lender.clone().zip(security) {
        Some((address, security)) => match lender::ping_us(&address, security) {
            Ok(us) => Pool::measured(us),
            Err(error) => {
                tracing::warn!("{error:#}; its latency is assumed");
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

/// Watches for as long as is wanted. Returns what was seen, and for how many seconds.
fn observe(watch: &mut Watch, scope: &Scope, span: &Span<'_>) -> Result<(Observed, f64)> {
    let mut observed = Observed::default();
    let (mut batch, mut threshold) = (Vec::new(), mrc::EVERY_PAGE);
    let mut failed = None;
    let seconds = span.pass(LOOK_EVERY, || {
        let taken = watch.take(&mut |seen| {
            if scope.holds(seen.device, seen.inode) {
                batch.push(seen);
            }
        });
        observed.note(&batch);
        batch.clear();
        if observed.threshold() < threshold {
            threshold = observed.threshold();
            failed = watch.set_threshold(threshold).err();
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
                observed.count_reads(watch.counters().read_pages);
            }
            Ok((observed, seconds))
        }
    }
}

/// The time of watching.
struct Span<'a> {
    length: Duration,
    stop: &'a AtomicBool,
}

impl Span<'_> {
    /// Lets it pass, with a look now and then, which says whether to go on and a word for the
    /// progress on a terminal. Returns its seconds.
    fn pass(&self, every: Duration, mut look: impl FnMut() -> (bool, String)) -> f64 {
        let bar = ProgressBar::with_draw_target(Some(self.length.as_secs()), ProgressDrawTarget::stderr());
        // A template that indicatif does not take costs the looks, nothing else.
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
