//! A minimal borrower, and a lender for tests.
#![allow(dead_code)] // each test program uses its part

use lender::{Address, Capacity, Config, Handle, Limits, Security, Server};
use page::{FileKey, PAGE_SIZE, Page, PageId, Version};

/// Returns a checksum as a borrower computes it.
pub fn checksum(id: page::PageId, version: page::Version, page: &page::Page) -> u64 {
    page::ChecksumKey::new([7; 32]).checksum(id, version, page)
}

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};
use wire::address::Stream;
use wire::key::PoolKey;
use wire::secure::{Channel, Handshake};
use wire::{GetItem, Header, Hello, Kind, PutItem, Refused, Welcome, WireKey};
use zerocopy::{FromBytes, IntoBytes};

/// A time limit that is longer than any operation on the slowest machine.
pub const WAIT_MAX: Duration = Duration::from_secs(60);

/// A connection.
pub struct Client {
    pub stream: Stream,
    pub channel: Channel,
    request: u64,
    /// The pages that the lender has reported as lost.
    pub lost: Vec<WireKey>,
}

/// The reply instead of a Welcome.
#[derive(Debug)]
pub struct NotWelcome {
    pub code: u32,
    pub text: String,
}

pub fn hello(role: u32, session: [u8; 16]) -> Hello {
    Hello { magic: wire::MAGIC, protocol: wire::PROTOCOL.into(), role: role.into(), session }
}

pub fn key(index: u32, version: u64) -> WireKey {
    WireKey::new(PageId { file: FileKey(1), index }, Version(version))
}

/// Returns the page for a key: the whole page repeats one mixture of index and version.
pub fn page_of(key: &WireKey) -> Page {
    let word = (u64::from(key.index.get()) << 32 | key.version.get()).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut page = [0; PAGE_SIZE];
    page.chunks_exact_mut(8).for_each(|place| place.copy_from_slice(&word.to_le_bytes()));
    page
}

impl Client {
    pub fn connect_raw(address: &Address) -> Client {
        let stream = address.connect(WAIT_MAX).unwrap();
        stream.set_read_timeout(Some(WAIT_MAX)).unwrap();
        Client { stream, channel: Channel::plain(), request: 0, lost: Vec::new() }
    }

    pub fn handshake(&mut self, hello: Hello) -> Result<Welcome, NotWelcome> {
        self.handshake_with(hello, 0)
    }

    /// Sends a Hello with the version that will be put next.
    pub fn handshake_with(&mut self, hello: Hello, next_version: u64) -> Result<Welcome, NotWelcome> {
        let (request, body) = hello.frame(next_version, self.channel.is_sealed());
        self.send_as(request, Kind::Hello, 0, 0, &body).unwrap();
        let (header, body) = self.receive().unwrap();
        match header.validate().unwrap() {
            Kind::Welcome => Ok(Welcome::read_from_bytes(&body).unwrap()),
            Kind::Refused => {
                let refused = Refused::read_from_bytes(&body).unwrap();
                Err(NotWelcome { code: refused.code.get(), text: refused.text() })
            }
            kind => panic!("{kind:?}"),
        }
    }

    /// Proves possession of the key.
    pub fn shake_hands(&mut self, key: &PoolKey) -> Result<(), NotWelcome> {
        let (handshake, first) = Handshake::begin(key).unwrap();
        self.request = u64::from(wire::PROTOCOL) - 1;
        self.send(Kind::Handshake1, 0, 0, &first).unwrap();
        let (header, body) = self.receive().unwrap();
        match header.validate().unwrap() {
            Kind::Handshake2 => self.channel = handshake.finish(&body).unwrap(),
            Kind::Refused => {
                let refused = Refused::read_from_bytes(&body).unwrap();
                return Err(NotWelcome { code: refused.code.get(), text: refused.text() });
            }
            kind => panic!("{kind:?}"),
        }
        Ok(())
    }

    pub fn connect_with(address: &Address, role: u32, name: u8, key: &PoolKey) -> Client {
        let mut client = Client::connect_raw(address);
        client.shake_hands(key).unwrap();
        client.handshake(hello(role, [name; 16])).unwrap();
        client
    }

    pub fn connect(address: &Address, role: u32, name: u8) -> Client {
        let mut client = Client::connect_raw(address);
        client.handshake(hello(role, [name; 16])).unwrap();
        client
    }

    pub fn send(&mut self, kind: Kind, flags: u8, items: usize, body: &[u8]) -> io::Result<u64> {
        self.request += 1;
        self.send_as(self.request, kind, flags, items, body)?;
        Ok(self.request)
    }

    fn send_as(&mut self, request: u64, kind: Kind, flags: u8, items: usize, body: &[u8]) -> io::Result<()> {
        let mut header = Header::new(kind, items, body.len(), request);
        header.flags = flags;
        (&self.stream).write_all(&self.frame(&header, body))
    }

    /// Returns a frame as it is sent.
    pub fn frame(&self, header: &Header, body: &[u8]) -> Vec<u8> {
        let (items, pages) = body.split_at(header.items_bytes());
        let mut frame = Vec::new();
        self.channel.push_head(header, items, &mut frame).unwrap();
        frame.extend_from_slice(pages);
        frame
    }

    pub fn receive(&mut self) -> io::Result<(Header, Vec<u8>)> {
        let mut header = [0; size_of::<Header>()];
        (&self.stream).read_exact(&mut header)?;
        let header = Header::read_from_bytes(&header).unwrap();
        header.validate().unwrap();
        let mut body = vec![0; header.body_bytes.get() as usize + self.channel.extra_bytes()];
        (&self.stream).read_exact(&mut body)?;
        if self.channel.is_sealed() {
            let sealed = ..header.items_bytes() + self.channel.extra_bytes();
            let mut opened = Vec::new();
            let items = self.channel.open_head(&header, &body[sealed], &mut opened).unwrap();
            body.splice(sealed, items.iter().copied());
        }
        Ok((header, body))
    }

    /// Returns the next frame that is not a notice; stores notices.
    pub fn answer(&mut self, request: u64) -> (Kind, Vec<u8>) {
        loop {
            let (header, body) = self.receive().unwrap();
            match header.validate().unwrap() {
                Kind::Lost => self.lost.extend_from_slice(<[WireKey]>::ref_from_bytes(&body).unwrap()),
                kind => {
                    assert_eq!(header.request.get(), request);
                    return (kind, body);
                }
            }
        }
    }

    pub fn put_pages(&mut self, pages: &[(WireKey, Page)]) -> Vec<bool> {
        let mut body = Vec::new();
        for (key, page) in pages {
            let checksum = checksum(key.id(), key.version(), page).into();
            body.extend_from_slice(PutItem { key: *key, checksum }.as_bytes());
        }
        pages.iter().for_each(|(_, page)| body.extend_from_slice(page));
        let request = self.send(Kind::Put, 0, pages.len(), &body).unwrap();
        let (kind, body) = self.answer(request);
        assert_eq!((kind, body.len()), (Kind::PutReply, pages.len()));
        body.iter().map(|status| *status == 1).collect()
    }

    /// Puts the pages for these keys; returns the number of stored pages.
    pub fn put(&mut self, keys: &[WireKey]) -> usize {
        let mut stored = 0;
        for keys in keys.chunks(wire::ITEMS_MAX) {
            let pages: Vec<_> = keys.iter().map(|key| (*key, page_of(key))).collect();
            stored += self.put_pages(&pages).into_iter().filter(|stored| *stored).count();
        }
        stored
    }

    /// Gets the pages, checks their bytes, and returns their statuses.
    pub fn get(&mut self, keys: &[WireKey], flags: u8) -> Vec<u8> {
        let mut statuses = Vec::new();
        for keys in keys.chunks(wire::ITEMS_MAX) {
            let request = self.send(Kind::Get, flags, keys.len(), keys.as_bytes()).unwrap();
            let (kind, body) = self.answer(request);
            assert_eq!(kind, Kind::GetReply);
            let (items, pages) = <[GetItem]>::ref_from_prefix_with_elems(&body, keys.len()).unwrap();
            let (pages, _) = pages.as_chunks::<PAGE_SIZE>();
            let mut pages = pages.iter();
            for (key, item) in keys.iter().zip(items) {
                if item.status == wire::STATUS_PAGE {
                    let page = pages.next().unwrap();
                    assert!(*page == page_of(key), "{key:?}");
                    assert_eq!(item.checksum.get(), checksum(key.id(), key.version(), page));
                }
                statuses.push(item.status);
            }
            assert_eq!(pages.count(), 0);
        }
        statuses
    }

    pub fn hits(&mut self, keys: &[WireKey]) -> usize {
        self.get(keys, 0).into_iter().filter(|status| *status == wire::STATUS_PAGE).count()
    }

    pub fn drop_keys(&mut self, keys: &[WireKey]) {
        self.send(Kind::Drop, 0, keys.len(), keys.as_bytes()).unwrap();
    }

    pub fn ping(&mut self) {
        let request = self.send(Kind::Ping, 0, 0, &[]).unwrap();
        assert_eq!(self.answer(request).0, Kind::Pong);
    }

    /// Ends the session, and waits until the lender has closed the connection.
    pub fn bye(mut self) {
        self.send(Kind::Bye, 0, 0, &[]).unwrap();
        assert!(self.is_closed());
    }

    /// Returns whether the lender has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        loop {
            match (&self.stream).read(&mut [0; 65536]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => {
                    return matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe);
                }
            }
        }
    }
}

/// A lender in this process, which ends when dropped.
pub struct Lender {
    pub address: Address,
    pub handle: Handle,
    /// The thread that accepts connections, as the kernel numbers it.
    pub acceptor: rustix::thread::Pid,
    thread: Option<std::thread::JoinHandle<()>>,
}

pub fn config(listen: &str, capacity_pages: u64) -> Config {
    Config {
        listen: listen.parse().unwrap(),
        capacity: Capacity::Bytes(capacity_pages * PAGE_SIZE as u64),
        reserve_bytes: 64 << 20,
        grace: Duration::ZERO,
        limits: Limits::default(),
        security: Security::Trusting,
    }
}

impl Lender {
    pub fn start(config: Config) -> Lender {
        let server = Server::bind(config).unwrap();
        let (address, handle) = (server.local_address().clone(), server.handle());
        let (send, started) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            send.send(rustix::thread::gettid()).unwrap();
            server.run().unwrap();
        });
        Lender { address, handle, acceptor: started.recv().unwrap(), thread: Some(thread) }
    }

    pub fn tcp(capacity_pages: u64) -> Lender {
        Lender::start(config("127.0.0.1:0", capacity_pages))
    }

    /// Waits until the status meets the condition.
    pub fn wait_for(&self, what: &str, mut condition: impl FnMut(&report::Lender) -> bool) -> report::Lender {
        let begun = Instant::now();
        loop {
            let status = self.handle.status();
            if condition(&status) {
                return status;
            }
            assert!(begun.elapsed() < WAIT_MAX, "{what} did not happen: {status:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.handle.shutdown();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.unwrap();
            }
        }
    }
}
