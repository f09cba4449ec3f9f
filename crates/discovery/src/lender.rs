//! The value that a node publishes about its lending: one line of text under one key.
//!
//! It is one key, because each key costs bytes in every exchange, and because address, capacity and
//! free memory change together. It is text, because chitchat's values are text. This module checks
//! values from the network; no other one parses them.

use std::net::IpAddr;
use wire::address::Address;

/// The key. No other key is used, and a message with another one is refused.
pub const KEY: &str = "lender";

/// The value of [`KEY`] if the node does not lend. (The key is not deleted: chitchat would have to
/// remember the deletion.)
pub const NOT_LENDING: &str = "";

/// The maximum length of a value in bytes: a host's name has at most 253, two numbers 20.
pub const VALUE_BYTES_MAX: usize = 300;

/// The minimum change of the free memory that is published: with less, a small lender would publish
/// all the time.
const STEP_BYTES_MIN: u64 = 16 << 20;

/// Steps of a lender's capacity: a change by one of them is published. Each change is a message to
/// every node of the pool, and a borrower only needs to know which lenders have room, not how much
/// to the byte.
const STEPS: u64 = 16;

/// The lending of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lender {
    /// The address of the lender.
    pub address: Address,
    /// How much more it could take, as last published: the value changes in steps.
    pub free_bytes: u64,
    /// The maximum of lent memory.
    pub capacity_bytes: u64,
}

/// The value is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Nonsense;

impl Lender {
    /// The value of [`KEY`]. Sizes are in MiB: finer ones would only cause more messages.
    pub fn to_text(&self) -> String {
        format!("{} {} {}", self.address, self.free_bytes >> 20, self.capacity_bytes >> 20)
    }

    /// Parses a node's value; `None`: it does not lend.
    ///
    /// # Errors
    /// Fails if the text cannot be from a node like this one.
    pub(crate) fn from_text(text: &str) -> Result<Option<Lender>, Nonsense> {
        if text == NOT_LENDING {
            return Ok(None);
        }
        if text.len() > VALUE_BYTES_MAX {
            return Err(Nonsense);
        }
        let mut words = text.split(' ');
        let address = words.next().and_then(|word| word.parse().ok()).filter(reachable).ok_or(Nonsense)?;
        let mut bytes = || {
            let mib: u32 = words.next()?.parse().ok()?;
            Some(u64::from(mib) << 20)
        };
        let (free_bytes, capacity_bytes) = bytes().zip(bytes()).ok_or(Nonsense)?;
        match words.next() {
            None if free_bytes <= capacity_bytes => Ok(Some(Lender { address, free_bytes, capacity_bytes })),
            _ => Err(Nonsense),
        }
    }

    /// The value to publish after `published`: the same again, if too little has changed.
    pub(crate) fn value_to_publish(self, published: Option<&Lender>) -> Lender {
        let step_bytes = (self.capacity_bytes / STEPS).max(STEP_BYTES_MIN);
        let free_bytes = self.free_bytes.min(self.capacity_bytes);
        match published {
            Some(published)
                if published.address == self.address
                    && published.capacity_bytes == self.capacity_bytes
                    && published.free_bytes.abs_diff(free_bytes) < step_bytes
                    // Zero is published exactly: a borrower that chooses a full lender chooses in
                    // vain.
                    && (published.free_bytes == 0) == (free_bytes == 0) =>
            {
                published.clone()
            }
            _ => Lender { free_bytes, ..self },
        }
    }
}

/// Whether another machine could reach this one at that address.
pub(crate) fn reachable(address: &Address) -> bool {
    match address {
        Address::Tcp { port: 0, .. } | Address::Unix(_) | Address::Vsock { .. } => false,
        Address::Tcp { host, .. } => {
            host.len() <= 253 && !host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified() || ip.is_multicast())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn lender(address: &str, free_bytes: u64, capacity_bytes: u64) -> Lender {
        Lender { address: address.parse().unwrap(), free_bytes, capacity_bytes }
    }

    #[test]
    fn published_values_are_read() {
        for address in ["10.0.0.1:7000", "[fe80::1]:65535", "a-host.example:1"] {
            let lender = lender(address, 3 * GIB, 8 * GIB);
            assert_eq!(Lender::from_text(&lender.to_text()), Ok(Some(lender)));
        }
        assert_eq!(Lender::from_text(NOT_LENDING), Ok(None));
    }

    #[test]
    fn nonsense_is_refused() {
        let long = format!("{}.example:7000 1 1", "x".repeat(VALUE_BYTES_MAX));
        let host = format!("{}:7000 1 1", "x".repeat(254));
        for text in [
            " ",
            "10.0.0.1:7000",
            "10.0.0.1:7000 1",
            "10.0.0.1:7000 1 1 1",
            "10.0.0.1:7000 2 1",
            "10.0.0.1:7000 -1 1",
            "10.0.0.1:7000 1 4294967296",
            "10.0.0.1:7000  1 1",
            "10.0.0.1:0 1 1",
            "0.0.0.0:7000 1 1",
            "[::]:7000 1 1",
            "224.0.0.1:7000 1 1",
            "unix:/run/lender 1 1",
            "nobody 1 1",
            &long,
            &host,
        ] {
            assert_eq!(Lender::from_text(text), Err(Nonsense), "{text:?}");
        }
    }

    #[test]
    fn small_moves_are_not_published() {
        let published = lender("a:1", 8 * GIB, 16 * GIB);
        let near = lender("a:1", 9 * GIB - 1, 16 * GIB);
        assert_eq!(near.clone().value_to_publish(Some(&published)), published);
        let far = lender("a:1", 7 * GIB, 16 * GIB);
        assert_eq!(far.clone().value_to_publish(Some(&published)), far);
        let moved = lender("b:1", 8 * GIB, 16 * GIB);
        assert_eq!(moved.clone().value_to_publish(Some(&published)), moved);
        assert_eq!(near.clone().value_to_publish(None), near);
    }

    #[test]
    fn full_and_no_longer_full_are_published() {
        let little = lender("a:1", 1 << 20, 16 * GIB);
        let full = lender("a:1", 0, 16 * GIB);
        assert_eq!(full.clone().value_to_publish(Some(&little)), full);
        assert_eq!(little.clone().value_to_publish(Some(&full)), little);
        let too_much = lender("a:1", 20 * GIB, 16 * GIB);
        assert_eq!(too_much.value_to_publish(None).free_bytes, 16 * GIB);
    }
}
