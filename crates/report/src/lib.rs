//! Reports of the daemons: their statuses, the metrics in them, and their answers to commands.
//!
//! A daemon fills one of these structures and sends it as JSON over its control socket.
//! `pumapool status`, `top`, the Prometheus page, the tests and the benches parse it into the same
//! structure, so that a misspelt field does not compile. A metric is declared next to its field
//! ([`metric`]).
//!
//! A reader may be older or newer than the daemon: a missing field has its default, and an unknown
//! field is ignored. The names of fields in JSON are an interface for users
//! (`pumapool status --json`), and must not change.
//!
//! This crate must never do I/O, or depend on the crates whose state it reports.

pub mod metric;

mod guest;
mod lender;
mod mount;
mod node;
mod numa;
mod pool;
mod reading;
mod reply;

pub use guest::{Guest, GuestCounts};
pub use lender::{Lend, Lender, LenderInfo, LentTo, Pressure};
pub use mount::{
    Borrower, Catalog, Cgroup, Curve, CurvePoint, Disk, Files, Guests, HostGuest, Latencies, Link, LinkState, Mount,
    Populate, RequestCount, Strategy, Tap, Times, Write,
};
pub use node::{Join, NodeMount, NodeMountState, Role, RoleName, RoleWanted};
pub use numa::{Numa, Target};
pub use pool::{Member, Pool};
pub use reading::{Family, Labels, Reading, read, sections};
pub use reply::{Borrowing, Reply, RoleSet, Upgraded};

use serde::{Deserialize, Serialize};
use std::fmt;

/// The status of one daemon, as it sends it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Daemon {
    /// A mount.
    Mount(Box<Mount>),
    /// A lender.
    Lend(Box<Lend>),
    /// A node that has joined a pool.
    Join(Box<Join>),
    /// A file system whose evictions are given to the host.
    Guest(Box<Guest>),
    /// The program that places memory on NUMA nodes.
    Numa(Box<Numa>),
    /// A daemon of a newer version, of a kind that this one does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

impl Daemon {
    /// The kind, as it stands in JSON and in the name of the control socket.
    pub fn kind(&self) -> &'static str {
        match self {
            Daemon::Mount(_) => "mount",
            Daemon::Lend(_) => "lend",
            Daemon::Join(_) => "join",
            Daemon::Guest(_) => "guest",
            Daemon::Numa(_) => "numa",
            Daemon::Unknown => "unknown",
        }
    }
}

/// A status, and the control socket that it came from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// The path of the socket.
    pub socket: String,
    /// The status.
    pub daemon: Daemon,
}

/// A status in a list of daemons of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Listed<T> {
    /// [`Daemon::kind`].
    pub kind: String,
    /// The path of the control socket.
    pub socket: String,
    /// The status.
    #[serde(flatten)]
    pub status: T,
}

/// A daemon that does not answer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Silent {
    /// `mount`, `lend` and so on.
    pub kind: String,
    /// The process that the socket is named after.
    pub pid: u32,
    /// Its socket.
    pub socket: String,
    /// Why it does not answer, as far as that is known, and what to do.
    pub reason: String,
}

/// All daemons of a machine, as `pumapool status --json` prints them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct All {
    /// Mounts.
    pub mounts: Vec<Listed<Mount>>,
    /// Lenders.
    pub lenders: Vec<Listed<Lend>>,
    /// Nodes that have joined a pool.
    pub nodes: Vec<Listed<Join>>,
    /// File systems whose evictions are given to the host.
    pub guests: Vec<Listed<Guest>>,
    /// Programs that place memory on NUMA nodes.
    pub numa: Vec<Listed<Numa>>,
    /// Daemons that do not answer.
    pub silent: Vec<Silent>,
}

impl All {
    /// Sorts statuses by kind. Daemons of unknown kinds are left out.
    pub fn new(statuses: Vec<Status>, silent: Vec<Silent>) -> All {
        let mut all = All { silent, ..All::default() };
        for Status { socket, daemon } in statuses {
            let kind = daemon.kind().to_owned();
            match daemon {
                Daemon::Mount(status) => all.mounts.push(Listed { kind, socket, status: *status }),
                Daemon::Lend(status) => all.lenders.push(Listed { kind, socket, status: *status }),
                Daemon::Join(status) => all.nodes.push(Listed { kind, socket, status: *status }),
                Daemon::Guest(status) => all.guests.push(Listed { kind, socket, status: *status }),
                Daemon::Numa(status) => all.numa.push(Listed { kind, socket, status: *status }),
                Daemon::Unknown => {}
            }
        }
        all
    }
}

/// The rights of a daemon, as read after it dropped the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Confined {
    /// Whether no program that it starts can gain rights.
    pub no_new_privs: bool,
    /// The remaining capabilities, without "CAP_".
    pub capabilities: Vec<String>,
    /// Which files it may open: "few", "few, and all in FOLDER", either with ", as far as this
    /// kernel can forbid them", or "all permitted".
    pub files: String,
}

/// The status of a daemon of one kind.
pub trait Reported: serde::de::DeserializeOwned {
    /// [`Daemon::kind`].
    const KIND: &'static str;
}

macro_rules! reported {
    ($($name:ty: $kind:literal),*) => {$(
        impl Reported for $name {
            const KIND: &'static str = $kind;
        }
    )*};
}

reported!(Mount: "mount", Lend: "lend", Join: "join", Guest: "guest", Numa: "numa");

/// Displays statuses as JSON, for the messages of tests.
macro_rules! shown_as_json {
    ($($name:ty),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
            }
        }
    )*};
}

shown_as_json!(All, Guest, Join, Lend, Mount, Numa);

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn older_and_newer_daemons_are_understood() {
        let read = |json: serde_json::Value| serde_json::from_value::<Daemon>(json).unwrap();
        assert_eq!(read(json!({"kind": "something newer", "x": 1})), Daemon::Unknown);
        let Daemon::Mount(mount) = read(json!({
            "kind": "mount", "mountpoint": "/mnt", "new": {"x": 1}, "tap": null,
            "lenders": [{"address": "a", "state": "a newer one", "get_us": null}],
        })) else {
            panic!("no mount")
        };
        assert_eq!((mount.mountpoint.as_str(), &mount.tap), ("/mnt", &None));
        assert_eq!(mount.lenders[0].state, LinkState::Unknown);
    }

    #[test]
    fn lists_keep_kind_and_socket() {
        let lend = Lend { listen: "x".into(), ..Lend::default() };
        let status = Status { socket: "lend-1.sock".into(), daemon: Daemon::Lend(Box::new(lend)) };
        let all = All::new(vec![status, Status::default()], Vec::new());
        let json = serde_json::to_value(&all).unwrap();
        assert_eq!(json["lenders"][0]["kind"], "lend");
        assert_eq!(
            (&json["lenders"][0]["socket"], &json["lenders"][0]["listen"]),
            (&"lend-1.sock".into(), &"x".into())
        );
        assert_eq!(serde_json::from_value::<All>(json).unwrap(), all);
    }
}
