//! A network namespace with one cable to us, which can be pulled: where a lender lives that is to
//! be cut off.
//!
//! The namespace, and the cable with it, go with the guard. What a killed run left is removed by
//! the next one.

use std::path::PathBuf;
use testbed::Failure;
use testbed::run_program as run;

/// All namespaces made here begin with it.
const PREFIX: &str = "puma-chaos-";

/// A namespace joined to ours by a pair of virtual network cards.
pub struct Network {
    name: String,
    /// Our end of the cable.
    card: String,
    ours: String,
    theirs: String,
}

impl Network {
    /// Makes one; `number` tells those of one process apart.
    pub fn create(number: u8) -> Result<Network, Failure> {
        sweep();
        let pid = std::process::id();
        // A net of four addresses in the range for benchmarks (RFC 2544), which nobody routes;
        // which one, follows from the pid.
        let net = (pid.wrapping_mul(4).wrapping_add(u32::from(number)).wrapping_mul(4)) & 0xfffc;
        let address = |host: u32| format!("198.{}.{}.{}", 18 + (number & 1), net >> 8, (net & 0xff) + host);
        let network = Network {
            name: format!("{PREFIX}{pid}-{number}"),
            card: format!("pm{pid}n{number}"),
            ours: address(1),
            theirs: address(2),
        };
        ip(&["netns", "add", &network.name])?;
        let far = "lend0";
        ip(&["link", "add", &network.card, "type", "veth", "peer", "name", far, "netns", &network.name])?;
        ip(&["address", "add", &format!("{}/30", network.ours), "dev", &network.card])?;
        ip(&["link", "set", &network.card, "up"])?;
        ip(&["-n", &network.name, "link", "set", "lo", "up"])?;
        ip(&["-n", &network.name, "link", "set", far, "up"])?;
        network.plug_in_address()?;
        Ok(network)
    }

    /// Where the lender listens, port apart.
    pub fn host(&self) -> &str {
        &self.theirs
    }

    /// The namespace, as a path that `nsenter --net=` takes.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// Pulls the cable at our end: nothing arrives, and nobody is told.
    pub fn pull(&self) -> Result<(), Failure> {
        ip(&["link", "set", &self.card, "down"])
    }

    /// Plugs it in again.
    pub fn plug(&self) -> Result<(), Failure> {
        ip(&["link", "set", &self.card, "up"])
    }

    /// Takes the lender's address away: what we send is not for anybody there.
    pub fn lose_address(&self) -> Result<(), Failure> {
        ip(&["-n", &self.name, "address", "flush", "dev", "lend0"])
    }

    /// Gives it back.
    pub fn plug_in_address(&self) -> Result<(), Failure> {
        ip(&["-n", &self.name, "address", "replace", &format!("{}/30", self.theirs), "dev", "lend0"])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The cable goes with its end; the namespace itself once its last process has ended.
        let _gone_already = ip(&["link", "del", &self.card]);
        if let Err(error) = ip(&["netns", "del", &self.name]) {
            eprintln!("The network namespace {} is left behind: {error}. Remove it with ip netns del.", self.name);
        }
    }
}

fn ip(arguments: &[&str]) -> Result<(), Failure> {
    run("ip", arguments, &[])
}

/// Removes namespaces whose makers are dead.
fn sweep() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let made_by = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if made_by.is_some_and(|pid| !PathBuf::from("/proc").join(pid.to_string()).exists()) {
            let _gone_already = ip(&["netns", "del", &name]);
        }
    }
}
