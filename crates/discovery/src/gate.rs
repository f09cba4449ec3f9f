//! The gate of a node: every datagram passes it in both directions. It is sealed or opened
//! ([`crate::datagram`]), checked ([`crate::message`]), and counted. The simulation's network uses
//! the same gate.
//!
//! The gate answers nothing by itself, and a datagram causes at most one log line of a kind.

use crate::datagram::{Codec, Refusal};
use crate::message::{self, Entry};
use chitchat::{Chitchat, ChitchatId, ChitchatMessage, Deserializable, Serializable};
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};

/// Milliseconds since 1970.
pub type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// The gate of one node.
pub struct Gate {
    own: ChitchatId,
    codec: Mutex<Codec>,
    clock: Clock,
    counters: Arc<Counters>,
    /// Set when gossip begins; nothing arrives before.
    chitchat: OnceLock<Arc<tokio::sync::Mutex<Chitchat>>>,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of a node's datagrams, as they run.
        #[derive(Default)]
        pub struct Counters { $($name: AtomicU64,)* }

        /// Counters of a node's datagrams since its start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Traffic { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            /// The present values.
            pub fn read(&self) -> Traffic {
                Traffic { $($name: self.$name.load(Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Sent datagrams.
    sent_datagrams,
    /// Their bytes, without the network's headers.
    sent_bytes,
    /// Valid received datagrams.
    received_datagrams,
    /// Their bytes.
    received_bytes,
    /// Datagrams of another protocol, or of nodes with another kind of protection.
    refused_foreign,
    /// Datagrams with another key or checksum.
    refused_unopened,
    /// Datagrams with a wrong time.
    refused_untimely,
    /// Datagrams that were received before.
    refused_replayed,
    /// Datagrams with a message that no node of this program sends.
    refused_malformed,
    /// Messages with more nodes than there is room for.
    refused_nodes,
    /// Messages that were not sent because they are too long.
    unsent_too_long,
    /// Datagrams that the system did not accept.
    unsent_failed,
}

impl Gate {
    /// The gate of the node `own`.
    pub fn new(own: ChitchatId, codec: Codec, clock: Clock, counters: Arc<Counters>) -> Gate {
        Gate { own, codec: Mutex::new(codec), clock, counters, chitchat: OnceLock::new() }
    }

    /// Begins gossip: from now on the list of known nodes is available.
    pub(crate) fn begin(&self, chitchat: Arc<tokio::sync::Mutex<Chitchat>>) {
        let _ = self.chitchat.set(chitchat);
    }

    /// Writes the datagram with this message to `out`. Returns false if it is too long for one.
    pub fn outgoing(&self, message: &ChitchatMessage, out: &mut Vec<u8>) -> bool {
        let fits = self.codec.lock().seal(&message.serialize_to_vec(), (self.clock)(), out).is_ok();
        if !fits {
            self.counters.unsent_too_long.fetch_add(1, Relaxed);
        }
        fits
    }

    /// Counts a datagram of so many bytes that was sent, or one that the system did not accept.
    pub fn sent(&self, bytes: Option<usize>) {
        match bytes {
            Some(bytes) => {
                self.counters.sent_datagrams.fetch_add(1, Relaxed);
                self.counters.sent_bytes.fetch_add(bytes as u64, Relaxed);
            }
            None => drop(self.counters.unsent_failed.fetch_add(1, Relaxed)),
        }
    }

    /// The message of a received datagram, if it is valid; the datagram is overwritten.
    pub fn incoming(&self, from: SocketAddr, datagram: &mut [u8]) -> Option<ChitchatMessage> {
        let bytes = datagram.len();
        let opened = self.codec.lock().open(datagram, (self.clock)());
        let opened = match opened {
            Ok(message) => message,
            Err(refusal) => {
                self.refuse(from, refusal);
                return None;
            }
        };
        let counters = &self.counters;
        let entries = match message::check(&opened, &self.own) {
            Ok(entries) => entries,
            Err(problem) => {
                if counters.refused_malformed.fetch_add(1, Relaxed) == 0 {
                    tracing::warn!("gossip from {from} is refused: {problem}; has it another version? (logged once)");
                }
                return None;
            }
        };
        if !self.room_for(&entries) {
            if counters.refused_nodes.fetch_add(1, Relaxed) == 0 {
                tracing::warn!("the pool has more nodes than gossip can list; some are left out (logged once)");
            }
            return None;
        }
        let Ok(message) = ChitchatMessage::deserialize(&mut &opened[..]) else {
            counters.refused_malformed.fetch_add(1, Relaxed);
            return None;
        };
        counters.received_datagrams.fetch_add(1, Relaxed);
        counters.received_bytes.fetch_add(bytes as u64, Relaxed);
        Some(message)
    }

    fn refuse(&self, from: SocketAddr, refusal: Refusal) {
        let counters = &self.counters;
        match refusal {
            Refusal::Foreign => drop(counters.refused_foreign.fetch_add(1, Relaxed)),
            Refusal::Replayed => drop(counters.refused_replayed.fetch_add(1, Relaxed)),
            Refusal::Damaged => drop(counters.refused_malformed.fetch_add(1, Relaxed)),
            Refusal::Unopened => {
                if counters.refused_unopened.fetch_add(1, Relaxed) == 0 {
                    tracing::warn!(
                        "gossip from {from} does not open with our pool key; does the node have another one? (logged once)"
                    );
                }
            }
            Refusal::Untimely(off_ms) => {
                if counters.refused_untimely.fetch_add(1, Relaxed) == 0 {
                    let seconds = off_ms / 1000;
                    tracing::warn!(
                        "gossip from {from} is refused: the clocks differ by {seconds} s; set them (logged once)"
                    );
                }
            }
        }
    }

    /// Whether all nodes would still fit in one table together with these.
    fn room_for(&self, entries: &[Entry]) -> bool {
        // The holder of the lock is on this thread, and does not wait while it holds it.
        let Some(chitchat) = self.chitchat.get().and_then(|chitchat| chitchat.try_lock().ok()) else { return true };
        message::fit_together(chitchat.node_states().keys().map(Entry::from), entries)
    }
}
