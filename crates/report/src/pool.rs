//! Discovery, as a part of other statuses.

use crate::measured;

measured! {
    /// The state and counters of gossip.
    pub struct Pool, "Discovery by gossip" of ["mount", "lend", "join"] by ["gossip"] {
        /// The name of this node.
        node: String,
        /// Where it listens.
        listen: String,
        /// Where others gossip with it.
        advertise: String,
        /// other nodes that are alive, lenders and borrowers
        live_nodes: u64 = gauge Count "pumapool_pool_live_nodes",
        /// nodes that are gone, and not yet forgotten
        dead_nodes: u64 = gauge Count "pumapool_pool_dead_nodes",
        /// nodes whose value makes no sense
        nonsense: u64 = gauge Count "pumapool_pool_nonsense_nodes",
        /// times that gossip failed and began again
        restarts: u64 = counter Count "pumapool_pool_restarts_total",
        /// datagrams that were sent
        sent_datagrams: u64 = counter Count "pumapool_pool_sent_datagrams_total",
        /// their bytes, without the network's headers
        sent_bytes: u64 = counter Bytes "pumapool_pool_sent_bytes_total",
        /// datagrams that were good
        received_datagrams: u64 = counter Count "pumapool_pool_received_datagrams_total",
        /// their bytes
        received_bytes: u64 = counter Bytes "pumapool_pool_received_bytes_total",
        /// datagrams of something else, or of nodes that protect them in another way
        refused_foreign: u64 = counter Count "pumapool_pool_refused_foreign_total",
        /// datagrams of another key or checksum
        refused_unopened: u64 = counter Count "pumapool_pool_refused_unopened_total",
        /// datagrams from a time that is not ours
        refused_untimely: u64 = counter Count "pumapool_pool_refused_untimely_total",
        /// datagrams that had been here before
        refused_replayed: u64 = counter Count "pumapool_pool_refused_replayed_total",
        /// datagrams with a message that no node of ours sends
        refused_malformed: u64 = counter Count "pumapool_pool_refused_malformed_total",
        /// messages with more nodes than there is room for
        refused_nodes: u64 = counter Count "pumapool_pool_refused_nodes_total",
        /// messages not sent, for being too long
        unsent_too_long: u64 = counter Count "pumapool_pool_unsent_too_long_total",
        /// datagrams that the system did not take
        unsent_failed: u64 = counter Count "pumapool_pool_unsent_failed_total",
        /// The lenders that were found.
        members: Vec<Member>,
    }
}

measured! {
    /// A lender that was found.
    pub struct Member, "Discovery: the lenders that were found" of ["mount", "lend", "join"] by ["gossip", "lender"] {
        /// The name of its node.
        node: String,
        /// A number that is new at each start.
        incarnation: u64,
        /// Where it lends.
        address: String,
        /// what it says that it has left
        free_bytes: u64 = gauge Bytes "pumapool_pool_lender_free_bytes",
        /// what it says that it lends at the most
        capacity_bytes: u64 = gauge Bytes "pumapool_pool_lender_capacity_bytes",
    }
}

impl Pool {
    /// Datagrams and messages that were refused, for whatever reason.
    pub fn refused(&self) -> u64 {
        let Pool { refused_foreign, refused_unopened, refused_untimely, .. } = self;
        let Pool { refused_replayed, refused_malformed, refused_nodes, .. } = self;
        let datagrams = [refused_foreign, refused_unopened, refused_untimely, refused_replayed, refused_malformed];
        datagrams.into_iter().fold(*refused_nodes, |sum, one| sum.saturating_add(*one))
    }
}
