//! The lenders of a mount: those that were named (each address of a name is one lender), and those
//! of the pool.
//!
//! A thread looks up the names, at once and then every [`LOOK_UP_INTERVAL`], so that neither a
//! mount nor a takeover waits for a resolver. A lender must never be lost because a name could not
//! be looked up.

use borrower::{Borrower, LenderAddress};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;
use wire::address::Address;

/// How often names are looked up again: as often as those of the pool's seeds.
const LOOK_UP_INTERVAL: Duration = Duration::from_secs(60);

/// Limit on the addresses of a name that are used. A resolver may return more of them by turns;
/// those in use are preferred, then the first in order.
const NAME_ADDRESSES_MAX: usize = 16;

/// The lenders of one mount.
pub struct Lenders {
    borrower: Weak<Borrower>,
    known: Mutex<Known>,
}

/// An address is dropped after so many consecutive answers of a resolver without it: some resolvers
/// do not return all addresses each time.
const MISSING_MAX: u32 = 5;

/// One address of a name.
struct Found {
    address: Address,
    /// Number of answers since the last one with this address.
    missing: u32,
}

/// The state of the lenders.
#[derive(Default)]
struct Known {
    /// The named lenders with their addresses. A name that was not looked up yet has none.
    named: Vec<(Address, Vec<Found>)>,
    of_pool: Vec<LenderAddress>,
    /// The list that the borrower got last.
    told: Vec<LenderAddress>,
}

impl Known {
    fn new(named: &[Address]) -> Known {
        let number = |address: &Address| Found { address: address.clone(), missing: 0 };
        let numbers = |address: &Address| if address.is_name() { Vec::new() } else { vec![number(address)] };
        let named = named.iter().map(|address| (address.clone(), numbers(address))).collect();
        let mut known = Known { named, ..Known::default() };
        known.told = known.all();
        known
    }

    fn all(&self) -> Vec<LenderAddress> {
        let mut all: Vec<LenderAddress> = Vec::new();
        let found = self.named.iter().flat_map(|(_, addresses)| addresses);
        let named = found.map(|found| LenderAddress::from(found.address.clone()));
        for lender in named.chain(self.of_pool.iter().cloned()) {
            if !all.iter().any(|known| known.address == lender.address) {
                all.push(lender);
            }
        }
        all
    }

    /// Stores the result of a lookup. If the lookup failed, the previous addresses stay. If there
    /// are none, the name itself stays, and connecting reports the error.
    fn looked_up(&mut self, name: &Address, mut found: Vec<Address>) {
        found.sort();
        let failed = found.iter().all(|address| address == name);
        for (_, known) in self.named.iter_mut().filter(|(named, _)| named == name) {
            if failed && !known.is_empty() {
                continue;
            }
            for known in known.iter_mut() {
                known.missing = if found.contains(&known.address) { 0 } else { known.missing + 1 };
            }
            known.retain(|known| known.missing < MISSING_MAX && known.address != *name);
            for address in found.iter().cloned() {
                // Not in the place of one that is used: with that lender all its pages would go.
                if known.len() < NAME_ADDRESSES_MAX && !known.iter().any(|known| known.address == address) {
                    known.push(Found { address, missing: 0 });
                }
            }
            known.sort_by(|one, other| one.address.cmp(&other.address));
        }
    }
}

impl Lenders {
    /// The lenders that can be used at once, before any name was looked up.
    pub fn at_first(named: &[Address]) -> Vec<LenderAddress> {
        Known::new(named).told
    }

    /// Starts to send all changes to the borrower, which began with [`Lenders::at_first`].
    pub fn follow(borrower: &Arc<Borrower>, named: &[Address]) -> Arc<Lenders> {
        let lenders = Arc::new(Lenders { borrower: Arc::downgrade(borrower), known: Mutex::new(Known::new(named)) });
        let names: Vec<Address> = named.iter().filter(|address| address.is_name()).cloned().collect();
        if !names.is_empty() {
            let weak = Arc::downgrade(&lenders);
            let thread = std::thread::Builder::new().name("puma-names".into());
            if let Err(error) = thread.spawn(move || keep_looking_up(&weak, &names)) {
                tracing::error!(
                    "cannot start a thread to look up names: {error}; lenders that were named so are not used"
                );
            }
        }
        lenders
    }

    /// Sets the lenders of the pool.
    pub fn set_of_pool(&self, of_pool: Vec<LenderAddress>) {
        self.change(|known| known.of_pool = of_pool);
    }

    fn change(&self, change: impl FnOnce(&mut Known)) {
        let Some(borrower) = self.borrower.upgrade() else { return };
        let mut known = self.known.lock();
        change(&mut known);
        let all = known.all();
        // Their free memory changes more often than the list of lenders.
        if known.told != all {
            borrower.set_lenders(&all);
            known.told = all;
        }
    }
}

fn keep_looking_up(lenders: &Weak<Lenders>, names: &[Address]) {
    loop {
        // A resolver must delay nothing, not even the end of the daemon.
        let found: Vec<_> = names.iter().map(|name| (name, name.resolve())).collect();
        let Some(lenders) = lenders.upgrade().filter(|lenders| lenders.borrower.strong_count() > 0) else { return };
        lenders.change(|known| found.into_iter().for_each(|(name, found)| known.looked_up(name, found)));
        drop(lenders);
        std::thread::sleep(LOOK_UP_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Address {
        text.parse().unwrap()
    }

    fn texts(lenders: &[LenderAddress]) -> Vec<String> {
        lenders.iter().map(|lender| lender.address.to_string()).collect()
    }

    #[test]
    fn a_name_is_each_of_its_addresses_and_outlives_its_resolver() {
        let name = address("lender.example:7000");
        let mut known = Known::new(&[address("192.0.2.1:7000"), name.clone(), address("unix:/socket")]);
        assert_eq!(texts(&known.told), ["192.0.2.1:7000", "unix:/socket"]);
        // Never looked up with success: connecting reports the error.
        known.looked_up(&name, vec![name.clone()]);
        assert_eq!(texts(&known.all()), ["192.0.2.1:7000", "lender.example:7000", "unix:/socket"]);
        let found = ["[2001:db8::2]:7000", "192.0.2.2:7000", "192.0.2.1:7000"].map(address);
        known.looked_up(&name, found.to_vec());
        let all = ["192.0.2.1:7000", "192.0.2.2:7000", "[2001:db8::2]:7000", "unix:/socket"];
        assert_eq!(texts(&known.all()), all);
        let told = known.all();
        known.looked_up(&name, found.iter().rev().cloned().collect());
        assert_eq!(known.all(), told, "their order is no change");
        known.looked_up(&name, vec![name.clone()]);
        assert_eq!(texts(&known.all()), all, "a failure is no change");
        // By turns: nobody is left for that.
        for turn in 0..20 {
            known.looked_up(&name, vec![found[turn % 3].clone()]);
            assert_eq!(texts(&known.all()), all);
        }
        let another = vec![address("192.0.2.3:7000")];
        (1..MISSING_MAX).for_each(|_| known.looked_up(&name, another.clone()));
        assert!(texts(&known.all()).contains(&"192.0.2.2:7000".to_owned()));
        (0..MISSING_MAX).for_each(|_| known.looked_up(&name, another.clone()));
        assert_eq!(texts(&known.all()), ["192.0.2.1:7000", "192.0.2.3:7000", "unix:/socket"]);
        let used = vec![address("192.0.2.3:7000"), address("192.0.2.99:7000")];
        known.looked_up(&name, used.clone());
        let many = (0..200).map(|number| address(&format!("192.0.2.{number}:7000"))).collect();
        known.looked_up(&name, many);
        assert_eq!(known.named[1].1.len(), NAME_ADDRESSES_MAX);
        let all = known.all();
        assert!(used.iter().all(|used| all.iter().any(|known| known.address == *used)), "who is used stays");
        // One of the pool that was named is there once, as it was named.
        let of_pool = |text: &str| LenderAddress { address: address(text), id: Some("abc".into()) };
        let before = known.all().len();
        known.of_pool = vec![of_pool("192.0.2.1:7000"), of_pool("192.0.2.9:7")];
        assert_eq!(known.all().len(), before + 1);
        assert_eq!(known.all().last(), Some(&of_pool("192.0.2.9:7")));
    }
}
