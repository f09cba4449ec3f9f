//! Pools of many nodes on a network in memory, in paused time: how soon all nodes see all lenders,
//! and the cost.
//!
//! The nodes are real ones ([`discovery::node`]), and every datagram passes its gate: sealed,
//! opened, checked. The network loses datagrams at a given rate, and can be cut in two. Loss and
//! start times come from a seed, which is printed; chitchat chooses the partners of a node,
//! differently in each run.
//!
//! `make gossip` has 64, 250 and 1,000 nodes, and prints the figures of docs/user/discovery.md.

use async_trait::async_trait;
use chitchat::ChitchatMessage;
use chitchat::transport::{Socket, Transport};
use discovery::gate::{Counters, Gate};
use discovery::node::{Identity, Node, name_of};
use discovery::{Lender, Security};
use std::collections::{BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use wire::key::PoolKey;

/// The maximum number of datagrams that wait for a node; more are lost, as with a socket's buffer.
const QUEUE_MAX: usize = 256;

/// The time between two checks of all nodes.
const LOOK: Duration = Duration::from_millis(500);

/// Nodes that are checked each second while nothing happens.
const LOOKED_AT: usize = 32;

/// The time limit for each event.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Network {
    queues: HashMap<SocketAddr, mpsc::Sender<(SocketAddr, Vec<u8>)>>,
    random: fastrand::Rng,
    loss: f64,
    is_parted: bool,
    datagrams: u64,
    bytes: u64,
    largest_bytes: usize,
    lost_in_queues: u64,
}

impl Network {
    /// The half of the network that contains an address.
    fn half(address: SocketAddr) -> bool {
        matches!(address, SocketAddr::V4(four) if four.ip().octets()[3] % 2 == 0)
    }

    fn carry(&mut self, from: SocketAddr, to: SocketAddr, datagram: &[u8]) {
        self.datagrams += 1;
        self.bytes += datagram.len() as u64;
        self.largest_bytes = self.largest_bytes.max(datagram.len());
        let is_cut = self.is_parted && Self::half(from) != Self::half(to);
        if is_cut || self.random.f64() < self.loss {
            return;
        }
        if let Some(queue) = self.queues.get(&to)
            && let Err(mpsc::error::TrySendError::Full(_)) = queue.try_send((from, datagram.to_vec()))
        {
            self.lost_in_queues += 1;
        }
    }
}

#[derive(Clone)]
struct Memory {
    network: Arc<Mutex<Network>>,
    address: SocketAddr,
    gate: Arc<Gate>,
}

#[async_trait]
impl Transport for Memory {
    async fn open(&self, _: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        let (sender, queue) = mpsc::channel(QUEUE_MAX);
        self.network.lock().unwrap().queues.insert(self.address, sender);
        Ok(Box::new(Port { memory: self.clone(), queue }))
    }
}

struct Port {
    memory: Memory,
    queue: mpsc::Receiver<(SocketAddr, Vec<u8>)>,
}

#[async_trait]
impl Socket for Port {
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        let mut datagram = Vec::new();
        if self.memory.gate.outgoing(&message, &mut datagram) {
            self.memory.network.lock().unwrap().carry(self.memory.address, to, &datagram);
            self.memory.gate.sent(Some(datagram.len()));
        }
        Ok(())
    }

    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        loop {
            let (from, mut datagram) = self.queue.recv().await.ok_or_else(|| anyhow::anyhow!("closed"))?;
            if let Some(message) = self.memory.gate.incoming(from, &mut datagram) {
                return Ok((from, message));
            }
        }
    }
}

/// A pool in which every node lends.
struct Pool {
    network: Arc<Mutex<Network>>,
    nodes: Vec<(String, Node)>,
    counters: Arc<Counters>,
    random: fastrand::Rng,
    start: Instant,
    started: usize,
}

impl Pool {
    fn new(seed: u64, loss: f64) -> Pool {
        let mut random = fastrand::Rng::with_seed(seed);
        let network = Network { random: random.fork(), loss, ..Network::default() };
        Pool {
            network: Arc::new(Mutex::new(network)),
            nodes: Vec::new(),
            counters: Arc::default(),
            random,
            start: Instant::now(),
            started: 0,
        }
    }

    async fn add(&mut self) {
        let ip = |index: usize| Ipv4Addr::from_bits(0x0a00_0000 + index as u32);
        self.started += 1;
        let lender = lender(ip(self.started), 8 << 30);
        let identity = Identity {
            name: name_of(&lender.address),
            incarnation: 1_800_000_000_000 + self.random.u64(..1_000_000),
            address: (ip(self.started), 7070).into(),
        };
        let seeds = vec![format!("{}:7070", ip(1)), format!("{}:7070", ip(2))];
        let (start, network, address) = (self.start, Arc::clone(&self.network), identity.address);
        let clock = Box::new(move || 1_800_000_000_000 + start.elapsed().as_millis() as u64);
        let open = |gate| Memory { network, address, gate };
        let security = Security::Keyed(PoolKey::new([7; 32]));
        let counters = Arc::clone(&self.counters);
        let mut node = Node::start(&identity, seeds, &security, clock, counters, open).await.unwrap();
        node.publish(Some(lender)).await;
        self.nodes.push((identity.name, node));
    }

    /// Waits until each node sees all others and nobody else; in halves, if the network is cut.
    /// Returns the time.
    async fn until_all_see_all(&mut self) -> Option<Duration> {
        let halves = |network: &Network, index: usize| network.is_parted.then_some(index % 2);
        let groups: Vec<_> = (0..self.nodes.len()).map(|index| halves(&self.network.lock().unwrap(), index)).collect();
        let mut members: HashMap<_, BTreeSet<&str>> = HashMap::new();
        for ((name, _), group) in self.nodes.iter().zip(&groups) {
            members.entry(group).or_default().insert(name);
        }
        let begin = Instant::now();
        let mut at = 0;
        // A node that has seen all is checked again in the end: it must not have lost any
        // meanwhile.
        let mut seen_in_a_row = 0;
        while seen_in_a_row < self.nodes.len() {
            let (name, node) = &self.nodes[at];
            let view = node.view().await;
            let mut seen: BTreeSet<&str> = view.reading.members.iter().map(|member| member.node.as_str()).collect();
            seen.insert(name);
            if seen == members[&groups[at]] {
                seen_in_a_row += 1;
                at = (at + 1) % self.nodes.len();
            } else if begin.elapsed() >= LIMIT {
                return None;
            } else {
                seen_in_a_row = 0;
                sleep(LOOK).await;
            }
        }
        Some(begin.elapsed())
    }

    /// Waits until every node except its owner has this lender in its list.
    async fn until_all_know(&self, lender: &Lender) -> Option<Duration> {
        let begin = Instant::now();
        let own = name_of(&lender.address);
        for (_, node) in self.nodes.iter().filter(|(name, _)| *name != own) {
            while !node.view().await.reading.members.iter().any(|member| member.lender == *lender) {
                if begin.elapsed() >= LIMIT {
                    return None;
                }
                sleep(LOOK).await;
            }
        }
        Some(begin.elapsed())
    }

    fn spent(&self) -> (u64, u64) {
        let network = self.network.lock().unwrap();
        (network.datagrams, network.bytes)
    }
}

fn lender(ip: Ipv4Addr, free_bytes: u64) -> Lender {
    Lender { address: SocketAddr::from((ip, 7000)).into(), free_bytes, capacity_bytes: 8 << 30 }
}

/// Times in seconds, amounts for each node.
#[derive(Debug, Default)]
struct Figures {
    nodes: usize,
    loss_percent: u32,
    all_see_all: f64,
    datagrams_until_then: f64,
    kib_until_then: f64,
    datagrams_a_second: f64,
    kib_a_second: f64,
    largest_kib: f64,
    missing_at_rest: usize,
    change_known: f64,
    joined: f64,
    left: f64,
    died: f64,
    parted: Option<f64>,
    healed: Option<f64>,
}

fn seconds(time: Option<Duration>, what: &str) -> f64 {
    time.unwrap_or_else(|| panic!("{what} not within {LIMIT:?}")).as_secs_f64()
}

/// Runs a pool of so many nodes through all events.
fn measure(count: usize, loss: f64, with_partition: bool) -> Figures {
    let seed = fastrand::u64(..);
    println!("{count} nodes, loss {loss}: seed {seed}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let mut figures = Figures { nodes: count, loss_percent: (loss * 100.0) as u32, ..Figures::default() };
        let mut pool = Pool::new(seed, loss);
        let amount = |total: u64| total as f64 / count as f64;

        // All start within a second.
        for _ in 0..count {
            pool.add().await;
            sleep(Duration::from_secs(1) / count as u32).await;
        }
        figures.all_see_all = 1.0 + seconds(pool.until_all_see_all().await, "all see all");
        let (datagrams, bytes) = pool.spent();
        figures.datagrams_until_then = amount(datagrams);
        figures.kib_until_then = amount(bytes) / 1024.0;

        // At rest no node may seem to be gone.
        let rest_seconds = 10;
        for _ in 0..rest_seconds {
            sleep(Duration::from_secs(1)).await;
            for _ in 0..LOOKED_AT {
                let (_, node) = &pool.nodes[pool.random.usize(..count)];
                figures.missing_at_rest += count - 1 - node.view().await.reading.members.len();
            }
        }
        let (datagrams_after, bytes_after) = pool.spent();
        figures.datagrams_a_second = amount(datagrams_after - datagrams) / f64::from(rest_seconds);
        figures.kib_a_second = amount(bytes_after - bytes) / 1024.0 / f64::from(rest_seconds);

        let changed = lender(Ipv4Addr::new(10, 0, 0, 5), 0);
        pool.nodes[4].1.publish(Some(changed.clone())).await;
        figures.change_known = seconds(pool.until_all_know(&changed).await, "a change is known");

        pool.add().await;
        figures.joined = seconds(pool.until_all_see_all().await, "a node has joined");

        let (_, node) = pool.nodes.pop().unwrap();
        let begin = Instant::now();
        node.leave().await;
        seconds(pool.until_all_see_all().await, "a node has left");
        figures.left = begin.elapsed().as_secs_f64();

        drop(pool.nodes.pop().unwrap());
        figures.died = seconds(pool.until_all_see_all().await, "a node has died");

        if with_partition {
            pool.network.lock().unwrap().is_parted = true;
            figures.parted = Some(seconds(pool.until_all_see_all().await, "parted"));
            pool.network.lock().unwrap().is_parted = false;
            figures.healed = Some(seconds(pool.until_all_see_all().await, "healed"));
        }
        let network = pool.network.lock().unwrap();
        figures.largest_kib = network.largest_bytes as f64 / 1024.0;
        let traffic = pool.counters.read();
        println!("{} datagrams lost in queues; {traffic:?}", network.lost_in_queues);
        let refused = traffic.refused_malformed
            + traffic.refused_nodes
            + traffic.refused_replayed
            + traffic.refused_unopened
            + traffic.refused_untimely;
        assert_eq!((refused, traffic.unsent_too_long), (0, 0), "{traffic:?}");
        println!("{figures:?}");
        figures
    })
}

fn check(figures: &Figures) {
    assert!(figures.all_see_all <= 20.0, "{figures:?}");
    assert_eq!(figures.missing_at_rest, 0, "{figures:?}");
    assert!(figures.change_known <= 10.0 && figures.joined <= 15.0, "{figures:?}");
    assert!(figures.left <= 10.0 && figures.died <= 20.0, "{figures:?}");
}

#[test]
fn sixty_four_nodes_see_each_other() {
    check(&measure(64, 0.0, true));
}

#[test]
fn sixty_four_nodes_see_each_other_on_a_bad_network() {
    check(&measure(64, 0.1, true));
}

#[test]
#[ignore = "some 20 minutes: make gossip"]
fn figures() {
    let mut rows = Vec::new();
    for (count, loss, with_partition) in
        [(64, 0.0, true), (64, 0.1, true), (250, 0.0, true), (250, 0.1, true), (1000, 0.0, false), (1000, 0.1, false)]
    {
        let begin = std::time::Instant::now();
        rows.push(measure(count, loss, with_partition));
        println!("took {:?}", begin.elapsed());
    }
    let optional = |value: Option<f64>| value.map_or("–".to_owned(), |value| format!("{value:.1}"));
    println!(
        "| nodes | loss | all see all | until then: datagrams, KiB a node | at rest: datagrams/s, KiB/s a node \
         | largest datagram, KiB | change known | joined | left | died | parted | healed |"
    );
    for row in &rows {
        println!(
            "| {} | {} % | {:.1} s | {:.0}, {:.0} | {:.1}, {:.0} | {:.1} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} |",
            row.nodes,
            row.loss_percent,
            row.all_see_all,
            row.datagrams_until_then,
            row.kib_until_then,
            row.datagrams_a_second,
            row.kib_a_second,
            row.largest_kib,
            row.change_known,
            row.joined,
            row.left,
            row.died,
            optional(row.parted),
            optional(row.healed),
        );
    }
    rows.iter().for_each(check);
}
