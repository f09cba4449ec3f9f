//! Discovery of lenders by gossip.
//!
//! Every lender and every mount with a seed (`--pool`) is a *node*. Nodes exchange, over UDP, the
//! nodes that they know. A node that lends publishes its address and its free memory. The protocol
//! is chitchat's: Scuttlebutt reconciliation, with a failure detector that learns how often news of
//! a node arrives.
//!
//! - [`Gossip`] is the interface for the command: plain calls, one thread (`puma-gossip`) with a
//!   runtime of its own.
//! - Each datagram passes [`gate`] in both directions; [`datagram`] seals and opens, [`message`]
//!   limits chitchat's input.
//! - [`lender`] and `members` are the logic, without sockets: a node's own value, and the list
//!   that follows from all values.
//! - [`role`] decides whether a node lends or borrows; `pumapool join` executes the decision.
//! - [`node`] is one node on any network; the simulation (`tests/convergence.rs`) has a thousand of
//!   them on a network of its own.
//!
//! Must never happen here:
//! - A message from the network ends this node, makes it grow without bound, or makes it answer a
//!   peer without the pool's key.
//! - The list of lenders becomes empty because this node itself is cut off (`members::next`): the
//!   data path finds out by itself which lenders it still reaches.
//! - A caller waits for gossip: every call except [`Gossip::start`] and [`Gossip::stop`] returns
//!   the known state.

pub mod datagram;
pub mod gate;
mod gossip;
pub mod lender;
mod members;
pub mod message;
pub mod node;
mod reach;
pub mod role;
pub mod timing;
mod udp;

pub use gossip::{Config, Error, Gossip, Listener};
pub use lender::Lender;
pub use members::Member;
pub use reach::local_address_towards;
pub use wire::secure::Security;

/// The protocol: nodes with another one ignore each other. Change it with any change of a
/// datagram's contents.
pub const CLUSTER: &str = "puma-1";
