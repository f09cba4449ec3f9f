//! The options of everything that takes part in a pool.

use crate::cli::{addresses, written};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use wire::address::Address;

/// Options of everything that takes part in a pool.
#[derive(clap::Args, Clone, Default, Serialize, Deserialize)]
#[group(id = "pool-options", multiple = true)]
pub struct Options {
    /// Address of any node in the pool: HOST:PORT where it gossips. May be given several times, and
    /// a name may have several addresses. The node need not run yet. The first node may give its
    /// own address.
    #[arg(long = "pool", value_name = "SEED_ADDR")]
    pub seeds: Vec<String>,

    /// Gossip with the pool at this address (UDP) [default: 0.0.0.0:7070 to lend, any port to
    /// mount].
    #[arg(long, value_name = "IP:PORT", requires = "seeds", value_parser = addresses::socket)]
    pub gossip: Option<SocketAddr>,

    /// Address by which other machines reach this one: a lender's HOST:PORT, or the address at
    /// which a mount gossips [default: the one that it listens at, or with --listen 0.0.0.0:PORT
    /// the one that this machine has on the way to the first SEED_ADDR].
    #[arg(long, value_name = "ADDR", requires = "seeds", value_parser = addresses::network)]
    #[serde(with = "written::maybe_text")]
    pub advertise: Option<Address>,
}

impl Options {
    /// Whether to take part in a pool.
    pub fn is_wanted(&self) -> bool {
        !self.seeds.is_empty()
    }

    /// An address on the network that the pool is on, if there is one to take part in.
    pub fn network(&self) -> Option<Address> {
        self.seeds.iter().find_map(|seed| seed.parse().ok())
    }

    /// The options of a mount of this node: of the same pool, at any port.
    pub fn of_mount(&self) -> Options {
        let advertise = match &self.advertise {
            Some(Address::Tcp { host, .. }) => Some(Address::Tcp { host: host.clone(), port: 0 }),
            _ => None,
        };
        let gossip = self.gossip.map(|gossip| SocketAddr::new(gossip.ip(), 0));
        Options { seeds: self.seeds.clone(), gossip, advertise }
    }
}
