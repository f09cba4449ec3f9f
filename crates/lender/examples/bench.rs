//! How fast a lender is, over TCP on the loopback interface, beside what the same machine does
//! without one.
//!
//! `cargo run --release -p lender --example bench`. Each line says what was measured, its median
//! and 99th percentile for one request, and pages a second. The floor of a get is a bare ping-pong
//! of the same sizes.

use lender::{Capacity, Config, Security, Server};
use page::{FileKey, PAGE_SIZE, PageId, Version};

/// A checksum as a borrower would make it.
fn checksum(id: page::PageId, version: page::Version, page: &page::Page) -> u64 {
    page::ChecksumKey::new([7; 32]).checksum(id, version, page)
}

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};
use wire::address::{Address, Stream};
use wire::{GetItem, Header, Hello, Kind, PutItem, WireKey};
use zerocopy::{FromBytes, IntoBytes};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Pages of the store: small enough for any machine, too many for its processor's cache.
const STORE_PAGES: u32 = 65_536;
/// Time for each measurement.
const MEASURE: Duration = Duration::from_secs(1);

fn main() -> Result<()> {
    println!("kernel {}", os::kernel::release());
    for pages in [1, 32] {
        let request_bytes = size_of::<Header>() + pages * size_of::<WireKey>();
        let reply_bytes = size_of::<Header>() + pages * (size_of::<GetItem>() + PAGE_SIZE);
        ping_pong(&format!("floor: {request_bytes} B for {reply_bytes} B"), pages, request_bytes, reply_bytes)?;
    }
    let server = Server::bind(Config {
        listen: "127.0.0.1:0".parse()?,
        capacity: Capacity::Bytes(u64::from(STORE_PAGES) * PAGE_SIZE as u64),
        reserve_bytes: 64 << 20,
        grace: Duration::ZERO,
        limits: lender::Limits::default(),
        security: Security::Trusting,
    })?;
    let (address, handle) = (server.local_address().clone(), server.handle());
    std::thread::scope(|scope| {
        scope.spawn(|| server.run());
        let measured = lender(&address);
        handle.shutdown();
        measured
    })
}

fn lender(address: &Address) -> Result<()> {
    let main = connect(address, wire::ROLE_MAIN)?;
    let get = connect(address, wire::ROLE_GET)?;
    let mut next = 0u32;
    for pages in [1usize, 16, 32, 256] {
        let mut reply = vec![0; size_of::<Header>() + pages];
        measure(&format!("put of {pages}"), pages, || {
            let request = put(next, pages);
            next = (next + pages as u32) % STORE_PAGES;
            let begun = Instant::now();
            (&main).write_all(&request)?;
            (&main).read_exact(&mut reply)?;
            let elapsed = begun.elapsed();
            assert!(reply[size_of::<Header>()..].iter().all(|status| *status == 1), "not stored");
            Ok(elapsed)
        })?;
    }
    for first in (0..STORE_PAGES).step_by(256) {
        (&main).write_all(&put(first, 256))?;
        (&main).read_exact(&mut [0; size_of::<Header>() + 256])?;
    }
    for pages in [1usize, 32, 256] {
        let mut reply = vec![0; size_of::<Header>() + pages * (size_of::<GetItem>() + PAGE_SIZE)];
        measure(&format!("get of {pages}"), pages, || {
            next = (next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223)) % (STORE_PAGES - pages as u32);
            let keys: Vec<WireKey> = (next..next + pages as u32).map(key).collect();
            let header = Header::new(Kind::Get, pages, size_of_val(&*keys), 1);
            let request = [header.as_bytes(), keys.as_bytes()].concat();
            let begun = Instant::now();
            (&get).write_all(&request)?;
            (&get).read_exact(&mut reply)?;
            Ok(begun.elapsed())
        })?;
    }
    Ok(())
}

fn key(index: u32) -> WireKey {
    WireKey::new(PageId { file: FileKey(1), index }, Version(1))
}

fn put(first: u32, pages: usize) -> Vec<u8> {
    let mut request = Header::new(Kind::Put, pages, pages * (size_of::<PutItem>() + PAGE_SIZE), 1).as_bytes().to_vec();
    let page_of = |key: &WireKey| [key.index.get() as u8 | 1; PAGE_SIZE];
    let keys = || (first..first + pages as u32).map(|index| key(index % STORE_PAGES));
    for key in keys() {
        let checksum = checksum(key.id(), key.version(), &page_of(&key)).into();
        request.extend_from_slice(PutItem { key, checksum }.as_bytes());
    }
    keys().for_each(|key| request.extend_from_slice(&page_of(&key)));
    request
}

fn connect(address: &Address, role: u32) -> Result<Stream> {
    let stream = address.connect(Duration::from_secs(5))?;
    let hello = Hello { magic: wire::MAGIC, protocol: wire::PROTOCOL.into(), role: role.into(), session: [1; 16] };
    (&stream).write_all(Header::new(Kind::Hello, 0, size_of::<Hello>(), 0).as_bytes())?;
    (&stream).write_all(hello.as_bytes())?;
    let mut welcome = [0; size_of::<Header>() + size_of::<wire::Welcome>()];
    (&stream).read_exact(&mut welcome)?;
    let kind = Header::read_from_prefix(&welcome).ok().and_then(|(header, _)| header.validate().ok());
    if kind != Some(Kind::Welcome) { Err("the lender refuses".into()) } else { Ok(stream) }
}

/// Sends and receives that much, with nothing in between.
fn ping_pong(name: &str, pages: usize, request_bytes: usize, reply_bytes: usize) -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let echo = std::thread::spawn(move || {
        let (mut request, reply) = (vec![0; request_bytes], vec![1; reply_bytes]);
        while far.read_exact(&mut request).is_ok() && far.write_all(&reply).is_ok() {}
    });
    let (request, mut reply) = (vec![1; request_bytes], vec![0; reply_bytes]);
    let measured = measure(name, pages, || {
        let begun = Instant::now();
        near.write_all(&request)?;
        near.read_exact(&mut reply)?;
        Ok(begun.elapsed())
    });
    drop(near);
    let _ = echo.join();
    measured
}

/// Repeats a request that says itself how long it took.
fn measure(name: &str, pages: usize, mut request: impl FnMut() -> Result<Duration>) -> Result<()> {
    let begun = Instant::now();
    let mut times = Vec::new();
    while begun.elapsed() < MEASURE {
        times.push(request()?);
    }
    times.sort_unstable();
    let busy: Duration = times.iter().sum();
    let (median, late) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    let pages_per_second = (times.len() * pages) as f64 / busy.as_secs_f64();
    println!("{name:32} p50 {median:>10.1?}  p99 {late:>10.1?}  {pages_per_second:>9.0} pages/s");
    Ok(())
}
