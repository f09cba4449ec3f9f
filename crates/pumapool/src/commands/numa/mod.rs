//! `pumapool numa`: shows and places memory of virtual machines and processes on NUMA nodes.

mod picture;

use crate::cli::numa::{AdviseOptions, ApplyOptions, DaemonOptions, GuestName, ListOptions, Options, RunOptions, What};
use crate::cli::size;
use crate::daemon::{Daemon, security};
use ::numa::advice;
use ::numa::apply::{self, Applied};
use ::numa::machines::{self, Found};
use ::numa::placing::{Limits, Placing, Wanted, Who};
use ::numa::process::{self, Process};
use ::numa::topology::{self, Node};
use ::numa::{NodeId, PAGE_BYTES, Policy};
use anyhow::{Context, Result, bail};
use parking_lot::Mutex;
use serde_json::json;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};
use wire::address::Address;
use wire::key::PoolKey;
use wire::listener::Listener;
use wire::peers;

/// Without --all, `list` shows at most so many processes that are not virtual machines.
const LISTED: usize = 20;
/// Width of a process's bar in `list`, in characters.
const PICTURE_WIDTH: u64 = 32;
/// Period of placement decisions, as in the paper on Carrefour.
const PERIOD: Duration = Duration::from_secs(1);
/// Time between two reads of the samples.
const TAKE: Duration = Duration::from_millis(100);
/// The rate limit compares the moved bytes with the clock after each such amount.
const PACE_BYTES: u64 = 16 << 20;

/// Runs the command.
pub fn run(options: Options) -> Result<ExitCode> {
    let nodes = topology::read(Path::new(topology::SYS)).context("cannot read the machine's nodes")?;
    match options.what {
        What::List(options) => list(&options, &nodes),
        What::Apply(options) => apply(&options, &nodes),
        What::Run(options) => run_command(options, &nodes),
        What::Daemon(options) => run_daemon(options, nodes),
        What::Advise(options) => run_advise(&options),
    }
}

fn list(options: &ListOptions, nodes: &[Node]) -> Result<ExitCode> {
    let mut found = machines::all().context("cannot list processes")?;
    let pages = |found: &Found| found.pages_by_node.values().sum::<u64>();
    found.sort_by_key(|found| (found.machine.is_none(), std::cmp::Reverse(pages(found)), found.pid));
    if !options.all {
        let machines = found.iter().filter(|found| found.machine.is_some()).count();
        found.truncate(machines + LISTED);
    }
    if let Some(file) = &options.picture {
        crate::commands::picture::save(&picture::draw(nodes, &found), file)?;
    }
    let mut out = io::stdout().lock();
    if options.json {
        writeln!(out, "{}", json!({ "nodes": nodes, "processes": found }))?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "NODE  {:<12} {:>9} {:>9}  DISTANCES", "PROCESSORS", "MEMORY", "FREE")?;
    for node in nodes {
        let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
        writeln!(
            out,
            "{:>4}  {:<12} {:>9} {:>9}  {}",
            node.id,
            ranges(&node.cpus),
            size::display(node.memory_bytes),
            size::display(node.free_bytes),
            distances.join(" ")
        )?;
    }
    if nodes.len() == 1 {
        writeln!(out, "\n{}", apply::ONE_NODE)?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(
        out,
        "\n{:>7}  {:<24} {:>9}  {:<width$}  SHARES",
        "PID",
        "WHAT",
        "MEMORY",
        "ON NODES",
        width = PICTURE_WIDTH as usize
    )?;
    for found in &found {
        let pages = pages(found);
        let mut shares = String::new();
        for (node, count) in &found.pages_by_node {
            let _ = write!(shares, "{node}: {:.0} %  ", *count as f64 / pages.max(1) as f64 * 100.0);
        }
        writeln!(
            out,
            "{:>7}  {:<24} {:>9}  {}  {}",
            found.pid,
            what(found),
            size::display(pages * PAGE_BYTES),
            bar(found),
            shares.trim_end()
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The name of a process in the list.
fn what(found: &Found) -> String {
    match &found.machine {
        Some(machine) if machine.name.is_empty() => format!("{} (machine)", found.name),
        Some(machine) => format!("{} (machine)", machine.name),
        None => found.name.clone(),
    }
}

/// A list of processors, in the form that the kernel uses: 0-3,8
fn ranges(cpus: &[u32]) -> String {
    let runs = cpus.chunk_by(|one, next| *one + 1 == *next);
    let runs: Vec<String> = runs
        .map(|run| match run {
            [only] => only.to_string(),
            _ => format!("{}-{}", run[0], run[run.len() - 1]),
        })
        .collect();
    if runs.is_empty() { "none".to_owned() } else { runs.join(",") }
}

/// A bar in which each node has as many of its digits as its share: 0000000011112222
fn bar(found: &Found) -> String {
    let pages: u64 = found.pages_by_node.values().sum();
    let (mut bar, mut so_far) = (String::new(), 0);
    for (node, count) in &found.pages_by_node {
        so_far += count;
        let end = (so_far * PICTURE_WIDTH + pages / 2) / pages.max(1);
        let digit = char::from_digit(u32::from(*node) % 36, 36).unwrap_or('?');
        while (bar.len() as u64) < end {
            bar.push(digit);
        }
    }
    bar
}

fn apply(options: &ApplyOptions, nodes: &[Node]) -> Result<ExitCode> {
    let pid = match (&options.target.vm, options.target.pid) {
        (Some(name), _) => machines::named(name).map_err(anyhow::Error::msg)?,
        (None, Some(pid)) => pid,
        (None, None) => bail!("name a process by --pid, or a virtual machine by --vm"),
    };
    let process = open(pid)?;
    let policy = options.policy.policy();
    let usable = usable(&process, nodes)?;
    let advice = match policy {
        Policy::Round4k | Policy::Round1g => None,
        Policy::FirstTouch => Some(first_touch(&process)),
        Policy::Carrefour => None,
        Policy::None => Some("its memory stays where it is".to_owned()),
    };
    let problem = apply::obstacle(&process, policy, nodes, &usable);
    let stop = stop_wanted()?;
    if policy == Policy::Carrefour && problem.is_none() {
        let until = options.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        let mut goes_on = || !stop.load(Relaxed) && until.is_none_or(|until| Instant::now() < until);
        let wanted = Wanted { who: Who::Pid(pid), policy };
        let mut placing = Placing::new(nodes.to_vec(), vec![wanted], options.rate).map_err(anyhow::Error::msg)?;
        place(&mut placing, &mut goes_on, &mut |_| {});
        let source = placing.source().map(|source| source.to_string()).unwrap_or_default();
        let status = placing.status().remove(0);
        let mut out = io::stdout().lock();
        if options.json {
            writeln!(out, "{}", json!({ "pid": pid, "nodes": usable, "source": source, "status": status }))?;
        } else {
            let moved = size::display(status.moved_pages * PAGE_BYTES);
            writeln!(out, "{moved} moved, from {} samples ({source})", status.samples)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut pace = Pace::new(options.rate, stop.clone());
    let applied = match (&problem, &advice) {
        (None, None) => apply::spread(&process, policy, &usable, &mut |bytes| pace.moved(bytes))
            .map_err(|error| told(pid, &error))?,
        _ => Applied::default(),
    };
    let said = problem.or(advice);
    let mut out = io::stdout().lock();
    if options.json {
        writeln!(
            out,
            "{}",
            json!({ "pid": pid, "policy": policy.name(), "nodes": usable, "applied": applied, "note": said })
        )?;
    } else {
        writeln!(out, "{}", said.unwrap_or_else(|| summary(&applied)))?;
    }
    if stop.load(Relaxed) {
        bail!("interrupted: what was moved stays there; the rest is where it was");
    }
    Ok(ExitCode::SUCCESS)
}

fn open(pid: u32) -> Result<Process> {
    Process::open(pid).map_err(|error| told(pid, &error))
}

fn told(pid: u32, error: &io::Error) -> anyhow::Error {
    anyhow::Error::msg(process::failure_of(pid, error))
}

fn usable(process: &Process, nodes: &[Node]) -> Result<Vec<NodeId>> {
    apply::usable_nodes(process, nodes).map_err(|error| told(process.pid(), &error))
}

fn first_touch(process: &Process) -> String {
    let machine = process.arguments().ok().and_then(|arguments| machines::machine(&arguments));
    match machine {
        Some(machine) if !machine.reports_free_pages => {
            format!(
                "memory that it touches from now on is placed on the node that touches it; but this machine does not report freed memory, so its present memory stays: {}",
                machines::REPORT_FREE_PAGES
            )
        }
        Some(_) => {
            "memory is placed on the node that touches it, and again after it was freed, which the machine reports"
                .to_owned()
        }
        None => "memory that it touches from now on is placed on that node; its present memory stays".to_owned(),
    }
}

fn summary(applied: &Applied) -> String {
    let bytes = |pages: u64| size::display(pages * PAGE_BYTES);
    let mut text = format!("of {}, {} moved; now on nodes", bytes(applied.pages), bytes(applied.moved_pages));
    let total: u64 = applied.pages_by_node.values().sum();
    for (node, pages) in &applied.pages_by_node {
        let _ = write!(text, "  {node}: {:.1} %", *pages as f64 / total.max(1) as f64 * 100.0);
    }
    let full: Vec<String> = applied.full_nodes.iter().map(NodeId::to_string).collect();
    for (pages, why) in [
        (applied.full_pages, format!("could not be moved: no memory is free on node {}", full.join(", "))),
        (applied.busy_pages, "were in use at that moment: try again".to_owned()),
        (applied.shared_pages, "stay because other processes use them, too".to_owned()),
        (applied.refused_pages, "the kernel would not move".to_owned()),
    ] {
        if pages > 0 {
            let _ = write!(text, "\n{} {why}", bytes(pages));
        }
    }
    text
}

/// A flag that SIGINT and SIGTERM set.
fn stop_wanted() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, stop.clone()).context("cannot listen for signals")?;
    }
    Ok(stop)
}

/// A rate limit, in bytes a second.
struct Pace {
    bytes_per_s: u64,
    stop: Arc<AtomicBool>,
    begun: Instant,
    bytes: u64,
}

impl Pace {
    fn new(bytes_per_s: u64, stop: Arc<AtomicBool>) -> Pace {
        Pace { bytes_per_s: bytes_per_s.max(1), stop, begun: Instant::now(), bytes: 0 }
    }

    fn moved(&mut self, bytes: u64) -> bool {
        self.bytes += bytes;
        if self.bytes >= PACE_BYTES {
            let due = Duration::from_secs_f64(self.bytes as f64 / self.bytes_per_s as f64);
            while self.begun.elapsed() < due && !self.stop.load(Relaxed) {
                std::thread::sleep((due.saturating_sub(self.begun.elapsed())).min(Duration::from_millis(100)));
            }
            (self.begun, self.bytes) = (Instant::now(), 0);
        }
        !self.stop.load(Relaxed)
    }
}

/// Places the targets, and calls `each`, until `goes_on` returns false or all targets have ended.
fn place(placing: &mut Placing, goes_on: &mut dyn FnMut() -> bool, each: &mut dyn FnMut(&mut Placing)) {
    let mut states: Vec<String> = Vec::new();
    while goes_on() {
        let begun = Instant::now();
        placing.begin_period();
        while begun.elapsed() < PERIOD && goes_on() {
            std::thread::sleep(TAKE);
            placing.take();
            each(placing);
        }
        placing.end_period(goes_on);
        let status = placing.status();
        // The part in brackets changes in each period.
        let state = |status: &report::Target| status.state.split(" (").next().unwrap_or_default().to_owned();
        states.resize(status.len(), String::new());
        for (status, before) in status.iter().zip(&mut states) {
            if state(status) != *before {
                tracing::info!(who = status.who, policy = %status.policy, "{}", status.state);
                *before = state(status);
            }
        }
        if placing.is_over() {
            break;
        }
    }
}

fn run_advise(options: &AdviseOptions) -> Result<ExitCode> {
    let host = options.to.clone().absolute()?;
    let security = security::of(&options.security, std::slice::from_ref(&host))?;
    let policy = options.policy.policy();
    advice::advise(&host, &security, policy).with_context(|| format!("{host} does not grant {policy}"))?;
    writeln!(io::stdout(), "granted: {policy}")?;
    Ok(ExitCode::SUCCESS)
}

fn run_daemon(options: DaemonOptions, nodes: Vec<Node>) -> Result<ExitCode> {
    // Check the options before anything is started.
    let mut wanted = options.target.clone();
    for GuestName { who, .. } in &options.guest {
        if !wanted.iter().any(|wanted| wanted.who == *who) {
            wanted.push(Wanted { who: who.clone(), policy: Policy::None });
        }
    }
    if let Some(nth) = (1..wanted.len()).find(|nth| wanted[..*nth].iter().any(|other| other.who == wanted[*nth].who)) {
        bail!("{} is named twice", wanted[nth].who);
    }
    let of_guests: Vec<Option<usize>> =
        options.guest.iter().map(|guest| wanted.iter().position(|wanted| wanted.who == guest.who)).collect();
    let read =
        |guest: &GuestName| -> Result<Option<PoolKey>> { Ok(Some(PoolKey::read(&std::path::absolute(&guest.key)?)?)) };
    let keys: Vec<Option<PoolKey>> = options.guest.iter().map(read).collect::<Result<_>>()?;
    if let Err(nth) = peers::check_keys(&keys.iter().map(Option::as_ref).collect::<Vec<_>>()) {
        bail!("{}: another guest has the same key; make one for each guest", options.guest[nth].who);
    }
    let limits = Limits {
        allowed: options.allow.iter().map(|name| name.policy()).collect(),
        carrefour_max: options.carrefour_max,
    };
    let mut placing = Placing::new(nodes.clone(), wanted, options.rate).map_err(anyhow::Error::msg)?;
    if nodes.len() == 1 {
        writeln!(io::stderr(), "pumapool: {}", apply::ONE_NODE)?;
    }
    let listen = options.listen.map(Address::absolute).transpose()?;
    let daemon = match Daemon::prepare("numa", &options.daemon)? {
        Ok(daemon) => daemon,
        Err(code) => return Ok(code),
    };
    let listener = listen.map(|address| Listener::bind(&address)).transpose()?;
    let address = listener.as_ref().map(|listener| listener.address().to_string());
    let (ask, asked) = sync_channel(advice::ASKED_MAX);
    let (stop, shown) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new((placing.status(), None::<String>))));
    let message = format!("the memory of {} targets is placed", placing.status().len());
    let status = {
        let shown = shown.clone();
        let description = report::Numa {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            metrics: daemon.metrics().map(Address::to_string),
            listen: address,
            ..report::Numa::default()
        };
        move || {
            let (targets, source) = &*shown.lock();
            report::Daemon::Numa(Box::new(report::Numa {
                source: source.clone(),
                targets: targets.clone(),
                ..description.clone()
            }))
        }
    };
    let for_stop = stop.clone();
    let serving = daemon.serve(&message, status, move || for_stop.store(true, Relaxed))?;
    tracing::info!("{message}");
    if let Some(listener) = listener {
        let listen = move || advice::listen(&listener, &keys, &ask);
        std::thread::Builder::new().name("puma-advisers".into()).spawn(listen).context("cannot start a thread")?;
    }
    let mut goes_on = || !stop.load(Relaxed);
    let mut each = |placing: &mut Placing| {
        for advice::Asked { guest, policy, answer, .. } in asked.try_iter().filter(|asked| !asked.is_late()) {
            let Some(target) = of_guests[guest] else { continue };
            let granted = placing.advise(target, policy, &limits);
            tracing::info!(who = %options.guest[guest].who, %policy, "advice: {}", granted.as_ref().err().map_or("granted", String::as_str));
            let _it_may_have_gone = answer.try_send(granted);
        }
        *shown.lock() = (placing.status(), placing.source().map(|source| source.to_string()));
    };
    place(&mut placing, &mut goes_on, &mut each);
    serving.ended_well();
    Ok(ExitCode::SUCCESS)
}

fn run_command(options: RunOptions, nodes: &[Node]) -> Result<ExitCode> {
    let mut words = options.command.iter();
    let Some(program) = words.next() else { bail!("name the command to run, after --") };
    let mut command = Command::new(program);
    command.args(words);
    let policy = options.policy.policy();
    let own = open(std::process::id())?;
    let usable = usable(&own, nodes)?;
    if let Some(problem) = apply::obstacle(&own, policy, nodes, &usable) {
        writeln!(io::stderr(), "pumapool: {problem}; the command runs without placement")?;
    } else {
        // For these policies the kernel places each page itself.
        match policy {
            Policy::Round4k => ::numa::mempolicy::interleave(&usable),
            Policy::FirstTouch => ::numa::mempolicy::local(),
            Policy::Round1g | Policy::Carrefour | Policy::None => Ok(()),
        }
        .context("the kernel does not accept the policy")?;
        if matches!(policy, Policy::Round1g | Policy::Carrefour) {
            return keep_up(command, program, &options, nodes);
        }
    }
    let error = command.exec();
    Err(error).with_context(|| format!("cannot run {}; is it installed, and in PATH?", Path::new(program).display()))
}

/// Runs the command, and places its memory while it runs.
fn keep_up(mut command: Command, program: &OsString, options: &RunOptions, nodes: &[Node]) -> Result<ExitCode> {
    // A signal from the terminal reaches the command, too; others are passed on.
    let stop = stop_wanted()?;
    let mut child = command.spawn().with_context(|| format!("cannot run {}", Path::new(program).display()))?;
    let pid = child.id();
    let (mut ended, mut is_told) = (None, false);
    let mut goes_on = || {
        if stop.load(Relaxed)
            && !std::mem::replace(&mut is_told, true)
            && let Some(pid) = rustix::process::Pid::from_raw(pid as i32)
        {
            let _it_may_have_ended = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        ended = ended.or(child.try_wait().ok().flatten());
        ended.is_none()
    };
    let wanted = Wanted { who: Who::Pid(pid), policy: options.policy.policy() };
    // If placement fails, the command still runs.
    match Placing::new(nodes.to_vec(), vec![wanted], options.rate) {
        Ok(mut placing) => place(&mut placing, &mut goes_on, &mut |_| {}),
        Err(problem) => tracing::warn!("{problem}; the command runs without placement"),
    }
    while goes_on() {
        std::thread::sleep(TAKE);
    }
    let code = ended.and_then(|status| status.code().or(status.signal().map(|signal| 128 + signal)));
    Ok(ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

#[cfg(test)]
mod tests;
