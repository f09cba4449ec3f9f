//! The descriptors that a successor gets from the supervisor.

use super::channel::{Channel, Held, Message};
use hashbrown::HashMap;
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::io;

/// The descriptors of the previous daemon.
#[derive(Debug, Default)]
pub struct Inherited {
    pub(crate) state: Option<OwnedFd>,
    pub(crate) source: Option<OwnedFd>,
    pub(crate) devices: BTreeMap<u64, OwnedFd>,
    pub(crate) opens: HashMap<u64, OwnedFd>,
    pub(crate) nodes: HashMap<u64, OwnedFd>,
}

impl Inherited {
    /// Receives all descriptors from the supervisor.
    ///
    /// # Errors
    /// Fails if the supervisor ends meanwhile, or sends an invalid message.
    pub fn receive(channel: &Channel) -> io::Result<Inherited> {
        let mut inherited = Inherited::default();
        loop {
            match channel.receive()? {
                Some(Message::Hold(held, fd)) => inherited.add(held, fd),
                Some(Message::AllSent) => return Ok(inherited),
                Some(message) => return Err(io::Error::other(format!("the supervisor sent {message:?}"))),
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
    }

    /// Adds a descriptor.
    pub fn add(&mut self, held: Held, fd: OwnedFd) {
        match held {
            Held::State => self.state = Some(fd),
            Held::Source => self.source = Some(fd),
            Held::Device(index) => drop(self.devices.insert(index, fd)),
            Held::Open(handle) => drop(self.opens.insert(handle, fd)),
            Held::Node(node) => drop(self.nodes.insert(node, fd)),
        }
    }

    /// Whether there are no descriptors, because this daemon is the first.
    pub fn is_empty(&self) -> bool {
        self.state.is_none()
    }
}
