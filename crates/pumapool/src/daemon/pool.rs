//! `--pool`: participation in a pool, for `lend` and `mount`. The crate `pool` implements it.

use crate::cli::pool::Options;
use crate::daemon::lenders::Lenders;
use ::discovery::{Config, Gossip, Lender, Member, Security, local_address_towards};
use anyhow::{Context, Result};
use borrower::LenderAddress;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Weak};
use std::time::Duration;
use wire::address::Address;

/// Default port at which a lender gossips. It is the same everywhere, so that a lender can be a
/// seed of others.
const PORT: u16 = 7070;

/// Time between two checks of a lender's free memory. Large changes are sent to the others.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

fn start(
    options: &Options,
    security: Security,
    advertise: Option<SocketAddr>,
    port: u16,
    lender: Option<Lender>,
) -> Result<Gossip> {
    let listen = options.gossip.unwrap_or((Ipv4Addr::UNSPECIFIED, port).into());
    Ok(Gossip::start(Config { listen, advertise, seeds: options.seeds.clone(), security, lender })?)
}

/// The number of `--advertise`, if that is given.
fn advertised(options: &Options) -> Result<Option<SocketAddr>> {
    let Some(address) = &options.advertise else { return Ok(None) };
    let found = address.to_string().to_socket_addrs().ok().and_then(|mut found| found.next());
    found.with_context(|| format!("--advertise {address}: no address of a network")).map(Some)
}
/// A lender's part in the pool, if one is wanted.
pub fn lend(
    options: &Options,
    security: Security,
    handle: &lender::Handle,
    listen: &Address,
) -> Result<Option<Arc<Gossip>>> {
    if !options.is_wanted() {
        return Ok(None);
    }
    let address = lender_address(options, listen)?;
    let advertise = advertised(options)?.map(|address| SocketAddr::new(address.ip(), 0));
    // It has the name of its lender, whether that lends now or not.
    let gossip = Arc::new(start(options, security, advertise, PORT, Some(what_is_left(&handle.status(), &address)))?);
    tell(&gossip, handle, &address);
    let (weak, handle) = (Arc::downgrade(&gossip), handle.clone());
    let thread = std::thread::Builder::new().name("puma-left".into());
    thread.spawn(move || keep_telling(&weak, &handle, &address)).context("cannot start a thread")?;
    Ok(Some(gossip))
}

fn keep_telling(gossip: &Weak<Gossip>, handle: &lender::Handle, address: &Address) {
    loop {
        std::thread::sleep(LOOK_INTERVAL);
        let Some(gossip) = gossip.upgrade() else { return };
        tell(&gossip, handle, address);
    }
}

/// Sends a lender's free memory to the others, or that it does not lend.
pub fn tell(gossip: &Gossip, handle: &lender::Handle, address: &Address) {
    let status = handle.status();
    // The address was good when gossip began.
    let _ = gossip.set_lender(status.lending.then(|| what_is_left(&status, address)));
}

fn what_is_left(status: &report::Lender, address: &Address) -> Lender {
    let unused_pages = status.capacity_pages.saturating_sub(status.stored_pages);
    let to_have_bytes = status.available_bytes.saturating_add(status.free_resident_pages.saturating_mul(4096));
    Lender {
        address: address.clone(),
        free_bytes: to_have_bytes.min(unused_pages.saturating_mul(4096)),
        capacity_bytes: status.capacity_pages.saturating_mul(4096),
    }
}

/// The address by which others reach a lender that listens at `listen`.
pub fn lender_address(options: &Options, listen: &Address) -> Result<Address> {
    if let Some(address) = &options.advertise {
        return Ok(address.clone());
    }
    let Address::Tcp { host, port } = listen else { return Ok(listen.clone()) };
    let Some(any) = host.parse::<IpAddr>().ok().filter(IpAddr::is_unspecified) else { return Ok(listen.clone()) };
    let ip = local_address_towards(&options.seeds, any).context(
        "cannot tell by which address others reach this lender, as no seed is known here (none of IPv4, if that is listened for): \
         give --advertise HOST:PORT",
    )?;
    Ok(SocketAddr::new(ip, *port).into())
}

/// A mount's part in the pool, if one is wanted.
pub fn join(options: &Options, security: Security) -> Result<Option<Arc<Gossip>>> {
    if !options.is_wanted() {
        return Ok(None);
    }
    let gossip = advertised(options).and_then(|advertise| start(options, security, advertise, 0, None))?;
    Ok(Some(Arc::new(gossip)))
}

/// From now on the mount uses the pool's lenders, except `except`.
pub fn follow(gossip: &Gossip, lenders: &Arc<Lenders>, except: Option<Address>) {
    let lenders = lenders.clone();
    let following = gossip.on_change(Box::new(move |members| lenders.set_of_pool(of_pool(members, except.as_ref()))));
    if let Err(error) = following {
        tracing::error!("{error}; no lenders will be found in the pool");
    }
}

fn of_pool(members: &[Member], except: Option<&Address>) -> Vec<LenderAddress> {
    let lender =
        |member: &Member| LenderAddress { address: member.lender.address.clone(), id: Some(member.node.clone()) };
    members.iter().filter(|member| Some(&member.lender.address) != except).map(lender).collect()
}
