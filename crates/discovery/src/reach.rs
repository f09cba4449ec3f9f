//! Finds the address at which others reach this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

/// The address of this machine on the way to the first of these hosts (`HOST:PORT`) that can be
/// resolved. Nothing is sent. Only IPv4 hosts count if `listen` is 0.0.0.0, because such a socket
/// receives nothing at other addresses.
pub fn local_address_towards(hosts: &[String], listen: IpAddr) -> Option<IpAddr> {
    let known = hosts.iter().filter_map(|host| host.to_socket_addrs().ok()).flatten();
    let known = known.filter(|host| host.is_ipv4() || listen.is_ipv6());
    known.filter_map(|host| towards(host).ok()).find(|ip| !ip.is_unspecified())
}

fn towards(host: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = if host.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(host)?; // selects the route, and so the address
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_oneself_is_loopback() {
        let hosts = ["[::ffff:0.0.0.0]:x".to_owned(), "127.0.0.1:7070".to_owned()];
        let any = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        for listen in any {
            assert_eq!(local_address_towards(&hosts, listen), Some(Ipv4Addr::LOCALHOST.into()));
            assert_eq!(local_address_towards(&[], listen), None);
        }
        // A name with both kinds of addresses, the unsuitable one first.
        let both = ["[::1]:7070".to_owned(), "127.0.0.1:7070".to_owned()];
        assert_eq!(local_address_towards(&both, any[0]), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(local_address_towards(&both[..1], any[0]), None);
    }
}
