//! Whole pools on the real logic of borrowers and lenders, in one thread, in virtual time, from one
//! seed.
//!
//! Each machine reads and changes its files. Meanwhile pages are evicted at any moment, and lenders
//! die and come back, forget, and lie. Connections break in mid-message, the event ring overflows,
//! files are changed externally, and daemons are killed and replaced. An oracle decides which
//! values each read may return. The logic is the real one ([`mod@borrower::core`],
//! [`lender::store`]). The kernel, the network and the order of the mount's steps are models, which
//! docs/design/consistency.md lists as assumptions.
//!
//! The same seed and number of steps give the same run.

#[cfg(not(debug_assertions))]
compile_error!("the simulation needs debug assertions: build it without `--release`, or run `make simulate`");

mod beside;
mod changing;
mod context;
mod file;
mod guest;
mod kind;
mod lending;
mod machine;
mod opening;
mod oracle;
mod rates;
mod reading;
mod together;

use context::Context;
pub use context::Tally;
use fastrand::Rng;
use lending::Lender;
use machine::Machine;
pub use rates::Rates;

/// The number of lines of the trace that are printed for a failed run.
const TRACE_LINES: usize = 1000;

/// A failed run.
#[derive(Debug)]
pub struct Failure {
    /// The seed that repeats it.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The wrong value that was read.
    pub what: String,
    /// How often what happens in it.
    pub weather: Rates,
    /// The last things that happened before.
    pub trace: Vec<String>,
}

/// Does one run of `steps` steps.
///
/// # Errors
/// If a read returned a wrong value.
pub fn run(seed: u64, steps: u64) -> Result<Tally, Box<Failure>> {
    attempt(seed, steps, false).map_err(|_| match attempt(seed, steps, true) {
        Err(failure) => failure,
        Ok(_) => Box::new(Failure {
            seed,
            step: 0,
            weather: Context::new(Rng::with_seed(seed), false).weather,
            what: "the run went wrong, but well when it was repeated: something does not depend on the seed alone"
                .to_owned(),
            trace: Vec::new(),
        }),
    })
}

fn attempt(seed: u64, steps: u64, trace: bool) -> Result<Tally, Box<Failure>> {
    let mut context = Context::new(Rng::with_seed(seed), trace);
    let (lender_count, machine_count) = (context.weather.lenders, context.weather.machines);
    let mut lenders: Vec<Lender> = (0..lender_count).map(|_| Lender::running()).collect();
    let mut machines: Vec<Machine> = (0..machine_count).map(|_| Machine::new(&mut context, lender_count)).collect();
    for step in 0..steps {
        context.now += 1;
        context.tally.steps += 1;
        let machine = context.random.usize(0..machines.len());
        context.machine = machine;
        let stepped = machines[machine].step(&mut context, &mut lenders);
        if let Err(wrong) = stepped {
            let trace = context.trace.take().unwrap_or_default();
            let from = trace.len().saturating_sub(TRACE_LINES);
            let (what, trace, weather) = (wrong.0, trace[from..].to_vec(), context.weather);
            return Err(Box::new(Failure { seed, step, what, weather, trace }));
        }
        trouble(&mut context, &mut machines, &mut lenders);
    }
    for machine in &machines {
        context.tally.lent += machine.core.metrics.lender_pages.get();
    }
    Ok(context.tally)
}

/// An event that hits lenders and daemons.
fn trouble(context: &mut Context, machines: &mut [Machine], lenders: &mut [Lender]) {
    let draw = context.random.u32(0..10_000);
    let weather = &context.weather;
    let (crashes, kills) = (weather.crashes, weather.kills);
    if draw < crashes {
        let lender = context.random.usize(0..lenders.len());
        lenders[lender].toggle();
        context.note(|| format!("lender {lender} runs: {}", lenders[lender].is_alive()));
    } else if draw < crashes + kills {
        let machine = context.random.usize(0..machines.len());
        machines[machine].kill(context);
    } else if draw < crashes + kills + 100 {
        let lender = context.random.usize(0..lenders.len());
        lenders[lender].squeeze(&mut context.random);
    } else if draw < crashes + kills + 150 {
        // A lender detects which sessions have ended.
        let lender = context.random.usize(0..lenders.len());
        let over = |session: &u64| !machines.iter().any(|machine| machine.links[lender].session == Some(*session));
        let sessions: Vec<u64> = lenders[lender].sessions().filter(over).collect();
        sessions.into_iter().for_each(|session| lenders[lender].leave(session));
    }
}
