//! Parsers for addresses. Not every option accepts every kind of address.

use std::net::SocketAddr;
use wire::address::Address;
use wire::address::vsock::CID_ANY;

/// Parses an address to listen at.
pub fn place(text: &str) -> Result<Address, String> {
    one_of(text, "HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:PORT", |_| true)
}

/// Parses an address to connect to.
pub fn peer(text: &str) -> Result<Address, String> {
    let is_one = |address: &Address| !matches!(address, Address::Vsock { cid: CID_ANY, .. });
    one_of(text, "HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:CID:PORT", is_one)
}

/// Parses an address on a network.
pub fn network(text: &str) -> Result<Address, String> {
    one_of(text, "HOST:PORT or [IPV6]:PORT", |address| matches!(address, Address::Tcp { .. }))
}

/// Parses an address at which HTTP can be served.
pub fn http(text: &str) -> Result<Address, String> {
    one_of(text, "HOST:PORT, [IPV6]:PORT or unix:PATH", |address| !matches!(address, Address::Vsock { .. }))
}

/// Parses a socket address of numbers only.
pub fn socket(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write a number and a port, such as 0.0.0.0:7070 or [::]:7070".to_owned())
}

fn one_of(text: &str, forms: &str, is_one: impl FnOnce(&Address) -> bool) -> Result<Address, String> {
    match text.parse::<Address>() {
        Ok(address) if is_one(&address) => Ok(address),
        Ok(_) => Err(format!("write {forms}")),
        Err(error) => Err(format!("{}; write {forms}", error.problem())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_is_told_what_it_takes() {
        let said = |parsed: Result<Address, String>| parsed.map(|address| address.to_string());
        assert_eq!(said(place("vsock:7070")), Ok("vsock:any:7070".to_owned()));
        assert_eq!(
            said(peer("vsock:7070")),
            Err("write HOST:PORT, [IPV6]:PORT, unix:PATH or vsock:CID:PORT".to_owned())
        );
        assert_eq!(said(peer("vsock:2:7070")), Ok("vsock:2:7070".to_owned()));
        assert_eq!(said(network("unix:/a")), Err("write HOST:PORT or [IPV6]:PORT".to_owned()));
        assert_eq!(said(http("foo")), Err("the port is missing; write HOST:PORT, [IPV6]:PORT or unix:PATH".to_owned()));
        assert!(http("vsock:7070").is_err() && http("unix:/a").is_ok() && http("[::1]:9").is_ok());
        assert!(socket("[::]:7070").is_ok() && socket("node.example:7070").is_err());
    }
}
