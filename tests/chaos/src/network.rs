//! A network namespace with one link to this machine, which can be cut: for a lender that is to be
//! cut off.
//!
//! The guard removes the namespace and its link. The next run removes those that a killed run left.

use std::path::PathBuf;
use testbed::Failure;
use testbed::run_program as run;

/// Prefix of all namespaces that are made here.
const PREFIX: &str = "puma-chaos-";

/// A namespace joined to ours by a pair of virtual network cards.
pub struct Network {
    name: String,
    /// This machine's end of the link.
    card: String,
    ours: String,
    theirs: String,
}

impl Network {
    /// Makes one; `number` distinguishes those of one process.
    pub fn create(number: u8) -> Result<Network, Failure> {
        sweep();
        let pid = std::process::id();
        // A network of four addresses in the range for benchmarks (RFC 2544), which nobody routes;
        // the pid determines which one.
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

    /// The lender's address, without the port.
    pub fn host(&self) -> &str {
        &self.theirs
    }

    /// The namespace, as a path that `nsenter --net=` takes.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// Cuts the link at this machine's end: nothing arrives, and no peer is notified.
    pub fn pull(&self) -> Result<(), Failure> {
        ip(&["link", "set", &self.card, "down"])
    }

    /// Restores the link.
    pub fn plug(&self) -> Result<(), Failure> {
        ip(&["link", "set", &self.card, "up"])
    }

    /// Removes the lender's address: nothing there receives what is sent to it.
    pub fn lose_address(&self) -> Result<(), Failure> {
        ip(&["-n", &self.name, "address", "flush", "dev", "lend0"])
    }

    /// Restores the address.
    pub fn plug_in_address(&self) -> Result<(), Failure> {
        ip(&["-n", &self.name, "address", "replace", &format!("{}/30", self.theirs), "dev", "lend0"])
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // Removing one end removes the link; the namespace itself ends with its last process.
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
