//! Latency of a lender: connects to it like a mount, and sends pings.

use anyhow::{Result, bail};
use borrower::{Borrower, Config, LenderAddress};
use std::time::{Duration, Instant};
use wire::address::Address;
use wire::secure::Security;

/// Time limit for the first ping, connecting included; and time in which pings are measured. A ping
/// is sent every half second.
const LIMIT: Duration = Duration::from_secs(5);
const PINGS: Duration = Duration::from_millis(2500);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Returns the round-trip time of the fastest ping, in microseconds. Stores nothing at the lender.
///
/// # Errors
/// Fails if no ping returns within [`LIMIT`].
pub(super) fn ping_us(address: &Address, security: Security) -> Result<f64> {
    let lenders = vec![LenderAddress::from(address.clone())];
    let config = Config { lenders, security, gate: None, hedge: false, ..Config::default() };
    let borrower = Borrower::start(config, None)?;
    let begin = Instant::now();
    let (mut fastest, mut reason) = (None, String::new());
    // The fastest ping counts, because others also measure how long this machine's threads take to
    // wake up.
    while begin.elapsed() < if fastest.is_some() { PINGS } else { LIMIT } {
        for lender in borrower.lenders() {
            reason = lender.reason;
            if lender.ping_us > 0 {
                fastest = Some(fastest.map_or(lender.ping_us, |us: u64| us.min(lender.ping_us)));
            }
        }
        std::thread::sleep(LOOK_EVERY);
    }
    borrower.stop();
    match fastest {
        Some(us) => Ok(us as f64),
        None => bail!(
            "cannot reach the lender {address}{}{reason}; check the address, the firewall and --key, or omit --lender",
            if reason.is_empty() { "" } else { ": " }
        ),
    }
}
