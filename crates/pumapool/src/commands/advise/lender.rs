//! How far a lender is: it is connected to as a mount would, and pinged.

use anyhow::{Result, bail};
use borrower::{Borrower, Config, LenderAddress};
use std::time::{Duration, Instant};
use wire::address::Address;
use wire::secure::Security;

/// For the connection and the pings: the first is later than the others, and there are two a
/// second.
const LIMIT: Duration = Duration::from_secs(5);
const PINGS: Duration = Duration::from_millis(2500);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Round-trip time of pings, in microseconds. Nothing is put there.
pub(super) fn ping_us(address: &Address, security: Security) -> Result<f64> {
    let lenders = vec![LenderAddress::from(address.clone())];
    let config = Config { lenders, security, gate: None, hedge: false, ..Config::default() };
    let borrower = Borrower::start(config, None)?;
    let begin = Instant::now();
    let (mut fastest, mut reason) = (None, String::new());
    // The fastest: what makes others slower is this machine's waking up, which is not how far it
    // is.
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
            "{address} is not reached{}{reason}; look at the address, the firewall and --key, or leave --lender out",
            if reason.is_empty() { "" } else { ": " }
        ),
    }
}
