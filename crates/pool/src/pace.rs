//! How fast gossip is, and how soon it believes that a node is gone.
//!
//! The figures go together: `tests/convergence.rs` measures what they lead to,
//! docs/user/discovery.md tells it.

use std::time::Duration;

/// A node talks to three others (chitchat's number) each time. A second is soon enough: a lender
/// that joins serves for hours, and one that fails is noticed by the data path itself. The cost
/// grows with the number of nodes, as each message names all of them.
pub const GOSSIP_INTERVAL: Duration = Duration::from_secs(1);

/// How many times longer than usual there must be no news of a node until it counts as gone. News
/// come about every half second; with the weight that [`FIRST_GUESS`] has, the first notice after
/// some 7 seconds, and the last of 64 after 12. In the simulation 6 did not yet have anybody taken
/// for gone who was there, with a tenth of all datagrams lost; who is, loses what he keeps for
/// others.
pub const SILENCE_RATIO: f64 = 10.0;

/// What is taken for the usual time between news of a node that is new. It goes on counting for as
/// much as five samples, which keeps the patience of a node that hears very often (in a large pool)
/// from becoming too short for a few lost datagrams.
pub const FIRST_GUESS: Duration = Duration::from_secs(1);

/// Times between news that are remembered of each node. Few: the memory of N nodes grows with N² in
/// a simulation, and what counts is how the network is now. Five of these to one of
/// [`FIRST_GUESS`]'s weight.
pub const SAMPLES: usize = 20;

/// A longer silence is no sample of what is usual.
pub const SAMPLE_MAX: Duration = Duration::from_secs(10);

/// How long a node that is gone is remembered, and now and then asked whether it is back. Each
/// restart of a node is a new one, and the table of nodes is bounded
/// ([`message::DIGEST_BYTES_MAX`](crate::message::DIGEST_BYTES_MAX)): so not for long. After a
/// separation that lasts longer the two sides find each other by the seeds.
pub const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Nodes that are told at once that this one leaves. They tell three others within a second, and so
/// on.
pub const FAREWELLS: usize = 8;

/// How long a node that leaves waits for the exchange in which it says so. Nobody's answer is
/// needed: who misses it finds out by silence.
pub const FAREWELL: Duration = Duration::from_millis(300);

/// Without anybody's answer for so long, one line says so.
pub const ALONE_AFTER: Duration = Duration::from_secs(10);

/// After a time in which nobody was heard, nodes come back one by one: so long nobody is taken from
/// the list of lenders, lest those who come last lose what they keep for us.
pub const SETTLE: Duration = Duration::from_secs(10);

/// Pause before gossip begins again, should it have ended by a fault.
pub const RESTART_PAUSE: Duration = Duration::from_secs(1);
