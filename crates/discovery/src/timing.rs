//! The rates of gossip, and its time limits for a node that is gone.
//!
//! The figures depend on each other: `tests/convergence.rs` measures their effect,
//! docs/user/discovery.md reports it.

use std::time::Duration;

/// A node contacts three others (chitchat's number) each time. A second is soon enough: a lender
/// that joins serves for hours, and the data path itself detects one that fails. The cost grows
/// with the number of nodes, because each message names all of them.
pub const GOSSIP_INTERVAL: Duration = Duration::from_secs(1);

/// A node counts as gone after this many times the usual time without news of it. News arrives
/// about every half second. With the weight of [`FIRST_GUESS`], the first node detects the failure
/// after some 7 seconds, and the last of 64 after 12. In the simulation, with a tenth of all
/// datagrams lost, 6 declared no live node gone. A node that is wrongly declared gone loses the
/// pages that it keeps for others.
pub const SILENCE_RATIO: f64 = 10.0;

/// The assumed time between news of a new node. It keeps the weight of five samples. So if news is
/// very frequent (in a large pool), the time limit does not become too short for a few lost
/// datagrams.
pub const FIRST_GUESS: Duration = Duration::from_secs(1);

/// Recorded times between news of each node. Few, because the memory of N nodes grows with N² in a
/// simulation, and the present state of the network matters. Five of these have [`FIRST_GUESS`]'s
/// weight.
pub const SAMPLES: usize = 20;

/// A longer silence is not recorded as a sample.
pub const SAMPLE_MAX: Duration = Duration::from_secs(10);

/// How long a node that is gone is remembered, and sometimes contacted again. Each restart makes a
/// new node, and the table of nodes is bounded
/// ([`message::DIGEST_BYTES_MAX`](crate::message::DIGEST_BYTES_MAX)): so not for long. After a
/// longer separation the two sides find each other through the seeds.
pub const FORGET_AFTER: Duration = Duration::from_secs(600);

/// Nodes that receive the farewell of a leaving node directly. They tell three others within a
/// second, and so on.
pub const FAREWELLS: usize = 8;

/// How long a leaving node waits for the exchange of its farewell. No answer is needed: a node that
/// misses it detects the silence.
pub const FAREWELL: Duration = Duration::from_millis(300);

/// After so long without any answer, the log has one line about it.
pub const ALONE_AFTER: Duration = Duration::from_secs(10);

/// After a time without messages, nodes come back one by one. For so long no lender is removed from
/// the list, so that the last ones do not lose the pages that they keep.
pub const HOLD: Duration = Duration::from_secs(10);

/// Pause before gossip begins again after a fault.
pub const RESTART_PAUSE: Duration = Duration::from_secs(1);
