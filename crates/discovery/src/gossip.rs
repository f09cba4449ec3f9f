//! Gossip behind plain calls, in a thread of its own.

use crate::gate::{Counters, Traffic};
use crate::lender::{Lender, reachable};
use crate::members::{self, Member};
use crate::node::{self, Identity, Node, View};
use crate::udp::Udp;
use crate::{Security, local_address_towards, timing};
use parking_lot::Mutex;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};
use wire::address::Address;
use wire::confined::{self, Work, confine};

/// Configuration of a node.
pub struct Config {
    /// The UDP address to listen on. Port 0 lets the kernel choose one.
    pub listen: SocketAddr,
    /// The address at which others reach it. By default `listen`, with the address that this
    /// machine has on the way to the first seed if `listen` is unspecified.
    pub advertise: Option<SocketAddr>,
    /// The first nodes to contact, `HOST:PORT`. Names may have several addresses, and are looked up
    /// again every minute. Seeds need not be up, and one may be this node itself.
    pub seeds: Vec<String>,
    /// The protection of the datagrams.
    pub security: Security,
    /// The memory that this node lends, as in [`Gossip::set_lender`].
    pub lender: Option<Lender>,
}

/// Why gossip cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A seed is no `HOST:PORT`.
    #[error("{0:?} is no node of a pool: write HOST:PORT or [IPV6]:PORT, as others gossip at")]
    Seed(String),
    /// The socket cannot be had.
    #[error("cannot gossip at {address} (UDP): {source}; choose another address with --gossip")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error.
        source: io::Error,
    },
    /// No address is known by which others reach this machine.
    #[error(
        "cannot tell by which address others reach this machine, as no seed is known here (none of IPv4, if that is \
         listened for): give --advertise, or --gossip [::]:PORT for IPv6"
    )]
    Address,
    /// Others could not reach this lender by its address.
    #[error("other machines cannot reach a lender at {0}: give them another address with --advertise")]
    Lender(Address),
    /// The system refused a thread, or random bytes.
    #[error("cannot start gossip: {0}")]
    Start(#[source] io::Error),
}

/// This machine's part in a pool.
pub struct Gossip {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Called with the list of lenders.
pub type Listener = Box<dyn Fn(&[Member]) + Send>;

/// The state that the thread and the callers share.
struct Shared {
    name: String,
    listen: SocketAddr,
    advertise: SocketAddr,
    seeds: Vec<String>,
    security: Security,
    counters: Arc<Counters>,
    state: Mutex<State>,
    /// Wakes the thread: this node's lender has changed, or the thread has to stop.
    wake: Notify,
    stop: AtomicBool,
}

#[derive(Default)]
struct State {
    lender: Option<Lender>,
    members: Vec<Member>,
    view: View,
    restarts: u64,
    /// One pending notification for each listener, which is enough.
    listeners: Vec<SyncSender<()>>,
}

impl Gossip {
    /// Begins to gossip. Unreachable seeds are no error.
    ///
    /// # Errors
    /// Fails if an address is invalid or cannot be bound.
    pub fn start(config: Config) -> Result<Gossip, Error> {
        for seed in &config.seeds {
            match seed.parse() {
                Ok(Address::Tcp { port, .. }) if port != 0 => {}
                _ => return Err(Error::Seed(seed.clone())),
            }
        }
        let cannot_listen = |source| Error::Listen { address: config.listen, source };
        let socket = UdpSocket::bind(config.listen).map_err(cannot_listen)?;
        let listen = socket.local_addr().map_err(cannot_listen)?;
        let advertise = match config.advertise {
            Some(address) if address.port() == 0 => SocketAddr::new(address.ip(), listen.port()),
            Some(address) => address,
            None if !listen.ip().is_unspecified() => listen,
            None => {
                SocketAddr::new(local_address_towards(&config.seeds, listen.ip()).ok_or(Error::Address)?, listen.port())
            }
        };
        let name = match &config.lender {
            Some(lender) => node::name_of(&lender.address),
            None => node::random_name().map_err(|_| Error::Start(io::Error::other("no random bytes")))?,
        };
        let shared = Arc::new(Shared {
            name,
            listen,
            advertise,
            seeds: config.seeds,
            security: config.security,
            counters: Arc::default(),
            state: Mutex::default(),
            wake: Notify::new(),
            stop: AtomicBool::new(false),
        });
        let gossip = Gossip { shared: Arc::clone(&shared), thread: Mutex::new(None) };
        gossip.set_lender(config.lender)?;
        let thread = thread::Builder::new().name("puma-gossip".into());
        *gossip.thread.lock() = Some(
            thread
                .spawn(move || {
                    confine(Work::Connecting, confined::NOTHING);
                    run(&shared, &socket);
                })
                .map_err(Error::Start)?,
        );
        Ok(gossip)
    }

    /// Sets the memory that this node lends; `None`: nothing. Small changes are not published, so
    /// this may be called often.
    ///
    /// # Errors
    /// Fails if others could not reach it at this address.
    pub fn set_lender(&self, lender: Option<Lender>) -> Result<(), Error> {
        if let Some(lender) = lender.as_ref().filter(|lender| !reachable(&lender.address)) {
            return Err(Error::Lender(lender.address.clone()));
        }
        self.shared.state.lock().lender = lender;
        self.shared.wake.notify_one();
        Ok(())
    }

    /// The lenders that are alive, by name, without this node.
    pub fn lenders(&self) -> Vec<Member> {
        self.shared.state.lock().members.clone()
    }

    /// Calls `listener` with the lenders whenever they change, and once at first, from a thread of
    /// its own: it may be slow, and gets the newest list then.
    ///
    /// # Errors
    /// Fails if no thread can be started.
    pub fn on_change(&self, listener: Listener) -> Result<(), Error> {
        let (publish, published) = sync_channel(1);
        let _ = publish.try_send(());
        let shared = Arc::clone(&self.shared);
        let thread = thread::Builder::new().name("puma-members".into());
        let call = move || {
            for () in published {
                let members = shared.state.lock().members.clone();
                listener(&members);
            }
        };
        // Registered before the first reading of the list, so that no change in between is missed.
        self.shared.state.lock().listeners.push(publish);
        thread.spawn(call).map_err(Error::Start)?;
        Ok(())
    }

    /// State and counters.
    pub fn status(&self) -> report::Pool {
        let shared = &self.shared;
        let state = shared.state.lock();
        let Traffic {
            sent_datagrams,
            sent_bytes,
            received_datagrams,
            received_bytes,
            refused_foreign,
            refused_unopened,
            refused_untimely,
            refused_replayed,
            refused_malformed,
            refused_nodes,
            unsent_too_long,
            unsent_failed,
        } = shared.counters.read();
        report::Pool {
            node: shared.name.clone(),
            listen: shared.listen.to_string(),
            advertise: shared.advertise.to_string(),
            live_nodes: state.view.reading.live_peers as u64,
            dead_nodes: state.view.dead as u64,
            nonsense: state.view.reading.nonsense as u64,
            restarts: state.restarts,
            sent_datagrams,
            sent_bytes,
            received_datagrams,
            received_bytes,
            refused_foreign,
            refused_unopened,
            refused_untimely,
            refused_replayed,
            refused_malformed,
            refused_nodes,
            unsent_too_long,
            unsent_failed,
            members: state.members.iter().map(Member::reported).collect(),
        }
    }

    /// Leaves the pool: tells others that this node no longer lends, which takes a moment, and
    /// ends. The list of lenders stays as it is.
    pub fn stop(&self) {
        self.shared.request_stop();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Gossip {
    fn drop(&mut self) {
        self.shared.request_stop();
    }
}

impl Shared {
    fn request_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.state.lock().listeners.clear();
        self.wake.notify_one();
    }

    fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Takes over the node's list, and notifies the listeners.
    fn publish(&self, view: View, hold: bool) {
        let mut state = self.state.lock();
        let members = members::next(&state.members, &view.reading, hold);
        state.view = view;
        let Some(members) = members else { return };
        if members.len() != state.members.len() {
            tracing::info!("the pool has {} lenders, without this node", members.len());
        }
        state.members = members;
        for listener in &state.listeners {
            let _ = listener.try_send(());
        }
    }
}

/// The thread.
fn run(shared: &Arc<Shared>, socket: &UdpSocket) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return tracing::error!("cannot gossip, no lenders will be found: {error}"),
    };
    runtime.block_on(async {
        loop {
            match gossip(shared, socket).await {
                Ok(()) => return,
                Err(error) => tracing::error!("gossip failed: {error:#}; it begins again"),
            }
            shared.state.lock().restarts += 1;
            sleep(timing::RESTART_PAUSE).await;
            if shared.is_stopping() {
                return;
            }
        }
    });
    // Does not wait for the resolver, if it is running.
    runtime.shutdown_background();
}

/// One life of the node, until it has to stop or gossip fails.
async fn gossip(shared: &Arc<Shared>, socket: &UdpSocket) -> anyhow::Result<()> {
    let socket = socket.try_clone()?;
    let incarnation = clock_ms();
    let identity = Identity { name: shared.name.clone(), incarnation, address: shared.advertise };
    let (seeds, counters) = (shared.seeds.clone(), Arc::clone(&shared.counters));
    let open = |gate| Udp::new(socket, gate);
    let mut start = pin!(Node::start(&identity, seeds, &shared.security, Box::new(clock_ms), counters, open));
    let mut node = loop {
        tokio::select! {
            node = &mut start => break node?,
            () = shared.wake.notified() => if shared.is_stopping() { return Ok(()) },
        }
    };
    let alone_at = Instant::now() + timing::ALONE_AFTER;
    let mut alone = true;
    let mut hold_until = Instant::now() + timing::HOLD;
    loop {
        if shared.is_stopping() {
            node.leave().await;
            return Ok(());
        }
        let lender = shared.state.lock().lender.clone();
        node.publish(lender).await;
        let view = node.view().await;
        match view.reading.live_peers {
            0 => hold_until = Instant::now() + timing::HOLD,
            _ => alone = false,
        }
        let hold = Instant::now() < hold_until;
        shared.publish(view, hold);
        tokio::select! {
            () = shared.wake.notified() => {}
            changed = node.changed() => changed?,
            () = sleep_until(hold_until), if hold => {}
            () = sleep_until(alone_at), if alone => {
                alone = false;
                tracing::info!("no node of the pool answers yet at {}; trying again", shared.seeds.join(", "));
            }
        }
    }
}

fn clock_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use testbed::wait_until;
    use wire::key::PoolKey;

    fn config(seeds: &[String], security: Security, lender: Option<&str>) -> Config {
        let lender = lender.map(|address| Lender {
            address: address.parse().unwrap(),
            free_bytes: 1 << 30,
            capacity_bytes: 2 << 30,
        });
        Config { listen: "127.0.0.1:0".parse().unwrap(), advertise: None, seeds: seeds.to_vec(), security, lender }
    }

    fn addresses(gossip: &Gossip) -> Vec<String> {
        gossip.lenders().iter().map(|member| member.lender.address.to_string()).collect()
    }

    const LIMIT: Duration = Duration::from_secs(60);

    fn sees(gossip: &Gossip, wanted: &[&str]) -> bool {
        let mut found = addresses(gossip);
        found.sort();
        found == wanted
    }

    #[test]
    fn lenders_come_change_and_go() {
        for security in [Security::Keyed(PoolKey::new([3; 32])), Security::Trusting] {
            let first = Gossip::start(config(&[], security.clone(), Some("10.0.0.1:7000"))).unwrap();
            let seed = [first.status().listen, "seed.invalid:7070".to_owned()];
            let second = Gossip::start(config(&seed, security.clone(), Some("10.0.0.2:7000"))).unwrap();
            let borrower = Gossip::start(config(&seed, security.clone(), None)).unwrap();
            let published = Arc::<Mutex<Vec<Member>>>::default();
            let listener = Arc::clone(&published);
            borrower.on_change(Box::new(move |members| *listener.lock() = members.to_vec())).unwrap();
            // A listener gets the list of `lenders()`, a moment later.
            let is_published = || wait_until(LIMIT, || *published.lock() == borrower.lenders());
            assert!(wait_until(LIMIT, || sees(&borrower, &["10.0.0.1:7000", "10.0.0.2:7000"])));
            assert!(is_published(), "{:?}", published.lock());
            assert!(wait_until(LIMIT, || sees(&first, &["10.0.0.2:7000"])));
            assert!(wait_until(LIMIT, || sees(&second, &["10.0.0.1:7000"])));

            let full = Lender { address: "10.0.0.2:7000".parse().unwrap(), free_bytes: 0, capacity_bytes: 2 << 30 };
            second.set_lender(Some(full.clone())).unwrap();
            assert!(wait_until(LIMIT, || borrower.lenders().iter().any(|member| member.lender == full)));

            let left = std::time::Instant::now();
            second.stop();
            assert!(wait_until(LIMIT, || sees(&borrower, &["10.0.0.1:7000"])));
            println!("gone from the list after {:?}", left.elapsed());
            assert!(is_published(), "{:?}", published.lock());
            let status = borrower.status();
            assert!(status.sent_datagrams > 0 && status.received_bytes > 0, "{status:?}");
            assert_eq!(status.refused_malformed + status.refused_unopened + status.refused_foreign, 0, "{status:?}");
            borrower.stop();
            first.stop();
        }
    }

    #[test]
    fn unauthenticated_nodes_are_refused_without_an_answer() {
        let ours = Gossip::start(config(&[], Security::Keyed(PoolKey::new([1; 32])), Some("10.0.0.1:7000"))).unwrap();
        let seed = [ours.status().listen];
        let unauthenticated = Gossip::start(config(&seed, Security::Keyed(PoolKey::new([2; 32])), None)).unwrap();
        let trusting = Gossip::start(config(&seed, Security::Trusting, None)).unwrap();
        let refused = |status: report::Pool| status.refused_unopened > 0 && status.refused_foreign > 0;
        assert!(wait_until(LIMIT, || refused(ours.status())));
        let status = ours.status();
        assert_eq!((status.sent_datagrams, status.live_nodes, status.dead_nodes), (0, 0, 0));
        assert!(unauthenticated.lenders().is_empty() && trusting.lenders().is_empty());
        let recorded = UdpSocket::bind("127.0.0.1:0").unwrap();
        for junk in [&b""[..], b"PGS1", &[0xff; 2000]] {
            recorded.send_to(junk, &seed[0]).unwrap();
        }
        recorded.set_nonblocking(true).unwrap();
        assert!(wait_until(LIMIT, || ours.status().refused_foreign >= status.refused_foreign + 3));
        assert!(recorded.recv(&mut [0; 10]).is_err());
    }

    #[test]
    fn what_cannot_be_is_said() {
        let error = |config| Gossip::start(config).err().unwrap().to_string();
        assert!(error(config(&["nowhere".into()], Security::Trusting, None)).contains("HOST:PORT"));
        assert!(error(config(&[], Security::Trusting, Some("0.0.0.0:1"))).contains("--advertise"));
        let any = Config { listen: "0.0.0.0:0".parse().unwrap(), ..config(&[], Security::Trusting, None) };
        assert!(error(any).contains("--advertise"));
        let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
        let listen = taken.local_addr().unwrap();
        assert!(error(Config { listen, ..config(&[], Security::Trusting, None) }).contains(&listen.to_string()));
    }
}
