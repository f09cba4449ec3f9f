//! One node, on any network: chitchat behind a [`Gate`], with its values in this crate's terms.
//!
//! All async code is in here and in `gossip.rs`; the simulation has a runtime of its own.

use crate::datagram::Codec;
use crate::gate::{Clock, Counters, Gate};
use crate::lender::{KEY, Lender, NOT_LENDING};
use crate::members::{self, Peer, Reading};
use crate::message::NAME_BYTES_MAX;
use crate::{CLUSTER, Security, timing};
use chitchat::transport::Transport;
use chitchat::{ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, NodeState};
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::watch;

/// The identity of a node, and its address.
#[derive(Clone)]
pub struct Identity {
    /// Its name: [`name_of`] or [`random_name`].
    pub name: String,
    /// Larger than at its last start.
    pub incarnation: u64,
    /// The address at which others reach it.
    pub address: SocketAddr,
}

/// The name of the lender at this address. It is the same after a restart, so that a pool's pages
/// stay where they are.
pub fn name_of(address: &wire::address::Address) -> String {
    hexadecimal(digest(&SHA256, address.to_string().as_bytes()).as_ref())
}

/// A name for a node that does not lend.
///
/// # Errors
/// Fails if the system has no random bytes.
pub fn random_name() -> Result<String, ring::error::Unspecified> {
    let mut bytes = [0; NAME_BYTES_MAX / 2];
    SystemRandom::new().fill(&mut bytes)?;
    Ok(hexadecimal(&bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().take(NAME_BYTES_MAX / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// The state that a node knows at a moment.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The values of the live nodes.
    pub reading: Reading,
    /// Nodes that are gone, and not yet forgotten.
    pub dead: usize,
}

/// A running node. Dropping it ends it without a farewell.
pub struct Node {
    name: String,
    handle: ChitchatHandle,
    changes: watch::Receiver<std::collections::BTreeMap<ChitchatId, NodeState>>,
    end: Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>>,
    published: Option<Lender>,
}

impl Node {
    /// Begins to gossip. `open` makes the network from the gate that all datagrams pass.
    ///
    /// # Errors
    /// Returns the errors of the network.
    pub async fn start<T: Transport>(
        identity: &Identity,
        seeds: Vec<String>,
        security: &Security,
        clock: Clock,
        counters: Arc<Counters>,
        open: impl FnOnce(Arc<Gate>) -> T,
    ) -> anyhow::Result<Node> {
        let id = ChitchatId::new(identity.name.as_str(), identity.incarnation, identity.address);
        let gate = Arc::new(Gate::new(id.clone(), Codec::new(security)?, clock, counters));
        let config = ChitchatConfig {
            chitchat_id: id,
            cluster_id: CLUSTER.to_owned(),
            gossip_interval: timing::GOSSIP_INTERVAL,
            listen_addr: identity.address,
            seed_nodes: seeds,
            failure_detector_config: FailureDetectorConfig {
                phi_threshold: timing::SILENCE_RATIO,
                sampling_window_size: timing::SAMPLES,
                max_interval: timing::SAMPLE_MAX,
                initial_interval: timing::FIRST_GUESS,
                dead_node_grace_period: timing::FORGET_AFTER,
            },
            // Nothing is ever deleted.
            marked_for_deletion_grace_period: timing::FORGET_AFTER,
            catchup_callback: None,
            // chitchat would copy all values of the live nodes whenever one of them changes. So
            // this node reads chitchat's own state instead, and chitchat only notifies it of
            // changes.
            extra_liveness_predicate: Some(Box::new(|_| false)),
        };
        let transport = open(Arc::clone(&gate));
        let said = vec![(KEY.to_owned(), NOT_LENDING.to_owned())];
        let handle = chitchat::spawn_chitchat(config, said, &transport).await?;
        gate.begin(handle.chitchat());
        let changes = handle.chitchat().lock().await.live_nodes_watcher();
        let end = Box::pin(handle.termination_watcher());
        Ok(Node { name: identity.name.clone(), handle, changes, end, published: None })
    }

    /// Publishes what this node lends; `None`: nothing. A change that is too small is not
    /// published.
    pub async fn publish(&mut self, lender: Option<Lender>) {
        let published = lender.map(|lender| lender.value_to_publish(self.published.as_ref()));
        if published == self.published {
            return;
        }
        let text = published.as_ref().map_or(NOT_LENDING.to_owned(), Lender::to_text);
        self.handle.with_chitchat(|chitchat| chitchat.self_node_state().set(KEY, &text)).await;
        self.published = published;
    }

    /// Waits for a new value, or until a node joins or leaves. An error means that gossip has
    /// ended, which it should not.
    ///
    /// # Errors
    /// Fails with the error that ended it.
    pub async fn changed(&mut self) -> anyhow::Result<()> {
        tokio::select! {
            changed = self.changes.changed() => Ok(changed?),
            ended = &mut self.end => {
                ended?;
                anyhow::bail!("it ended")
            }
        }
    }

    /// The present state.
    pub async fn view(&self) -> View {
        let chitchat = self.handle.chitchat();
        let chitchat = chitchat.lock().await;
        let live = chitchat.live_nodes().filter_map(|id| {
            let state = chitchat.node_state(id)?;
            Some(Peer { node: &id.node_id, incarnation: id.generation_id, value: state.get(KEY) })
        });
        View { reading: members::read(live, &self.name), dead: chitchat.dead_nodes().count() }
    }

    /// Ends the node, after it has told some others that it no longer lends, if it did.
    pub async fn leave(mut self) {
        if self.published.is_none() {
            return;
        }
        self.publish(None).await;
        let chitchat = self.handle.chitchat();
        let others: Vec<_> = {
            let chitchat = chitchat.lock().await;
            let own = chitchat.self_chitchat_id();
            let others = chitchat.live_nodes().filter(|id| *id != own).map(|id| id.gossip_advertise_addr);
            others.take(timing::FAREWELLS).collect()
        };
        if others.is_empty() {
            return;
        }
        for address in others {
            let _ = self.handle.gossip(address);
        }
        tokio::time::sleep(timing::FAREWELL).await;
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.handle.abort();
    }
}
