//! Which lenders there are: discovery by gossip.
//!
//! Every lender and every mount that is given a seed (`--pool`) is a *node*. Nodes tell each other,
//! over UDP, of the nodes they know; a node that lends says where, and how much it has left. The
//! protocol between them is chitchat's: Scuttlebutt reconciliation, with a failure detector that
//! learns how often one hears of a node.
//!
//! - [`Gossip`] is all that the command needs: plain calls, one thread (`puma-gossip`) with a
//!   runtime of its own inside.
//! - [`gate`] is what each datagram passes in both directions; [`datagram`] seals and opens,
//!   [`message`] bounds what chitchat gets.
//! - [`lender`] and [`members`] are the logic, apart from sockets: what a node says of itself, and
//!   what follows from what all said.
//! - [`role`] decides whether a node lends or borrows; `pumapool join` does what it says.
//! - [`node`] is one node on any network; the simulation (`tests/convergence.rs`) has a thousand of
//!   them on one of its own.
//!
//! What must never happen here:
//! - Nothing that comes from the network makes this end, grow without bound, or answer who does not
//!   have the pool's key.
//! - A list of lenders never becomes empty because we ourselves are cut off ([`members::next`]):
//!   the data path finds out by itself which of them it still reaches.
//! - Nobody waits for gossip: every call but [`Gossip::start`] and [`Gossip::stop`] returns what is
//!   known.

pub mod datagram;
pub mod gate;
mod gossip;
pub mod lender;
pub mod members;
pub mod message;
pub mod node;
pub mod pace;
mod reach;
pub mod role;
mod udp;

pub use gossip::{Config, Error, Gossip, Listener, Status};
pub use lender::Lender;
pub use members::Member;
pub use reach::local_address_towards;
pub use wire::secure::Security;

/// The protocol: nodes of another one are strangers to each other. To be changed with anything that
/// a datagram holds.
pub const CLUSTER: &str = "puma-1";
