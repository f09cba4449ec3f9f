//! Gossip over UDP.
//!
//! No error of the network ends it: a datagram that cannot be sent is lost like one in transit.

use crate::datagram::DATAGRAM_BYTES_MAX;
use crate::gate::Gate;
use async_trait::async_trait;
use chitchat::ChitchatMessage;
use chitchat::transport::{Socket, Transport};
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

/// The size of the kernel's receive buffer, if it is permitted: in a large pool messages have 20
/// KB, and several arrive at once.
const RECEIVE_BYTES: usize = 2 << 20;

/// Pause after the system failed to receive, to avoid a busy loop.
const PAUSE: Duration = Duration::from_millis(100);

/// A socket that is already bound.
pub(crate) struct Udp {
    socket: UdpSocket,
    gate: Arc<Gate>,
}

impl Udp {
    /// Gossip through a copy of this socket.
    pub(crate) fn new(socket: UdpSocket, gate: Arc<Gate>) -> Udp {
        Udp { socket, gate }
    }
}

#[async_trait]
impl Transport for Udp {
    async fn open(&self, _: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        let socket = self.socket.try_clone()?;
        let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BYTES);
        socket.set_nonblocking(true)?;
        let is_ipv6 = socket.local_addr()?.is_ipv6();
        let socket = tokio::net::UdpSocket::from_std(socket)?;
        let received = vec![0; DATAGRAM_BYTES_MAX].into_boxed_slice();
        Ok(Box::new(Open { socket, is_ipv6, gate: Arc::clone(&self.gate), received, to_send: Vec::new() }))
    }
}

struct Open {
    socket: tokio::net::UdpSocket,
    is_ipv6: bool,
    gate: Arc<Gate>,
    received: Box<[u8]>,
    to_send: Vec<u8>,
}

#[async_trait]
impl Socket for Open {
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        if self.gate.outgoing(&message, &mut self.to_send) {
            // An IPv6 socket that also takes IPv4 has these addresses in another form.
            let to = match to {
                SocketAddr::V4(four) if self.is_ipv6 => (four.ip().to_ipv6_mapped(), four.port()).into(),
                to => to,
            };
            self.gate.sent(self.socket.send_to(&self.to_send, to).await.ok());
        }
        Ok(())
    }

    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        loop {
            match self.socket.recv_from(&mut self.received).await {
                Ok((bytes, from)) => {
                    if let Some(message) = self.gate.incoming(from, &mut self.received[..bytes]) {
                        return Ok((from, message));
                    }
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }
}
