//! Whole pools on the real logic of borrowers and lenders, in one thread, in virtual time, from one
//! seed.
//!
//! Each node reads and changes its files. Meanwhile pages are evicted at any moment, and lenders
//! die and come back, forget, and lie. Connections break in mid-message, the event ring overflows,
//! files are changed externally, and daemons are killed and replaced. An oracle decides which
//! values each read may return. The logic is the real one ([`mod@borrower::core`],
//! [`lender::store`]). The kernel, the network and the order of the mount's steps are models, which
//! docs/design/consistency.md lists as assumptions.
//!
//! The same seed and number of steps give the same run.

#[cfg(not(debug_assertions))]
compile_error!("the simulation needs debug assertions: build it without `--release`, or run `make simulate`");

mod batch;
mod changing;
mod context;
mod external;
mod file;
mod guest;
mod kind;
mod lending;
mod node;
mod opening;
mod oracle;
mod rates;
mod reading;

use borrower::catalog::rules::Rule;
use context::Context;
pub use context::Statistics;
use fastrand::Rng;
use lending::Lender;
use node::Node;
pub use rates::{Rates, SUITED};

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
    pub rates: Rates,
    /// The last things that happened before.
    pub trace: Vec<String>,
}

/// Does one run of `steps` steps. With a rule, its rates are those at which the rule matters most.
///
/// # Errors
/// If a read returned a wrong value.
pub fn run(seed: u64, steps: u64, rule: Option<Rule>) -> Result<Statistics, Box<Failure>> {
    attempt(seed, steps, rule, false).map_err(|_| match attempt(seed, steps, rule, true) {
        Err(failure) => failure,
        Ok(_) => Box::new(Failure {
            seed,
            step: 0,
            rates: Context::new(Rng::with_seed(seed), rule, false).rates,
            what: "the run went wrong, but well when it was repeated: something does not depend on the seed alone"
                .to_owned(),
            trace: Vec::new(),
        }),
    })
}

fn attempt(seed: u64, steps: u64, rule: Option<Rule>, trace: bool) -> Result<Statistics, Box<Failure>> {
    let mut context = Context::new(Rng::with_seed(seed), rule, trace);
    let (lender_count, node_count) = (context.rates.lenders, context.rates.nodes);
    let mut lenders: Vec<Lender> = (0..lender_count).map(|_| Lender::running()).collect();
    let mut nodes: Vec<Node> = (0..node_count).map(|_| Node::new(&mut context, lender_count)).collect();
    for step in 0..steps {
        context.now += 1;
        context.statistics.steps += 1;
        let node = context.random.usize(0..nodes.len());
        context.node = node;
        let stepped = nodes[node].step(&mut context, &mut lenders);
        if let Err(wrong) = stepped {
            let trace = context.trace.take().unwrap_or_default();
            let from = trace.len().saturating_sub(TRACE_LINES);
            let (what, trace, rates) = (wrong.0, trace[from..].to_vec(), context.rates);
            return Err(Box::new(Failure { seed, step, what, rates, trace }));
        }
        trouble(&mut context, &mut nodes, &mut lenders);
    }
    for node in &nodes {
        context.statistics.lent += node.core.metrics.lender_pages.get();
    }
    Ok(context.statistics)
}

/// An event that hits lenders and daemons.
fn trouble(context: &mut Context, nodes: &mut [Node], lenders: &mut [Lender]) {
    let draw = context.random.u32(0..10_000);
    let rates = &context.rates;
    let (crashes, kills) = (rates.crashes, rates.kills);
    if draw < crashes {
        let lender = context.random.usize(0..lenders.len());
        lenders[lender].toggle();
        context.note(|| format!("lender {lender} runs: {}", lenders[lender].is_alive()));
    } else if draw < crashes + kills {
        let node = context.random.usize(0..nodes.len());
        nodes[node].kill(context);
    } else if draw < crashes + kills + 100 {
        let lender = context.random.usize(0..lenders.len());
        lenders[lender].apply_memory_pressure(&mut context.random);
    } else if draw < crashes + kills + 150 {
        // A lender detects which sessions have ended.
        let lender = context.random.usize(0..lenders.len());
        let over = |session: &u64| !nodes.iter().any(|node| node.links[lender].session == Some(*session));
        let sessions: Vec<u64> = lenders[lender].sessions().filter(over).collect();
        sessions.into_iter().for_each(|session| lenders[lender].leave(session));
    }
}
